"""Finding blocks by a chain of hashes: each block's key covers its own tokens and, through its parent, all before."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

ExtraKey = tuple[tuple[str, str], ...]  # (kind, value) pairs, such as ("salt", "x"): who may share with whom
TokenBlock = tuple[int, ...]


def block_hash(parent: bytes, tokens: TokenBlock) -> bytes:
    """SHA-256 over the parent's key and the token ids, 8 bytes each: ids are never cut short or joined as text."""
    return hashlib.sha256(parent + array("Q", tokens).tobytes()).digest()


def root_hash(extra: ExtraKey) -> bytes:
    """The key before the first block: kind and value of each extra with their lengths, so none can pose as another."""
    parts = [text.encode("utf-8", "surrogatepass") for pair in extra for text in pair]  # half characters have a key too
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


@dataclass(frozen=True, eq=False)
class Entry:
    """A block that can be found, or the root, which has no parent, no tokens and no block."""

    key: bytes
    parent: Entry | None
    tokens: TokenBlock
    block: int | None


class HashChain:
    """Entries by key. A key that is found proves nothing: tokens and parent are compared, so a collision is a miss."""

    def __init__(self, hash_block: Callable[[bytes, TokenBlock], bytes] = block_hash) -> None:
        self.hash_block = hash_block
        self.entries: dict[bytes, Entry] = {}
        self.by_block: dict[int, Entry] = {}
        self.roots: WeakValueDictionary[ExtraKey, Entry] = WeakValueDictionary()  # each as long as anything follows it

    def root(self, extra: ExtraKey) -> Entry:
        """Where every sequence with these extras begins."""
        return self.roots.setdefault(extra, Entry(root_hash(extra), None, (), None))

    def find(self, parent: Entry, tokens: TokenBlock) -> Entry | None:
        """The entry of the block that follows `parent` with exactly these tokens."""
        entry = self.entries.get(self.hash_block(parent.key, tokens))
        return entry if entry and entry.parent is parent and entry.tokens == tokens else None

    def prefix(self, root: Entry, token_ids: Sequence[int], block_size: int, most: int) -> list[Entry]:
        """The entries of the longest known prefix of at most so many blocks, one after the other."""
        entries, place = [], root
        for number in range(most):
            found = self.find(place, tuple(token_ids[number * block_size : (number + 1) * block_size]))
            if found is None:
                break
            entries.append(found)
            place = found
        return entries

    def put(self, parent: Entry, tokens: TokenBlock, block: int) -> tuple[Entry | None, bool]:
        """What `find` finds, or this block as a new entry. None if its parent is lost, or its key is another's."""
        key = self.hash_block(parent.key, tokens)
        old = self.entries.get(key)
        if old and old.parent is parent and old.tokens == tokens:
            return old, False
        if self.is_lost(parent) or (old is not None and not self.is_lost(old.parent)):
            return None, False
        entry = self.entries[key] = self.by_block[block] = Entry(key, parent, tokens, block)
        return entry, True

    def remove(self, block: int) -> Entry | None:
        """Forget a block: what it held is about to be overwritten. Returns what it was, if it was known."""
        entry = self.by_block.pop(block, None)
        if entry is not None and self.entries.get(entry.key) is entry:
            del self.entries[entry.key]
        return entry

    def is_lost(self, entry: Entry | None) -> bool:
        """Was it forgotten, or replaced? What follows it is then never found: no look-up comes past it."""
        return entry is not None and entry.parent is not None and self.entries.get(entry.key) is not entry
