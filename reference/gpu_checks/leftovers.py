"""What other kernels left in shared memory, made NaN before every step: it must reach no answer.

Nobody clears shared memory between kernels, so a kernel that reads what it did not write reads what another one left.
If that is multiplied by zero, answers stay right for thousands of steps, until what was left is no number.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from reference.bench.gpu_runs import forget, replaced
from reference.gpu_checks import fast_engine, guessing
from reference.gpu_checks.check import Check
from reference.gpu_checks.fast_engine import expected, ids, prompts, ragged, same, tiny


@gluon.jit
def _fill_kernel(value_ptr, result_ptr, FIRST: gl.constexpr, SECOND: gl.constexpr):  # noqa: ANN001, ANN202
    """One program, which leaves no room for another on its processor."""
    threads: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    value = gl.load(value_ptr)
    first = gl.allocate_shared_memory(gl.float32, [FIRST], plain, gl.full([FIRST], 0.0, gl.float32, threads) + value)
    second = gl.allocate_shared_memory(gl.float32, [SECOND], plain, gl.full([SECOND], 0.0, gl.float32, threads) + value)
    read = gl.max(first.load(threads), 0) + gl.max(second.load(threads), 0)  # else nothing would be written
    gl.store(result_ptr + gl.program_id(0), read)


def fill_shared_memory(value: torch.Tensor, results: torch.Tensor, most_bytes: int) -> None:
    """`value` fp32 [1], on every processor of the GPU; results: fp32, one of each. most_bytes: of a program.

    Tensors are powers of 2, so it is the two largest that fit: 192 KiB of the 227 of an H200.
    """
    first = 2 ** int(math.log2(most_bytes // 4))
    second = 2 ** int(math.log2(most_bytes // 4 - first))
    _fill_kernel[(len(results),)](value, results, first, second, num_warps=8)


@contextmanager
def nan_before_steps(llm: Any) -> Iterator[list[None]]:
    """Inside, each step of the engine begins with NaN in most of the shared memory; an entry for each.

    A step that is recorded first runs once before that, and leaves numbers: so record all of them before.
    """
    runner = llm.engine.runner
    device, count = runner.state.flat.device, list[None]()
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stub does not know all of them
    value = torch.full((1,), float("nan"), device=device)
    results = torch.empty(gpu.multi_processor_count, device=device)

    def after_nan(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            fill_shared_memory(value, results, gpu.shared_memory_per_block_optin)
            count.append(None)
            return step(*arguments)

        return run

    with (
        replaced(runner, launch=after_nan(runner.launch)),
        replaced(runner.graphs, replay=after_nan(runner.graphs.replay)),
    ):
        yield count


def check_leftovers(device: str, family: str, guesses: bool) -> list[Check]:
    """Stage 06's tokens on the CPU from stage 07's engine, or stage 08's with guesses of which 60 % are right."""
    checks, stage = [], guessing if guesses else fast_engine
    with tiny(family) as folder:
        asked, params = prompts(guessing.ROWS), ragged(guessing.ROWS)
        wanted = expected(folder, asked, params)
        for everywhere in (False, True):
            llm = stage.engine(folder, device, everywhere=everywhere)
            with guessing.told(llm, asked, wanted, 0.6) if guesses else nullcontext():
                ids(llm, asked, params)  # records
                forget(llm)
                recorded = set(llm.engine.runner.graphs.captured)
                with nan_before_steps(llm) as steps:
                    found = ids(llm, asked, params)
            which = "guesses" if guesses else "no guesses"
            kernels = "few-row kernels wherever they can" if everywhere else "all on"
            name = f"NaN left in shared memory, {family}, {which}, {kernels}"
            checks.append(same(name, found, wanted))
            same_steps = len(steps) > 10 and set(llm.engine.runner.graphs.captured) == recorded
            checks.append(Check(f"{name}: steps", same_steps, note=f"{len(steps)} of them"))
    return checks
