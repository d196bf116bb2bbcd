"""What the step log tells of contents: how far they begin alike, exactly, in bounded memory, and nothing else."""

from __future__ import annotations

import random
from itertools import combinations

import msgspec
import pytest

from quire_engine.contract.batch import SampledToken, StepResult
from quire_engine.contract.types import BeamParams
from quire_engine.scheduling.log.step_records import MOST_BYTES, MOST_CONTENTS, NOTHING, Contents
from quire_engine.scheduling.scheduler import Scheduler
from quire_lab.simulation.contents import Contents as MadeUp
from quire_lab.simulation.recorded import Entry
from support.fake_executor import new_run, request
from support.limits import scheduler_config

Tokens = tuple[int, ...]


def num_common(one: Tokens, other: Tokens) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def drawn(dice: random.Random, before: list[Tokens]) -> Tokens:
    """New tokens, often behind a part of what was there, of a few kinds, so that they meet by chance, too."""
    begins = dice.choice(before)[: dice.randint(0, 40)] if before and dice.random() < 0.7 else ()
    return (*begins, *(dice.choice((0, 1, 255, 256, 2**31 - 1)) for _ in range(dice.randint(1, 6))))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_told_gives_every_pairs_common_beginning(seed: int) -> None:
    dice, contents, known = random.Random(seed), Contents(), list[Tokens]()
    entries = []
    for number in range(60):
        tokens = drawn(dice, known)
        shared = contents.add(number, "", tokens)
        assert shared[1] == max((num_common(tokens, other) for other in known), default=0)
        known.append(tokens)
        plain = {"request_id": str(number), "request": {"num_prompt_tokens": len(tokens)}, "shared": shared}
        entries.append(Entry(kind="submit", ordinal=number, plain=plain))
    made = MadeUp(entries, block_size=16)
    for i, j in combinations(range(60), 2):
        assert num_common(made.prompt(str(i)), made.prompt(str(j))) == num_common(known[i], known[j])


def test_what_goes_on_is_compared_as_if_it_had_been_told_whole() -> None:
    contents = Contents()
    assert contents.add(1, "s", (1, 2, 3)) == NOTHING
    assert contents.extend(2, 1, "s", [1, 2, 3, 4, 5], 3) == (1, 3)
    assert contents.add(3, "s", (1, 2, 9)) == (2, 2)  # the first one is in the second
    assert contents.extend(4, 1, "s", [1, 2, 3, 4, 6], 3) == (2, 4)  # and is not there any more
    assert contents.add(5, "other", (1, 2, 3)) == NOTHING
    assert contents.add(6, "", (1, 2, 3)) == NOTHING
    assert contents.complete_from == 0
    assert sorted(contents._of) == [2, 3, 4, 5, 6]


def test_memory_is_bounded_and_what_was_dropped_is_said() -> None:
    contents = Contents(max_bytes=10_000)
    for number in range(1, 100):
        contents.add(number, "", (number,) * 100)
        assert contents._num_bytes <= 10_000
    kept = sorted(contents._of)
    assert kept == list(range(contents.complete_from, 100))
    assert 10 < len(kept) < 20
    assert len(contents._sorted) == len(kept)
    assert contents.add(100, "", (1,) * 100) == NOTHING
    assert contents.add(101, "", (99,) * 7) == (99, 7)
    contents.add(102, "", range(5000))  # more than there is room for
    assert (contents._num_bytes, contents.complete_from) == (0, 103)
    few = Contents(max_contents=3)
    for number in range(1, 10):
        few.add(number, "", (number,))
    assert (sorted(few._of), few.complete_from) == ([7, 8, 9], 7)


def test_a_short_log_compares_with_few() -> None:
    short = Contents.for_log(2)
    for number in range(1, 20):
        short.add(number, "", (number,))
    assert sorted(short._of) == list(range(12, 20))
    short.add(20, "", range(3800))
    assert (len(short._of), short._num_bytes <= 16384) == (5, True)
    assert not Contents.for_log(0).compares
    long = Contents.for_log(1 << 30)
    assert (long._max_bytes, long._max_contents) == (MOST_BYTES, MOST_CONTENTS)


def test_events_say_from_when_on_they_were_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_engine.scheduling.log.step_records.MOST_BYTES", 2000)
    run = new_run()
    for i in range(30):
        run.add(request(f"r{i}", 20, 3))
        run.to_end()
    events = run.scheduler.answer("steps", {"limit": 256, "events": True})["events"]
    assert events[0].complete_from == 0
    assert events[-1].complete_from > 20
    assert run.scheduler._log._contents._num_bytes <= 2000


