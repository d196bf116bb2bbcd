"""Exercises by a live server: what a right log, pool or answer shows holds, and what a wrong one shows does not."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from property.test_replay import Recorded
from quire_bench.servers import BenchError
from quire_engine.contract.batch import SampledToken, StepResult
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_engine.scheduling.scheduler import Scheduler
from quire_lab.exercises import alone, commands, library, pool, reasons, stepping
from quire_lab.exercises.__main__ import checks, main
from quire_lab.exercises.own import SLOTS, TIGHT_BLOCKS, OwnServers
from quire_lab.facts.command import run_checks
from quire_lab.facts.fact import Fact, NotShown, equal, renamed
from quire_lab.facts.logs import apart, arrivals_of, most_live
from quire_lab.simulation.recorded import Recording
from quire_lab.simulation.replaying import Replayer
from support.documents import text
from support.fake_executor import request

LENGTHS, ARRIVALS = stepping.LENGTHS, stepping.ARRIVALS


def holds(facts: list[Fact]) -> list[bool]:
    return [fact.ok for fact in facts]


def log_of(path: Path, arrivals: tuple[int, ...], **limits: Any) -> Recording:
    """Four requests of one token, behind a short one of somebody else."""
    run = Recorded(**{"num_blocks": 64, "max_num_batched_tokens": 512, **limits})
    run.scheduler.add(request("short", 1, 8, arrival=run.now, penalty=0.0), run.now)
    run.step()
    number = 0
    for step in range(10_000):
        while number < len(arrivals) and arrivals[number] <= step:
            wanted = request(f"r{number}", (number,), LENGTHS[number], arrival=run.now, penalty=0.0)
            run.scheduler.add(wanted, run.now)
            number += 1
        if number == len(arrivals) and not run.scheduler.has_work:
            break
        run.step()
    return run.write(path / "log.jsonl")


def changed(told: Recording, step_id: int, **fields: Any) -> Recording:
    """The log with other words about one step."""
    entries = tuple(
        dataclasses.replace(entry, plain={**entry.plain, **fields})
        if entry.kind == "step" and entry.plain["step_id"] == step_id
        else entry
        for entry in told.entries
    )
    return dataclasses.replace(told, entries=entries)


@pytest.mark.parametrize("arrivals", [(0, 0, 0, 0), ARRIVALS])
def test_the_steps_of_a_log_are_the_simulators(tmp_path: Path, arrivals: tuple[int, ...]) -> None:
    told = log_of(tmp_path, arrivals)
    live, expected = stepping.steps_of(told, LENGTHS), stepping.simulated(LENGTHS, arrivals)
    assert holds(stepping.alike("S2.2", live, expected)) == [True, True, True]
    assert max(live.blocks) == 16
    if arrivals == ARRIVALS:
        assert (live.ends(LENGTHS), live.blocks.index(16)) == ([32, 130, 68, 262], 118)
    elsewhere = stepping.simulated(LENGTHS, (0, 2, 4, 7))
    assert not any(holds(stepping.alike("S2.2", live, elsewhere)))
    more = dataclasses.replace(live, blocks=(*live.blocks[:-1], live.blocks[-1] + 1))
    assert holds(stepping.alike("S2.2", more, expected)) == [True, True, False]


def test_a_plan_that_its_requests_do_not_bring_about_is_told(tmp_path: Path) -> None:
    told = log_of(tmp_path, (0, 1, 1, 9))
    found = Replayer(told).run()
    assert found.difference is None
    assert stepping.planned_alike("S1.3", told, dataclasses.replace(found, requests=4)).ok
    assert not stepping.planned_alike("S1.3", told, found).ok, "somebody else had a request there"
    other = changed(told, 40, blocks_used=99)
    wrong = stepping.planned_alike("S1.3", other, Replayer(other).run())
    assert not wrong.ok
    assert "step 40 differs in blocks_used" in wrong.got


def test_the_blocks_of_a_shared_prompt(tmp_path: Path) -> None:
    run = Recorded(num_blocks=64, max_num_batched_tokens=512, max_num_seqs=16, min_chunk=16)
    run.scheduler.add(request("a", 200, 2, n=16, arrival=run.now, penalty=0.0), run.now)
    while run.scheduler.has_work:
        run.step()
    told = run.write(tmp_path / "log.jsonl")
    assert holds(pool.copied_on_write(told, choices=16, block_size=16)) == [True, True]
    assert holds(pool.copied_on_write(told, choices=15, block_size=16)) == [True, False]
    assert holds(pool.copied_on_write(told, choices=16, block_size=32)) == [False, True]


def test_audits() -> None:
    under_load = pool.Look(clean=True, disagreement="", references=9, total=10, used=6, cached=1, free=3)
    over = dataclasses.replace(under_load, references=0, used=0, cached=4, free=6)
    assert all(holds(pool.audits([under_load], over)))
    dirty = dataclasses.replace(under_load, clean=False, disagreement="I1: block 3 has 2 holders")
    assert holds(pool.audits([dirty], over)) == [False, True, True, True, True]
    assert "I1: block 3" in pool.audits([dirty], over)[0].got
    assert pool.audits([over], over)[1].verdict == "not shown here", "nothing ran"
    assert holds(pool.audits([dataclasses.replace(under_load, free=2)], over)) == [True, True, True, False, True]
    assert holds(pool.audits([under_load], under_load)) == [True, True, False, True, False]


def test_answers_that_differ_alone() -> None:
    assert alone.equal_answers("S2.4", [(1, 2), (3,)], [(1, 2), (3,)]).ok
    assert not alone.equal_answers("S2.4", [(1, 2), (3,)], [(1, 2), (4,)]).ok
    assert not alone.equal_answers("S2.4", [(1, 2), ()], [(1, 2), ()]).ok, "no token shows nothing"
    assert not alone.equal_answers("S2.4", [], []).ok


def test_every_decision_has_a_rule(tmp_path: Path) -> None:
    run = Recorded(num_blocks=12, max_num_seqs=4)
    for name in ("a", "b", "c"):
        run.scheduler.add(request(name, 60, 70, arrival=run.now, penalty=0.0), run.now)
    while run.scheduler.has_work:
        run.step()
    told = run.write(tmp_path / "log.jsonl")
    steps = list(told.steps)
    assert holds(reasons.explained("S4.2", steps, needed=("enters", "waits", "preempted"))) == [True, True]
    first = {**steps[0], "decisions": [{"kind": "waits", "request_id": "a", "reason": "whim", "num_tokens": 0}]}
    odd, kinds = reasons.explained("S4.2", [first], needed=("enters",))
    assert (odd.ok, kinds.verdict, kinds.got) == (False, "not shown here", "nothing enters: waits for whim")
    assert "waits 'whim'" in odd.got
    new = {**first, "decisions": [{"kind": "sits", "request_id": "a", "reason": "", "num_tokens": 0}]}
    assert not reasons.explained("S4.2", [new], needed=())[0].ok
    assert not reasons.explained("S4.2", [], needed=())[0].ok, "no decision shows nothing"


def test_what_commands_say() -> None:
    assert commands.shows("S3.2", ("a b", "c"), "a b, c").ok
    assert commands.shows("S3.2", ("a b", "c"), "a b").got == "all but c"
    assert commands.written_alike(["## Planned settings\na", "## Planned settings\na"]).ok
    assert not commands.written_alike(["## Planned settings\na", "## Planned settings\nb"]).ok
    assert not commands.written_alike(["## Planned settings\na", "## Planned settings\na\nb"]).ok
    assert not commands.written_alike(["a", "a"]).ok, "no section"
    said = "│ ttft_p95 │ 2 s │ 9 ms │ {} │\n│ itl_p95 │ 200 ms │ 1 ms │ ok │\n"
    assert commands.judged(0, said.format("ok"), "").ok
    assert not commands.judged(1, said.format("ok"), "").ok
    assert not commands.judged(0, said.format("no data"), "").ok
    assert commands.judged(1, said.format("MISSED") + "1. kv\n   remedy: more\n", "").ok
    assert not commands.judged(2, "", "it cannot be read").ok


def test_what_a_sweep_shows() -> None:
    good = {"ok": 4, "errors": {}}
    results: dict[str, Any] = {
        "points": [{"servers": [{"rounds": [good], "ratios": {}}]} for _ in range(4)],
        "knees": {"server": {"value": 4.0, "throughput": 99.0, "reached": True}},
    }
    assert holds(commands.swept(results)) == [True, True]
    assert holds(commands.swept({**results, "knees": {}})) == [True, False]
    bad = {"servers": [{"rounds": [{"ok": 3, "errors": {"reset": 1}}], "ratios": {}}]}
    assert holds(commands.swept({**results, "points": [bad, *results["points"][1:]]})) == [False, True]


def test_a_server_compared_with_itself() -> None:
    """What a busy machine makes of the ratio is not shown; other requests, or no ratio, are a fault."""

    def compared(ratio: float | None, *tokens: list[int]) -> list[str]:
        ratios: list[dict[str, Any]] = [{}, {} if ratio is None else {"output_tok_s": {"median": ratio}}]
        servers = [
            {"rounds": [{"output_tokens": count} for count in counts], "ratios": each}
            for counts, each in zip(tokens, ratios, strict=False)
        ]
        return [fact.verdict for fact in commands.compared_with_itself({"points": [{"servers": servers}]})]

    assert compared(1.1, [64, 64], [64, 64]) == ["ok", "ok"]
    assert compared(2.1, [64, 64], [64, 64]) == ["ok", "not shown here"]
    assert compared(1.1, [64, 64], [64, 63]) == ["NOT SO", "ok"]
    assert compared(None, [64], [64]) == ["ok", "NOT SO"]
    assert compared(None, [64]) == ["NOT SO", "NOT SO"]


def preemptions(*, step: float, row: float, token: float) -> int:
    """Of the small pool's requests, on a machine with these times: after short answers, four of them at once."""
    limits = SchedulerLimits(max_num_seqs=SLOTS, max_num_batched_tokens=64, prefill_chunk=32)
    scheduler = Scheduler(SchedulerConfig(num_blocks=TIGHT_BLOCKS, max_model_len=512, limits=limits))
    now, long, short = 0.0, alone.large_jobs(Prompts()), alone.FORGOTTEN  # type: ignore[arg-type]

    def run() -> None:
        nonlocal now
        while (batch := scheduler.schedule(now)) is not None:
            count = sum(item.num_tokens for item in batch.items)
            now += step + row * len(batch.items) + token * count
            ids = {item.sequence_id: alone.STOP if is_short else 7 for item in batch.items if item.wants_sample}
            samples = {name: (SampledToken(token_id=token_id),) for name, token_id in ids.items()}
            scheduler.apply(batch, StepResult(samples=samples), now)

    is_short = True
    for number in range(short):
        scheduler.add(request(f"short{number}", 4, alone.LARGE_ANSWER, stop=(alone.STOP,), penalty=0.0), now)
        run()
    is_short = False
    for number, job in enumerate(long):
        scheduler.add(request(f"long{number}", job.prompt, job.num_tokens, stop=(alone.STOP,), penalty=0.0), now)
    run()
    return scheduler.stats().total_preemptions


