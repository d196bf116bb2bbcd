"""Runs a step log again: its submissions, aborts and results in their order, through another scheduler.

Promises: nothing but the log's lines is used; tokens are invented, and equal blocks are those of equal hashes.
Must not know: how the log was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import Any

from quire_engine.batch import Batch, SampledToken, StepResult
from quire_engine.limits import SchedulerConfig, SchedulerLimits
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.types import GenerationRequest, SamplingParams, StopParams

Line = dict[str, Any]
STOP = -7  # a token that no block can be made of


class Replay:
    """One pass over the lines; `scheduler` has a log of its own then."""

    def __init__(self, lines: Sequence[Line]) -> None:
        config, *self._lines = lines
        assert (config["kind"], config["format"]) == ("config", 1)
        given = dict(config["config"])
        self.scheduler = Scheduler(SchedulerConfig(**{**given, "limits": SchedulerLimits(**given["limits"])}))
        self._tokens = count(1_000_000)
        self._batches: dict[int, Batch | None] = {}
        self._hashes: dict[tuple[str, int], list[bytes]] = defaultdict(list)
        for line in self._lines:
            if line["kind"] == "end":
                self._hashes[line["request_id"], line["choice"]] = _read(line)

    def run(self) -> None:
        calls = []
        for line in self._lines:
            if line["kind"] == "step":
                calls.append((line["ordinal"], self._plan, line))
                if line["applied_ordinal"] is not None:
                    calls.append((line["applied_ordinal"], self._apply, line))
            elif line["kind"] != "end":
                calls.append((line["ordinal"], getattr(self, f"_{line['kind']}"), line))
        for _, call, line in sorted(calls, key=lambda each: each[0]):
            call(line)

    def _submit(self, line: Line) -> None:
        asked, request_id = line["request"], line["request_id"]
        scores = 0 if not asked["reads_cache"] and asked["pooling"] != "mean" else None
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=self._invent(asked["num_prompt_tokens"]),
            sampling=SamplingParams(num_prompt_logprobs=scores),
            stop=StopParams(max_new_tokens=asked["max_new_tokens"], stop_token_ids=(STOP,)),
            n=asked["n"],
            priority=asked["priority"],
            arrival_time=asked["arrival_time"],
            resumed_token_ids=tuple(self._invent(length) for length in asked["num_resumed_tokens"]),
            finished_choices=tuple(asked["finished_choices"]),
            pooling=asked["pooling"],
        )
        for choice in range(asked["n"]):
            behind = self._hashes[request_id, choice]
            self._hashes[request_id, choice] = [*_read(line), *behind]
        self.scheduler.add(request, line["at"])
        self._name_blocks()

    def _abort(self, line: Line) -> None:
        assert self.scheduler.abort(line["request_id"])

    def _fail(self, line: Line) -> None:
        assert self.scheduler.fail(line["request_id"], "again")

    def _plan(self, line: Line) -> None:
        self._batches[line["step_id"]] = self.scheduler.schedule(line["planned_at"])
        self._name_blocks()

    def _apply(self, line: Line) -> None:
        batch = self._batches.pop(line["step_id"])
        assert batch is not None
        ends = {(request_id, choice): why for request_id, choice, why, _ in line["ends"]}
        forced = {(request_id, choice): number for request_id, choice, number in line["forced"]}
        result = StepResult()
        sequences = self.scheduler._roster.sequences
        for item in batch.items:
            sequence = sequences.get(item.sequence_id)
            if sequence is None:
                continue
            request_id = sequence.group.request.request_id
            if request_id in line["starved"]:
                result.starved.add(item.sequence_id)
            if ends.get((request_id, item.choice)) == "error":
                result.errors[item.sequence_id] = "again"
            result.prompt_logprobs[item.sequence_id] = ()
            result.pooled[item.sequence_id] = (0,)
            if item.wants_sample:
                for each in (item, *item.forks):
                    name = request_id, each.choice
                    tokens = [*self._invent(forced.get(name, 1))]
                    if ends.get(name) == "stop":
                        tokens[-1] = STOP
                    result.samples[each.sequence_id] = tuple(SampledToken(token_id=token) for token in tokens)
        self.scheduler.apply(batch, result, line["applied_at"])

    def _invent(self, length: int) -> tuple[int, ...]:
        return tuple(next(self._tokens) for _ in range(length))

    def _name_blocks(self) -> None:
        """Blocks are what the log calls them; those that it does not name have tokens that no other block has."""
        for sequence in self.scheduler._roster.sequences.values():
            known = self._hashes[sequence.group.request.request_id, sequence.choice]
            if len(sequence.block_hashes) < len(known):
                sequence.block_hashes = list(known)


def _read(line: Line) -> list[bytes]:
    return [bytes.fromhex(each) for each in line["block_hashes"]]
