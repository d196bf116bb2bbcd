"""Replays a step log: makes the recorded calls again on a new scheduler and compares the plans (I18).

Promises: only inputs from outside of the scheduler are taken from the log; the first difference is reported with both
values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from quire_engine.contract.batch import Batch, SampledToken, ScheduledSequence, StepResult
from quire_engine.contract.block_hashes import prompt_hashes
from quire_engine.contract.drafts import NO_DRAFT, Draft, Wish
from quire_engine.contract.types import (
    Adapter,
    BeamParams,
    GenerationRequest,
    SamplingParams,
    StopParams,
    TokenLogprobs,
)
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.speculation import Speculation
from quire_engine.scheduling.step_plan import StepPlan
from quire_lab.simulation.contents import STOP, Contents
from quire_lab.simulation.recorded import Entry, Recording


class RecordedBeams:
    """Made-up log-probabilities for the searches in a log, with which each sequence continues the recorded beam.

    The search ends in the same step. The log does not have the recorded scores.
    """

    def __init__(self, steps: Iterable[Mapping[str, Any]], contents: Contents) -> None:
        self._contents = contents
        self._searched: dict[str, list[tuple[int, Sequence[int]]]] = defaultdict(
            list
        )  # (step, the beam that each sequence continues)
        self._totals: Counter[tuple[str, int]] = Counter()  # the score of each sequence's beam
        self._num_pruned: Counter[tuple[str, int]] = Counter()  # earlier beams of each sequence
        for step in steps:
            for name, parents in step["beams"]:
                self._searched[name].append((step["step_id"], parents))

    def offer(self, step: Mapping[str, Any], whose: tuple[str, int], width: int, position: int) -> TokenLogprobs:
        """The candidates after a sequence's beam in this step, or in a later one after a preemption."""
        name, lane = whose
        parents = next((given for step_id, given in self._searched[name] if step_id >= step["step_id"]), None)
        offers: list[tuple[int, float]] = []
        if parents is not None:
            for rank, heir in enumerate(_by_rank(parents)):
                if parents[heir] == lane:
                    beam = self._num_pruned[name, heir] + (heir != lane)
                    token_id = self._contents.output(name, heir, position, beam)
                    offers.append((token_id, float(-rank - self._totals[whose])))
        elif lane == 0 and any(end[0] == name and end[2] != "error" for end in step["ends"]):
            # As many that end, and as many that could continue: with fewer the search would fail.
            offers = [(STOP if rank < width else STOP + rank, -float(rank)) for rank in range(2 * width)]
        ids, logprobs = tuple(token_id for token_id, _ in offers), tuple(logprob for _, logprob in offers)
        return TokenLogprobs(token_id=0, logprob=0.0, rank=1, top_ids=ids, top_logprobs=logprobs)

    def note(self, step: Mapping[str, Any]) -> None:
        """Apply a step's beams."""
        for name, parents in step["beams"]:
            for rank, lane in enumerate(_by_rank(parents)):
                self._totals[name, lane] = -rank
                self._num_pruned[name, lane] += parents[lane] != lane


def _by_rank(parents: Sequence[int]) -> list[int]:
    """A ranking that assigns the same beams to the same sequences: first those that keep their own beam."""
    return sorted(range(len(parents)), key=lambda lane: (parents[lane] != lane, lane))


