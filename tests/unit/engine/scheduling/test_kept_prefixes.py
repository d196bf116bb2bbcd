"""Which blocks are kept, and for which requests kept ones are read before they enter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire_engine.contract.block_hashes import prompt_hashes
from quire_engine.contract.types import GenerationRequest, StepOutput
from quire_engine.engine import Engine
from quire_engine.scheduling.kept_prefixes import LEAST_TOKENS
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import FakeExecutor, expected_tokens, request
from support.fake_store import FakeStore
from support.limits import scheduler_config

SIZE = 16
LONG = tuple(range(3, 3 + LEAST_TOKENS + 5))
SHORT = LONG[:100]


class Always(random.Random):
    """Dice that let everything happen at once."""

    def random(self) -> float:
        return 0.05


class Served:
    """An engine with a store; `kept` may come from an engine before it."""

    def __init__(self, kept: dict[bytes, bytes] | None = None, **limits: object) -> None:
        config = scheduler_config(**{"num_blocks": 256, "max_num_batched_tokens": 256, "itl_target": 0.0, **limits})
        self.store = FakeStore(Always(), SIZE, {} if kept is None else kept)
        self.scheduler = Scheduler(config, store=self.store)
        self.executor = self.store.executor = FakeExecutor(SIZE)
        self.now = 0.0
        self.engine = Engine(self.scheduler, self.executor, check_invariants=True, clock=lambda: self.now)
        self.engine.on_step = self._take
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def _take(self, step: StepOutput) -> None:
        for output in step.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.cached[output.request_id] = output.num_cached_tokens

    def serve(self, *requests: GenerationRequest) -> None:
        for each in requests:
            self.engine.submit(each)
        while self.engine.has_work:
            self.engine.step()
            self.store.tick()
            self.now += 0.01
        for each in requests:
            assert tuple(self.tokens[each.request_id]) == expected_tokens(each, 0)

    @property
    def depths(self) -> list[int]:
        """The depths of the blocks that were offered."""
        return [depth for _, depth in self.store.offered]


def test_blocks_of_long_prompts_are_kept_as_they_are_computed_and_outputs_are_not():
    served = Served()
    served.serve(request("a", LONG, 40))
    assert served.depths == list(range(len(LONG) // SIZE))
    assert {key for key, _ in served.store.offered} == set(prompt_hashes(LONG, "", SIZE))
    assert set(served.store.kept) == set(prompt_hashes(LONG, "", SIZE))


def test_blocks_of_short_prompts_are_kept_when_a_second_request_begins_with_them():
    served = Served()
    served.serve(request("a", (*SHORT, 1), 4))
    assert served.depths == []
    served.serve(request("b", (*SHORT, 2), 4))
    assert served.depths == list(range(len(SHORT) // SIZE))


def test_what_a_request_finds_of_itself_is_shared_with_nobody():
    served = Served()
    served.engine.submit(request("a", SHORT, 20))
    for _ in range(3):
        served.engine.step()
    served.engine.hold_request("a")
    served.engine.step()
    served.engine.release_request("a")
    served.serve()
    assert tuple(served.tokens["a"]) == expected_tokens(request("a", SHORT, 20), 0)
    assert served.depths == []


def test_a_restarted_engine_computes_only_the_rest():
    first = Served()
    first.serve(request("a", LONG, 4))
    again = Served(first.store.kept)
    again.serve(request("b", (*LONG, 7, 8), 4))
    full = len(LONG) // SIZE * SIZE
    assert again.cached["b"] == full
    assert sum(batch.num_prefills for batch in again.executor.log) == len(LONG) + 2 - full
    assert again.scheduler.stats().total_prefix_hit_tokens == full
    assert again.scheduler.stats().total_kept_read == full // SIZE


def test_one_token_is_left_to_compute():
    first, whole = Served(), LONG[:LEAST_TOKENS]
    first.serve(request("a", whole, 4))
    again = Served(first.store.kept)
    again.serve(request("b", whole, 4))
    assert again.scheduler.stats().total_kept_read == LEAST_TOKENS // SIZE - 1


def test_requests_that_come_together_read_a_block_once():
    first = Served()
    first.serve(request("a", LONG, 4))
    again = Served(first.store.kept)
    again.serve(*(request(name, (*LONG, number), 4) for number, name in enumerate("bcd")))
    assert again.scheduler.stats().total_kept_read == len(LONG) // SIZE
    assert {again.cached[name] for name in "bcd"} == {len(LONG) // SIZE * SIZE}


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "salt"},
        {"cache_salt": "tenant a\0"},
        {"prompt_token_ids": (1, *LONG)},
        {"cache_salt": "\1" + 64 * "0"},  # as `GenerationRequest.bound_to` makes it; the fake engine has no adapters
    ],
    ids=["salt", "tenant", "tokens", "adapter"],
)
def test_other_requests_read_nothing(change: dict[str, object]):
    first = Served()
    first.serve(request("a", LONG, 4))
    again = Served(first.store.kept)
    again.serve(replace(request("b", LONG, 4), **change))
    assert again.scheduler.stats().total_kept_read == 0


def test_who_needs_every_row_computed_reads_nothing():
    first = Served()
    first.serve(request("a", LONG, 4))
    again = Served(first.store.kept)
    again.serve(request("b", LONG, 4, prompt_logprobs=0))
    assert again.scheduler.stats().total_kept_read == 0


def test_computing_is_preferred_where_it_is_sooner_and_reading_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    prompts = {name: (number, *LONG) for number, name in enumerate("abc", 10)}
    first = Served()
    first.serve(*(request(name, prompt, 1) for name, prompt in prompts.items()))
    again = Served(first.store.kept)
    again.scheduler.kept.learn(prompt_tokens=1000, num_decodes=0, seconds=1.0)  # 16 ms for a block
    monkeypatch.setattr(again.scheduler.kept, "learn", lambda **_: None)
    again.store.seconds_per_block = 0.0165
    again.serve(request("a", prompts["a"], 1))
    assert again.cached["a"] == 0
    assert again.scheduler.stats().total_kept_read == 0
    again.serve(request("b", prompts["b"], 1))  # after a refusal 5 % less is believed, or one slow read were the last
    assert again.cached["b"] == len(LONG) // SIZE * SIZE
    again.serve(request("c", prompts["c"], 1))
    assert again.cached["c"] == 0


def test_a_disk_that_does_not_answer_makes_nobody_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    first = Served()
    first.serve(request("a", LONG, 4))
    again = Served(first.store.kept)
    monkeypatch.setattr(again.store, "take", lambda: [])
    again.serve(request("b", LONG, 4))
    assert 5.0 < again.now < 7.0
    assert again.cached["b"] == 0


def test_a_refused_block_is_computed_and_kept_anew():
    first = Served()
    first.serve(request("a", LONG, 4))
    keys, kept = prompt_hashes(LONG, "", SIZE), first.store.kept
    del kept[keys[20]]
    again = Served(dict(kept))
    again.store.holds = lambda key: key in kept or key == keys[20]  # type: ignore[method-assign]
    again.serve(request("b", LONG, 4))
    assert again.cached["b"] == 20 * SIZE
    assert again.scheduler.stats().total_kept_refused == 1


def test_an_abort_while_it_reads_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    first = Served()
    first.serve(request("a", LONG, 4))
    again = Served(first.store.kept)
    monkeypatch.setattr(again.store, "take", lambda: [])
    again.engine.submit(request("b", LONG, 4))
    again.engine.step()
    assert again.scheduler.kept.is_reading
    again.engine.abort("b")
    assert not again.scheduler.kept.is_reading
    assert again.store._reads == []


def test_a_small_pool_reads_no_more_than_it_holds():
    first = Served()
    first.serve(request("a", LONG, 4))
    again = Served(first.store.kept, num_blocks=len(LONG) // SIZE + 2)
    again.serve(request("b", LONG, 4), request("c", (*LONG, 9), 4))
    assert again.cached["b"] == len(LONG) // SIZE * SIZE


def test_an_emptied_cache_empties_the_store_and_lets_those_who_wait_compute():
    first = Served()
    first.serve(request("a", LONG, 4))
    again = Served(first.store.kept)
    again.engine.submit(request("b", LONG, 4))
    again.engine.control("reset_prefix_cache", {})
    assert (again.store.emptied, again.store.kept) == (1, {})
    again.serve()
    assert tuple(again.tokens["b"]) == expected_tokens(request("b", LONG, 4), 0)
    assert again.cached["b"] == 0
