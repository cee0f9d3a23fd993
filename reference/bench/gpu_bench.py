"""What the measurements of one process share: the weights, Hugging Face's model of it, the options, the clock."""

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from reference.bench.gpu_logits import BUDGET, LENGTHS, MANY, TOKENS, Agreement, HuggingFace, check_logits
from reference.bench.gpu_runs import build, replaced
from reference.bench.gpu_shapes import random_checkpoint, random_model
from reference.bench.harness import RESULTS
from stages.s01_forward import frontend
from stages.s01_forward.config import ModelConfig
from stages.s01_forward.loader import checkpoint_slots
from stages.s01_forward.model import Model


def add_engine_options(parser: argparse.ArgumentParser, memory_share: float, longest_check: int) -> None:
    """Where the engine runs, with how much memory, and where the result goes; with these defaults."""
    parser.add_argument("--memory-share", type=float, default=memory_share, help="of the GPU, for weights and cache")
    parser.add_argument("--kv-cache-mb", type=float, help="the cache's size instead (needed on a CPU)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    check = "longest prompt of which logits are compared"
    parser.add_argument("--longest-check", type=int, default=longest_check, help=check)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")


def check_device(parser: argparse.ArgumentParser, options: argparse.Namespace, trial: str) -> None:
    """End with an error without a GPU, if one is asked for. trial: options that do without."""
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"no CUDA GPU is here; `{trial}` tries the rest")


@dataclass(frozen=True)
class Bench:
    """One shape on one device."""

    options: argparse.Namespace
    folder: Path
    theirs: HuggingFace
    began: float

    def say(self, text: str) -> None:
        """Progress, with the seconds since the start."""
        print(f"{time.perf_counter() - self.began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def build(self, without: Sequence[str] = (), **others: Any) -> Any:
        """`build`, with Hugging Face's weights, which lie on the device already: nothing is read from a disk."""
        with replaced(frontend, load_model=self.copied_model):
            return build(self.folder, self.options, without, **others)

    def copied_model(self, folder: Path, config: ModelConfig, *, dtype: str, progress: bool, **where: Any) -> Model:
        """In place of `load_model`."""
        del folder, progress
        model, weights = Model(config, dtype=getattr(torch, dtype), **where), dict(self.theirs.model.named_parameters())
        with torch.no_grad():
            for name, slot in checkpoint_slots(model):
                slot.copy_(weights[name])
        return model

    def check(self, llm: Any, thorough: bool = True) -> Agreement:
        """The engine's logits. If not thorough: short prompts only."""
        options, most = self.options, self.options.longest_check
        lengths = [n for n in LENGTHS if n <= (most if thorough else min(most, 300))]
        budget = BUDGET if options.stage >= 5 and thorough else None
        found = check_logits(llm, self.theirs, lengths, TOKENS, budget, min(MANY, options.requests or MANY))
        self.say(f"logits agree: {found}")
        return found

    def drop_model(self) -> None:
        """No check comes any more: the device's memory is for the engine."""
        self.theirs.release()
        self.empty_device()

    def empty_device(self) -> None:
        """Give back what nobody holds. The collector passes by what an engine has frozen, so that is thawed first."""
        gc.unfreeze()
        gc.collect()
        if self.options.device == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def prepared(options: argparse.Namespace, write: bool = True) -> Iterator[Bench]:
    """Random weights of the shape; with a checkpoint of them if `write`, in a folder that is there until the end."""
    began, make = time.perf_counter(), random_checkpoint if write else random_model
    with TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "model"
        theirs = HuggingFace(make(options.model_shape, folder, options.device))
        bench = Bench(options, folder, theirs, began)
        bench.say("the weights are there")
        yield bench
