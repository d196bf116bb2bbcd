"""Beam search over one request: ranks continuations, keeps the live beams, decides when the search ends.

The results are those of transformers' `generate` with as many beams, in double precision. Ties go to the beam that
ranked before, then to the likelier token, then to the lower id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from quire_engine.contract.types import BeamParams, GenerationRequest, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class _Path:
    """A beam's last token and the path to it, which beams with a common beginning share."""

    before: _Path | None
    token: TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A beam that has ended."""

    score: float
    finish: Literal["stop", "length"]
    path: _Path

    def tokens(self) -> tuple[TokenLogprobs, ...]:
        """The tokens in order."""
        tokens: list[TokenLogprobs] = []
        path: _Path | None = self.path
        while path is not None:
            tokens.append(path.token)
            path = path.before
        return tuple(reversed(tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beam:
    """A live beam: the lane that computes it, the sum of its log-probabilities, its tokens."""

    lane: int
    total: float
    path: _Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A beam with one token more."""

    parent: _Beam
    token_id: int
    place: int  # the token's rank among the parent's candidates, from 0
    total: float


class BeamSearch:
    """The state of a search whose beams are computed by `width` lanes, 0 .. width - 1, all in step.

    A step is complete when every lane has offered the candidates after its beam. At first every lane is at the prompt's
    end and all offers are equal, so only one of them counts.
    """

    def __init__(self, request: GenerationRequest, params: BeamParams) -> None:
        self.is_over = False
        self.finished: list[Hypothesis] = []  # at most `width`, the best first
        self._params = params
        self._num_logprobs = request.sampling.num_logprobs or 0
        self._stop_ids = frozenset(request.stop.stop_token_ids)
        self._min_tokens = request.sampling.min_tokens
        self._max_tokens = request.stop.max_new_tokens
        self._live = [_Beam(lane=0, total=0.0, path=None)]  # by rank
        self._num_tokens = 0  # tokens of each live beam
        self._offers: dict[int, TokenLogprobs] = {}  # by lane
        # Enough candidates of a beam that at least `width` of them are not stop tokens.
        needed = max(params.width + len(self._stop_ids), self._num_logprobs)
        # Greedy, since a draw would cost time and is not used; `advance` handles stop tokens and min_tokens.
        self.sampling: SamplingParams = replace(request.sampling, temperature=0.0, min_tokens=0, num_logprobs=needed)

    def offer(self, lane: int, candidates: TokenLogprobs) -> bool:
        """Take the candidates after a lane's beam: its likeliest tokens. True: the step is complete."""
        self._offers[lane] = candidates
        return len(self._offers) == self._params.width

    def forget_step(self) -> None:
        """Drop the offers: after a preemption the lanes compute their beams again and offer again."""
        self._offers.clear()

    def advance(self) -> list[tuple[int, int]] | None:
        """Rank all continuations of a complete step; those that ended are added to `finished`.

        Returns the live continuations by rank as (lane that has computed its past, next token); the caller then calls
        `assign` with the lanes that compute them. Empty if the search `is_over`; None where there are too few
        continuations.
        """
        params, length = self._params, self._num_tokens + 1
        ranked = sorted(self._candidates(), key=lambda candidate: -candidate.total)
        at_limit = length == self._max_tokens
        ended = [c for c in ranked[: params.width] if at_limit or c.token_id in self._stop_ids]
        divisor = float(length) ** params.length_penalty
        self.finished += [self._hypothesis(candidate, divisor) for candidate in ended]
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)  # stable: of equals the older first
        del self.finished[params.width :]
        live = [c for c in ranked if c.token_id not in self._stop_ids][: params.width]
        if at_limit:
            self.is_over = True
        elif len(live) == params.width:
            self.is_over = self._is_decided(live[0].total, length)
        else:
            return None
        if self.is_over:
            return []
        self._num_tokens = length
        self._live = [_Beam(lane=c.parent.lane, total=c.total, path=self._path(c)) for c in live]
        self._offers.clear()
        return [(beam.lane, candidate.token_id) for beam, candidate in zip(self._live, live, strict=True)]

    def assign(self, lanes: list[int]) -> None:
        """Set the lanes that compute the live beams, by rank."""
        self._live = [replace(beam, lane=lane) for beam, lane in zip(self._live, lanes, strict=True)]

    def _candidates(self) -> Iterator[_Candidate]:
        """The likeliest continuations of every live beam: beams by rank, then tokens by rank."""
        may_stop = self._num_tokens >= self._min_tokens
        for beam in self._live:
            offered = self._offers[beam.lane]
            for place, (token, logprob) in enumerate(zip(offered.top_ids, offered.top_logprobs, strict=True)):
                if may_stop or token not in self._stop_ids:
                    yield _Candidate(parent=beam, token_id=token, place=place, total=beam.total + logprob)

    def _is_decided(self, best: float, length: int) -> bool:
        """Whether the search ends now; `best`: the sum of the best live beam, over `length` tokens."""
        params = self._params
        if len(self.finished) < params.width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._max_tokens
        highest: float = best / float(length) ** params.length_penalty
        return highest <= self.finished[-1].score

    def _hypothesis(self, candidate: _Candidate, divisor: float) -> Hypothesis:
        return Hypothesis(
            score=candidate.total / divisor,
            finish="stop" if candidate.token_id in self._stop_ids else "length",
            path=self._path(candidate),
        )

    def _path(self, candidate: _Candidate) -> _Path:
        offered, place, told = self._offers[candidate.parent.lane], candidate.place, self._num_logprobs
        token = replace(
            offered,
            token_id=candidate.token_id,
            logprob=offered.top_logprobs[place],
            rank=place + 1,
            top_ids=offered.top_ids[:told],
            top_logprobs=offered.top_logprobs[:told],
        )
        return _Path(candidate.parent.path, token)
