"""Frames over the engine socket: four bytes of length, one byte of kind, a msgpack payload.

Owns the wire format between the API process and the engine process. Promises: no pickle, a bounded frame size, and
ProtocolError for anything that does not decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, TypeAlias

import msgspec

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ProtocolError
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.token_columns import OTHER_FIELDS, Outputs, StepInColumns, Stream
from quire_engine.contract.types import EngineHealth, GenerationRequest, StepOutput

MAX_FRAME_BYTES = 256 * 1024 * 1024
_HEADER = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """End a request, whatever its state."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Suspend a request, whatever its state, because its client does not read its tokens."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Continue a held request."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """End the process, whatever is running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspect:
    """A question about the engine's state; `scheduling.log.inspection` has the questions."""

    token: int  # comes back with the answer
    what: str
    argument: str = "{}"  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """The reply to a question or an order: JSON, or an error in words."""

    token: int
    body: bytes = b""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """An operator's order, answered by `Inspected` when it is carried out; `Engine.control` has the orders."""

    token: int  # comes back with the answer
    what: str
    argument: str = "{}"  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """The process runs, whatever its step does; sent by a thread of its own where it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProgress:
    """Progress of the start; any number of these frames come before READY."""

    phase: str  # a few words, such as "reading weights"
    done: int = 0
    total: int = 0  # 0: not known
    unit: str = "bytes"

    @property
    def ratio(self) -> float:
        """The share that is done, 0 to 1; 0 where the total is not known."""
        return min(1.0, self.done / self.total) if self.total > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """The engine could not be built; one line for the operator."""

    kind: Literal["config", "model"]
    message: str


Frame: TypeAlias = (
    EngineConfig
    | GenerationRequest
    | Abort
    | Hold
    | Release
    | Shutdown
    | Inspect
    | Control
    | LoadProgress
    | EnginePlan
    | StartFailed
    | StepOutput
    | EngineHealth
    | Inspected
    | Alive
)


class Kind(IntEnum):
    """The byte that names a payload's type."""

    START = 1
    SUBMIT = 2
    ABORT = 3
    SHUTDOWN = 4
    READY = 5
    START_FAILED = 6
    STEP = 7
    HEARTBEAT = 8
    INSPECT = 9
    INSPECTED = 10
    LOAD_PROGRESS = 11
    HOLD = 13
    RELEASE = 14
    CONTROL = 16
    ALIVE = 17


_TYPES: dict[int, type] = {
    Kind.START: EngineConfig,
    Kind.SUBMIT: GenerationRequest,
    Kind.ABORT: Abort,
    Kind.HOLD: Hold,
    Kind.RELEASE: Release,
    Kind.SHUTDOWN: Shutdown,
    Kind.READY: EnginePlan,
    Kind.START_FAILED: StartFailed,
    Kind.STEP: StepOutput,
    Kind.HEARTBEAT: EngineHealth,
    Kind.INSPECT: Inspect,
    Kind.INSPECTED: Inspected,
    Kind.LOAD_PROGRESS: LoadProgress,
    Kind.CONTROL: Control,
    Kind.ALIVE: Alive,
}
_ENCODER = msgspec.msgpack.Encoder()


class Codec:
    """The frames of one kind of socket: which there are, the bytes that name them, and how long one may be."""

    def __init__(self, types: Mapping[int, type], *, most_bytes: int = MAX_FRAME_BYTES) -> None:
        """`types` by the byte of their kind; `most_bytes` of a payload."""
        self.most_bytes = most_bytes
        self._kinds = {payload: kind for kind, payload in types.items()}
        self._names = {kind: payload.__name__ for kind, payload in types.items()}
        self._decoders: dict[int, msgspec.msgpack.Decoder[Any]] = {
            int(kind): msgspec.msgpack.Decoder(payload) for kind, payload in types.items()
        }

    def encode(self, frame: Any) -> bytes:
        """The bytes of one frame. Raises ProtocolError for one that is too long."""
        return self.framed(_ENCODER.encode(frame), type(frame))

    def framed(self, payload: bytes, frame_type: type) -> bytes:
        """The bytes of a frame of this type from its encoded payload. Raises ProtocolError for one that is too long."""
        if len(payload) > self.most_bytes:
            raise ProtocolError(f"a frame of {len(payload)} bytes is over the limit of {self.most_bytes}")
        return b"%b%c%b" % (len(payload).to_bytes(4, "little"), self._kinds[frame_type], payload)

    def check(self, size: int, kind: int) -> None:
        """Check the header of a frame, whose payload may not be there yet. Raises ProtocolError."""
        if size > self.most_bytes:
            raise ProtocolError(f"a frame announces {size} bytes, over the limit of {self.most_bytes}")
        if kind not in self._decoders:
            raise ProtocolError(f"unknown frame kind {kind}")

    def decode(self, kind: int, payload: bytes | bytearray) -> Any:
        """The frame of a checked header. Raises ProtocolError."""
        try:
            return self._decoders[kind].decode(payload)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a frame of kind {self._names[kind]} does not decode: {error}") from None


