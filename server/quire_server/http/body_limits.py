"""How large a body may be, and how much of all bodies may be held: both from what the model's context can take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

from starlette.types import ASGIApp, Receive, Scope, Send

from quire_server.errors import ApiError, NotReady, PayloadTooLarge
from quire_server.http.envelopes import error_reply

LARGEST_BODY = 8 << 20  # of those that are derived
LEAST_BODY = 512 << 10  # tools, schemas, 65,536 allowed ids
TOKEN_BYTES = (
    8  # of an id with its comma, and of a token of text on average: escapes, where they are, are not all of it
)
PROMPTS = 64  # of one completion
INPUT_TOKENS = 1 << 20  # of all texts of one embedding or score
OTHER_VALUES = 1 << 18  # of a body, besides the ids of prompts that fit: one that is cut to fit may be longer
VALUE_BYTES = 4  # of an id on average, where an operator has said how many bytes a body may have
MANY_INPUTS = frozenset({"/v1/embeddings", "/v1/score", "/score"})
FREE_BYTES = 16 << 10  # of each body: connections are counted as well
BUSY_SECONDS = 2.0  # after which there may be room: a body is held while it arrives and is parsed
_HOLD = "body_hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimit:
    """Of the bodies of a route."""

    max_bytes: int
    max_values: int  # of arrays and objects
    max_model_len: int | None  # where the limit follows from it

    def too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(self.max_bytes, max_model_len=self.max_model_len)


class BodyLimits:
    """The limit of each path. What a full context needs in JSON is never refused."""

    def __init__(self, *, max_body_bytes: int | None, max_model_len: int, root_path: str = "") -> None:
        self._root_path = root_path
        self._one = _limit(max_body_bytes, max_model_len, PROMPTS * max_model_len)
        self._many = _limit(max_body_bytes, max_model_len, max(INPUT_TOKENS, PROMPTS * max_model_len))

    @property
    def largest(self) -> int:
        return self._many.max_bytes

    def of(self, path: str) -> BodyLimit:
        """Of a path, with or without the root that a proxy may add."""
        return self._many if path.removeprefix(self._root_path) in MANY_INPUTS else self._one


def _limit(max_body_bytes: int | None, max_model_len: int, tokens: int) -> BodyLimit:
    max_values = tokens + OTHER_VALUES
    if max_body_bytes is None:
        max_bytes = min(LARGEST_BODY, LEAST_BODY + TOKEN_BYTES * tokens)
        return BodyLimit(max_bytes=max_bytes, max_values=max_values, max_model_len=max_model_len)
    max_values = max(max_values, max_body_bytes // VALUE_BYTES)
    return BodyLimit(max_bytes=max_body_bytes, max_values=max_values, max_model_len=None)


class BodyBudget:
    """Bytes of bodies that are held at once, over all connections; `on_change` is told how many."""

    def __init__(self, max_bytes: int, on_change: Callable[[int], None] = lambda _: None) -> None:
        self._max_bytes = max_bytes
        self._on_change = on_change
        self.held = 0

    def has_room(self, num_bytes: int) -> bool:
        return num_bytes <= FREE_BYTES or self.held + num_bytes <= self._max_bytes

    def change(self, num_bytes: int) -> None:
        """Raises NotReady where there is no room."""
        if not num_bytes:
            return
        if num_bytes > 0 and self.held + num_bytes > self._max_bytes:
            raise no_room()
        self.held += num_bytes
        self._on_change(self.held)


class BodyHold:
    """What one body takes of the budget: nothing while it is small."""

    __slots__ = ("_budget", "_num_bytes", "_released")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0
        self._released = False

    def grow(self, num_bytes: int) -> None:
        """More of the body has arrived. Raises NotReady where there is no room for it, and lets go of all then."""
        if self._released:
            return
        counted = self._counted
        self._num_bytes += num_bytes
        try:
            self._budget.change(self._counted - counted)
        except NotReady:
            self._num_bytes -= num_bytes
            self.release()
            raise

    def release(self) -> None:
        """The body's bytes are gone: it has become fields, or nothing."""
        if not self._released:
            self._released = True
            self._budget.change(-self._counted)

    @property
    def _counted(self) -> int:
        return self._num_bytes if self._num_bytes > FREE_BYTES else 0


class BodyGate:
    """Refuses by the head what is too large or finds no room; behind the middleware that asks for keys."""

    def __init__(self, app: ASGIApp, *, limits: BodyLimits, budget: BodyBudget) -> None:
        self._app = app
        self._limits = limits
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await error_reply(refusal, scope)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        declared = declared_bytes(scope["headers"]) or 0
        limit = self._limits.of(scope["path"])
        if declared > limit.max_bytes:
            return limit.too_large()
        return None if self._budget.has_room(declared) else no_room()


def declared_bytes(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The length of the body that a head announces; None where it does not say."""
    for name, value in headers:
        if name == b"content-length":
            return int(value) if value.isdigit() and len(value) < 20 else None
        if name == b"transfer-encoding":
            return None
    return 0


def no_room() -> NotReady:
    return NotReady(
        "Too many large request bodies are held; retry later.",
        retry_after_seconds=BUSY_SECONDS,
        code="too_many_body_bytes",
        close=True,
    )


def hold_of(scope: Scope) -> BodyHold | None:
    """What the body of this request takes of the budget."""
    hold = scope.get("state", {}).get(_HOLD)
    return hold if isinstance(hold, BodyHold) else None


def put_hold(scope: Scope, hold: BodyHold) -> None:
    scope.setdefault("state", {})[_HOLD] = hold


OWN_BYTES = 256 << 10  # what is smaller is not worth a mapping

Bytes = bytes | mmap  # both can be searched, matched and cut


class BodyBuffer:
    """Takes the parts of a body of at most `most` bytes.

    A large one has memory of its own, which the system has back as soon as the body is read; the heap would keep it,
    since something small always lies behind it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[bytes] = []
        self._memory: mmap | None = None
        self._num_bytes = 0

    def add(self, part: bytes) -> None:
        if self._memory is None:
            if self._num_bytes + len(part) <= OWN_BYTES:
                self._parts.append(part)
                self._num_bytes += len(part)
                return
            self._memory = _mapping(max(self._most, self._num_bytes + len(part)))
            self._memory.write(b"".join(self._parts))
            self._parts.clear()
        self._memory.write(part)
        self._num_bytes += len(part)

    def take(self) -> Bytes:
        """All of it; the buffer is empty then."""
        memory, parts = self._memory, self._parts
        self.clear()
        if memory is None:
            return b"".join(parts)
        size = memory.tell()
        if size == len(memory):
            return memory
        exact = _mapping(size)
        exact.write(memoryview(memory)[:size])
        return exact

    def clear(self) -> None:
        self._memory, self._parts, self._num_bytes = None, [], 0


def _mapping(num_bytes: int) -> mmap:
    return mmap(-1, num_bytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
