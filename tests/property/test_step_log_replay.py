"""The step log under random traffic: it tells all that the plans follow from, and its accounts add up.

Each run draws a small pool, policies, prompts of three families, tenants, deadlines, beams, aborts and failures from
its seed, on an executor with one step or two in flight. I18: the log's lines alone, through another scheduler, bring
the same plans for the same reasons.
"""

from __future__ import annotations

import dataclasses
import io
import json
import random
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from property.test_speculation import Guesses, Verifier
from quire_engine.contract.block_store import BlockStore
from quire_engine.contract.limits import AdmissionName, LeastShares, PolicyName, SchedulerConfig, VictimName
from quire_engine.contract.types import BeamParams, GenerationRequest, StepOutput
from quire_engine.engine import Engine
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.speculation import Speculation
from quire_lab.commands.trace import PAGE, Lines, narrate, pages
from quire_lab.simulation.recorded import read_log
from quire_lab.simulation.replaying import Difference, Replayer
from support.fake_executor import FakeExecutor, expected_tokens, request
from support.limits import scheduler_config
from support.scheduler_model import feasible

Line = dict[str, Any]
NUM_RUNS = 4  # of each kind; `make property-test` does many times as many
SHARES = tuple(LeastShares(interactive=i, batch=b) for i, b in ((0, 0), (0, 0.1), (0.5, 0.5)))  # of the classes
PLAN = ("step_id", "slices", "copies", "swaps", "decisions", "running", "waiting", "blocks_used", "starved", "beams")


class Traffic:
    speculates = False

    """One run: requests come and go until a step number, then all end."""

    def __init__(self, seed: int, *, num_steps: int = 60) -> None:
        self.dice = random.Random(seed)
        # Each of its own, so that what else happens stays as it was drawn.
        self.holding, self.spoiling = random.Random(seed + 1_000_000), random.Random(seed + 2_000_000)
        self.pinning = random.Random(seed + 3_000_000)
        self.time = 100.0
        config = self.config = self.draw_config()
        guesses = partial(Speculation, Guesses(random.Random(seed)), most=4) if self.speculates else None
        self.scheduler = Scheduler(config, store=self.make_store(), speculate=guesses)
        kind = Verifier if self.speculates else FakeExecutor
        self.executor = kind(config.limits.block_size, max_in_flight=2 if config.plans_ahead else 1)
        self.engine = Engine(self.scheduler, self.executor, check_invariants=True, clock=self.clock)
        self.live: set[str] = set()
        self.held: list[str] = []
        self.penalty = self.dice.choice([0.0, 0.0, 1.0])  # with one the engine waits for each result before it plans
        self.asked: list[GenerationRequest] = []
        self.engine.on_step = self.take
        number = 0
        while number < num_steps or self.engine.has_work or self.held:
            if number < num_steps:
                self.disturb(number)
                self.hold_or_release()
            elif self.held:
                self.engine.release_request(self.held.pop())
            self.engine.step()
            number += 1

    def make_store(self) -> BlockStore | None:
        return None

    def draw_config(self) -> SchedulerConfig:
        dice = self.dice
        min_chunk, max_num_seqs = dice.randint(1, 6), dice.randint(2, 6)
        return scheduler_config(
            num_blocks=dice.randint(5, 24),
            block_size=dice.randint(1, 5),
            max_model_len=dice.randint(24, 48),
            plans_ahead=dice.random() < 0.5,
            max_num_seqs=max_num_seqs,
            min_chunk=min_chunk,
            max_num_batched_tokens=max_num_seqs + min_chunk + dice.randint(0, 12),
            prefill_chunk=min_chunk + dice.randint(0, 8),
            itl_target=dice.choice([0.0, 0.02]),
            max_bypasses=dice.randint(0, 4),
            elder_age_steps=dice.randint(0, 8),
            scheduling_policy=dice.choice(get_args(PolicyName)),
            enable_prefix_caching=dice.random() < 0.9,
            preemption_victim=dice.choice(get_args(VictimName)),
            admission=dice.choice(get_args(AdmissionName)),
            class_share=dice.choice(SHARES),
            max_consecutive_chunks=dice.randint(0, 3),
            num_host_blocks=dice.choice([0, 0, 8, 24]),
            swap_seconds=dice.choice([0.0, 0.0, 0.001]),
        )

    def clock(self) -> float:
        self.time += self.dice.random() / 100
        return self.time

    def disturb(self, number: int) -> None:
        dice = self.dice
        for each in range(dice.choice([0, 0, 0, 1, 1, 3])):
            wanted = self.draw_request(f"r{number}.{each}")
            if feasible(self.config, wanted):
                self.engine.submit(wanted)
                self.asked.append(wanted)
                self.live.add(wanted.request_id)
        if self.live and dice.random() < 0.1:
            gone = dice.choice(sorted(self.live))
            self.live.discard(gone)
            self.engine.abort(gone)
        if self.scheduler._roster.sequences and dice.random() < 0.05:
            self.executor.errors[dice.choice(sorted(self.scheduler._roster.sequences))] = "out of luck"
        if self.scheduler._roster.sequences and dice.random() < 0.05:
            self.executor.starved.add(dice.choice(sorted(self.scheduler._roster.sequences)))
        if self.scheduler._roster.sequences and self.spoiling.random() < 0.05:
            self.executor.non_finite.add(self.spoiling.choice(sorted(self.scheduler._roster.sequences)))
        if self.scheduler._roster.live and dice.random() < 0.02:
            self.scheduler.fail(dice.choice(sorted(self.scheduler._roster.live)), "the operator's doing")

    def hold_or_release(self) -> None:
        """Beside the traffic's own draws."""
        dice, live = self.holding, [name for name in self.scheduler._roster.live if name not in self.held]
        if live and dice.random() < 0.1:
            self.held.append(dice.choice(live))
            self.engine.hold_request(self.held[-1])
        if self.held and dice.random() < 0.15:
            self.engine.release_request(self.held.pop(dice.randrange(len(self.held))))

    def draw_request(self, name: str) -> GenerationRequest:
        dice = self.dice
        if self.asked and dice.random() < 0.15:  # what was asked before, for the same answers
            again = dice.choice(self.asked)
            prompt = (*again.prompt_token_ids,)  # a copy: the executor tells requests apart by these objects
            return dataclasses.replace(
                again, request_id=name, prompt_token_ids=prompt, arrival_time=self.time, deadline=None
            )
        family = [(dice.randint(0, 2) + 1) * 1000 + i for i in range(40)]
        prompt = (*family[: dice.randint(1, 20)], *(dice.randint(0, 3) for _ in range(dice.randint(0, 6))))
        if self.asked and dice.random() < 0.3:  # a conversation goes on
            before = dice.choice(self.asked)
            prompt = (*before.prompt_token_ids, *expected_tokens(before, dice.randrange(before.n)), 7)
        n = dice.choice([1, 1, 1, 2, 3])
        tokens = dice.randint(0 if n == 1 else 1, 12)
        beam = None
        if tokens and dice.random() < 0.15:
            early = dice.choice([False, True, "never"])
            beam = BeamParams(
                width=n + dice.randint(0, 2), length_penalty=dice.choice([-1.0, 0.0, 2.0]), early_stopping=early
            )
        tenant = dice.choice(["", "a", "b", "c"])
        wanted = request(
            name,
            tuple(prompt),
            tokens,
            n=n,
            stop=tuple(range(0, 1000, 9 if beam is None else 90)) if dice.random() < 0.5 else (),
            priority=dice.randint(0, 2),
            arrival=self.time - dice.random() / 10,
            salt=dice.choice(["", "", "a\0", "b\0b"]),
            penalty=self.penalty,
            prompt_logprobs=1 if dice.random() < 0.1 else None,
            beam=beam,
        )
        return dataclasses.replace(
            wanted,
            tenant=tenant,
            weight=dice.choice([0.5, 1.0, 4.0]),
            max_running=2 if tenant == "c" else 0,
            service_class=dice.choice(["interactive", "interactive", "batch"]),
            deadline=self.time + dice.random() if dice.random() < 0.15 else None,
            cache_ttl=self.pinning.choice([0.0, 0.0, 0.1, 1e6]),
        )

    def take(self, step: StepOutput) -> None:
        if any(output.finish is not None for output in step.outputs):
            self.live &= set(self.scheduler._roster.live)


