"""Records of requests: their times and counts, which become metrics, log lines and traces."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain

from quire_engine.contract.types import RequestTiming
from quire_server.metrics.metric_catalog import Outcome, RequestMetrics
from quire_server.metrics.occupancy import Occupancy, StaticBatching
from quire_server.metrics.usage import UsageBook


@dataclass(frozen=True, slots=True)
class Load:
    """The parts that all requests' records update beside the metrics."""

    occupancy: Occupancy
    static: StaticBatching
    board: RequestBoard
    usage: UsageBook


class RequestRecord:
    """The times and counts of one prompt and its choices. Times are `time.monotonic()` seconds.

    Each token is counted once, and only requests that ran to their end have latencies.
    What the client sees is measured here, in the server; queue, KV wait and prefill come from the engine.
    """

    __slots__ = (
        "_account",
        "_cached",
        "_counts",
        "_ended",
        "_finished",
        "_first",
        "_gap",
        "_gap_began",
        "_id",
        "_last",
        "_load",
        "_max_tokens",
        "_metrics",
        "_n",
        "_number",
        "_outcome",
        "_prompt_counted",
        "_prompt_tokens",
        "_started",
        "_static",
        "_timing",
        "_token_seconds",
    )

    def __init__(
        self,
        metrics: RequestMetrics,
        load: Load,
        *,
        request_id: str,
        prompt_tokens: int,
        max_tokens: int | None,
        n: int,
        account: str = "",
        started: float | None = None,
    ) -> None:
        """`started`: when it was sent to the queue; None: now."""
        self._metrics = metrics
        self._load = load
        self._account = account
        self._id = request_id
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._n = n
        self._started = time.monotonic() if started is None else started
        self._first: float | None = None
        self._last: list[float] = [0.0] * n
        self._counts = [0] * n
        self._token_seconds = 0.0  # summed over choices: from each one's first token to its last
        self._gap, self._gap_began = 0.0, 0.0  # the longest one between two tokens of a choice
        self._cached = 0
        self._timing: RequestTiming | None = None
        self._prompt_counted = False
        self._finished = False
        self._outcome = ""
        self._ended: float | None = None
        load.usage.add(account, requests=1, prompt=prompt_tokens)
        load.occupancy.arrive(n)
        self._number = load.board.begin(self.row)
        # A prompt for an embedding has no output.
        self._static = None if max_tokens is None else load.static.join(n, prompt_tokens + max_tokens)

    def tokens(self, choice: int, count: int, now: float) -> None:
        """`count` new tokens of a choice arrived together."""
        if count <= 0:
            return
        metrics = self._metrics
        metrics.generated.inc(count)
        self._load.usage.add(self._account, output=count)
        if self._first is None:
            self._first = now
            metrics.ttft.observe(now - self._started)
            self._count_prompt()
        following = count
        if self._counts[choice] == 0:
            self._last[choice] = now
            following -= 1
        if following:
            gap = now - self._last[choice]
            metrics.itl.observe(gap / following, following)
            self._token_seconds += gap
            if gap > self._gap:
                self._gap, self._gap_began = gap, self._last[choice]
            self._last[choice] = now
        self._counts[choice] += count

    def cached(self, tokens: int) -> None:
        """Record the number of prompt tokens from the prefix cache."""
        if tokens > self._cached:
            self._load.usage.add(self._account, cached=tokens - self._cached)
            self._cached = tokens

    def timing(self, timing: RequestTiming) -> None:
        """Take in the engine's times; of several choices the longest time of each kind counts."""
        known = self._timing
        self._timing = timing if known is None else _longest(known, timing)

    def finish(self, outcome: Outcome) -> None:
        """The request ended. Idempotent. Only completed requests count in the latencies."""
        if self._finished:
            return
        self._finished, self._outcome, self._ended = True, outcome, time.monotonic()
        load = self._load
        load.occupancy.leave(self._n, time.monotonic() - self._started)
        load.board.end(self._number)
        if self._static is not None:
            load.static.leave(self._static, self._counts)
        metrics = self._metrics
        metrics.finished.inc(1, outcome)
        if outcome not in {"stop", "length"}:
            return
        self._count_prompt()
        generated = sum(self._counts)
        following = sum(count - 1 for count in self._counts if count)
        decode_seconds = max(0.0, max(self._last) - self._first) if self._first is not None else 0.0
        metrics.e2e.observe(time.monotonic() - self._started)
        metrics.prompt_tokens.observe(self._prompt_tokens)
        metrics.generation_tokens.observe(generated)
        metrics.max_generation_tokens.observe(max(self._counts))
        metrics.computed_tokens.observe(max(0, self._prompt_tokens - self._cached))
        metrics.params_n.observe(self._n)
        if self._max_tokens is not None:
            metrics.params_max_tokens.observe(self._max_tokens)
        metrics.decode.observe(decode_seconds)
        if following:
            metrics.tpot.observe(self._token_seconds / following)
        if self._timing is not None:
            metrics.queue.observe(self._timing.queue_seconds)
            metrics.kv_wait.observe(self._timing.kv_wait_seconds)
            metrics.prefill.observe(self._timing.prefill_seconds)
            metrics.inference.observe(self._timing.prefill_seconds + decode_seconds)
            metrics.preemptions.observe(self._timing.num_preemptions)

    def row(self) -> RequestRow:
        """The request's phases and their durations so far."""
        now = time.monotonic()
        epoch = time.time() - now
        timing, first = self._timing, self._first
        last = max(self._last) if self._finished else now
        state = self._outcome or ("waiting" if first is None else "running")
        gap, began = self._gap, self._gap_began
        if first is not None and not self._finished and (silence := now - max(self._last)) > gap:
            gap, began = silence, max(self._last)  # it lasts
        return RequestRow(
            id=self._id,
            at=round(epoch + self._started, 3),
            state=state,
            n=self._n,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            generated_tokens=sum(self._counts),
            waited=round(now - self._started, 4) if timing is None else 0.0,
            queue=0.0 if timing is None else round(timing.queue_seconds, 4),
            kv_wait=0.0 if timing is None else round(timing.kv_wait_seconds, 4),
            prefill=0.0 if timing is None else round(timing.prefill_seconds, 4),
            decode=0.0 if first is None else round(max(0.0, last - first), 4),
            preemptions=0 if timing is None else timing.num_preemptions,
            gap=round(gap, 4),
            gap_at=round(epoch + began, 3) if gap else None,
        )

    def summary(self) -> RequestSummary:
        """The record of an ended request; one without an outcome counts as aborted."""
        timing = self._timing
        return RequestSummary(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            output_tokens=sum(self._counts),
            max_tokens=self._max_tokens,
            n=self._n,
            outcome=self._outcome or "abort",
            started=self._started,
            first=self._first,
            last=None if self._first is None else max(self._last),
            ended=time.monotonic() if self._ended is None else self._ended,
            queue_seconds=None if timing is None else timing.queue_seconds,
            prefill_seconds=None if timing is None else timing.prefill_seconds,
            token_seconds=self._token_seconds,
            following_tokens=sum(count - 1 for count in self._counts if count),
        )

    def _count_prompt(self) -> None:
        if not self._prompt_counted:
            self._prompt_counted = True
            self._metrics.prompted.inc(self._prompt_tokens)
            self._metrics.cached.inc(min(self._cached, self._prompt_tokens))


