"""Answers questions about the scheduler's state: requests and why they wait, blocks, the last steps.

An answer changes nothing, consists of plain JSON values and has a bounded size. Questions are answered between steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from itertools import chain
from typing import Any

from quire_engine.contract.errors import Unanswerable
from quire_engine.contract.invariants import InvariantViolation
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.scheduling.cached_blocks import CachedBlocks
from quire_engine.scheduling.log.pool_view import pool_view
from quire_engine.scheduling.log.step_log import Event, Step, StepLog
from quire_engine.scheduling.log.step_records import FORMAT, RequestEvent, StepRecord
from quire_engine.scheduling.log.why_slow import explanation, summary
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.running_decodes import unused_slots
from quire_engine.scheduling.sequence import Sequence

MOST_STEPS = 256  # in one answer, which is made between two steps while every stream waits
MOST_EVENTS = 512  # in one view
MOST_REQUESTS = 512  # in one answer
MOST_EXPLAINED = 16  # in one answer; each explanation reads every step
RECENT = 32  # ended requests in one answer, beside the live ones
Arguments = Mapping[str, Any]


class Inspection:
    """Answers the questions in the table `_QUESTIONS`; every question is a method."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: CachedBlocks,
        roster: Roster,
        log: StepLog | None,
        num_restored: int,
        *,
        check: Callable[[], None],
    ) -> None:
        self._config = config
        self._kv = kv
        self._roster = roster
        self._log = log
        self._num_restored = num_restored  # host blocks whose content was restored from an earlier run
        self._check = check

    def answer(self, what: str, arguments: Arguments) -> object:
        """The answer to one question. Raises Unanswerable."""
        ask = _QUESTIONS.get(what)
        if ask is None:
            raise Unanswerable(f"there is no question {what!r}; there are {', '.join(sorted(_QUESTIONS))}")
        return ask(self, arguments)

    def steps(self, arguments: Arguments) -> dict[str, object]:
        """Steps after `after`, the earliest first, at most `limit`; with `events` also the other inputs of a replay."""
        log = self._required()
        after, limit = int(arguments.get("after", 0)), min(int(arguments.get("limit", 100)), MOST_STEPS)
        first = log.steps[0].step_id if log.steps else 0
        begin = max(after + 1, first)
        # No step is missing from the first on, so ids give indices.
        chosen = [log.steps[i] for i in range(begin - first, min(begin - first + limit, len(log.steps)))]
        answer: dict[str, object] = {
            "steps": [self._record(log, step) for step in chosen],
            "first": first,
            "last": log.steps[-1].step_id if log.steps else 0,
        }
        if arguments.get("events"):
            last = chosen[-1].step_id if chosen else 0
            answer["events"] = [_event(e) for e in log.events if begin - 1 <= e.after_step <= last]
            answer |= {"config": asdict(self._config), "format": FORMAT, "restored_blocks": self._num_restored}
        return answer

    def view(self, arguments: Arguments) -> object:
        """Return the last `limit` steps after `after`, with the events and the pool's picture of that moment."""
        log = self._required()
        after, limit = int(arguments.get("after", 0)), min(int(arguments.get("limit", 100)), MOST_STEPS)
        last = log.steps[-1].step_id if log.steps else 0
        begin = max(after, last - limit)
        answer = self.steps({"after": begin, "limit": limit})
        events = [_event(event) for event in log.events if event.after_step >= begin][-MOST_EVENTS:]
        return {**answer, "events": events, "pool": pool_view(self._kv, self._roster), "now": log.now}

    def prefixes(self, arguments: Arguments) -> object:  # noqa: ARG002
        """A snapshot for a router's index: the fields of `PrefixChanges`."""
        return asdict(self._kv.prefixes.snapshot())

    def requests(self, arguments: Arguments) -> object:
        """Every live request in the order of arrival, then the last ended ones."""
        del arguments
        log = self._required()
        step = log.steps[-1].step_id if log.steps else 0
        live = list(log.live.values())[:MOST_REQUESTS]
        ended = [life for life, _ in zip(log.finished(), range(RECENT), strict=False)]
        return {
            "num_live": len(log.live),
            "live": [summary(life, step, log.now) for life in live],
            "ended": [summary(life, step, log.now) for life in ended],
            "step": step,
        }

    def request(self, arguments: Arguments) -> object:
        """Explain why requests take, or took, so long."""
        log = self._required()
        lives = [life for each in arguments["ids"][:MOST_EXPLAINED] if (life := log.life(str(each))) is not None]
        if not lives:
            raise Unanswerable("there is no such request, or it ended too long ago")
        step = log.steps[-1].step_id if log.steps else 0
        return {"requests": [explanation(life, step, log) for life in lives], "step": step}

    def kv(self, arguments: Arguments) -> object:
        """The pool: used, cached, free and shared blocks, fragmentation, and the blocks of each sequence.

        With `names` also those of the full blocks that can be matched, by group of layers.
        """
        kv = self._kv
        held = self._held()
        used, size = kv.num_used, kv.block_size
        unused = sum(unused_slots([s for group in self._roster.running for s in group.sequences], size))
        shared = sum(1 for holders in held.values() if holders > 1)
        return {
            "block_size": size,
            "blocks": {
                "total": kv.num_blocks,
                "used": used,
                "cached": kv.num_cached,
                "free": kv.num_available - kv.num_cached,
            },
            "sharing": {
                "shared": shared,
                "unshared": len(held) - shared,
                "saved": sum(held.values()) - len(held),
            },
            "evictions": kv.total_kv_evictions,
            "fragmentation": {
                "slots": used * size,
                "slack": unused,
                "slack_ratio": unused / (used * size) if used else 0.0,
                "largest_free_run": int(max(kv.free_runs(), default=0)),
                "note": "A sequence's blocks need not be neighbours: any free block serves, so the largest run of free"
                " ones limits nothing. What paging can waste is the slack: at most one block less a token for each"
                " sequence.",
            },
            "tables": [
                {"request_id": s.group.request.request_id, "choice": s.choice, "blocks": s.kv.num_held}
                for s in list(self._roster.sequences.values())[:MOST_REQUESTS]
                if s.kv.num_held
            ],
            **({"matchable": kv.matchable_names()} if arguments.get("names") else {}),
        }

    def table(self, arguments: Arguments) -> object:
        """The page tables of live requests; with `pos` the block of one position."""
        sequences = [
            sequence
            for request_id in arguments["ids"][:MOST_REQUESTS]
            if (group := self._roster.live.get(str(request_id))) is not None
            for sequence in group.sequences
        ]
        if not sequences:
            raise Unanswerable("no live request has this id: what has ended holds no blocks")
        pos = arguments.get("pos")
        return {"block_size": self._kv.block_size, "sequences": [_table(each, pos) for each in sequences]}

    def audit(self, arguments: Arguments) -> object:
        """Check the invariants: references against tables, lists against counts, queues against states."""
        del arguments
        counted = {
            "blocks": self._kv.num_blocks,
            "references": sum(self._held().values()),
            "sequences": len(self._roster.sequences),
            "requests": len(self._roster.live),
        }
        try:
            self._check()
        except InvariantViolation as violation:
            return {"clean": False, "disagreement": str(violation), "counted": counted}
        return {"clean": True, "disagreement": None, "counted": counted}

    def _required(self) -> StepLog:
        if self._log is None:
            raise Unanswerable("nothing is remembered of steps and requests: step_log is 0")
        self._log.settle()
        return self._log

    def _held(self) -> Counter[int]:
        """The number of tables that hold each used block."""
        tables = chain.from_iterable(sequence.kv.tables for sequence in self._roster.sequences.values())
        return Counter(block for table in tables for block in table.held)

    def _record(self, log: StepLog, step: Step) -> StepRecord:
        return StepRecord(
            slices=tuple(_slices(log, step)),
            prefill_tokens=step.num_prefills,
            decode_tokens=step.num_decodes,
            drafts=tuple([(*log.name(i), count, accepted) for i, count, accepted in step.guesses]),
            **_kept(StepRecord, step),
        )


