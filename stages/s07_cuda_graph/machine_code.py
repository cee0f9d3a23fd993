"""For checks: kernels compiled without a GPU, and what their machine code shows.

A kernel that is right may be assembled wrongly. If all that is read at a wrong address is multiplied by zero, no answer
changes, until what lies there is not a number (lesson 07b, "A wrong register").
"""

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

Register = tuple[str, int]  # "R" or "UR", and its number
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([\w.]+)\s*(.*?)\s*;")
NAMED = re.compile(r"\b(U?R)(\d+)(\.64)?")
# What writes no register: stores, comparisons, barriers, branches.
NO_TARGET = re.compile(r"ST|RED|LDGSTS|U?[DFHI]SETP|HSETP2|FCHK|R2P|BAR|DEPBAR|WARPSYNC|NANOSLEEP|BR")


class NoGpu:
    """A driver for Triton that stands for a Hopper GPU, as far as compiling goes."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """In place of a kernel: `kernel[grid](...)` compiles, and keeps what came out."""

    result: Any = None  # Triton's compiled kernel, of the last launch

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.result = self.kernel.warmup(*arguments, grid=grid, **options)

        return launch


@contextmanager
def compiling(module: Any, name: str) -> Iterator[Compiled]:
    """Inside, the kernel of this name in a module is compiled for a Hopper GPU where it would be launched."""
    from triton.runtime import driver

    from stages.s03_paged_kv import store_kv

    kernel, options = Compiled(getattr(module, name)), {"PDL": True, "launch_pdl": True}
    with ExitStack() as stack:
        stack.enter_context(patch.object(type(driver), "active", NoGpu()))
        stack.enter_context(patch.object(module, name, kernel))
        for owner in (store_kv, module):
            if hasattr(owner, "launch_options"):
                stack.enter_context(patch.object(owner, "launch_options", return_value=options))
        yield kernel


def tool(name: str, option: str, compiled: Any, folder: Path) -> str:
    """What one of the tools that come with Triton says of the machine code."""
    from triton import knobs

    code = folder / "kernel.cubin"
    code.write_bytes(compiled.asm["cubin"])
    command = [getattr(knobs.nvidia, name).path, option, str(code)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def products(code: str) -> tuple[int, list[str]]:
    """Of machine code as text: the number of products of warpgroups, and those with an operand at a strange address.

    All programs of a grid have their tiles at the same places of shared memory. So a descriptor, which says where an
    operand lies, never hangs on the program's number: where it does, it was made of a register with another content.
    Followed are registers alone: not what goes through memory, and no branch (a loop's end meets its beginning).
    """
    instructions = INSTRUCTION.findall(code)
    tainted, before = set[Register](), None
    while tainted != before:  # what a loop's end writes, its beginning reads
        before = set(tainted)
        strange = follow(tainted, instructions)
    return sum(name.startswith("HGMMA") for _, name, _ in instructions), strange


def follow(tainted: set[Register], instructions: list[tuple[str, str, str]]) -> list[str]:
    """Once from top to bottom, with `tainted` kept up to date: the products that are strange by then."""
    strange = []
    for guard, name, operands in instructions:
        if name.startswith("HGMMA"):
            if descriptors(operands) & tainted:
                strange.append(f"{name} {operands}")
        elif not NO_TARGET.match(name):
            write(tainted, bool(guard), name, operands)
    return strange


def write(tainted: set[Register], guarded: bool, name: str, operands: str) -> None:
    """One instruction: what it writes hangs on the program's number if what it reads does."""
    parts = [part.strip() for part in operands.split(",")]
    while parts and re.fullmatch(r"U?P\w+", parts[0]):  # predicates come first
        parts.pop(0)
    target = re.fullmatch(r"(U?R)(\d+)", parts[0]) if parts else None
    if target is None:
        return
    sources = ",".join(parts[1:])
    strange = "SR_CTAID" in sources or bool(registers(sources) & tainted) and not name.startswith("LD")
    wide = 4 if ".128" in name or name.startswith("HMMA") else 2 if re.search(r"\.64|WIDE|CS2R", name) else 1
    written = {(target[1], int(target[2]) + place) for place in range(wide)}
    if strange:
        tainted |= written
    elif not guarded:
        tainted -= written


def registers(operands: str) -> set[Register]:
    """Those that an instruction names."""
    named = [(kind, int(number), bool(wide)) for kind, number, wide in NAMED.findall(operands)]
    return {(kind, number + place) for kind, number, wide in named for place in range(1 + wide)}


def descriptors(operands: str) -> set[Register]:
    """The registers that say where a product's operands lie: two for A, unless it is in registers, and two for B."""
    first = 2 if re.match(r"R\d+, R\d+,", operands) else 0
    places = re.findall(r"gdesc\[UR(\d+)\]", operands)
    return {("UR", int(number) + place) for number in places for place in range(first, 4)}
