"""The decoder: token ids in, hidden states out, logits on demand. Parameters carry Hugging Face's names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stages.s01_forward.config import ModelConfig
from stages.s01_forward.context import Context
from stages.s01_forward.layers import Linear, Norm, parameter
from stages.s01_forward.moe import SparseMLP
from stages.s01_forward.ops import TORCH_OPS, Ops
from stages.s01_forward.rope import rope_table


class Attention(nn.Module):
    """Queries, keys and values of each token; mixing them over tokens is the context's work."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        self.layer, self.ops, self.eps = layer, ops, config.rms_norm_eps
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, config.qkv_bias)
        self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, config.o_bias)
        self.q_norm = Norm(self.head_dim) if config.qk_norm else None
        self.k_norm = Norm(self.head_dim) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ctx: Context) -> Tensor:  # [T, H] -> [T, H]
        qkv = self.qkv_proj(x).view(len(x), self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)  # [T, Hq or Hkv, D]
        q_weight, k_weight = (self.q_norm.weight, self.k_norm.weight) if self.q_norm and self.k_norm else (None, None)
        q, k = self.ops.norm_rope(q, k, q_weight, k_weight, cos, sin, self.eps)
        o = ctx.attend(self.layer, q, k, v)  # [T, Hq, D]
        return self.o_proj(o.flatten(1))


class MLP(nn.Module):
    """SwiGLU; gate and up are one matrix product."""

    def __init__(self, config: ModelConfig, ops: Ops) -> None:
        super().__init__()
        self.ops = ops
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:  # [T, H] -> [T, H]
        return self.down_proj(self.ops.silu_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    """Norm, attention, norm, MLP. What each adds to the residual stream is added by the norm that follows."""

    def __init__(self, config: ModelConfig, layer: int, ops: Ops) -> None:
        super().__init__()
        self.ops, self.eps = ops, config.rms_norm_eps
        self.input_layernorm = Norm(config.hidden_size)
        self.self_attn = Attention(config, layer, ops)
        self.post_attention_layernorm = Norm(config.hidden_size)
        sparse = config.moe is not None and config.moe.is_sparse(layer)
        self.mlp = SparseMLP(config, ops) if sparse else MLP(config, ops)

    def forward(self, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        x, residual = self.ops.add_rms_norm(x, residual, self.input_layernorm.weight, self.eps)  # [T, H] each
        x = self.self_attn(x, cos, sin, ctx)
        x, residual = self.ops.add_rms_norm(x, residual, self.post_attention_layernorm.weight, self.eps)
        return self.mlp(x), residual


class Model(nn.Module):
    """A decoder-only transformer over flat tokens; `max_len` (tokens) bounds the positions.

    The weights hold whatever was in memory until `loader.load_model` fills them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        max_len: int | None = None,
        ops: Ops = TORCH_OPS,
    ) -> None:
        super().__init__()
        self.config, self.ops = config, ops
        self.embed_tokens = nn.Embedding.from_pretrained(parameter(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(config, i, ops) for i in range(config.num_layers))
        self.norm = Norm(config.hidden_size)
        self.lm_head = Linear(config.hidden_size, 0 if config.tie_word_embeddings else config.vocab_size)
        for module in self.modules():  # `to_empty` says the same, and so does `empty_like`: each imports sympy for it
            for name, weight in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(torch.empty(weight.shape, dtype=dtype, device=device), False))
            if isinstance(module, Linear):
                module.product = ops.linear
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.cos, self.sin = rope_table(config.rope, config.head_dim, max_len or config.max_len, device)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: Context) -> Tensor:
        """input_ids, positions [T] int64 -> hidden [T, H], normed and ready for `logits`."""
        x = self.embed_tokens(input_ids)  # [T, H]
        residual = torch.zeros_like(x)
        cos, sin = self.cos[positions], self.sin[positions]  # [T, D/2]
        for layer in self.layers:
            x, residual = layer(x, residual, cos, sin, ctx)
        return self.ops.add_rms_norm(x, residual, self.norm.weight, self.config.rms_norm_eps)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> [N, V]: pass only the rows that are needed, V is large."""
        return self.lm_head(hidden)
