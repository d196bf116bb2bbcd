"""Limits on the size of a body and on all bodies together, derived from the model's context length."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

from starlette.types import ASGIApp, Receive, Scope, Send

from quire_server.errors import ApiError, NotReady, PayloadTooLarge
from quire_server.http.envelopes import error_reply

LARGEST_BODY = 8 << 20  # the largest derived limit, in bytes
LEAST_BODY = 512 << 10  # bytes for tools, schemas, 65,536 allowed ids
TOKEN_BYTES = 8  # bytes of an id with its comma, and of a token of text on average, with some escapes
PROMPTS = 64  # most prompts of one completion
INPUT_TOKENS = 1 << 20  # most tokens of all texts of one embedding or score
OTHER_VALUES = 1 << 18  # values of a body besides the ids of full contexts, such as ids of a prompt that will be cut
VALUE_BYTES = 4  # bytes of an id on average, if the operator has set the limit in bytes
MANY_INPUTS = frozenset(
    {
        *("/v1/embeddings", "/v1/score", "/score"),
        *("/v1/rerank", "/v2/rerank", "/rerank", "/classify", "/v1/classify", "/api/embed"),
    }
)
FILES_PATH = "/v1/files"
FORM_BYTES = 64 << 10  # of a form around its file
FREE_BYTES = 16 << 10  # bytes of each body that are not counted; connections are limited too
BUSY_SECONDS = 2.0  # Retry-After: a body is held while it arrives and is parsed
_HOLD = "body_hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimit:
    """The limit of a route's bodies."""

    max_bytes: int
    max_values: int  # values in arrays and objects
    max_model_len: int | None  # the context length, if the limit is derived from it
    is_streamed: bool = False  # goes to the disk while it arrives: no memory is held for it, and it may take its time

    def too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(self.max_bytes, max_model_len=self.max_model_len)


class BodyLimits:
    """The limit of each path. A body that fills the context is never refused."""

    def __init__(
        self, *, max_body_bytes: int | None, max_model_len: int, root_path: str = "", max_file_bytes: int | None = None
    ) -> None:
        """`max_file_bytes`: of an uploaded file; None: this server keeps none."""
        self._root_path = root_path
        self._one = _limit(max_body_bytes, max_model_len, PROMPTS * max_model_len)
        self._many = _limit(max_body_bytes, max_model_len, max(INPUT_TOKENS, PROMPTS * max_model_len))
        self._file = self._one
        if max_file_bytes is not None:
            self._file = BodyLimit(
                max_bytes=max_file_bytes + FORM_BYTES, max_values=0, max_model_len=None, is_streamed=True
            )

    @property
    def largest(self) -> int:
        return self._many.max_bytes

    def of(self, path: str) -> BodyLimit:
        """The limit of a path, with or without the root path that a proxy may add."""
        bare = path.removeprefix(self._root_path)
        if bare == FILES_PATH:
            return self._file
        return self._many if bare in MANY_INPUTS else self._one


def _limit(max_body_bytes: int | None, max_model_len: int, tokens: int) -> BodyLimit:
    max_values = tokens + OTHER_VALUES
    if max_body_bytes is None:
        max_bytes = min(LARGEST_BODY, LEAST_BODY + TOKEN_BYTES * tokens)
        return BodyLimit(max_bytes=max_bytes, max_values=max_values, max_model_len=max_model_len)
    max_values = max(max_values, max_body_bytes // VALUE_BYTES)
    return BodyLimit(max_bytes=max_body_bytes, max_values=max_values, max_model_len=None)


class BodyBudget:
    """The bytes of bodies that are held at once, over all connections; `on_change` is called with their number."""

    def __init__(self, max_bytes: int, on_change: Callable[[int], None] = lambda _: None) -> None:
        self._max_bytes = max_bytes
        self._on_change = on_change
        self.held = 0

    def has_room(self, num_bytes: int) -> bool:
        return num_bytes <= FREE_BYTES or self.held + num_bytes <= self._max_bytes

    def change(self, num_bytes: int) -> None:
        """Add or, if negative, give back bytes. Raises NotReady where there is no room."""
        if not num_bytes:
            return
        if num_bytes > 0 and self.held + num_bytes > self._max_bytes:
            raise no_room()
        self.held += num_bytes
        self._on_change(self.held)


class BodyHold:
    """One body's share of the budget; small bodies are not counted."""

    __slots__ = ("_budget", "_num_bytes", "_released")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._num_bytes = 0
        self._released = False

    def grow(self, num_bytes: int) -> None:
        """More of the body has arrived. Raises NotReady where there is no room for it, and then gives all back."""
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
        """The body's bytes are freed."""
        if not self._released:
            self._released = True
            self._budget.change(-self._counted)

    @property
    def _counted(self) -> int:
        return self._num_bytes if self._num_bytes > FREE_BYTES else 0


class BodyGate:
    """Refuses by the head a body that is too large or has no room; inside the layers that check keys."""

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
        return None if limit.is_streamed or self._budget.has_room(declared) else no_room()


def declared_bytes(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    """The length of the body from the head; None if the head does not have it."""
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
    """The request's share of the budget."""
    hold = scope.get("state", {}).get(_HOLD)
    return hold if isinstance(hold, BodyHold) else None


def put_hold(scope: Scope, hold: BodyHold) -> None:
    scope.setdefault("state", {})[_HOLD] = hold


OWN_BYTES = 256 << 10  # smaller bodies are not worth a memory mapping

Bytes = bytes | mmap  # both can be searched, matched and sliced


class BodyBuffer:
    """Collects the parts of a body of at most `most` bytes.

    A large body is in a memory mapping of its own, which the system gets back as soon as the body is parsed. The heap
    would keep it, because small allocations lie behind it.
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
        """Return all bytes and empty the buffer."""
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
