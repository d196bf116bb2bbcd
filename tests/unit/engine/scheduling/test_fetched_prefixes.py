"""Requests that wait for another engine's blocks: which blocks, for how long, and what they compute in the end."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from quire_engine.contract.roles import LATE_SECONDS, LATE_SHARE
from quire_engine.contract.types import GenerationRequest, KVSource, StepOutput
from quire_engine.engine import Engine
from quire_engine.scheduling.kept_prefixes import SHORTEST, Wait
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import FakeExecutor, expected_tokens, request
from support.fake_peers import FakePeers
from support.limits import scheduler_config

SIZE = 16
LONG = tuple(range(3, 3 + 405))
BLOCKS = len(LONG) // SIZE
STEP = 0.01
BEGAN = 1.0  # on the engine's clock


class Side:
    """An engine whose blocks others may have; time passes with each step."""

    def __init__(self, lender: Side | None = None, **limits: object) -> None:
        self.peers = FakePeers(SIZE)
        self.peers.lender = None if lender is None else lender.peers
        config = scheduler_config(**{"num_blocks": 256, "max_num_batched_tokens": 256, "itl_target": 0.0, **limits})
        self.scheduler = Scheduler(config, peers=self.peers)
        self.executor = self.peers.executor = FakeExecutor(SIZE)
        self.now = BEGAN
        self.engine = Engine(self.scheduler, self.executor, check_invariants=True, clock=lambda: self.now)
        self.engine.on_step = self._take
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def _take(self, step: StepOutput) -> None:
        for output in step.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            self.cached.setdefault(output.request_id, output.num_cached_tokens)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.engine.step()
            self.now += STEP

    def finish(self, *requests: GenerationRequest) -> None:
        while self.engine.has_work:
            self.step()
        for each in requests:
            assert tuple(self.tokens[each.request_id]) == expected_tokens(each, 0)


def fetching(name: str, prompt: tuple[int, ...] = LONG, own_seconds: float = 10.0) -> GenerationRequest:
    source = KVSource(address="there:1", is_computing=True, own_seconds=own_seconds)
    return replace(request(name, prompt, 4), kv_source=source, arrival_time=BEGAN)


@pytest.fixture
def prefill() -> Side:
    """An engine that has computed the prompt."""
    side = Side()
    side.engine.submit(request("p", LONG, 1))
    side.finish()
    return side


def test_what_comes_is_a_prefix_hit_and_can_be_lent_on(prefill: Side) -> None:
    decode, asked = Side(prefill), fetching("d")
    decode.engine.submit(asked)
    decode.step(3)
    assert (decode.tokens, len(decode.peers.fetches["d"])) == ({}, BLOCKS)
    for _ in range(BLOCKS):
        decode.peers.come("d")
        decode.step()
    decode.finish(asked)
    assert decode.cached["d"] == BLOCKS * SIZE
    assert set(decode.peers.offered) >= set(prefill.peers.offered)
    third, again = Side(decode), fetching("e")
    third.engine.submit(again)
    third.peers.come("e", BLOCKS)
    third.finish(again)
    assert third.cached["e"] == BLOCKS * SIZE
    answer: Any = decode.scheduler.answer("request", {"ids": ["d"]})
    (life,) = answer["requests"]
    assert "waiting for KV blocks of its prompt from another engine" in life["why"]
    assert ("transit", "transfer") in {(part["phase"], part["reason"]) for part in life["spent"]}
    assert decode.scheduler.stats().total_transfer_wait_seconds == pytest.approx((BLOCKS + 3) * STEP, abs=3 * STEP)


def test_what_does_not_come_is_computed_from_the_last_block_that_has(prefill: Side) -> None:
    decode, asked = Side(prefill), fetching("d", own_seconds=1.0)
    decode.engine.submit(asked)
    decode.peers.come("d", 10)
    decode.finish(asked)
    assert decode.cached["d"] == 10 * SIZE
    assert decode.peers.cancelled == ["d"]
    waited = decode.scheduler.stats().total_transfer_wait_seconds
    assert waited == pytest.approx(LATE_SHARE + 10 / BLOCKS + LATE_SECONDS, abs=3 * STEP)


def test_a_miss_ends_the_wait_at_once(prefill: Side) -> None:
    decode, asked = Side(prefill), fetching("d")
    decode.engine.submit(asked)
    decode.peers.come("d", 3)
    decode.peers.miss("d")
    decode.finish(asked)
    assert decode.cached["d"] == 3 * SIZE
    assert decode.scheduler.stats().total_transfer_wait_seconds < 3 * STEP


def test_others_with_the_same_prompt_share_a_fetch_and_its_bound(prefill: Side) -> None:
    decode = Side(prefill)
    asked = [fetching("d", own_seconds=1.0), fetching("e", own_seconds=1.0), request("f", LONG, 4)]
    for each in asked:
        decode.engine.submit(each)
    decode.step()
    assert list(decode.peers.fetches) == ["d"]
    decode.finish(*asked)
    assert decode.now < BEGAN + 1.0, "all of them compute as soon as the fetch is behind"
    assert decode.peers.fetches == {}


def test_an_abort_ends_the_fetch_and_others_compute(prefill: Side) -> None:
    decode, other = Side(prefill), request("f", LONG, 4)
    decode.engine.submit(fetching("d"))
    decode.engine.submit(other)
    decode.step()
    decode.engine.abort("d")
    assert (decode.peers.cancelled, decode.peers.fetches) == (["d"], {})
    decode.finish(other)
    assert decode.now < BEGAN + 1.0


def test_nothing_is_fetched_where_computing_is_sooner_and_it_is_tried_again_after_a_while(prefill: Side) -> None:
    decode = Side(prefill)
    decode.scheduler.kept.learn(prompt_tokens=1000, num_decodes=0, seconds=1.0)  # 16 ms for a block
    decode.peers.seconds_per_block = 0.0165
    asked = [fetching(name, (ord(name), *LONG)) for name in "defgh"]
    for each, after, is_fetched in zip(
        asked, (0.0, 0.9, 0.2, 1.8, 0.3), (False, False, True, False, True), strict=True
    ):
        decode.now += after * SHORTEST
        decode.engine.submit(each)
        assert (each.request_id in decode.peers.fetches) == is_fetched, "else one slow block would be the last"
        late: frozenset[str] = decode.scheduler.stats().late_peers
        assert late == (frozenset() if is_fetched else {"there:1"})
        if is_fetched:
            decode.peers.miss(each.request_id)
            decode.step()
            assert decode.scheduler.stats().late_peers == {"there:1"}
    decode.finish(*asked)


def test_an_engine_that_was_late_is_left_alone_until_all_comes_again(prefill: Side) -> None:
    decode = Side(prefill)
    for name, expected in (("c", frozenset[str]()), ("d", {"there:1"})):  # the first time is forgiven
        prompt = (ord(name), *LONG)
        prefill.engine.submit(request(name, prompt, 1))
        prefill.finish()
        late = fetching(name, prompt, own_seconds=1.0)
        decode.engine.submit(late)
        decode.peers.come(name, BLOCKS // 3)
        decode.finish(late)
        assert decode.scheduler.stats().late_peers == expected
    computed = fetching("e", (5, *LONG))
    decode.engine.submit(computed)
    assert decode.peers.fetches == {}
    decode.finish(computed)
    decode.now += SHORTEST
    for name, salt in (("f", 6), ("g", 7)):
        prefill.engine.submit(request(name, (salt, *LONG), 1))
        prefill.finish()
        comes = fetching(name, (salt, *LONG))
        decode.engine.submit(comes)
        decode.peers.come(name, BLOCKS)
        decode.finish(comes)
        assert decode.cached[name] == BLOCKS * SIZE
        assert decode.scheduler.stats().late_peers == frozenset()


def test_alone_the_bound_is_what_computing_is_known_to_take(prefill: Side) -> None:
    decode = Side(prefill)
    decode.scheduler.kept.learn(prompt_tokens=1000, num_decodes=0, seconds=1.0)
    asked = fetching("d", own_seconds=100.0)  # as a front may predict that knows nothing yet
    decode.engine.submit(asked)
    decode.finish(asked)
    expected = LATE_SHARE * BLOCKS * SIZE / 1000 + LATE_SECONDS
    assert decode.scheduler.stats().total_transfer_wait_seconds == pytest.approx(expected, abs=2 * STEP)


def test_a_request_that_would_have_to_wait_anyway_waits_so_much_longer(prefill: Side) -> None:
    decode, other = Side(prefill), request("busy", tuple(range(900, 960)), 40)
    decode.engine.submit(other)
    decode.step(2)
    for _ in range(40):
        decode.scheduler.kept.learn(prompt_tokens=1000, num_decodes=0, seconds=0.2)  # 80 ms for the prompt
    asked = replace(fetching("d", own_seconds=0.3), arrival_time=decode.now)
    decode.engine.submit(asked)
    decode.finish(asked, other)
    expected = 0.3 - BLOCKS * SIZE / 5000 + LATE_SHARE * 0.3 + LATE_SECONDS
    assert decode.scheduler.stats().total_transfer_wait_seconds == pytest.approx(expected, abs=2 * STEP)


def test_one_token_is_left_to_compute_and_no_more_comes_than_the_pool_holds(prefill: Side) -> None:
    whole = LONG[: 20 * SIZE]
    decode = Side(prefill)
    decode.engine.submit(fetching("d", whole))
    assert len(decode.peers.fetches["d"]) == 19
    small = Side(prefill, num_blocks=30, max_model_len=440)
    small.engine.submit(replace(request("busy", tuple(range(500, 660)), 40)))
    small.step(2)
    small.engine.submit(fetching("d"))
    assert len(small.peers.fetches["d"]) == 30 - 11
    decode.engine.abort("d")


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_whenever_the_first_token_is_late_by_a_bounded_time(seed: int) -> None:
    rng = random.Random(seed)
    count, own = rng.randrange(1, 200), rng.choice([0.0, 0.05, 1.0, 30.0])
    keys = {bytes([number]) for number in range(count)}
    wait = Wait(keys=set(keys), began=5.0, moved_at=5.0, peer="there:1", seconds=own, num_keys=count)
    now, tick = 5.0, max(own, 0.1) / 500
    pace = rng.choice([0.0, 0.3, 0.9, 1.0, 1.1, 3.0])  # of what computing takes
    while wait.keys and now < wait.over_at:
        now += tick
        while wait.keys and rng.random() < pace * tick * count / max(own, 1e-9):
            wait.keys.pop()
    rest = own * len(wait.keys) / count
    assert now - 5.0 + rest <= own * (1 + LATE_SHARE) + LATE_SECONDS + tick