_CODEC = Codec(_TYPES)


def encode_frame(frame: Frame) -> bytes:
    """The bytes of one frame between the API process and an engine process. Raises ProtocolError if it is too long."""
    return FrameEncoder().encode(frame)


class FrameEncoder:
    """Makes the bytes of an engine's frames; those of plain tokens from what it has made for their streams before."""

    def __init__(self) -> None:
        self._streams: tuple[Stream, ...] = ()  # of the last step with columns
        self._around: dict[Stream, tuple[bytes, bytes]] = {}  # what comes before their tokens, and behind them

    def encode(self, frame: Frame) -> bytes:
        """Encode a frame like `encode_frame`, with the outputs of a step taken from its columns."""
        if not isinstance(frame, StepInColumns):
            return _CODEC.encode(frame)
        fields = {name: getattr(frame, name) for name in OTHER_FIELDS}
        fields["outputs"] = msgspec.Raw(self._outputs(frame.columns))
        return _CODEC.framed(_ENCODER.encode(fields), StepOutput)

    def _outputs(self, columns: Outputs) -> bytes:
        streams, ids = columns.streams, columns.ids
        if streams is not self._streams:
            known = self._around
            self._around = {stream: known.get(stream) or _around_token(stream) for stream in streams}
            self._streams = streams
        plain = [b""] * (3 * len(streams))
        plain[::3], plain[2::3] = zip(*self._around.values(), strict=True)
        plain[1::3] = [ids[at : at + 4] for at in range(0, len(ids), 4)]
        pieces = [_array_head(len(columns))]
        for some, others in columns.parts():
            pieces += plain[3 * some.start : 3 * some.stop]
            pieces += map(_ENCODER.encode, others)
        return b"".join(pieces)


_LARGEST = (1 << 32) - 1  # of the numbers that msgpack writes in a byte that says so, and four


def _around_token(stream: Stream) -> tuple[bytes, bytes]:
    """The msgpack of a plain output before and behind the four bytes of its token. All fields are there, in order: so
    they are decoded fastest."""
    before, token, behind = _ENCODER.encode(stream.output(_LARGEST)).rpartition(_ENCODER.encode((_LARGEST,)))
    return before + token[:-4], behind


def _array_head(length: int) -> bytes:
    """The beginning of an array in msgpack."""
    return b"\xdd" + length.to_bytes(4, "big")


class FrameDecoder:
    """Turns a byte stream, in pieces of any size, into frames."""

    def __init__(self, codec: Codec = _CODEC) -> None:
        self._codec = codec
        self._buffer = bytearray()

    @property
    def num_unfinished(self) -> int:
        """Bytes of a frame that has begun to arrive."""
        return len(self._buffer)

    def feed(self, data: bytes) -> list[Any]:
        """Frames completed by `data`, in order. Raises ProtocolError."""
        self._buffer += data
        frames: list[Any] = []
        start = 0
        while len(self._buffer) - start >= _HEADER:
            size, kind = int.from_bytes(self._buffer[start : start + 4], "little"), self._buffer[start + 4]
            self._codec.check(size, kind)
            end = start + _HEADER + size
            if len(self._buffer) < end:
                break
            frames.append(self._codec.decode(kind, self._buffer[start + _HEADER : end]))
            start = end
        del self._buffer[:start]
        return frames
