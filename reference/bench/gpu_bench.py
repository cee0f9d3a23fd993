"""What the measurements of one process share: the checkpoint, Hugging Face's model of it, the options, the clock."""

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from reference.bench.gpu_logits import BUDGET, LENGTHS, MANY, TOKENS, Agreement, HuggingFace, check_logits
from reference.bench.gpu_shapes import random_checkpoint


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
def prepared(options: argparse.Namespace) -> Iterator[Bench]:
    """A checkpoint of the shape, in a folder that is there until the block ends."""
    began = time.perf_counter()
    with TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch) / "model"
        theirs = HuggingFace(random_checkpoint(options.model_shape, folder, options.device))
        bench = Bench(options, folder, theirs, began)
        bench.say("the checkpoint is written")
        yield bench
