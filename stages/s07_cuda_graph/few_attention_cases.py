"""What the attention kernel for few rows is held to: exact attention over scattered keys, in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from stages.s01_forward import layers
from stages.s03_paged_kv.attention_plan import Launch
from stages.s07_cuda_graph.few_cases import EPS, GAP, relative_error


@dataclass(frozen=True)
class AttentionCase:
    """One call of `few_attention`, for rows with so many old keys each. The first has `queries` new tokens, each one
    after that one less, down to 1. Of several rows the last is padding: one token in the dummy block, or none. Of
    three or more, the last but one writes its last token nowhere."""

    old: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    normed: bool = True
    block_size: int = 16
    queries: int = 1
    splits: int | None = None  # None: as many as the kernel would take

    def __str__(self) -> str:
        words = [f"few_attention {list(self.old)} x ({self.heads}+2*{self.kv_heads}) x {self.dim}"]
        words += [f"blocks of {self.block_size}", f"queries {self.queries}", f"splits {self.splits}"]
        words.append(str(self.dtype).removeprefix("torch."))
        return ", ".join(words + ["no norm"] * (not self.normed))

    def error(self, device: torch.device) -> float:
        """The larger one of the answer and of what was written; infinite if anything else in the caches changed."""
        from stages.s07_cuda_graph import few_attention

        rows, size = len(self.old), self.block_size
        draw = torch.Generator().manual_seed(sum(self.old) + self.heads + self.dim)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(device, self.dtype)

        news = [max(self.queries - row, 1) for row in range(rows)]
        if rows > 1 and self.queries > 1:
            news[-1] = 0
        cu_q = torch.tensor([0, *news]).cumsum(0).int().to(device)
        row_of = torch.repeat_interleave(torch.tensor(news)).to(device)  # [T]
        place = torch.cat([torch.arange(old, old + new) for old, new in zip(self.old, news, strict=True)]).to(device)
        width = -(-(max(self.old) + self.queries) // size)
        table = (torch.randperm(rows * width, generator=draw).view(rows, width) + 1).int().to(device)
        slot_of = (table.long()[:, :, None] * size + torch.arange(size, device=device)).flatten(1)  # [R, MB * BS]
        slots = slot_of[row_of, place]
        if rows > 1:
            slots[row_of == rows - 1] = 0
        if rows > 2:
            slots[cu_q[-2] - 1] = -1
        qkv = random(len(place), self.heads + 2 * self.kv_heads, self.dim)
        gains = (1 + 0.3 * random(self.dim), 1 + 0.3 * random(self.dim)) if self.normed else None
        angles = 50 * torch.randn(max(self.old) + self.queries, self.dim // 2, generator=draw).to(device)
        cache = random(2, rows * width + 1, 2, size, self.kv_heads, self.dim)[:, :, 1]  # a view, as of a layer
        unread = torch.ones(cache.shape[1:3], dtype=torch.bool, device=device)
        for row, old in enumerate(self.old):
            unread.view(-1)[slot_of[row, :old]] = False
        cache[:, unread] = GAP

        q, k, v = qkv.float().split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if gains:
            q, k = (layers.rms_norm(x, gain.float(), EPS) for x, gain in zip((q, k), gains, strict=True))
        cos, sin = angles.cos(), angles.sin()
        q, k = (layers.apply_rope(x, cos[place], sin[place]).to(self.dtype).float() for x in (q, k))
        exact = []
        for row, old in enumerate(self.old):
            mine = row_of == row
            keys, values = (part.flatten(0, 1)[slot_of[row, :old]].float() for part in cache)
            keys, values = torch.cat((keys, k[mine])), torch.cat((values, v[mine]))
            exact.append(layers.attention(q[mine], keys, values, self.dim**-0.5))
        before = cache.clone()
        ctx = SimpleNamespace(slots=slots, block_table=table, cu_q=cu_q, scale=self.dim**-0.5)
        picked = few_attention.pick_launch

        def pick(*sizes: int) -> Launch:
            launch = picked(*sizes)
            return launch if self.splits is None else replace(launch, num_splits=self.splits)

        with patch.object(few_attention, "pick_launch", pick):
            out = few_attention.few_attention(
                qkv, gains, EPS, (cos, sin), place, (cache[0], cache[1]), ctx, self.queries
            )
        kept = torch.ones_like(unread)
        kept.view(-1)[slots.clamp(min=0)] = False
        bits = {2: torch.int16, 4: torch.int32}[self.dtype.itemsize]
        if not torch.equal(cache[:, kept].view(bits), before[:, kept].view(bits)):
            return float("inf")
        written = torch.stack([part.flatten(0, 1)[slots[slots > 0]] for part in cache])
        return max(
            relative_error(out, torch.cat(exact)),
            relative_error(written, torch.stack((k[slots > 0], v[slots > 0]))),
        )


def attention_cases() -> Iterator[AttentionCase]:
    """For the interpreter: one tile, tiles without a key, several tiles to a split, no split at all."""
    shapes = ((2, 2, 4, 16, (9,)), (6, 2, 16, 1, (3, 9, 0)), (7, 1, 80, 32, (140, 5, 0)), (1, 1, 128, 4, (70, 0)))
    for i, (heads, kv_heads, dim, block_size, old) in enumerate(shapes):
        for dtype, queries in ((torch.float32, 1), (torch.float16, 1), (torch.float32, 3 + 7 * (i == 3))):
            splits = (None, 3, 2, 1)[i]
            yield AttentionCase(old, heads, kv_heads, dim, dtype, i % 2 == 0, block_size, queries, splits)
