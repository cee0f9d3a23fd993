"""The pool of blocks: who is free, and how many sequences share each block that is not. No tensors, no lengths."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

DUMMY = 0  # padding rows read and write block 0: it is never handed out, and nobody looks at what it holds


class BlockPool:
    """Blocks 1 .. num_blocks - 1, each free or held by as many sequences as its reference count says."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has none to give: block 0 is the dummy")
        self.ref_counts = [0] * num_blocks
        self.ref_counts[DUMMY] = 1  # held for ever, by nobody
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # a set in order

    @property
    def num_blocks(self) -> int:
        """All blocks, the dummy included."""
        return len(self.ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self.free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one owner each, or None, with nothing changed, if there are not so many."""
        if count > self.num_free:
            return None
        blocks = [self.free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block."""
        blocks = list(blocks)
        self._check_held(blocks)
        for block in blocks:
            self.ref_counts[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One owner fewer for each block; without an owner it is free. A block given back twice is an error."""
        blocks = list(blocks)
        self._check_held(blocks)
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self.free[block] = None

    def is_shared(self, block: int) -> bool:
        """Would writing to it change what somebody else reads?"""
        return self.ref_counts[block] > 1

    def check(self) -> None:
        """Free + held + the dummy are all blocks, and no block is both. Raises RuntimeError naming what is wrong."""
        if self.ref_counts[DUMMY] != 1:
            raise RuntimeError(f"the dummy block has {self.ref_counts[DUMMY]} owners")
        unowned = [block for block, owners in enumerate(self.ref_counts) if owners == 0]
        if sorted(self.free) != unowned:
            raise RuntimeError(f"free are {sorted(self.free)}, but without owner are {unowned}")

    def _check_held(self, blocks: list[int]) -> None:
        """Before anything is changed: each block has as many owners as it is named times."""
        for block, times in Counter(blocks).items():
            owners = self.ref_counts[block] if DUMMY < block < self.num_blocks else 0
            if times > owners:
                raise RuntimeError(
                    f"block {block} has {owners} owners, so it cannot be shared or given back {times} times"
                )
