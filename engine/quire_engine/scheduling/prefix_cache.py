"""Which block holds which chain of tokens: content hash <-> block.

Promises: a hash names the block's tokens, all tokens before them and the salt; one block per hash, one hash per block.
Must not know: reference counts, sequences, who is waiting.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from hashlib import sha256

from quire_engine.invariants import require


def root_hash(salt: str) -> bytes:
    """The parent of every first block: requests with different salts share no hash."""
    return sha256(b"quire prefix root\0" + salt.encode("utf-8", "surrogatepass")).digest()


def block_hash(parent: bytes, token_ids: list[int]) -> bytes:
    """The hash of one full block of tokens after the chain that `parent` names."""
    return sha256(parent + array("q", token_ids).tobytes()).digest()


class PrefixCache:
    """Two maps that mirror each other. A block stays matchable until it is forgotten."""

    __slots__ = ("_block_of", "_hash_of")

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def holds(self, block: int) -> bool:
        """Whether the block's content can be matched."""
        return block in self._hash_of

    def block(self, content: bytes) -> int | None:
        """The block with this content, if there is one."""
        return self._block_of.get(content)

    def contents(self) -> Iterable[bytes]:
        """All that can be matched."""
        return self._block_of.keys()

    def longest_match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of known hashes from the first on."""
        blocks: list[int] = []
        for content in hashes:
            block = self._block_of.get(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def register(self, content: bytes, block: int) -> bool:
        """Make a finished block matchable; False if another block already holds the same content."""
        if content in self._block_of:
            return False
        require(block not in self._hash_of, f"block {block} is registered twice")
        self._block_of[content] = block
        self._hash_of[block] = content
        return True

    def forget(self, block: int) -> bytes | None:
        """Drop a block's content before the block is reused, and return it; None if it had none."""
        content = self._hash_of.pop(block, None)
        if content is not None:
            del self._block_of[content]
        return content

    def keep_only(self, contents: Collection[bytes]) -> None:
        """Drop every content but these."""
        self._block_of = {content: block for content, block in self._block_of.items() if content in contents}
        self._hash_of = {block: content for content, block in self._block_of.items()}

    def check(self) -> None:
        """Raise InvariantViolation unless both maps mirror each other."""
        require(len(self._block_of) == len(self._hash_of), "the prefix cache's two maps differ in size")
        for content, block in self._block_of.items():
            require(self._hash_of.get(block) == content, f"block {block} and its hash do not name each other")
