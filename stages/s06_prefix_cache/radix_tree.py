"""Finding blocks in a radix tree (SGLang, Zheng et al. 2023): prefixes as paths, runs of blocks as one edge."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from stages.s06_prefix_cache.hash_chain import ExtraKey, TokenBlock


@dataclass(eq=False)
class Node:
    """An edge of one or more blocks (the root's has none) and what may follow it."""

    parent: Node | None = None
    slots: list[Slot] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=lambda: array("Q"))  # of all its blocks, to be compared at once
    children: dict[TokenBlock, Node] = field(default_factory=dict)  # by their first block's tokens


@dataclass(eq=False)
class Slot:
    """A block that can be found: its place in the tree; `node` is None once no path leads to it any more."""

    node: Node | None
    index: int
    tokens: TokenBlock = ()
    block: int | None = None


class RadixTree:
    """The same answers as `HashChain`, without hashes: tokens are compared as the tree is walked."""

    def __init__(self) -> None:
        self.by_block: dict[int, Slot] = {}
        self.roots: WeakValueDictionary[ExtraKey, Node] = WeakValueDictionary()  # each as long as it has children

    def root(self, extra: ExtraKey) -> Slot:
        """Where every sequence with these extras begins."""
        return Slot(self.roots.setdefault(extra, Node()), -1)

    def find(self, parent: Slot, tokens: TokenBlock) -> Slot | None:
        """The slot of the block that follows `parent` with exactly these tokens."""
        node, following = parent.node, parent.index + 1
        if node is None:
            return None
        if following < len(node.slots):
            slot = node.slots[following]
            return slot if slot.tokens == tokens else None
        child = node.children.get(tokens)
        return child.slots[0] if child else None

    def prefix(self, root: Slot, token_ids: Sequence[int], block_size: int, most: int) -> list[Slot]:
        """The slots of the longest known prefix of at most so many blocks: those of an edge are compared at once."""
        slots: list[Slot] = []
        node, start, end = root.node, 0, most * block_size
        while node and start < end and (child := node.children.get(tuple(token_ids[start : start + block_size]))):
            run = array("Q", token_ids[start : min(start + len(child.token_ids), end)])
            count = blocks_alike(run, child.token_ids, block_size)
            slots += child.slots[:count]
            node, start = child if count == len(child.slots) else None, start + count * block_size
        return slots

    def put(self, parent: Slot, tokens: TokenBlock, block: int) -> tuple[Slot | None, bool]:
        """What `find` finds, or this block as a new slot. None if `parent` was forgotten."""
        node, following = parent.node, parent.index + 1
        if node is None:
            return None, False
        if (found := self.find(parent, tokens)) is not None:
            return found, False
        if following < len(node.slots):
            split(node, following)
        if parent.index < 0 or node.children:  # the root has no edge of its own; a fork ends an edge
            node.children[tokens] = child = Node(node)
            node, following = child, 0
        slot = self.by_block[block] = Slot(node, following, tokens, block)
        node.slots.append(slot)
        node.token_ids += array("Q", tokens)
        return slot, True

    def remove(self, block: int) -> Slot | None:
        """Forget a block and all that follows it: no path leads there any more. Returns what was in it."""
        slot = self.by_block.pop(block, None)
        if slot is not None and slot.node is not None:
            cut(slot.node, slot.index)
        return slot


def blocks_alike(some: array[int], others: array[int], block_size: int) -> int:
    """With how many equal blocks do both begin? Often one is the beginning of the other; else by bisection."""
    most = min(len(some), len(others)) // block_size

    def differ(blocks: int) -> bool:
        return some[: blocks * block_size] != others[: blocks * block_size]

    return bisect_left(range(1, most), True, key=differ) if differ(most) else most


def take_off(node: Node, index: int) -> tuple[list[Slot], array[int]]:
    """What an edge holds from its block number `index` on; the edge then ends before."""
    first = index * len(node.slots[index].tokens)
    slots, token_ids = node.slots[index:], node.token_ids[first:]
    del node.slots[index:], node.token_ids[first:]
    return slots, token_ids


def cut(node: Node, index: int) -> None:
    """Drop an edge from `index` on, and everything below it."""
    if index == 0 and node.parent is not None:
        del node.parent.children[node.slots[0].tokens]
    lost, _ = take_off(node, index)
    below, node.children = list(node.children.values()), {}
    while below:  # not by recursion: a tree may be deeper than Python's stack
        child = below.pop()
        lost += child.slots
        below += child.children.values()
    for slot in lost:
        slot.node = None


def split(node: Node, index: int) -> None:
    """Cut an edge in two: the upper part stays, the lower part becomes its child."""
    lower = Node(node, *take_off(node, index), node.children)
    for child in lower.children.values():
        child.parent = lower
    for place, slot in enumerate(lower.slots):
        slot.node, slot.index = lower, place
    node.children = {lower.slots[0].tokens: lower}
