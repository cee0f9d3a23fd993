"""`forward_few` against the model's own forward pass, and all cases of the kernels for few rows that run on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stages.s01_forward.config import ModelConfig
from stages.s01_forward.model import Model
from stages.s01_forward.rope import RopeConfig
from stages.s02_kv_cache.kv_store import KVStore
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.context import PagedContext
from stages.s03_paged_kv.ops import PagedOps
from stages.s07_cuda_graph.few_attention_cases import AttentionCase, attention_cases
from stages.s07_cuda_graph.few_cases import ALLOWED, EPS, LinearCase, RopeCase, relative_error, small_cases

# In half precision both passes round after every operation, each in other places.
ALLOWED_MODEL = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class ModelCase:
    """`forward_few` of a random model against the model itself, for rows of these lengths; 0: a padding row."""

    name: str
    config: ModelConfig
    lens: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"forward_few {self.name}, {len(self.lens)} rows, {str(self.dtype).removeprefix('torch.')}"

    def error(
        self, device: torch.device, ops: PagedOps | None = None, forward: Callable[..., Tensor] | None = None
    ) -> float:
        """The larger one of logits and K/V, over the rows that are no padding. `forward`: instead of `forward_few`."""
        from stages.s07_cuda_graph.few_rows import forward_few, logits_few

        draw = torch.Generator().manual_seed(len(self.lens))
        model = random_model(self.config, device, self.dtype)
        rows, ops = len(self.lens), ops or PagedOps()
        shape = AttentionShape(
            self.config.num_heads, self.config.num_kv_heads, self.config.head_dim, 4, self.dtype.itemsize
        )
        widest = max(self.lens) // 4 + 1
        table = (torch.randperm(rows * widest, generator=draw).view(rows, widest) + 1).int()
        lens = torch.tensor(self.lens)
        last = (lens - 1).clamp(min=0)
        slots = table.gather(1, (last // 4)[:, None])[:, 0].long() * 4 + last % 4
        slots[lens == 0] = 0
        contexts = []
        for _ in range(2):
            store = KVStore(self.config, rows * widest + 1, 4, device=device, dtype=self.dtype)
            store.data.copy_(torch.randn(store.data.shape, generator=draw.manual_seed(1)))
            contexts.append(PagedContext(
                store, ops, slots.to(device), table.to(device), lens.int().to(device),
                torch.arange(rows + 1, dtype=torch.int32, device=device),
                ops.make_plan([1] * rows, list(self.lens), table.to(device), shape), shape.head_dim**-0.5,
            ))  # fmt: skip
        ids = torch.randint(self.config.vocab_size, (rows,), generator=draw).to(device)
        expected = model.logits(model(ids, last.to(device), contexts[0]))
        out = logits_few(model, (forward or forward_few)(model, ids, last.to(device), contexts[1]))
        real = (lens > 0).to(device)
        kv, kv_expected = contexts[1].store.data[:, :, 1:], contexts[0].store.data[:, :, 1:]
        return max(relative_error(out[real], expected[real]), relative_error(kv, kv_expected))


def random_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Model:
    """Every weight matters: norms between 0.5 and 1.5, biases near 0.3, matrices that keep the size of their input."""
    model = Model(config, device=device, dtype=dtype, max_len=256)
    draw = torch.Generator(device).manual_seed(0)
    for name, weight in model.named_parameters():
        values = torch.randn(weight.shape, generator=draw, device=device)
        if name.endswith("norm.weight"):
            values = 1 + values.clamp(-1.5, 1.5) / 3
        elif name.endswith("bias"):
            values *= 0.3
        else:
            values *= weight.shape[-1] ** -0.5 if "embed" not in name else 1.0
        weight.copy_(values)
    return model


TINY = ModelConfig(
    architecture="", vocab_size=50, hidden_size=24, intermediate_size=40, num_layers=2, num_heads=3, num_kv_heads=1,
    head_dim=16, rms_norm_eps=EPS, max_position=256, rope=RopeConfig(), qkv_bias=False, o_bias=False, mlp_bias=False,
    qk_norm=False, tie_word_embeddings=False, moe=None, dtype=None, eos_token_ids=frozenset(),
)  # fmt: skip
MODELS = {
    "q/k norm, tied, group of 7": replace(
        TINY, qk_norm=True, tie_word_embeddings=True, num_heads=7, num_kv_heads=1, head_dim=8
    ),
    "QKV bias, group of 3": replace(TINY, qkv_bias=True),
    "all biases, q/k norm, no groups": replace(
        TINY, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, num_heads=2, num_kv_heads=2, head_dim=20
    ),
}


def model_cases() -> Iterator[ModelCase]:
    """Lengths around multiples of the block size, a first token, padding."""
    for (name, config), lens in zip(MODELS.items(), ((9,), (8, 1, 5), (9, 1, 8, 0, 4, 5, 30, 12, 13)), strict=True):
        yield ModelCase(name, config, lens)


SHAPES = {  # hidden, intermediate, query and KV heads; head_dim is 128 in all
    "qwen3-0.6b": (1024, 3072, 16, 8),
    "qwen2.5-1.5b": (1536, 8960, 12, 2),
    "qwen2.5-7b": (3584, 18944, 28, 4),
}


def config_of(name: str) -> ModelConfig:
    """Two layers of a benchmark's model, and a small vocabulary."""
    (hidden, inner, heads, kv_heads), plain = SHAPES[name], name != "qwen3-0.6b"
    return replace(
        TINY, vocab_size=1000, hidden_size=hidden, intermediate_size=inner, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=128, qk_norm=not plain, qkv_bias=plain,
    )  # fmt: skip