_SAME_NAMES = {one.name for one in fields(GenerationRequest)} & {
    *("n", "priority", "arrival_time", "pooling", "cache_salt", "tenant", "weight", "max_running", "service_class"),
    *("deadline", "service_elsewhere", "cache_ttl"),
}
_MOST_DRAFTS = 1 << 10  # of one sequence in a step: more than any server gives
_OWN_RULES = SamplingParams(presence_penalty=1.0)  # for a request whose plans depend on its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference between a recorded plan and a replayed one."""

    step_id: int
    what: str
    recorded: object
    replayed: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of a replay."""

    steps: int  # steps with equal plans
    requests: int
    difference: Difference | None


def replay(recording: Recording) -> Replay:
    """Make every call again, up to the first difference. Raises ValueError for a log without its beginning."""
    if not recording.is_whole:
        raise ValueError(
            f"the log begins with step {recording.first_step}: what was live before is not in it, so plans cannot be"
            " compared; `quire trace --json --follow`, begun with the server, keeps all"
        )
    return Replayer(recording).run()


class RecordedDrafts(Speculation):
    """Gives the drafts that a log tells of, with made-up tokens: which of them are right is a matter of the results."""

    def __init__(self, kv: KVAllocator) -> None:
        super().__init__(_NoDrafter(), kv, most=_MOST_DRAFTS)
        self.given: dict[tuple[str, int], int] = {}  # of the next step: guessed tokens by request and choice

    def extend(self, plan: StepPlan) -> None:
        sequences = {(each.group.request.request_id, each.choice): each for each in plan.slices}
        for whose, count in self.given.items():
            sequence = sequences.get(whose)
            if sequence is not None:  # else the plans differ already
                self.lend(plan, sequence, (0,) * count)


class _NoDrafter:
    is_costly = False

    def draft(self, wishes: Sequence[Wish]) -> list[Draft]:
        return [NO_DRAFT for _ in wishes]

    def note_end(self, token_ids: Sequence[int], scope: str) -> None:
        """Do nothing: this drafter learns nothing."""

    def forget(self, sequence_id: int) -> None:
        """Nothing is kept."""


class Replayer:
    """Makes the calls of one recording on `scheduler`, which keeps a log of its own."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._drafts: RecordedDrafts | None = None
        self.scheduler = Scheduler(recording.config, speculate=self._speculate)
        self._contents = Contents(recording.entries, recording.config.limits.block_size)
        self._beams = RecordedBeams(recording.steps, self._contents)
        self._names: dict[int, tuple[str, int]] = {}  # request and choice by sequence
        self._widths: dict[str, int] = {}  # beam widths of searches, by request
        self._launched: dict[int, Batch] = {}
        self._steps = self._requests = 0

    def _speculate(self, kv: KVAllocator) -> RecordedDrafts:
        self._drafts = RecordedDrafts(kv)
        return self._drafts

    def run(self) -> Replay:
        difference = None
        for _, is_plan, entry in sorted(self._calls(), key=lambda call: call[0]):
            difference = self._call(entry, is_plan)
            if difference is not None:
                break
        return Replay(steps=self._steps, requests=self._requests, difference=difference)

    def _calls(self) -> Iterator[tuple[int, bool, Entry]]:
        """The calls with their ordinals; a step is two calls, its plan and the application of its result."""
        for entry in self._recording.entries:
            yield entry.ordinal, True, entry
            if entry.kind == "step" and entry.plain["applied_ordinal"] is not None:
                yield int(entry.plain["applied_ordinal"]), False, entry

    def _call(self, entry: Entry, is_plan: bool) -> Difference | None:
        match entry.kind:
            case "submit":
                self._submit(entry)
            case "abort":
                self.scheduler.abort(entry.request_id)
            case "fail":
                self.scheduler.fail(entry.request_id, "failed")
            case "hold":
                self.scheduler.hold(entry.request_id)
            case "release":
                self.scheduler.release(entry.request_id)
            case "expire":
                self.scheduler.expire(float(entry.plain["at"]))
            case "reset":
                self.scheduler.reset_prefix_cache()
            case "adopt":
                self._adopt(entry)
            case "step" if is_plan:
                return self._plan(entry.plain)
            case "step":
                self._apply(entry.plain)
        return None

    def _adopt(self, entry: Entry) -> None:
        """Let the blocks be matched by the hashes of the tokens that this replay makes up."""
        asked, tokens = entry.plain["request"], self._contents.content(entry.ordinal)
        keys = prompt_hashes(
            tokens, asked["cache_salt"], self._recording.config.limits.block_size, most=asked["first"] + asked["count"]
        )
        request = GenerationRequest(
            request_id=entry.request_id,
            prompt_token_ids=tokens,
            sampling=SamplingParams(),
            stop=StopParams(max_new_tokens=0),
            cache_salt=asked["cache_salt"],
            weight=asked["weight"],
        )
        self.scheduler.kept.adopt(request, asked["first"], keys[asked["first"] :])

    def _submit(self, entry: Entry) -> None:
        asked = entry.plain["request"]
        resumed = tuple(
            tuple(self._contents.output(entry.request_id, choice, asked["num_prompt_tokens"] + i) for i in range(count))
            for choice, count in enumerate(asked.get("num_resumed_tokens", ()))
        )
        same = {name: asked[name] for name in _SAME_NAMES if name in asked}
        sampling = _OWN_RULES if asked.get("reads_output") else SamplingParams()
        if not asked.get("reads_cache", True) and asked.get("pooling", "") != "mean":
            sampling = SamplingParams(presence_penalty=sampling.presence_penalty, num_prompt_logprobs=0)
        width = int(asked.get("num_beams", 0))
        if width:  # a search allows no penalties, and reads its output anyway
            sampling = replace(sampling, presence_penalty=0.0)
        request = GenerationRequest(
            request_id=entry.request_id,
            prompt_token_ids=self._contents.prompt(entry.request_id),
            sampling=sampling,
            stop=StopParams(
                max_new_tokens=asked["max_new_tokens"], stop_token_ids=(STOP,) if asked.get("may_stop", True) else ()
            ),
            resumed_token_ids=resumed,
            finished_choices=tuple(asked.get("finished_choices", ())),
            beam=BeamParams(width=width, early_stopping=True) if width else None,
            # The digest is a part of the salt already.
            adapter=Adapter(name="", path="", digest=asked["adapter"]) if asked.get("adapter") else None,
            **same,
        )
        self.scheduler.add(request, float(entry.plain["at"]))
        for sequence in self.scheduler.roster.live[entry.request_id].sequences:
            self._names[sequence.sequence_id] = entry.request_id, sequence.choice
        if width:
            self._widths[entry.request_id] = width
        self._requests += 1

    def _plan(self, step: Mapping[str, Any]) -> Difference | None:
        assert self._drafts is not None
        self._drafts.given = {(name, choice): count for name, choice, count, _ in step.get("drafts", ())}
        batch = self.scheduler.schedule(float(step["planned_at"]))
        items = () if batch is None else batch.items
        if batch is not None:
            self._launched[step["step_id"]] = batch
        for what, recorded, replayed in (
            ("slices", _tuples(step["slices"]), tuple(self._slice(item) for item in items)),
            ("copies", _tuples(step.get("copies", ())), () if batch is None else batch.copies),
            ("swaps", _pair(step.get("swaps")), (0, 0) if batch is None else (len(batch.swap_out), len(batch.swap_in))),
            ("blocks_used", step.get("blocks_used"), self.scheduler.num_used_blocks),
            ("running", step.get("running"), self.scheduler.roster.num_running),
            ("waiting", step.get("waiting"), len(self.scheduler.roster.waiting)),
        ):
            if recorded is not None and recorded != replayed:
                return Difference(step_id=step["step_id"], what=what, recorded=recorded, replayed=replayed)
        self._steps += 1
        return None

    def _slice(self, item: ScheduledSequence) -> tuple[str, int, int, int]:
        return (*self._names[item.sequence_id], item.start, item.num_tokens)

    def _apply(self, step: Mapping[str, Any]) -> None:
        batch = self._launched.pop(step["step_id"], None)
        if batch is None:
            return
        ends = {(name, choice): (finish, count) for name, choice, finish, count in step["ends"]}
        accepted = {(name, choice): count for name, choice, _, count in step.get("drafts", ())}
        failed = {(name, choice, part) for name, choice, part in step["failed"]}
        forced = {(name, choice): count for name, choice, count in step["forced"]}
        result = StepResult()
        for item in batch.items:
            name, choice = self._names[item.sequence_id]
            result.prompt_logprobs[item.sequence_id] = ()
            result.pooled[item.sequence_id] = (0,)
            if (name, choice, "memory") in failed:
                result.starved.add(item.sequence_id)
            if (name, choice, "slice") in failed:
                result.errors[item.sequence_id] = "failed"
            concerned = (item.sequence_id, *[fork.sequence_id for fork in item.forks])
            result.non_finite.update(each for each in concerned if (*self._names[each], "values") in failed)
            if item.wants_sample:
                for sequence_id in concerned:
                    whose = self._names[sequence_id]
                    if (*whose, "sample") in failed:
                        result.samples[sequence_id] = (SampledToken(error="failed"),)
                    elif whose[0] in self._widths:
                        offered = self._beams.offer(step, whose, self._widths[whose[0]], item.end)
                        result.samples[sequence_id] = (SampledToken(token_id=offered.token_id, logprobs=offered),)
                    else:
                        right, start = accepted.get(whose, 0), item.end - item.num_drafts
                        tokens = self._tokens(whose, start, max(forced.get(whose, 1), 1 + right), 1 + right)
                        finish, count = ends.get(whose, ("", 0))
                        if finish == "stop":  # what was accepted behind the end is dropped
                            last = item.num_prompt_tokens + count - start - 1
                            tokens[last] = replace(tokens[last], token_id=STOP)
                        result.samples[sequence_id] = tuple(tokens)
        self.scheduler.apply(batch, result, float(step["applied_at"]))
        self._beams.note(step)

    def _tokens(self, whose: tuple[str, int], at: int, count: int, num_drawn: int) -> list[SampledToken]:
        """Output from position `at` on; the tokens behind the drawn ones were forced."""
        return [
            SampledToken(token_id=self._contents.output(*whose, at + i), is_forced=i >= num_drawn) for i in range(count)
        ]


def _pair(values: Any) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _tuples(values: Any) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(value) for value in values)
