"""More adapters than places: each has its turn, nobody waits for the end of a long request, no token is lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quire_engine.contract.types import Adapter, AdaptersInUse, EngineStats, GenerationRequest, StepOutput
from quire_engine.engine import Engine
from quire_engine.scheduling.scheduler import Scheduler
from support.covering import few
from support.fake_executor import FakeExecutor, expected_tokens, request
from support.limits import scheduler_config
from support.seeds import naming

TURN = 10


class FakeStore:
    """Adapters that are read at once, as `execution.adapters` keeps them; what it has and has read is seen."""

    def __init__(self, most: int) -> None:
        self.most, self.leaving, self.there = most, set[str](), dict[str, None]()
        self.read: list[str] = []
        self.broken: set[str] = set()

    def prepare(self, adapter: Adapter, in_use: AdaptersInUse) -> str | None:
        digest = adapter.digest
        if digest in self.there:
            if digest in self.leaving and digest in in_use.active:
                return None
            self.leaving.discard(digest)
            return ""
        if len(self.there) == self.most:
            idle = [each for each in self.there if each not in in_use.active]
            if not idle:
                self.leaving = self.leaving or {next(iter(self.there))}
                return None
            del self.there[idle[0]]
            self.leaving.discard(idle[0])
        if digest in self.broken:
            return "its files are gone"
        self.there[digest] = None
        self.read.append(digest)
        return ""

    def order(self, name: str, path: str, in_use: AdaptersInUse) -> None:
        raise AssertionError

    def forget(self, digest: str, in_use: AdaptersInUse) -> None:
        raise AssertionError

    def wait(self, seconds: float) -> None:
        assert seconds < 0.1


class Told:
    """An engine with its executor; every step is one of the clock."""

    def __init__(self, places: int = 1, max_loras: int = 1, **limits: object) -> None:
        settings = {"num_blocks": 512, "elder_age_steps": TURN, "max_loras": max_loras, "max_num_seqs": 8, **limits}
        self.store, self.executor, self.steps = FakeStore(places), FakeExecutor(16), 0
        self.scheduler = Scheduler(scheduler_config(**settings))
        self.engine = Engine(
            self.scheduler, self.executor, adapters=self.store, check_invariants=True, clock=lambda: float(self.steps)
        )
        self.engine.on_step = self.take
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.errors: dict[str, str] = {}
        self.ended: dict[str, int] = {}  # by request: the step of its end
        self.stats = EngineStats()

    def take(self, step: StepOutput) -> None:
        self.stats = step.stats
        for output in step.outputs:
            self.tokens.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
            if output.finish == "error":
                self.errors[output.request_id] = output.error or ""
            if output.finish is not None:
                self.ended[output.request_id] = self.steps

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.steps += 1
            self.engine.step()
            for batch in self.executor.log:
                computed = {item.adapter for item in batch.items if item.adapter}
                assert computed <= self.store.there.keys(), "it computes with what is not there"
            self.executor.log.clear()

    def to_end(self) -> None:
        while self.engine.has_work:
            assert self.steps < 20_000, "it does not end"
            self.step()


def asked(name: str, adapter: str = "", prompt: int = 8, tokens: int = 6, n: int = 1) -> GenerationRequest:
    plain = request(name, prompt, tokens, n=n)
    return plain.bound_to(Adapter(name=adapter, path=f"/{adapter}", digest=adapter)) if adapter else plain


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("beside", [0, 3])
def test_a_long_request_keeps_no_adapter_out(places: int, beside: int) -> None:
    """Whether the others have their place in memory already or not, and whether the model alone is busy too."""
    told = Told(places)
    wanted = [asked("long", "a", tokens=300, n=2), *(asked(f"base{i}", tokens=250) for i in range(beside))]
    for each in wanted:
        told.engine.submit(each)
    told.step(5)
    others = [asked(f"{adapter}{i}", adapter, tokens=8) for i in range(2) for adapter in "bc"]
    for each in others:
        told.engine.submit(each)
    told.to_end()
    assert max(told.ended[each.request_id] for each in others) < 12 * TURN
    assert told.ended["long"] < 300 + 16 * TURN
    for each in [*wanted, *others]:
        for choice in range(each.n):
            assert tuple(told.tokens[each.request_id, choice]) == expected_tokens(each, choice)


def test_long_requests_take_turns_and_all_of_an_adapter_compute_together() -> None:
    told = Told()
    wanted = [asked(f"{adapter}{i}", adapter, tokens=200) for adapter in "abc" for i in range(2)]
    for each in wanted:
        told.engine.submit(each)
    told.to_end()
    assert told.store.read[:6] == ["a", "b", "c", "a", "b", "c"]
    assert len(told.store.read) <= 3 * 200 / TURN + 3
    ends = [told.ended[each.request_id] for each in wanted]
    assert max(ends) - min(ends) < 4 * TURN, "who came first has no advantage but its turn"
    assert max(ends) < 3 * 200 * 1.5
    assert all(tuple(told.tokens[each.request_id, 0]) == expected_tokens(each, 0) for each in wanted)


def test_a_turn_lasts_until_prompts_are_computed() -> None:
    told = Told(max_num_batched_tokens=32, min_chunk=16, prefill_chunk=16, max_num_seqs=4)
    wanted = [asked("a", "a", prompt=600, tokens=30), asked("b", "b", prompt=600, tokens=30)]
    for each in wanted:
        told.engine.submit(each)
    told.to_end()
    assert all(tuple(told.tokens[each.request_id, 0]) == expected_tokens(each, 0) for each in wanted)
    assert told.steps < 1000, "with turns of ten steps neither prompt would ever be computed"


def test_who_needs_no_adapter_does_not_wait_for_those_who_do() -> None:
    told = Told(places=2, max_bypasses=2, elder_age_steps=400)
    told.engine.submit(asked("long", "a", tokens=300))
    told.step(2)
    told.engine.submit(asked("b", "b"))
    for i in range(20):
        told.engine.submit(asked(f"base{i}", tokens=4))
    told.step(60)
    assert {f"base{i}" for i in range(20)} <= set(told.ended)
    assert "b" not in told.ended
    told.to_end()


def test_the_names_of_adapters_that_run_and_are_waited_for() -> None:
    told = Told(places=1)
    for name, adapter in (("one", "a"), ("two", "b"), ("three", "c"), ("none", "")):
        told.engine.submit(asked(name, adapter, tokens=20))
    told.step(2)
    assert (told.stats.running_adapters, told.stats.waiting_adapters) == ({"a"}, {"b", "c"})
    told.to_end()
    assert (told.stats.running_adapters, told.stats.waiting_adapters) == (frozenset(), frozenset())


def test_a_client_that_does_not_read_keeps_no_place() -> None:
    told = Told()
    slow, other = asked("slow", "a", tokens=40), asked("other", "b", tokens=40)
    told.engine.submit(slow)
    told.step(5)
    told.engine.hold_request("slow")
    told.engine.submit(other)
    told.step(3)
    assert told.store.read == ["a", "b"]
    told.engine.release_request("slow")
    told.to_end()
    assert all(tuple(told.tokens[each.request_id, 0]) == expected_tokens(each, 0) for each in (slow, other))


def test_what_is_set_aside_may_be_held_released_aborted_and_reach_its_deadline() -> None:
    told = Told()
    for name in ("held", "aborted"):
        told.engine.submit(asked(name, "a", tokens=60))
    told.engine.submit(replace(asked("late", "a", tokens=60), deadline=TURN + 14.0))
    told.engine.submit(asked("other", "b", tokens=90))
    told.step(TURN + 8)
    assert told.stats.held == 3
    told.engine.hold_request("held")
    told.engine.abort("aborted")
    told.step(8)
    assert told.errors.keys() == {"late"}
    assert told.stats.held == 1
    told.to_end()
    assert "held" not in told.ended
    told.engine.release_request("held")
    told.to_end()
    assert len(told.tokens["held", 0]) == 60


def test_files_that_have_gone_meanwhile_end_the_request_with_the_reason() -> None:
    told = Told()
    told.engine.submit(asked("a", "a", tokens=60, n=2))
    told.engine.submit(asked("b", "b", tokens=60))
    told.step(TURN + 8)
    told.store.broken.add("a")
    told.to_end()
    assert told.errors == {"a": "its files are gone"}
    assert len(told.tokens["b", 0]) == 60


@pytest.mark.parametrize("places", few([1, 2, 3], 3))
def test_whatever_clients_do_all_others_get_their_tokens(places: int) -> None:
    """Random arrivals, ends, pauses and adapters that cannot be read, with every invariant looked at in each step."""
    for seed in range(3):
        with naming(seed):
            source = random.Random(seed)
            told = Told(
                places, max_loras=source.randint(1, places), num_blocks=source.choice((24, 200)), max_model_len=128
            )
            told.store.broken = {"e"} if source.random() < 0.3 else set()
            wanted, gone, held = {}, set[str](), set[str]()
            for i in range(120):
                if source.random() < 0.35:
                    adapter = source.choice(("", "a", "b", "c", "d", "e"))
                    one = asked(
                        f"r{i}", adapter, source.randint(1, 40), source.randint(1, 60), n=source.choice((1, 1, 2))
                    )
                    wanted[one.request_id] = one
                    told.engine.submit(one)
                live = [name for name in wanted if name not in told.ended and name not in gone]
                match source.randrange(8):
                    case 0 if live:
                        name = source.choice(live)
                        gone.add(name)
                        held.discard(name)
                        told.engine.abort(name)
                    case 1 if live:
                        held.add(source.choice(live))
                        for name in held:
                            told.engine.hold_request(name)
                    case 2:
                        for name in held:
                            told.engine.release_request(name)
                        held.clear()
                told.step()
            for name in held:
                told.engine.release_request(name)
            told.to_end()
            for name, one in wanted.items():
                if name in gone or name in told.errors:
                    assert name in gone or one.adapter is not None
                    continue
                for choice in range(one.n):
                    assert tuple(told.tokens[name, choice]) == expected_tokens(one, choice), name
            assert told.stats.held == 0