def large_cases() -> Iterator[AttentionCase | LinearCase | RopeCase | ModelCase]:
    """Every projection and the attention of the benchmark's models, mostly in bf16, and two layers of each."""
    yield from attention_cases()
    for name, (hidden, inner, heads, kv_heads) in SHAPES.items():
        plain, qkv = name != "qwen3-0.6b", (heads + 2 * kv_heads) * 128
        calls = [(rows, torch.bfloat16) for rows in (1, 2, 5, 8, 9, 16)]
        if name == "qwen2.5-1.5b":
            calls += [(rows, dtype) for dtype in (torch.float16, torch.float32) for rows in (1, 5, 16)]
        for rows, dtype in calls:
            yield LinearCase(rows, qkv, hidden, dtype, norm=True, bias=plain)
            yield LinearCase(rows, hidden, heads * 128, dtype, add=True)
            yield LinearCase(rows, inner, hidden, dtype, norm=True, glu=True)
            yield LinearCase(rows, hidden, inner, dtype, add=True)
            yield RopeCase(rows, heads, kv_heads, 128, dtype, normed=not plain)
            old = (200, 31, 64, 0, 700, 5, 128, 90, 0)[:rows]
            yield AttentionCase(old, heads, kv_heads, 128, dtype, normed=not plain)
        for queries in (2, 4):
            yield AttentionCase((200, 31, 64), heads, kv_heads, 128, torch.bfloat16, not plain, queries=queries)
        config = config_of(name)
        for lens in ((200,), (9, 200), (4, 0, 200, 17, 5, 1, 9, 30), (9, 0, 16, 200) * 4):
            yield ModelCase(name, config, lens, torch.bfloat16)
            if not plain:
                yield ModelCase(name, config, lens, torch.float32)


def run_case(case: AttentionCase | LinearCase | RopeCase | ModelCase) -> tuple[str, float, float]:
    """Runs a case on the GPU: (name, error, allowed)."""
    from stages.s07_cuda_graph.fused_ops import fused_ops

    device = torch.device("cuda")
    if isinstance(case, ModelCase):
        return str(case), case.error(device, fused_ops(device)), ALLOWED_MODEL[case.dtype]
    return str(case), case.error(device), ALLOWED[case.dtype]


def gpu_cases() -> Iterator[tuple[str, float, float]]:
    """Runs all cases on the GPU: (name, error, allowed)."""
    yield from map(run_case, (*small_cases(), *model_cases(), *large_cases()))
