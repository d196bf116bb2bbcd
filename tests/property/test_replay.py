"""I18: a recorded log replayed makes the same plans, whatever came: forks, aborts, failures, preemptions, sharing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from quire_engine.contract.errors import InfeasibleRequest
from quire_engine.contract.types import BeamParams
from quire_engine.scheduling.scheduler import Scheduler
from quire_lab.simulation.counterfactual import fitted_cost, load_of, measured
from quire_lab.simulation.recorded import Recording, read_log
from quire_lab.simulation.replaying import replay
from support.fake_executor import FakeExecutor, own_tokens, request
from support.limits import scheduler_config

SIZE = 16  # of a block
MOST = 256  # steps in one answer


class Recorded:
    """A scheduler with an executor, and what a server would tell of its log."""

    def __init__(self, **limits: Any) -> None:
        self.config = scheduler_config(
            **{
                "num_blocks": 40,
                "max_num_batched_tokens": 64,
                "max_num_seqs": 8,
                "itl_target": 0.0,
                "step_log": 4096,
                **limits,
            }
        )
        self.scheduler = Scheduler(self.config)
        depth = 2 if self.config.plans_ahead else 1
        self.executor = FakeExecutor(self.config.limits.block_size, max_in_flight=depth)
        self.in_flight: list[Any] = []
        self.now = 1.0
        self.answers: dict[str, list[int]] = {}

    def step(self) -> None:
        self.now += 0.25
        if self.in_flight and self.scheduler.needs_results:
            self._collect()
        batch = self.scheduler.schedule(self.now)
        if batch is not None:
            self.executor.launch(batch)
            self.in_flight.append(batch)
        if self.in_flight and (batch is None or len(self.in_flight) == self.executor.max_in_flight):
            self._collect()

    def _collect(self) -> None:
        self.now += 0.01
        for output in self.scheduler.apply(self.in_flight.pop(0), self.executor.collect(), self.now):
            if output.choice == 0:
                self.answers.setdefault(output.request_id, []).extend(output.token_ids)

    def write(self, path: Path) -> Recording:
        """As `quire trace --json` does."""
        lines: list[dict[str, Any]] = []
        after = 0
        while True:
            page: Any = self.scheduler.answer("steps", {"after": after, "limit": MOST, "events": True})
            if not lines:
                lines.append(
                    {"kind": "config", "format": page["format"], "config": page["config"], "first_step": page["first"]}
                )
            if not page["steps"]:
                break
            after = page["steps"][-1].step_id
            entries = [{"kind": "step", **asdict(one)} for one in page["steps"]] + [
                asdict(one) for one in page["events"]
            ]
            lines += sorted(entries, key=lambda entry: int(entry["ordinal"]))
        path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
        return read_log(path)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
        st.tuples(st.just("submit"), st.integers(1, 70), st.integers(0, 24)),
        st.tuples(st.just("again"), st.integers(0, 9), st.integers(0, 9)),
        st.tuples(st.just("fork"), st.integers(2, 4), st.integers(2, 9)),
        st.tuples(st.just("search"), st.integers(2, 4), st.integers(2, 9)),
        st.tuples(st.just("abort"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("fail"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("error"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("starve"), st.integers(0, 5), st.just(0)),
    ),
    min_size=3,
    max_size=30,
)


def play(run: Recorded, actions: list[tuple[str, int, int]]) -> None:
    names: list[str] = []
    prompts: dict[str, tuple[int, ...]] = {}

    def own(count: int) -> tuple[int, ...]:
        """Tokens that no other prompt has."""
        return tuple(1_000_000 + 1000 * len(names) + i for i in range(count))

    def submit(prompt: tuple[int, ...], outputs: int, n: int = 1, **more: Any) -> None:
        name = f"r{len(names)}"
        stop = (7, 9, 300, 511)
        wanted = request(name, prompt, outputs, n=n, stop=stop, arrival=run.now, **{"penalty": 0.0, **more})
        try:
            run.scheduler.add(wanted, run.now)
        except InfeasibleRequest:
            return
        names.append(name)
        prompts[name] = prompt

    for action, a, b in actions:
        if action == "step":
            for _ in range(a):
                run.step()
        elif action == "submit":
            shared = min(a, 2 * SIZE + a % 3)
            submit((*own_tokens("system", shared), *own(a - shared)), b, penalty=float(a % 5 == 0))
        elif action == "again" and names:
            earlier = names[a % len(names)]
            said = (*prompts[earlier], *run.answers.get(earlier, []))[:96]
            submit((*said[: len(said) - a], *own(b + 1)), 12)
        elif action == "fork":
            submit(own(20 + b), b, n=a)
        elif action == "search":
            submit(own(20 + b), b, n=a - 1, beam=BeamParams(width=a, early_stopping="never"))
        elif action in {"abort", "fail"} and names:
            name = names[a % len(names)]
            run.scheduler.abort(name) if action == "abort" else run.scheduler.fail(name, "told to")
        elif action in {"error", "starve"} and run.scheduler._roster.sequences:
            ids = sorted(run.scheduler._roster.sequences)
            if action == "error":
                run.executor.errors[ids[a % len(ids)]] = "broken"
            else:
                run.executor.starved.add(ids[a % len(ids)])
    while run.scheduler.has_work or run.in_flight:
        run.step()


@settings(max_examples=60, deadline=None)
@given(
    actions=ACTIONS, num_blocks=st.integers(12, 40), ahead=st.booleans(), policy=st.sampled_from(["fcfs", "priority"])
)
def test_a_log_makes_the_same_plans(
    actions: list[tuple[str, int, int]], num_blocks: int, ahead: bool, policy: str
) -> None:
    run = Recorded(num_blocks=num_blocks, plans_ahead=ahead, scheduling_policy=policy)
    play(run, actions)
    with TemporaryDirectory() as folder:
        recording = run.write(Path(folder) / "log.jsonl")
    found = replay(recording)
    assert found.difference is None, found.difference
    assert found.steps == sum(1 for _ in recording.steps)


def test_other_settings_make_other_plans_and_are_told(tmp_path: Path) -> None:
    run = Recorded()
    play(run, [("submit", 60, 20), ("submit", 50, 20), ("step", 3, 0), ("submit", 30, 12)])
    recording = run.write(tmp_path / "log.jsonl")
    limits = replace(recording.config.limits, prefill_chunk=16)
    found = replay(replace(recording, config=replace(recording.config, limits=limits)))
    assert found.difference is not None
    assert found.difference.what == "slices"
    assert found.difference.step_id == 1


def test_a_log_is_a_load_with_times(tmp_path: Path) -> None:
    run = Recorded()
    play(run, [*[("submit", 60, 20), ("step", 6, 0)] * 8])
    recording = run.write(tmp_path / "log.jsonl")
    rows = load_of(recording)
    assert [row.input_tokens for row in rows] == [60] * 8
    assert rows[0].blocks[:2] == rows[1].blocks[:2]
    assert all(1 <= row.output_tokens <= 20 for row in rows)
    assert measured(recording).ttft.count == 8
    assert fitted_cost(recording).decode_seconds(1, 60) > 0
