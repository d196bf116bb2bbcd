"""The names of KV blocks: a hash covers a block's tokens, all tokens before them and the cache salt.

The prefix cache finds blocks by them, and a router the replica that holds them. Must not know: the scheduler.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256

MOST_ROUTED = 256  # blocks of a prompt by which a router compares replicas


def root_hash(salt: str) -> bytes:
    """The parent of every first block: requests with different salts share no hash."""
    return sha256(b"quire prefix root\0" + salt.encode("utf-8", "surrogatepass")).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of one full block of tokens after the chain that `parent` names."""
    return sha256(parent + array("q", token_ids).tobytes()).digest()


def prompt_hashes(token_ids: Sequence[int], salt: str, block_size: int, most: int = MOST_ROUTED) -> tuple[bytes, ...]:
    """The hashes of a prompt's full blocks, at most `most` from the first on."""
    hashes = []
    parent = root_hash(salt)
    for end in range(block_size, min(len(token_ids), most * block_size) + 1, block_size):
        parent = block_hash(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return tuple(hashes)


def short_name(content: bytes) -> int:
    """The first 8 bytes of a hash as a number: what replicas tell a router of their blocks."""
    return int.from_bytes(content[:8], "little")


def routed_names(token_ids: Sequence[int], salt: str, block_size: int) -> tuple[int, ...]:
    """The short names of a prompt's blocks, by which a request is routed."""
    return tuple(map(short_name, prompt_hashes(token_ids, salt, block_size)))
