"""What kind of work a kernel does, by its name, and how a time in which several run is divided among them."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

PRODUCTS, ATTENTION, SAMPLING, SMALL, OTHER = "products", "attention", "sampling", "small", "other"
KINDS: dict[str, tuple[str, ...]] = {  # by words in their names; the first kind that has one
    ATTENTION: ("attention", "merge", "chunk", "flash", "fmha"),
    SAMPLING: ("filter", "weigh", "race", "finish", "sample", "argmax", "sort", "scan", "softmax", "keep"),
    SMALL: ("norm", "rope", "silu", "store"),  # what lies between products and attention
    PRODUCTS: ("one_row", "few_rows", "gemm", "gemv", "nvjet", "cutlass", "splitK", "cublas"),
}


class Ran(NamedTuple):
    """A kernel or a copy on the GPU, in microseconds."""

    start: float
    end: float
    name: str


def kind_of(name: str, kinds: Mapping[str, Sequence[str]] = KINDS) -> str:
    """The first kind of which the name has a word."""
    return next((kind for kind, words in kinds.items() if any(word in name for word in words)), OTHER)


def union(spans: Sequence[tuple[float, float]]) -> float:
    """The length of what intervals cover together."""
    return sum(shares([Ran(start, end, "") for start, end in spans]))


def shares(ran: Iterable[Ran]) -> list[float]:
    """For each of them, in order of their starts, the microseconds that are its own.

    While several run at once, the time is that of the one that began first: those behind it mostly wait for it
    (programmatic dependent launch). So the shares add up to the time in which anything ran.
    """
    found, reached = [], float("-inf")
    for start, end, _ in sorted(ran):
        found.append(max(0.0, end - max(start, reached)))
        reached = max(reached, end)
    return found


def by_kind(ran: Sequence[Ran]) -> dict[str, float]:
    """Microseconds of each kind; all kinds are there."""
    found = dict.fromkeys((*KINDS, OTHER), 0.0)
    for each, share in zip(sorted(ran), shares(ran), strict=True):
        found[kind_of(each.name)] += share
    return found


def longest_names(ran: Sequence[Ran], kind: str, most: int = 3) -> list[tuple[str, float, int]]:
    """Of a kind the names with the most time: their microseconds, and how many of them ran."""
    spent, count = defaultdict[str, float](float), Counter[str]()
    for each, share in zip(sorted(ran), shares(ran), strict=True):
        if kind_of(each.name) == kind:
            spent[each.name] += share
            count[each.name] += 1
    return [(name, spent[name], count[name]) for name in sorted(spent, key=spent.__getitem__, reverse=True)[:most]]
