"""Figures that only a fresh process gives: start-up times, and what a card holds with nothing else on it."""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from reference.bench.gpu_shapes import random_checkpoint


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a new interpreter, which has ended when this returns."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def timed_start(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """The same for a function that is told, as its first argument, when its process was asked for (`time.time`)."""
    return in_fresh_process(function, time.time(), *arguments)


def write_checkpoint(shape: str, folder: Path, device: str) -> None:
    """For a process of its own: when it has ended, nothing of it is left on the device."""
    random_checkpoint(shape, folder, device)