def _longest(one: RequestTiming, other: RequestTiming) -> RequestTiming:
    return RequestTiming(
        queue_seconds=max(one.queue_seconds, other.queue_seconds),
        kv_wait_seconds=max(one.kv_wait_seconds, other.kv_wait_seconds),
        prefill_seconds=max(one.prefill_seconds, other.prefill_seconds),
        num_preemptions=max(one.num_preemptions, other.num_preemptions),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryTotals:
    """Totals over a request's prompts and choices. Seconds are None for phases that were not reached."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reasons: tuple[str, ...]  # each once
    queue_seconds: float | None  # the longest of its prompts
    ttft_seconds: float | None  # from the first acceptance to the first token of any
    tpot_seconds: float | None
    e2e_seconds: float


@dataclass(slots=True, kw_only=True)
class RequestStory:
    """The records of one HTTP request, for its log line and its trace.

    `CURRENT` has it while the request is served. It contains every prompt accepted for the request, in any task; a
    token costs nothing.
    """

    carrier: dict[str, str] = field(default_factory=dict)  # trace context headers of the request
    account: str = ""  # the tenant or key that its tokens are counted for
    model: str = ""  # of several, the one that it has chosen
    records: list[RequestRecord] = field(default_factory=list)

    def summaries(self) -> list[RequestSummary]:
        """One for each prompt, in the order of their acceptance."""
        return [record.summary() for record in self.records]


# Set in a request's task and inherited by the tasks that it starts.
CURRENT: ContextVar[RequestStory | None] = ContextVar("request story", default=None)


def totals(summaries: list[RequestSummary]) -> StoryTotals | None:
    """None for a request without computed prompts."""
    if not summaries:
        return None
    started = min(each.started for each in summaries)
    first = min((each.first for each in summaries if each.first is not None), default=None)
    following = sum(each.following_tokens for each in summaries)
    return StoryTotals(
        prompt_tokens=sum(each.prompt_tokens for each in summaries),
        cached_tokens=sum(each.cached_tokens for each in summaries),
        output_tokens=sum(each.output_tokens for each in summaries),
        finish_reasons=tuple(dict.fromkeys(each.outcome for each in summaries)),
        queue_seconds=max((each.queue_seconds for each in summaries if each.queue_seconds is not None), default=None),
        ttft_seconds=None if first is None else first - started,
        tpot_seconds=sum(each.token_seconds for each in summaries) / following if following else None,
        e2e_seconds=max(each.ended for each in summaries) - started,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """A prompt and its choices at their end. Times are `time.monotonic()` seconds."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    max_tokens: int | None
    n: int
    outcome: str
    started: float
    first: float | None  # time of the first token
    last: float | None
    ended: float
    queue_seconds: float | None
    prefill_seconds: float | None
    token_seconds: float  # between tokens, summed over choices
    following_tokens: int  # tokens after the first of their choice


MOST_ENDED = 48  # ended requests that are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One request's seconds in the queue, in prefill and in decode. Before its first token all are in `waited`."""

    id: str
    at: float  # accepted, seconds since the epoch
    state: str  # "waiting" for its first token, "running", or its outcome
    n: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    waited: float  # until now, if there is no token yet; else 0
    queue: float
    kv_wait: float  # part of the waiting for KV blocks, also after preemptions
    prefill: float
    decode: float
    preemptions: int
    gap: float  # the longest between two tokens of a choice; of an unfinished request also that since its last token
    gap_at: float | None  # when it began, seconds since the epoch; None: there are no two tokens yet


class RequestBoard:
    """The running requests and the last ended ones, with the time in each phase.

    `begin` numbers the rows. A row is computed only when it is read.
    """

    def __init__(self) -> None:
        self.ended: deque[RequestRow] = deque(maxlen=MOST_ENDED)
        self._live: dict[int, Callable[[], RequestRow]] = {}
        self._number = 0
        self._guests: dict[int, tuple[list[RequestRow], int]] = {}  # of API servers: their oldest rows, and how many

    def begin(self, row: Callable[[], RequestRow]) -> int:
        """A request was accepted; `row` computes its row."""
        self._number += 1
        self._live[self._number] = row
        return self._number

    def end(self, number: int) -> None:
        """The request ended; its row is kept for a while."""
        row = self._live.pop(number, None)
        if row is not None:
            self.ended.append(row())

    def live(self, most: int) -> list[RequestRow]:
        """The `most` oldest unfinished requests."""
        rows = [row() for _, row in zip(range(most), self._live.values(), strict=False)]
        if not self._guests:
            return rows
        rows += [row for guests, _ in self._guests.values() for row in guests]
        return sorted(rows, key=lambda row: row.at)[:most]

    def find(self, request_id: str) -> RequestRow | None:
        """The row of a request by the engine's id; None if it ended too long ago."""
        guests = [row for rows, _ in self._guests.values() for row in rows]
        rows = chain(reversed(self.ended), (row() for row in self._live.values()), guests)
        return next((row for row in rows if row.id == request_id), None)

    def show_guest(self, key: int, rows: list[RequestRow], num_live: int) -> None:
        """The unfinished requests of another process are these, of `num_live`; none: forget it."""
        self._guests.pop(key, None)
        if num_live:
            self._guests[key] = rows, num_live

    @property
    def num_live(self) -> int:
        return len(self._live) + sum(num_live for _, num_live in self._guests.values())