def test_no_token_is_told_nor_a_salt() -> None:
    run = new_run(block_size=4)
    secret = tuple(range(7_000_001, 7_000_040))
    run.add(request("a", secret, 8, salt="pepper"))
    run.add(request("b", (*secret, 8_000_000), 8, salt="pepper", beam=BeamParams(width=2)))
    run.to_end()
    run.add(request("c", (*secret, 8_000_000), 8, salt="sugar"))
    run.to_end()
    body = msgspec.json.encode(run.scheduler.answer("steps", {"limit": 256, "events": True})).decode()
    answer = msgspec.json.decode(body)
    submits = [event for event in answer["events"] if event["kind"] == "submit"]
    assert [event["num_tokens"] for event in submits] == [39, 40, 40]
    assert [event["shared"] for event in submits] == [[0, 0], [submits[0]["ordinal"], 39], [0, 0]]
    names = [event["request"]["cache_salt"] for event in submits]
    assert names[0] == names[1] != names[2]
    for told in (*map(str, secret), "8000000", "pepper", "sugar"):
        assert told not in body
    for values in (secret, *run.tokens.values()):  # nor in a row, as ids of small tokens could be
        assert str(list(values))[1:-1].replace(" ", "") not in body


def test_every_beam_is_told_when_it_is_given_up_and_at_the_end() -> None:
    run = new_run(block_size=4)
    run.add(request("a", 10, 6, n=2, beam=BeamParams(width=4)))
    run.to_end()
    answer = run.scheduler.answer("steps", {"limit": 256, "events": True})
    parents = [each for step in answer["steps"] for _, each in step.beams]
    assert parents[0] == (0, 0, 0, 0)
    given_up = [lane for each in parents for lane, parent in enumerate(each) if lane != parent]
    ends = [event for event in answer["events"] if event.kind == "end"]
    assert [event.choice for event in ends] == [*given_up, 0, 1, 2, 3]
    assert len(given_up) > 3
    assert [event.num_tokens for event in ends[:3]] == [10, 10, 10]
    assert all(event.num_tokens > 10 and event.shared[1] >= 10 for event in ends[3:])
    (last,) = [step for step in answer["steps"] if step.ends]
    said = [len(output.token_ids) for output in run.outputs]
    assert [(end[1], end[3]) for end in last.ends] == list(enumerate(said))
    assert not any(step.forced for step in answer["steps"])


def test_two_logs_name_a_salt_differently() -> None:
    assert Contents().salt_name("pepper") != Contents().salt_name("pepper")
    assert Contents().salt_name("") == ""


def test_a_salts_name_has_its_scopes_name() -> None:
    """A replay keeps blocks by scope, as the server did."""
    contents = Contents()
    names = [contents.salt_name(salt) for salt in ("a\0", "a\0x", "b\0x", "x")]
    scopes = [name.partition("\0")[0] for name in names]
    assert len(set(names)) == 4
    assert scopes[0] == scopes[1] != scopes[2] != scopes[3]
    assert "\0" not in names[3]


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    run = new_run(enable_prefix_caching=False)
    run.add(request("a", 20, 3))
    run.to_end()
    assert run.scheduler._log._contents._num_bytes == 0


def test_an_answer_that_ends_beside_a_step_in_flight_is_told_without_the_token_that_is_void() -> None:
    config = scheduler_config(num_blocks=64, max_num_batched_tokens=128, plans_ahead=True)
    ahead = Scheduler(config)
    ahead.add(request("a", 20, 9, stop=(5,), penalty=0.0), 0.0)
    batches = []
    for now in range(3):
        batch = ahead.schedule(float(now))
        if batch is not None:
            batches.append(batch)
        if now:
            first = batches.pop(0)
            token = 5 if now == 2 else 4
            sampled = {i.sequence_id: (SampledToken(token_id=token),) for i in first.items if i.wants_sample}
            ahead.apply(first, StepResult(samples=sampled), float(now))
    answer = ahead.answer("steps", {"limit": 9, "events": True})
    assert [step.ends for step in answer["steps"]] == [(), (("a", 0, "stop", 2),), ()]
    assert [(event.kind, event.num_tokens) for event in answer["events"]] == [("submit", 20), ("end", 22)]
