"""One live request and what its client has of it.

Owns a journal entry. Promises: the request it makes for a new engine process continues exactly where the client stands.
Must not know: why the engine ended, processes, sockets, the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from quire_engine.types import GenerationRequest, TokenOutput


@dataclass(slots=True)
class JournalEntry:
    """A request and the tokens already delivered, per choice."""

    request: GenerationRequest
    tokens: list[list[int]] = field(init=False)
    finished: set[int] = field(init=False)  # choices
    prompt_scored: bool = False  # the prompt's log-probabilities were delivered
    in_flight: bool = False  # the running engine has it
    held: bool = False  # its client takes nothing: no engine is to compute it
    strikes: int = 0  # crashes while in flight since it last made progress
    is_suspect: bool = False  # the latest of these may have been its doing
    crashes: list[float] = field(default_factory=list)  # when, of those while in flight that nothing explains yet

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.request.n)]
        self.finished = set()

    @property
    def has_tokens(self) -> bool:
        """Whether an engine has computed something for it."""
        return any(self.tokens) or bool(self.finished)

    def record(self, output: TokenOutput) -> bool:
        """Note what is about to be delivered. True: it is the request's last output."""
        self.tokens[output.choice].extend(output.token_ids)
        if output.prompt_logprobs is not None:
            self.prompt_scored = True
        if output.finish is not None:
            self.finished.add(output.choice)
        return len(self.finished) == self.request.n

    def resumed_request(self) -> GenerationRequest:
        """The request as a fresh engine must see it to go on with the next undelivered token."""
        sampling = self.request.sampling
        if self.prompt_scored and sampling.num_prompt_logprobs is not None:
            sampling = replace(sampling, num_prompt_logprobs=None)
        return replace(
            self.request,
            sampling=sampling,
            resumed_token_ids=tuple(map(tuple, self.tokens)) if self.has_tokens else (),
            finished_choices=tuple(sorted(self.finished)),
        )

    def failure(self, message: str, *, culprit: bool) -> tuple[TokenOutput, ...]:
        """The last outputs of the choices that no engine will finish."""
        return tuple(
            TokenOutput(
                request_id=self.request.request_id, choice=choice, finish="error", error=message, culprit=culprit
            )
            for choice in range(self.request.n)
            if choice not in self.finished
        )
