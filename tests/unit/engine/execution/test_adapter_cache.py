"""Which adapters are in memory, when one must go, and who waits."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

import pytest

from quire_engine.contract.errors import ModelLoadError
from quire_engine.contract.types import Adapter, AdaptersInUse
from quire_engine.execution.adapters import AdapterCache
from quire_engine.execution.models.adapter import read_adapter
from quire_engine.execution.models.config import load_model_config
from quire_kernels.reference import REFERENCE
from support.adapters import write_adapter
from support.checkpoints import shared_checkpoint


@pytest.fixture
def config():
    return load_model_config(shared_checkpoint("qwen3"))


@pytest.fixture
def adapters(tmp_path: Path, config) -> list[Adapter]:
    found = []
    for seed in range(3):
        path = write_adapter(tmp_path / f"a{seed}", shared_checkpoint("qwen3"), seed=seed)
        digest = read_adapter(path, config, max_rank=16).digest
        found.append(Adapter(name=f"a{seed}", path=str(path), digest=digest))
    return found


def new_cache(config, most: int) -> AdapterCache:
    return AdapterCache(config, REFERENCE.adapted, max_rank=16, most=most)


def prepared(
    cache: AdapterCache, adapter: Adapter, active: Collection[str] = (), held: Collection[str] = ()
) -> str | None:
    """Asked for until it is read, or until it is clear that it waits for others."""
    for _ in range(200):
        answer = cache.prepare(adapter, AdaptersInUse(active, held))
        if answer is not None:
            return answer
        if not cache._loads:
            return None
        cache.wait(0.05)
    raise AssertionError("it is never read")


def test_the_one_that_was_asked_for_least_recently_goes(config, adapters) -> None:
    cache = new_cache(config, 2)
    a, b, c = adapters
    for adapter in (a, b, a, c):
        assert prepared(cache, adapter) == ""
    assert set(cache._packed) == {a.digest, c.digest}


def test_one_that_is_in_use_stays(config, adapters) -> None:
    cache = new_cache(config, 2)
    a, b, c = adapters
    for adapter in (a, b):
        assert prepared(cache, adapter) == ""
    assert prepared(cache, c, {a.digest}) == ""
    assert set(cache._packed) == {a.digest, c.digest}


def test_where_all_are_in_use_one_takes_no_more_requests_until_it_has_gone(config, adapters) -> None:
    cache = new_cache(config, 2)
    a, b, c = adapters
    for adapter in (a, b):
        assert prepared(cache, adapter) == ""
    both = {a.digest, b.digest}
    assert prepared(cache, c, both) is None
    assert prepared(cache, a, both) is None  # it is to go
    assert prepared(cache, b, both) == ""
    assert prepared(cache, c, {b.digest}) == ""  # its last request has ended
    assert prepared(cache, a, {b.digest, c.digest}) is None
    assert prepared(cache, a, {c.digest}) == ""


def test_one_whose_requests_are_set_aside_goes_if_no_other_can(config, adapters) -> None:
    cache = new_cache(config, 2)
    a, b, c = adapters
    for adapter in (a, b):
        assert prepared(cache, adapter) == ""
    assert prepared(cache, c, {b.digest}, {a.digest}) == ""
    assert set(cache._packed) == {b.digest, c.digest}
    assert prepared(cache, a, (), {b.digest}) == ""
    assert set(cache._packed) == {a.digest, b.digest}, "c is used by nobody"
    cache.forget(b.digest, AdaptersInUse((), {b.digest}))
    assert list(cache._packed) == [b.digest, a.digest], "it may go on, and is the first to go"


def test_one_that_was_to_go_stays_if_nobody_wants_its_place(config, adapters) -> None:
    cache = new_cache(config, 1)
    a, b, _ = adapters
    assert prepared(cache, a) == ""
    assert prepared(cache, b, {a.digest}) is None  # and its request is aborted
    assert prepared(cache, a, {a.digest}) is None
    assert prepared(cache, a) == ""


def test_files_that_changed_are_not_taken_for_others(config, adapters) -> None:
    cache = new_cache(config, 1)
    a, b, _ = adapters
    moved = Adapter(name="a0", path=b.path, digest=a.digest)
    assert "no longer those" in (prepared(cache, moved) or "")
    assert not cache._packed
    assert "cannot be loaded" in (prepared(cache, Adapter(name="x", path="/nowhere", digest="0")) or "")
    assert prepared(cache, a) == ""


def test_orders_read_the_files_each_time(config, adapters) -> None:
    cache = new_cache(config, 1)
    a, b, _ = adapters

    def order(name: str, path: str, in_use: Collection[str] = ()) -> dict[str, object]:
        for _ in range(200):
            facts = cache.order(name, path, AdaptersInUse(in_use, ()))
            if facts is not None:
                return facts
            time.sleep(0.01)
        raise AssertionError("it is never read")

    assert order("1", a.path)["digest"] == a.digest
    assert list(cache._packed) == [a.digest]
    write_adapter(Path(a.path), shared_checkpoint("qwen3"), seed=7)
    changed = order("2", a.path, {a.digest})
    assert changed["digest"] != a.digest
    assert list(cache._packed) == [a.digest]  # there is no room while it is in use
    assert order("3", b.path)["digest"] == b.digest
    assert list(cache._packed) == [b.digest]
    with pytest.raises(ModelLoadError, match="no such directory"):
        order("4", "/nowhere")
    cache.forget(b.digest, AdaptersInUse({b.digest}, ()))
    assert list(cache._packed) == [b.digest]
    cache.forget(b.digest, AdaptersInUse((), ()))
    assert not cache._packed