class Guessing(Traffic):
    """The same with guessed tokens, which need each step's results before the next plan."""

    speculates = True

    def draw_config(self) -> SchedulerConfig:
        return dataclasses.replace(super().draw_config(), plans_ahead=False, speculates=True)


class Log:
    """A scheduler's log in pages, as a server gives them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def page(self, after: int, *, events: bool) -> dict[str, Any]:
        answer = self._scheduler.answer("steps", {"after": after, "limit": PAGE, "events": events})
        page: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(answer))
        return page


def lines_of(scheduler: Scheduler) -> list[Line]:
    """The log as `quire trace --json` writes it."""
    out = io.StringIO()
    lines = Lines(out)
    for page in pages(Log(scheduler), 0, events=True, follow=False):
        lines.page(page)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def replayed(lines: list[Line], folder: Path) -> tuple[Scheduler, Difference | None]:
    """What `quire replay` makes of the log."""
    path = folder / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    replayer = Replayer(read_log(path))
    return replayer.scheduler, replayer.run().difference


def plans(lines: list[Line]) -> list[dict[str, Any]]:
    return [{name: line[name] for name in PLAN} for line in lines if line["kind"] == "step"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function in (test_a_log_replays_to_the_same_plans, test_every_lifes_account_adds_up):
        metafunc.parametrize("seed", range(NUM_RUNS * int(metafunc.config.getoption("--times", 1))))


@pytest.mark.parametrize("kind", [Traffic, Guessing])
def test_a_log_replays_to_the_same_plans(seed: int, kind: type[Traffic], tmp_path: Path) -> None:
    traffic = kind(seed)
    lines = lines_of(traffic.scheduler)
    scheduler, difference = replayed(lines, tmp_path)
    assert difference is None
    scheduler.check_invariants()
    assert plans(lines_of(scheduler)) == plans(lines)


def test_guessed_tokens_are_in_the_log_and_needed(tmp_path: Path) -> None:
    guessed = accepted = 0
    for seed in range(6):
        traffic = Guessing(seed)
        lines = lines_of(traffic.scheduler)
        drafts = [each for line in lines for each in line.get("drafts", ())]
        stats = traffic.scheduler.stats()
        assert sum(each[2] for each in drafts) >= stats.total_draft_tokens  # results of what was aborted are not taken
        assert sum(each[3] for each in drafts) >= stats.total_accepted_tokens
        guessed, accepted = guessed + stats.total_draft_tokens, accepted + stats.total_accepted_tokens
        for line in lines:
            if line.get("drafts"):
                assert "[speculation]" in "\n".join(narrate(line, since=0.0))
                line["drafts"] = []
        for name in {each[0] for each in drafts}:
            (told,) = traffic.scheduler.answer("request", {"ids": [name]})["requests"]  # type: ignore[index]
            assert (
                told["num_guessed_right"] <= told["num_guessed"] <= sum(each[2] for each in drafts if each[0] == name)
            )
        assert (replayed(lines, tmp_path)[1] is not None) == bool(drafts)
    assert guessed > accepted > 50


def test_the_runs_see_what_makes_plans_differ() -> None:
    wanted = {"submit", "abort", "end", "elder", "enters", "waits kv", "waits slots", "waits budget"}
    wanted |= {"preempted blocks", "cached", "copies", "ends stop", "ends length", "ends error"}
    wanted |= {"fail", "expire", "shared", "swaps", "beams", "beams part", "failed slice", "failed memory"}
    wanted |= {"failed values"}
    wanted |= {"waits prefix", "preempted class", "preempted elder", "hold", "release"}
    seen: set[str] = set()
    for seed in range(20):
        if wanted <= seen:
            break
        for line in lines_of(Traffic(seed).scheduler):
            seen.add(line["kind"])
            seen |= {"shared"} if line.get("shared", (0, 0))[1] else set()
            if line["kind"] == "step":
                seen |= {f"{each['kind']} {each['reason']}".strip() for each in line["decisions"]}
                seen |= {f"ends {end[2]}" for end in line["ends"]}
                seen |= {"cached"} if any(each["num_tokens"] for each in line["decisions"]) else set()
                seen |= {name for name in ("copies", "beams") if line[name]}
                seen |= {"swaps"} if any(line["swaps"]) else set()
                seen |= {f"failed {each[2]}" for each in line["failed"]}
                seen |= {"beams part"} if any(sorted(set(p)) != sorted(p) for _, p in line["beams"]) else set()
    assert wanted <= seen


@pytest.mark.parametrize("left_out", ["submit", "abort", "fail", "expire", "hold", "release", "end"])
def test_a_log_that_lacks_an_input_does_not_replay(left_out: str, tmp_path: Path) -> None:
    """Ends tell what answers begin like, which who goes on with a conversation matches."""

    def differs(seed: int) -> bool:
        lines = lines_of(Traffic(seed).scheduler)
        return replayed([line for line in lines if line["kind"] != left_out], tmp_path)[1] is not None

    assert any(map(differs, range(20)))


@pytest.mark.parametrize(
    "left_out",
    ["shared", "beams", "failed", "deadline", "tenant", "service_class", "cache_salt", "weight", "cache_ttl"],
)
def test_each_part_of_a_line_is_needed(left_out: str, tmp_path: Path) -> None:
    def differs(seed: int) -> bool:
        lines = lines_of(Traffic(seed).scheduler)
        for line in lines:
            line.pop(left_out, None)
            line.get("request", {}).pop(left_out, None)
        return replayed(lines, tmp_path)[1] is not None

    assert any(map(differs, range(20)))


def test_every_lifes_account_adds_up(seed: int) -> None:
    """The phases have no gap, in seconds nor in steps, and what is before the first token is the time to it."""
    traffic = Traffic(seed)
    answer = traffic.scheduler.answer("requests", {})
    assert isinstance(answer, dict)
    assert answer["num_live"] == 0
    for each in answer["ended"]:
        (told,) = traffic.scheduler.answer("request", {"ids": [each["request_id"]]})["requests"]
        assert told["state"] == "done"
        assert sum(part["steps"] for part in told["spent"]) == told["last_step"] - told["added_step"]
        assert sum(part["seconds"] for part in told["spent"]) == pytest.approx(told["age_seconds"])
        if told["ttft_seconds"] is not None:
            before = told["before_first_token"]
            assert sum(part["seconds"] for part in before) == pytest.approx(told["ttft_seconds"])
            assert sum(part["steps"] for part in before) == told["first_token_step"] - told["added_step"]
        assert told["num_stalls"] <= told["num_preemptions"] == len(told["preemptions"])
    log = traffic.scheduler._log
    assert log is not None
    assert not log.live
    assert not log._life_of
    assert (log._num_unfinished, log._num_computing_prompts, log._num_reading_output) == (0, 0, 0)
