"""Content hashes and the two maps."""

from __future__ import annotations

import pytest

from quire_engine.contract.block_hashes import block_hash, root_hash
from quire_engine.contract.invariants import InvariantViolation
from quire_engine.scheduling.prefix_cache import PrefixCache


def test_a_hash_names_tokens_parents_and_salt() -> None:
    root = root_hash("")
    same = block_hash(root, [1, 2, 3])
    assert same == block_hash(root_hash(""), [1, 2, 3])
    others = {
        block_hash(root, [1, 2, 4]),
        block_hash(root, [3, 2, 1]),
        block_hash(root, [1, 2]),
        block_hash(root_hash("tenant"), [1, 2, 3]),
        block_hash(same, [1, 2, 3]),
    }
    assert len(others) == 5
    assert same not in others
    assert len(same) == 32


def test_large_and_awkward_values_hash() -> None:
    assert block_hash(root_hash("\ud800"), [2**31, 2**40]) != block_hash(root_hash(""), [2**31, 2**40])


def test_the_longest_run_is_matched() -> None:
    cache = PrefixCache()
    a, b, c = (bytes([i]) for i in range(3))
    cache.register(a, 7)
    cache.register(c, 5)
    assert cache.longest_match([a, b, c]) == [7]
    cache.register(b, 1)
    assert cache.longest_match([a, b, c]) == [7, 1, 5]
    assert cache.longest_match([b"?", a]) == []


def test_the_first_block_with_a_content_keeps_it() -> None:
    cache = PrefixCache()
    assert cache.register(b"x", 1)
    assert not cache.register(b"x", 2)
    assert cache.longest_match([b"x"]) == [1]
    assert not cache.holds(2)


def test_a_forgotten_block_is_no_longer_matched() -> None:
    cache = PrefixCache()
    cache.register(b"x", 1)
    assert cache.forget(1)
    assert not cache.forget(1)
    assert cache.longest_match([b"x"]) == []
    assert len(cache) == 0
    cache.check()


def test_a_block_has_one_content() -> None:
    cache = PrefixCache()
    cache.register(b"x", 1)
    with pytest.raises(InvariantViolation, match="registered twice"):
        cache.register(b"y", 1)