class Prompts:
    """A server as far as jobs need it to be drawn."""

    def __init__(self) -> None:
        self.drawn = 0

    def prompt(self, num_tokens: int) -> list[int]:
        self.drawn += 1
        return [self.drawn, *range(64, 63 + num_tokens)]


@pytest.mark.parametrize("step", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize(("row", "token"), [(1e-6, 1e-6), (1e-2, 1e-5), (1e-4, 1e-2)])
def test_the_small_pool_preempts_whatever_the_machine(step: float, row: float, token: float) -> None:
    """Prices of admission are learned from the times of steps; the requests are such that none of them matters."""
    assert preemptions(step=step, row=row, token=token) > 0


def test_arrivals_and_who_was_there_at_one_time(tmp_path: Path) -> None:
    told = log_of(tmp_path, ARRIVALS)
    assert arrivals_of(told, LENGTHS) == [step + 1 for step in ARRIVALS], "a short one came first"
    assert arrivals_of(told, (32, 77)) == [1, -1]
    assert most_live(told) == 5
    assert apart(told, 5) == ""
    late = log_of(tmp_path, (0, 40, 300, 400), max_num_seqs=4)
    assert most_live(late) == 2
    assert apart(late, 3) == "at most 2 of 3 requests were there at one time"
    assert apart(late, 5) == "the server has 4 seats"


def test_every_exercise_of_the_documents_is_there() -> None:
    named = {
        name for row in re.findall(r"^\| (S[\d., S]+) \|", text("docs/measuring.md"), re.M) for name in row.split(", ")
    }
    assert named == {name for names in checks(None, OwnServers(), None) for name in names}


def test_the_library_without_a_model() -> None:
    facts = library.without_a_model()
    assert holds(facts) == [True] * 4
    assert library.WITHOUT_A_MODEL in text("docs/measuring.md")
    assert "\n".join(library.PRINTED) in text("docs/measuring.md")
    assert holds(library.said_as_expected(["a", "b"], ["1", "2"], ["1"])) == [True, False]


def test_names_and_servers_that_there_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["S9.9"])
    assert ended.value.code == 2
    assert "no check of S9.9" in capsys.readouterr().err
    assert main(["--url", "http://127.0.0.1:9", "s1.3"]) == 1
    assert "does not answer" in capsys.readouterr().err


class Idle:
    def until_idle(self) -> None:
        pass


def test_what_cannot_be_checked_does_not_hold() -> None:
    def check(live: object) -> list[Fact]:
        raise BenchError("it does not answer")

    def late(live: object) -> list[Fact]:
        raise NotShown("the pause ended early")

    tried = {("S1.1",): check, ("S1.2", "S1.3"): lambda _: [equal("S1.2", 1, 1)], ("S2.2", "S2.3"): late}
    facts = run_checks(Idle(), tried, ["S1.1", "S1.3", "S2.3"])
    assert [fact.verdict for fact in facts] == ["NOT SO", "ok", "not shown here"]
    assert [facts[0].got, facts[2].name] == ["it does not answer", "S2.2/S2.3"]
    assert [fact.name for fact in renamed("S3.1", [equal("F3 steps", 1, 1)])] == ["S3.1 steps"]