_QUESTIONS: dict[str, Callable[[Inspection, Arguments], object]] = {
    "steps": Inspection.steps,
    "view": Inspection.view,
    "requests": Inspection.requests,
    "request": Inspection.request,
    "kv": Inspection.kv,
    "table": Inspection.table,
    "audit": Inspection.audit,
    "prefixes": Inspection.prefixes,
}


def _event(event: Event) -> RequestEvent:
    return RequestEvent(request=event.asked, **_kept(RequestEvent, event))


def _kept(record: type[StepRecord] | type[RequestEvent], entry: Step | Event) -> dict[str, Any]:
    """The fields of a record that an entry of the log has by the same name; lists as they are now."""
    found = {field.name: getattr(entry, field.name) for field in fields(record) if hasattr(entry, field.name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def _slices(log: StepLog, step: Step) -> Iterator[tuple[str, int, int, int]]:
    sizes = step.sizes or (1,) * len(step.ids)
    for sequence_id, start, size in zip(step.ids, step.starts, sizes, strict=True):
        yield (*log.name(sequence_id), start, size)


def _table(sequence: Sequence, pos: object) -> dict[str, object]:
    table = sequence.kv.table
    answer: dict[str, object] = {
        "request_id": sequence.group.request.request_id,
        "choice": sequence.choice,
        "num_tokens": sequence.num_known,
        "num_computed": sequence.kv.num_computed,
        "num_blocks": sequence.kv.num_held,
        "slack": table.num_slots - sequence.kv.num_computed,
    }
    if len(sequence.kv.tables) > 1 or table.group.window is not None:
        answer["groups"] = [
            {"window": each.group.window, "num_passed": each.num_passed, "blocks": each.held}
            for each in sequence.kv.tables
        ]
    if pos is None:
        answer["blocks"] = table.held
        return answer
    position = int(str(pos))
    if not 0 <= position < table.num_slots:
        raise Unanswerable(f"position {position} has no block: there are {len(table)}, for {table.num_slots} positions")
    index, offset = table.position_to_block(position)
    if index < table.num_passed:
        raise Unanswerable(f"position {position} has no block any more: every window has passed it")
    answer |= {"position": position, "block_index": index, "offset": offset, "block": table.block_ids[index]}
    return answer
