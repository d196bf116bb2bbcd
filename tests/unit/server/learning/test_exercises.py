"""Each exercise is done by what an engine's log says and by nothing less: real schedules, over pretended KV slots."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest

from quire_server.learning.exercises import BY_NAME, EXERCISES, FEWEST_DECODES, Progress, described
from support.fake_executor import Run, new_run, own_tokens, request

SMALL = {"num_blocks": 12, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 4, "min_chunk": 4}
ROOMY = {"num_blocks": 256, "block_size": 4, "max_num_batched_tokens": 64, "max_num_seqs": 4, "min_chunk": 4}


class Learner:
    """A scheduler, and the progress that its answers make."""

    def __init__(self, **limits: object) -> None:
        self.run: Run = new_run(**limits)
        self.progress = Progress()

    def answer(self) -> dict:
        return msgspec.json.decode(msgspec.json.encode(self.run.scheduler.answer("view", {"limit": 256})))

    def look(self) -> None:
        answer = self.answer()
        self.progress.take(answer, answer["steps"])

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.run.one_step()
            self.look()

    def to_end(self) -> None:
        while self.run.scheduler.has_work:
            self.steps(1)

    @property
    def done(self) -> set[str]:
        return set(self.progress.done)


def test_they_are_described_and_begin_open():
    assert [each["name"] for each in described()] == [each.name for each in EXERCISES]
    assert len({each.lesson for each in EXERCISES}) == 4
    assert len(BY_NAME) == len(EXERCISES) == 11
    assert not any(state["done"] or state["said"] for state in Progress().states())


def test_one_request_alone_does_nothing():
    learner = Learner(**ROOMY)
    learner.run.add(request("a", 40, 30))
    learner.to_end()
    assert learner.done == set()


def test_a_table_of_no_neighbours():
    learner = Learner(**ROOMY)
    learner.run.add(request("a", 8, 20), request("b", 8, 20))
    learner.to_end()
    assert "scattered" in learner.done
    assert "a has the blocks 0" in learner.progress.done["scattered"]


def test_blocks_for_two():
    same = own_tokens("same", 16)
    for shared, is_done in ((16, True), (12, False)):
        learner = Learner(**ROOMY)
        learner.run.add(request("a", (*same[:shared], 1, 2), 8))
        learner.steps(1)
        learner.run.add(request("b", (*same[:shared], 3, 4), 8))
        learner.to_end()
        assert ("share" in learner.done) == is_done, shared


def test_choices_of_one_request_are_not_two_requests():
    learner = Learner(**ROOMY)
    learner.run.add(request("a", 18, 6, n=3))
    learner.to_end()
    assert "share" not in learner.done
    assert "was copied to" in learner.progress.done["copy"]


def test_two_phases_in_a_step_and_a_prompt_in_pieces():
    learner = Learner(**ROOMY, prefill_chunk=8)
    learner.run.add(request("a", 8, 30))
    learner.steps(3)
    learner.run.add(request("b", 12, 2))
    learner.steps(2)
    assert "mixed" in learner.done
    assert "chunks" not in learner.done, "two pieces are not three"
    learner = Learner(**{**ROOMY, "max_num_batched_tokens": 16, "max_num_seqs": 4}, prefill_chunk=12)
    learner.run.add(request("a", 60, 3))
    learner.to_end()
    assert "chunks" not in learner.done, "nobody got a token meanwhile"
    learner.run.add(request("c", 8, 40))
    learner.steps(2)
    learner.run.add(request("d", 60, 2))
    learner.to_end()
    assert "the prompt of d was computed in pieces of" in learner.progress.done["chunks"]


def test_the_place_of_who_has_ended():
    learner = Learner(**{**ROOMY, "max_num_seqs": 2})
    learner.run.add(request("a", 8, 4), request("b", 8, 20))
    learner.to_end()
    assert "seat" not in learner.done, "nobody waited"
    learner.run.add(request("c", 8, 4), request("d", 8, 20), request("e", 8, 4))
    learner.to_end()
    assert "e has the place of who has ended" in learner.progress.done["seat"]


def test_a_batch_that_ends_together_leaves_no_place_beside_others():
    learner = Learner(**{**ROOMY, "max_num_seqs": 2})
    learner.run.add(request("a", 8, 6), request("b", 8, 6), request("c", 8, 6))
    learner.to_end()
    assert "seat" not in learner.done


def test_preempted_and_the_same_tokens():
    learner = Learner(**SMALL)
    learner.run.add(request("a", 12, 20), request("b", 12, 20))
    learner.to_end()
    assert learner.run.scheduler.stats().total_preemptions
    assert "preemption" not in learner.done, "nothing to compare with"
    (hit,) = [name for name in ("a", "b") if learner.progress._requests[name].preempted]
    again = replace(request(hit, 12, 20), request_id="again")
    learner.run.add(again)
    learner.to_end()
    assert learner.progress.done["preemption"].startswith(f"{hit} was preempted and again was not: the same 32 tokens")


def test_the_same_prompt_with_fewer_tokens_is_not_the_same():
    learner = Learner(**SMALL)
    learner.run.add(request("a", 12, 20), request("b", 12, 20))
    learner.to_end()
    for name in ("a", "b"):
        learner.run.add(replace(request(name, 12, 19), request_id=f"{name}-short"))
        learner.to_end()
    assert "preemption" not in learner.done


def test_prefixes_that_are_cached_waited_for_and_gone():
    same = own_tokens("same", 64)
    learner = Learner(**{**ROOMY, "max_num_batched_tokens": 128})
    learner.run.add(request("a", (*same, 1), 4), request("b", (*same, 2), 4))
    learner.to_end()
    assert learner.done >= {"hit", "wait"}
    assert "64 tokens" in learner.progress.done["hit"]
    assert "evicted" not in learner.done
    learner.run.scheduler.reset_prefix_cache()
    learner.run.add(request("c", (*same, 3), 4))
    learner.to_end()
    assert "c begins with 64 tokens of before" in learner.progress.done["evicted"]


def test_a_short_beginning_is_no_hit():
    same = own_tokens("same", 60)
    learner = Learner(**ROOMY)
    learner.run.add(request("a", (*same, 1, 1, 1, 1, 1), 4))
    learner.to_end()
    learner.run.add(request("b", (*same, 2, 2, 2, 2, 2), 4))
    learner.to_end()
    assert learner.done.isdisjoint({"hit", "wait", "evicted"})


def timed(prompt: int, output: int, seconds: float, number: int) -> dict:
    counts = {"step_id": number, "prefill_tokens": prompt, "decode_tokens": output, "seconds": seconds}
    return {**counts, "slices": [], "decisions": [], "copies": [], "swaps": [0, 0], "ends": []}


NOTHING = {"events": [], "pool": {"tables": []}}


def test_the_chunk_that_bounds_the_time_between_tokens():
    progress = Progress()
    assert "0 steps had output tokens alone" in progress.answer("itl", 50)
    # 2 ms for output tokens, and 0.05 ms more for each token of a prompt: 40 tokens double it.
    steps = [timed(0, 4, 0.002, number) for number in range(1, FEWEST_DECODES + 1)]
    steps += [timed(size, 4, 0.002 + 0.00005 * size, 100 + size) for size in range(16, 128, 8)]
    progress.take(NOTHING, steps)
    for number, word in ((10, "too few"), (100, "too many"), (24, "too few"), (66, "too many")):
        assert word in progress.answer("itl", number)
        assert "itl" not in progress.done
    assert "40 tokens double it" in progress.answer("itl", 36)
    assert "itl" in progress.done
    assert progress.states()[7]["said"] == progress.done["itl"]
    with pytest.raises(KeyError):
        progress.answer("share", 4)
    with pytest.raises(KeyError):
        progress.answer("nothing", 4)


def test_what_is_done_stays_done_until_it_is_begun_again():
    learner = Learner(**ROOMY)
    learner.run.add(request("a", 18, 6, n=3))
    learner.to_end()
    assert "copy" in learner.done
    learner.progress.begin_anew()
    assert "copy" in learner.done
    learner.look()
    learner.progress.begin_again()
    assert learner.done == set()
    learner.look()
    assert learner.done == set(), "the past does not count again"
    learner.run.add(request("b", 18, 6, n=3))
    learner.to_end()
    assert "copy" in learner.done


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("quire_server.learning.exercises._MOST_REQUESTS", 4)
    monkeypatch.setattr("quire_server.learning.exercises._MOST_CONTENTS", 4)
    learner = Learner(**ROOMY)
    for number in range(20):
        learner.run.add(request(str(number), 8, 2))
        learner.to_end()
    assert len(learner.progress._requests) <= 4
    assert len(learner.progress._contents) <= 4
    assert json.dumps(learner.progress.states())
