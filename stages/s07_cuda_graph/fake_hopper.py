"""For checks: what a Hopper GPU has beside its warps. Barriers, the copy engine, asynchronous products.

A copy lands some time after it was asked for, a product reads its operands some time before it is waited for. What a
GPU would do silently wrong raises `Fault`: bytes that nobody expected, a copy into a tile that a product still reads, a
product that reads what has not landed or is not fenced, or that is used before it was waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.s07_cuda_graph.fake_shared import Memory, Shared, Tile, check_landed, check_unread, warp
from stages.s07_cuda_graph.fake_warps import Fault


@dataclass(frozen=True)
class TensorDescriptor:
    """A tensor of which the copy engine brings boxes."""

    base: Tensor
    shape: Sequence[int]
    strides: Sequence[int]
    block_shape: Sequence[int]
    layout: object

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def box(self, corner: Sequence[int]) -> Tensor:
        """Zeros past the end of the tensor; but its first block or token must exist, though a GPU does not mind."""
        if min(corner) < 0 or corner[0] >= self.shape[0]:
            raise Fault(f"a copy from {list(corner)} of a tensor of {list(self.shape)}")
        box = torch.zeros(*self.block_shape, dtype=self.dtype)
        whole = self.base.as_strided(self.shape, self.strides)
        part = whole[tuple(slice(at, at + n) for at, n in zip(corner, self.block_shape, strict=True))]
        box[tuple(slice(n) for n in part.shape)] = part
        return box


@dataclass
class Barrier:
    """A phase ends when all arrivals and all bytes have come that it lacks."""

    place: Shared
    count: int
    missing: int
    bytes: int = 0
    phase: int = 0

    def __str__(self) -> str:
        lacks = f"{self.missing} of {self.count} arrivals and {self.bytes} bytes"
        return f"{self.place}, whose phase {self.phase} lacks {lacks}"

    def change(self, arrivals: int, expected: int) -> None:
        self.missing -= arrivals
        self.bytes += expected
        if self.missing < 0 or self.bytes < 0:
            raise Fault(f"more has come than was expected: {self}")
        if self.missing == self.bytes == 0:
            self.phase += 1
            self.missing = self.count


@dataclass(eq=False)
class Copy:
    """On its way to `target`, which is of no use until it has landed."""

    weight: float
    box: Tensor
    barrier: Barrier
    target: Shared

    def happen(self) -> None:
        self.target.write(self.box)
        self.barrier.change(0, -self.box.nbytes)

    def writes(self, place: Shared) -> bool:
        return self.target.meets(place)


@dataclass(eq=False)
class Product:
    """Of no use until its warp has waited for it."""

    weight: float
    a: Tensor | Shared
    b: Shared
    acc: Tensor | float
    value: Tensor | None = None

    def happen(self) -> None:
        a, b = (x.read() if isinstance(x, Shared) else x for x in (self.a, self.b))
        self.value = (a.float() @ b.float() + self.acc).as_subclass(Tile)

    def writes(self, place: Shared) -> bool:
        return False

    def reads(self, place: Shared) -> bool:
        return any(isinstance(x, Shared) and x.meets(place) for x in (self.a, self.b))

    @classmethod
    def too_early(cls, *arguments: object) -> None:
        raise Fault("a product is used before it was waited for")

    __add__ = __mul__ = __truediv__ = __getitem__ = __getattr__ = __torch_function__ = too_early


# What a kernel calls, with Gluon's arguments. At each of them others may go on.


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
    unknown = float("nan") if dtype.is_floating_point else 0
    return Shared(Memory(shape[0], torch.full((math.prod(shape),), unknown, dtype=dtype)), 0, tuple(shape))


def init(place: Shared, count: int) -> None:
    place.memory.barriers[place.start] = Barrier(place, count, count)
    warp().unfenced.append(place)


def barrier_at(place: Shared) -> Barrier:
    if place.start not in place.memory.barriers:
        raise Fault(f"{place} is no barrier yet")
    return place.memory.barriers[place.start]


def wait(place: Shared, phase: int) -> None:
    """Until the phase of this parity is over, as far as one bit can tell: what came before the first counts as over."""
    barrier = barrier_at(place)
    warp().pause(lambda: barrier.phase & 1 != phase, f"parity {phase} of {barrier}")


def arrive(place: Shared, count: int) -> None:
    warp().pause()
    barrier_at(place).change(count, 0)


def expect(place: Shared, bytes: int) -> None:
    warp().pause()
    barrier_at(place).change(1, bytes)


def copy_to_shared(desc: TensorDescriptor, corner: Sequence[int], barrier: Shared, target: Shared) -> None:
    warp().pause()
    if target.shape != tuple(desc.block_shape) or target.dtype != desc.dtype:
        raise Fault(f"a box of {desc.block_shape}, {desc.dtype}, into {target} of {target.shape}, {target.dtype}")
    check_landed(target)
    check_unread(target, "a copy")
    target.panels().fill_(float("nan"))
    program = warp().program
    program.under_way.append(Copy(program.copy_weight, desc.box(corner), barrier_at(barrier), target))


def fence() -> None:
    warp().pause()
    warp().unfenced.clear()


def multiply(
    a: Tensor | Shared, b: Shared, acc: Tensor, *, use_acc: bool = True, is_async: bool = False
) -> Product | Tensor:
    me = warp()
    me.pause()
    if (a.shape[0], b.shape[1]) != tuple(acc.shape) or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        raise Fault(f"a product of {tuple(a.shape)} and {b.shape} ({a.dtype}, {b.dtype}) into {tuple(acc.shape)}")
    for place in (x for x in (a, b) if isinstance(x, Shared)):
        check_landed(place)
        if any(place.meets(written) for written in me.unfenced):
            raise Fault(f"{me.name} wrote to {place} and put no fence before the product")
    product = Product(me.program.product_weight, a, b, acc if use_acc else 0.0)
    me.products.append(product)
    me.program.under_way.append(product)
    return product if is_async else wait_products(0, [product])


def wait_products(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    """Until no more products than so many are unfinished. The finished ones of `deps` are values from now on."""
    me = warp()
    me.pause()
    finished = me.products[: len(me.products) - num_outstanding]
    del me.products[: len(finished)]
    for product in finished:
        if product.value is None:
            me.program.let_happen(product)
    values = [x if not isinstance(x, Product) or x in me.products else x.value for x in deps]
    return values[0] if len(values) == 1 else values
