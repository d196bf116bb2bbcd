"""The frames between a front and a node: those of an engine's socket, with a node's state around them.

Times of a request and of statistics are relative to the moment of sending: no clock of one machine is compared with
that of another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import EngineStats, GenerationRequest, StepOutput
from quire_engine.process.transport import (
    Abort,
    Codec,
    Control,
    Hold,
    Inspect,
    Inspected,
    Kind,
    LoadProgress,
    Release,
)

MAX_LINK_FRAME_BYTES = 64 << 20  # prompt log-probabilities are the longest


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """A node's greeting, and later what has changed of it."""

    instance: str  # random, of the node's process: another one after its restart
    version: str  # of Quire
    state: str  # of its engine; `supervisor.EngineState`
    draining: bool = False  # it takes nothing new, and ends when it is empty
    proving: bool = False  # new requests would wait for a culprit to be found
    restarts: int = 0  # of its engine
    pid: int | None = None  # of its engine, on its machine
    tokenizer: str = ""  # digest of its tokenizer's file; empty: it has none
    plan: EnginePlan | None = None  # with names of checkpoint and numerics that hold on all machines; None: not yet
    progress: LoadProgress | None = None  # of its engine's start


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStep:
    """A step's outputs for one front, and what other fronts have at the node."""

    step: StepOutput
    tokens_ahead: int = 0  # prompt tokens of other fronts' requests without an output
    requests: int = 0  # of other fronts, unfinished


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Sent by a front, and sent back by the node: then both directions work."""

    number: int


_STATE, _STEP, _PING = 32, 33, 34
# What each side reads; anything else ends the connection.
FROM_FRONT = Codec(
    {
        Kind.SUBMIT: GenerationRequest,
        Kind.ABORT: Abort,
        Kind.HOLD: Hold,
        Kind.RELEASE: Release,
        Kind.INSPECT: Inspect,
        Kind.CONTROL: Control,
        _PING: Ping,
    },
    most_bytes=MAX_LINK_FRAME_BYTES,
)
FROM_NODE = Codec(
    {_STATE: NodeState, _STEP: NodeStep, Kind.INSPECTED: Inspected, _PING: Ping}, most_bytes=MAX_LINK_FRAME_BYTES
)


def request_shifted(request: GenerationRequest, seconds: float) -> GenerationRequest:
    """The request with its times later by `seconds`: by -now to send it, by now when it has come."""
    deadline = None if request.deadline is None else request.deadline + seconds
    return replace(request, arrival_time=request.arrival_time + seconds, deadline=deadline)


def stats_shifted(stats: EngineStats, seconds: float) -> EngineStats:
    """Return the statistics with their times later by `seconds`, as `request_shifted` does for a request."""
    if stats.kv_waiting_since is None:
        return stats
    return replace(stats, kv_waiting_since=stats.kv_waiting_since + seconds)
