"""For checks: Gluon kernels as plain Python, on any CPU. Triton's interpreter runs no Gluon; here no Triton is needed.

A kernel's own source is executed, with other things where it imports from Triton. Tiles are tensors, warps are threads
that take turns (`fake_warps`), they share memory (`fake_shared`) and ask for what takes time (`fake_hopper`).

Not shown: layouts and registers, the warps within a warpgroup, what the compiler makes of the order within a warp,
integers that overflow, quotients of negative ones, what Triton itself refuses, and whatever takes two programs at a
time: they run one after the other.
"""

from __future__ import annotations

import builtins
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from stages.s07_cuda_graph import fake_hopper
from stages.s07_cuda_graph.fake_hopper import Product
from stages.s07_cuda_graph.fake_shared import Shared, Tile, warp
from stages.s07_cuda_graph.fake_warps import Fault, Program, Warp


class Number(int):
    """A scalar."""

    def to(self, dtype: torch.dtype) -> Number:
        return self


class Pointer:
    """Into the numbers of a tensor, counted from its first one."""

    def __init__(self, x: Tensor, offset: Any = 0) -> None:
        self.x, self.offset, self.dtype = x, offset, SimpleNamespace(element_ty=x.dtype)
        last = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
        self.numbers = x.as_strided((last + 1,), (1,))

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.x, self.offset + more)

    def check(self, offset: Tensor) -> Tensor:
        if offset.numel() and not 0 <= int(offset.min()) <= int(offset.max()) < len(self.numbers):
            raise Fault(f"an address outside of a tensor of {list(self.x.shape)}")
        return offset


def load(pointer: Pointer) -> Number:
    warp().program.count_turn()
    return Number(pointer.numbers[pointer.check(torch.as_tensor(pointer.offset))])


def store(pointer: Pointer, value: Tensor, mask: Tensor) -> None:
    offset, wanted = torch.broadcast_tensors(pointer.offset, mask)
    pointer.numbers[pointer.check(offset[wanted])] = value[wanted]


def where(condition: Any, one: Any, other: Any) -> Any:
    """A scalar of scalars, or a tile."""
    if not any(isinstance(x, Tensor | Product) for x in (condition, one, other)):
        return Number(one if condition else other)
    one, other = (torch.as_tensor(x) if isinstance(x, int) else x for x in (one, other))
    return torch.where(torch.as_tensor(condition), one, other)


def warp_specialize(parts: Sequence[tuple], num_warps: Sequence[int], registers: Sequence[int]) -> None:
    """Each part becomes a warp or a warpgroup. Errors call shared memory what the caller calls it."""
    me = warp()
    if me.unfenced:
        raise Fault("the copy engine may not see the barriers yet: no fence")
    for name, value in cast(Any, inspect.currentframe()).f_back.f_locals.items():
        for i, each in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(each, Shared):
                each.memory.name = f"{name}[{i}]" if isinstance(value, tuple) else name
    others = [
        Warp(me.program, f"{kernel.function.__name__} {number}", partial(kernel, *arguments))
        for number, (kernel, arguments) in enumerate(parts)
    ]
    for other in others:
        other.start()
    me.pause(lambda: all(other.done for other in others), "the others")


class Layout:
    """How numbers are shared out among threads or banks, which nobody sees here."""

    def __init__(self, *arguments: object, **options: object) -> None: ...

    @classmethod
    def get_default_for(cls, *arguments: object) -> Layout:
        return cls()


@dataclass(frozen=True)
class Kernel:
    """What `gluon.jit` makes of a function: called by another one, or launched on a grid."""

    function: Callable[..., Any]
    chance: random.Random

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.function(*arguments, **options)

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        return partial(self.launch, grid[0])

    def launch(self, count: int, *arguments: Any, **options: Any) -> None:
        known = {name: value for name, value in options.items() if name in inspect.signature(self.function).parameters}
        pointers = [Pointer(x) if isinstance(x, Tensor) else x for x in arguments]
        for index in range(count):
            Program(index, count, self.chance).run(partial(self.function, *pointers, **known))


LANGUAGE = SimpleNamespace(
    constexpr=object, float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16,
    int64=torch.int64, load=load, store=store, where=where, max=torch.amax, sum=torch.sum, exp2=torch.exp2,
    minimum=lambda one, other: where(one < other, one, other),
    maximum=lambda one, other: where(one > other, one, other),
    program_id=lambda axis: Number(warp().program.index), num_programs=lambda axis: Number(warp().program.count),
    static_range=range, arange=lambda start, end, layout: torch.arange(start, end).as_subclass(Tile),
    zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype).as_subclass(Tile),
    convert_layout=lambda x, layout: x,
    inline_asm_elementwise=lambda asm, constraints, tiles, **options: tiles[0],  # when something is done, not what
    allocate_shared_memory=fake_hopper.allocate, warp_specialize=warp_specialize,
    SliceLayout=Layout, BlockedLayout=Layout, DotOperandLayout=Layout, NVMMADistributedLayout=Layout,
    NVMMASharedLayout=Layout,
)  # fmt: skip
HOPPER = SimpleNamespace(
    fence_async_shared=fake_hopper.fence,
    mbarrier=SimpleNamespace(
        MBarrierLayout=Layout, init=fake_hopper.init, wait=fake_hopper.wait, arrive=fake_hopper.arrive,
        expect=fake_hopper.expect,
    ),
    tma=SimpleNamespace(async_copy_global_to_shared=fake_hopper.copy_to_shared),
    warpgroup_mma=fake_hopper.multiply,
    warpgroup_mma_wait=fake_hopper.wait_products,
)  # fmt: skip


def execute(sources: Mapping[str, str], seed: int, imports: Mapping[str, Any]) -> ModuleType:
    """The last of some modules, given by name and source, which may import those before it, and `imports`.

    Nothing of Triton is imported. `seed` decides what happens when.
    """
    chance = random.Random(seed)

    def jit(function: Callable[..., Any] | None = None, **options: object) -> Any:
        return Kernel(function, chance) if function else jit

    gluon = SimpleNamespace(jit=jit, language=LANGUAGE)
    replaced = {
        "triton.experimental": SimpleNamespace(gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language.nvidia.hopper": HOPPER,
        "triton.experimental.gluon.nvidia.hopper": SimpleNamespace(TensorDescriptor=fake_hopper.TensorDescriptor),
        "triton.language.extra.cuda": SimpleNamespace(gdc_wait=lambda: None, gdc_launch_dependents=lambda: None),
        **imports,
    }

    def find(name: str, *arguments: Any) -> Any:
        if name in replaced:
            return replaced[name]
        if name.split(".")[0] == "triton":
            raise ImportError(f"{name} is not replaced")
        return builtins.__import__(name, *arguments)

    for name, source in sources.items():
        replaced[name] = module = ModuleType(name)
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": find}
        exec(compile(source, name, "exec", dont_inherit=True), vars(module))
    return module
