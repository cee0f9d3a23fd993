"""`LLM` that guesses ahead: several tokens of an answer from one step, and the same answer."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path
from typing import Any

import torch

from stages.s01_forward.config import ModelConfig
from stages.s01_forward.hub import resolve_model
from stages.s01_forward.loader import load_model
from stages.s01_forward.model import Model
from stages.s01_forward.sampling_params import check_float, check_int
from stages.s02_kv_cache.kv_store import KVStore, kv_bytes_per_token
from stages.s03_paged_kv.attention_plan import AttentionShape
from stages.s03_paged_kv.paged_cache import PagedCache
from stages.s04_continuous_batching.engine import Engine
from stages.s04_continuous_batching.scheduler import Scheduler
from stages.s04_continuous_batching.swap import SwapSpace
from stages.s07_cuda_graph.graphs import GRAPH_BYTES, Graphs, decode_buckets, decode_size
from stages.s07_cuda_graph.llm import LLM as GraphLLM
from stages.s07_cuda_graph.step import Step
from stages.s08_speculative.draft_model import DraftModelProposer, check_vocabulary, first_layers
from stages.s08_speculative.ngram import NgramProposer
from stages.s08_speculative.pace import Pace
from stages.s08_speculative.proposer import Proposer
from stages.s08_speculative.speculative_engine import SpeculativeEngine
from stages.s08_speculative.speculative_runner import Rule, SpeculativeRunner
from stages.s08_speculative.speculative_scheduler import SpeculativeScheduler

MAX_DRAFT_TOKENS = 64  # guesses per step
LEAST_RATE = 0.2  # of guesses that stand: of 4, 0.8, so 1.8 tokens a step
# Running requests up to which anybody guesses: as long as verifying 4 guesses for each costs 1.8 plain steps, or little
# more. H200, Qwen2.5-7B (`s08_gpu_qwen2.5-7b`): 1.9 of them with 32 rows, 2.7 with 64; with a faster host 1.6 and 2.4
# (noted). Two cores of a CPU, SmolLM2-135M in fp32, 200 tokens of context (noted): 1.9 with 1 to 3 rows, 2.5 with 4.
MAX_ROWS = {"cuda": 32, "cpu": 3}


class LLM(GraphLLM):
    """speculative: "ngram"; "layers:12", a draft of the model's first layers; a folder or hub id of a smaller model;
    None: off. num_draft_tokens: guesses per step. acceptance: "match" (the answer is that of plain decoding, token for
    token) or "ratio" (it is distributed alike). speculative_max_rows, speculative_least_rate: when nobody guesses;
    max_rows None: what was measured for such a device.
    """

    def __init__(
        self,
        *args: Any,
        speculative: str | Path | None = None,
        num_draft_tokens: int = 4,
        acceptance: Rule = "match",
        speculative_max_rows: int | None = None,
        speculative_least_rate: float = LEAST_RATE,
        **options: Any,
    ) -> None:
        check_int("num_draft_tokens", num_draft_tokens, 0, MAX_DRAFT_TOKENS)
        if speculative_max_rows is not None:
            check_int("speculative_max_rows", speculative_max_rows, 1)
        check_float("speculative_least_rate", speculative_least_rate, 0, 1)
        if acceptance not in ("match", "ratio"):
            raise ValueError(f"acceptance is {acceptance!r}; it must be 'match' or 'ratio'")
        if not isinstance(speculative, (str, Path, type(None))):
            raise TypeError(f"speculative is {speculative!r}; it must be 'ngram', 'layers:12', a folder or a hub id")
        self.speculative = str(speculative) if speculative is not None and num_draft_tokens else None
        self.num_draft_tokens, self.acceptance = num_draft_tokens, acceptance
        self.speculative_max_rows, self.speculative_least_rate = speculative_max_rows, speculative_least_rate
        self.draft: Model | None = None
        super().__init__(*args, **options)

    @property
    def max_rows(self) -> int:
        """Running requests up to which anybody guesses."""
        return self.speculative_max_rows or MAX_ROWS[self.device.type]

    def reserved_bytes(self) -> int:
        """As before, and what steps with guesses add: their graphs, and rows of logits.

        The draft model is loaded here, before anybody looks at how much memory is free.
        """
        self.draft = self.make_draft()
        if self.speculative is None or self.device.type != "cuda":
            return super().reserved_bytes()
        guessing = self.guessing_rows()
        rows = max(0, guessing[-1] * (1 + self.num_draft_tokens) - self.max_num_seqs)
        logits = rows * self.config.vocab_size * (self.dtype.itemsize + torch.float32.itemsize)
        return super().reserved_bytes() + logits + (GRAPH_BYTES * len(guessing) if self.graphs else 0)

    def guessing_rows(self) -> list[int]:
        """Numbers of rows for which steps with guesses have a graph."""
        sizes = decode_buckets(self.max_num_seqs)
        return sizes[: bisect_left(sizes, min(self.max_rows, self.max_num_seqs)) + 1]

    def kv_share(self) -> float:
        """The draft model's K/V lies in the same blocks, and its bytes count as the model's do."""
        if self.draft is None:
            return 1.0
        own, other = (kv_bytes_per_token(config, self.dtype) for config in (self.config, self.draft.config))
        return own / (own + other)

    def make_draft(self) -> Model | None:
        """The smaller model, if one guesses. Raises ValueError for what cannot be one."""
        if self.speculative in (None, "ngram"):
            return None
        kind, _, count = self.speculative.partition(":")
        if kind == "layers":
            if not (count.isascii() and count.isdigit()):
                raise ValueError(f"speculative is {self.speculative!r}; say how many layers, as in 'layers:12'")
            return first_layers(self.model, int(count))
        folder = resolve_model(Path(self.speculative) if Path(self.speculative).exists() else self.speculative)
        config = ModelConfig.from_dir(folder)
        draft = load_model(
            folder, config, device=self.device, dtype=str(self.dtype).removeprefix("torch."),
            max_len=min(self.max_model_len, config.max_len), ops=self.ops,
        )  # fmt: skip
        check_vocabulary(draft, self.model)
        if config.max_len < self.max_model_len:
            raise ValueError(f"the draft model reads {config.max_len} tokens; max_model_len is {self.max_model_len}")
        return draft

    def make_scheduler(self, cache: PagedCache, swap: SwapSpace) -> Scheduler:
        """One whose rows may carry guesses."""
        if self.speculative is None:
            return super().make_scheduler(cache, swap)
        return SpeculativeScheduler(cache, swap, self.max_num_seqs, self.max_num_batched_tokens, self.max_chunk)

    def make_engine(self, scheduler: Scheduler, store: KVStore, host_store: KVStore) -> Engine:
        """Stage 07's parts, and who guesses."""
        if not isinstance(scheduler, SpeculativeScheduler):
            return super().make_engine(scheduler, store, host_store)
        step, graphs = self.make_step(store)
        runner = SpeculativeRunner(
            step, host_store, graphs, self.max_num_batched_tokens, self.num_draft_tokens, self.acceptance
        )
        proposer = self.make_proposer(scheduler.cache, store)
        pace = Pace(self.max_rows, self.speculative_least_rate)
        return SpeculativeEngine(scheduler, runner, proposer, pace, ahead=int(self.overlap))

    def make_step(self, store: KVStore) -> tuple[Step, Graphs | None]:
        """As before; steps with guesses are captured at the start, too, if that is when graphs are."""
        step, graphs = super().make_step(store)
        if graphs and self.speculative is not None and self.capture == "start":
            for rows in reversed(self.guessing_rows()):
                graphs.prepare(decode_size(rows, queries=1 + self.num_draft_tokens))
        return step, graphs

    def make_proposer(self, cache: PagedCache, store: KVStore) -> Proposer:
        """N-grams, or the draft model with K/V in as many blocks as the model has."""
        if self.draft is None:
            return NgramProposer()
        config, (num_blocks, block_size) = self.draft.config, store.data.shape[2:4]
        own = KVStore(config, num_blocks, block_size, device=self.device, dtype=self.dtype)
        shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, block_size, self.dtype.itemsize)
        return DraftModelProposer(self.draft, self.ops, own, shape, cache, drawn=self.acceptance == "ratio")
