"""Several owners of cached blocks, in the pool and on the host: random runs, planted faults, and a flood.

The runs are those of `test_swapping` with requests of two scopes and different weights; after each step the scheduler's
invariants compare every owner's count with its blocks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest

from property.test_swapping import AheadWithSwaps
from quire_engine.contract.invariants import InvariantViolation
from quire_engine.contract.types import GenerationRequest
from quire_engine.scheduling import cache_shares
from quire_engine.scheduling.cache_shares import CacheShares, Owner
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.sequence import Sequence
from quire_engine.scheduling.swapping import HostPool
from support.fake_executor import new_run, outputs_of, own_tokens
from support.fake_executor import request as request_for
from support.planted import show_a_fault
from support.seeds import naming

NUM_RUNS = 100  # `make schedule-test` does many times as many


class AheadWithOwners(AheadWithSwaps):
    """Tenants "a" and "b"; the weight of a request is that of its tenant, which changes now and then."""

    salts = ("a\0", "a\0", "b\0x")

    def submit(self) -> None:
        submit = self.engine.submit
        self.engine.submit = lambda wanted: submit(self.weighed(wanted))  # type: ignore[method-assign]
        super().submit()
        self.engine.submit = submit  # type: ignore[method-assign]

    def weighed(self, wanted: GenerationRequest) -> GenerationRequest:
        return dataclasses.replace(wanted, weight=self.dice.choice([0.5, 1.0, 1.0, 3.0]))

    def check_end(self) -> None:
        super().check_end()
        kv = self.run.scheduler._kv
        owners = {owner for owner in map(kv._pool.owner, range(kv.num_blocks)) if owner is not None}
        self.seen["two owners"] += len(owners) > 1
        self.seen["evictions"] += kv.total_kv_evictions
        self.seen["two on the host"] += len({owner.scope for owner in kv.host.pool._owner_of.values()}) > 1


def play(seed: int) -> Counter[str]:
    run = AheadWithOwners(seed)
    with naming(seed):
        run.play()
    return run.seen


def test_random_runs_with_two_owners_give_the_tokens_of_solo_runs(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_RUNS * int(request.config.getoption("--times", 1))):
        monkeypatch.setattr(cache_shares, "PATIENCE", seed % 3)
        seen += play(seed)
    print(dict(seen))
    for what in ("two owners", "two on the host", "evictions", "swap", "out", "in", "copies", "forks"):
        assert seen[what] > NUM_RUNS / 20, seen


def _children_are_of_nobody(patch: pytest.MonkeyPatch) -> None:
    fork = KVAllocator.fork

    def careless(self: KVAllocator, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        fork(self, parent, child, num_tokens)
        child.kv.owner = None

    patch.setattr(KVAllocator, "fork", careless)


def _evicted_blocks_still_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheShares, "drop", lambda self, owner: None)


def _the_heap_is_never_raised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheShares, "_raise", lambda self, owner: None)


def _the_host_counts_a_content_for_its_first_owner(patch: pytest.MonkeyPatch) -> None:
    """Content hashes differ between scopes, so owners change only where an earlier run's content is used again."""
    patch.setattr(HostPool, "store", lambda self, key, owner=None, store=HostPool.store: store(self, key))

    def careless(self: HostPool, key: bytes, owner: Owner[int] | None) -> None:
        if key in self._owner_of:
            self._owner_of[key] = self._own(owner)

    patch.setattr(HostPool, "own", careless)


@pytest.mark.parametrize(
    "plant",
    [
        _children_are_of_nobody,
        _evicted_blocks_still_count,
        _the_heap_is_never_raised,
        _the_host_counts_a_content_for_its_first_owner,
    ],
)
def test_a_planted_fault_is_found(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    show_a_fault(play, 400, as_one_of=(AssertionError, KeyError, IndexError, InvariantViolation))


def cached_after_a_flood(
    *, scopes: bool, num_blocks: int = 40, num_host_blocks: int = 0, weight: float = 1.0
) -> list[int]:
    """The cached tokens of a prompt of 33 tokens that comes again after every twenty unique prompts of another."""
    run = new_run(num_blocks=num_blocks, block_size=4, num_host_blocks=num_host_blocks, max_num_seqs=4)
    salts = ("victim\0", "flood\0") if scopes else ("", "")
    found = []
    for turn in range(6):
        name = f"victim {turn}"
        run.add(request_for(name, own_tokens("victim", 33), 2, salt=salts[0]))
        run.to_end()
        found.append(outputs_of(run, name)[-1].num_cached_tokens)
        for number in range(20):
            flood = request_for(f"flood {turn}.{number}", own_tokens(f"flood {turn}.{number}", 30), 2, salt=salts[1])
            run.add(dataclasses.replace(flood, weight=weight))
        run.to_end()
    return found


def test_a_flood_leaves_the_prefixes_of_others() -> None:
    assert cached_after_a_flood(scopes=True) == [0, 32, 32, 32, 32, 32]
    assert cached_after_a_flood(scopes=False) == [0, 0, 0, 0, 0, 0], "as without keys, where they are one"


def test_a_heavy_tenants_flood_leaves_as_much_as_its_weight_says() -> None:
    """40 blocks in shares of 1 and 39: one for the victim."""
    assert cached_after_a_flood(scopes=True, weight=39.0)[-1] <= 8


def test_a_flood_leaves_the_prefixes_of_others_on_the_host() -> None:
    """The flood's requests that run need nearly all of the pool; 20 blocks of the host keep the victim's eight."""
    assert cached_after_a_flood(scopes=True, num_blocks=12)[-1] < 32
    assert cached_after_a_flood(scopes=True, num_blocks=12, num_host_blocks=20)[-1] == 32
    assert cached_after_a_flood(scopes=False, num_blocks=12, num_host_blocks=20)[-1] == 0
