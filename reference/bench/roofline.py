"""The floor: the least time that a step can take, from the model's shape and two figures of the machine alone.

A step reads every weight once and every cached key and value once, and multiplies every weight with every token:

    decode  >= max(W / BW, 2 P B / F) + sum(len) * kv_bytes / BW + B * V * b / BW
    prefill >= max(W_body / BW, 2 P_body T / F) + 2 L Hq D sum(len^2) / F

with W bytes and P count of weights, BW bytes/s, F FLOP/s, B rows, T tokens, b bytes per number. The idea is the
roofline model (Williams, Waterman and Patterson, "Roofline: an insightful visual performance model", 2009).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What the floor needs to know of a model. `experts`/`top_k` are 0 in a dense model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    top_k: int = 0

    @classmethod
    def from_dir(cls, folder: str | Path) -> "Shape":
        """Read the shape from a `config.json` that gives its keys in full, as save_pretrained writes it."""
        return cls.from_config(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Shape":
        """The same from the keys of such a file."""
        experts = config.get("num_experts", config.get("num_local_experts", 0))
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            intermediate=config["moe_intermediate_size"] if experts else config["intermediate_size"],
            vocab=config["vocab_size"],
            experts=experts,
            top_k=config["num_experts_per_tok"] if experts else 0,
        )

    @property
    def body(self) -> int:
        """Matrix weights of all layers that one token uses (of a MoE: its top_k experts in every layer)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = 3 * self.hidden * self.intermediate * max(self.top_k, 1) + self.hidden * self.experts
        return self.layers * (attention + mlp)

    @property
    def head(self) -> int:
        """Weights of the output head."""
        return self.vocab * self.hidden

    def kv_bytes(self, width: int = 2) -> int:
        """Bytes of keys and values of one token, at `width` bytes per number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width


@dataclass(frozen=True)
class Machine:
    """Two figures of a machine: bytes/s it can read, FLOP/s it can do in the dtype of the weights."""

    bandwidth: float
    flops: float


H200 = Machine(bandwidth=4.3e12, flops=7.0e14)  # measured: device copy, bf16 matmul


def decode_parts(
    shape: Shape, machine: Machine, context_lens: Sequence[int], width: int = 2, shared: int = 0
) -> dict[str, float]:
    """Seconds of one decode step by what takes them: one row per entry of `context_lens` (tokens in its cache).

    shared: tokens with which all of them begin, whose K/V need be read once only.
    """
    rows, weights = len(context_lens), shape.body + shape.head
    read = sum(context_lens) - shared * (rows - 1)
    return {
        "products": max(weights * width / machine.bandwidth, 2 * weights * rows / machine.flops),
        "attention": read * shape.kv_bytes(width) / machine.bandwidth,
        "sampling": rows * shape.vocab * width / machine.bandwidth,
    }


def prompt_parts(
    shape: Shape, machine: Machine, spans: Sequence[tuple[int, int]], width: int = 2, shared: int = 0
) -> dict[str, float]:
    """Seconds of steps that compute prompts to their ends, each of them (tokens in the cache before, new tokens).

    shared: as in `decode_parts`.
    """
    tokens, rows = sum(new for _, new in spans), len(spans)
    pairs = sum(new * (start + new / 2) for start, new in spans)  # of a query and a key that it sees
    body = max(shape.body * width / machine.bandwidth, 2 * shape.body * tokens / machine.flops)
    head = max(shape.head * width / machine.bandwidth, 2 * shape.head * rows / machine.flops)
    read = (sum(start + new for start, new in spans) - shared * (rows - 1)) * shape.kv_bytes(width) / machine.bandwidth
    return {
        "products": body + head,
        "attention": max(4 * shape.layers * shape.heads * shape.head_dim * pairs / machine.flops, read),
        "sampling": rows * shape.vocab * width / machine.bandwidth,
    }


def decode_floor(shape: Shape, machine: Machine, context_lens: Sequence[int], width: int = 2) -> float:
    """Seconds of one decode step with one row per entry of `context_lens` (tokens in each row's cache)."""
    return sum(decode_parts(shape, machine, context_lens, width).values())


def prefill_floor(shape: Shape, machine: Machine, prompt_lens: Sequence[int], width: int = 2) -> float:
    """Seconds to run prompts of these lengths through the layers in one pass, without the head."""
    gemm = max(shape.body * width / machine.bandwidth, 2 * shape.body * sum(prompt_lens) / machine.flops)
    pairs = sum(length * length for length in prompt_lens)
    return gemm + 2 * shape.layers * shape.heads * shape.head_dim * pairs / machine.flops


def generate_floor(
    shape: Shape, machine: Machine, prompt_lens: Sequence[int], output_lens: Sequence[int], width: int = 2
) -> float:
    """Seconds of a whole run: one prefill of all prompts, then one decode step per further token, all rows together."""
    seconds = prefill_floor(shape, machine, prompt_lens, width)
    for step in range(1, max(output_lens)):
        lens = [p + step for p, n in zip(prompt_lens, output_lens, strict=True) if n > step]
        seconds += decode_floor(shape, machine, lens, width)
    return seconds
