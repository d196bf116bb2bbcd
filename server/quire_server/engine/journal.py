"""What is needed to replay live requests in a new engine process: each request and the tokens already delivered.

Owns the journal. Promises: a replayed request continues exactly where its client stands, and a request that takes the
engine down twice is singled out. Must not know: processes, sockets, the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from quire_engine.types import GenerationRequest, TokenOutput

STRIKES = 2  # crashes in a row, without a token in between, that prove a request guilty
STRIKES_WHEN_KILLED = 3  # SIGKILL comes from outside (an operator, the OOM killer): blame more slowly


@dataclass(slots=True)
class JournalEntry:
    """One live request."""

    request: GenerationRequest
    tokens: list[list[int]] = field(init=False)  # delivered, per choice
    finished: set[int] = field(init=False)
    prompt_scored: bool = False  # the prompt's log-probabilities were delivered
    in_flight: bool = False  # the running engine has it
    strikes: int = 0  # crashes while in flight since it last made progress

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.request.n)]
        self.finished = set()

    def resumed_request(self) -> GenerationRequest:
        """The request as a fresh engine must see it to go on with the next undelivered token."""
        sampling = self.request.sampling
        if self.prompt_scored and sampling.num_prompt_logprobs is not None:
            sampling = replace(sampling, num_prompt_logprobs=None)
        started = any(self.tokens) or bool(self.finished)
        return replace(
            self.request,
            sampling=sampling,
            resumed_token_ids=tuple(map(tuple, self.tokens)) if started else (),
            finished_choices=tuple(sorted(self.finished)),
        )


class Journal:
    """Live requests in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[JournalEntry]:
        return iter(self._entries.values())

    def add(self, request: GenerationRequest) -> JournalEntry:
        entry = self._entries[request.request_id] = JournalEntry(request)
        return entry

    def get(self, request_id: str) -> JournalEntry | None:
        return self._entries.get(request_id)

    def remove(self, request_id: str) -> JournalEntry | None:
        return self._entries.pop(request_id, None)

    def record(self, output: TokenOutput) -> JournalEntry | None:
        """Note what is about to be delivered. None: not a live request, the output is stale."""
        entry = self._entries.get(output.request_id)
        if entry is None:
            return None
        entry.strikes = 0
        entry.tokens[output.choice].extend(output.token_ids)
        entry.prompt_scored = entry.prompt_scored or output.prompt_logprobs is not None
        if output.finish is not None:
            entry.finished.add(output.choice)
            if len(entry.finished) == entry.request.n:
                del self._entries[output.request_id]
        return entry

    def crashed(self, *, killed: bool) -> list[JournalEntry]:
        """The engine is gone: give every request it held a strike. Returns, and drops, those proven guilty."""
        limit = STRIKES_WHEN_KILLED if killed else STRIKES
        guilty = []
        for entry in list(self._entries.values()):
            if entry.in_flight:
                entry.in_flight = False
                entry.strikes += 1
                if entry.strikes >= limit:
                    guilty.append(entry)
                    del self._entries[entry.request.request_id]
        return guilty
