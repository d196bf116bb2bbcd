"""The frames between the main process and an API server, over a socket pair.

Both are on one machine and of one version: times are of the same clock, and no frame is converted.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import Adapter, GenerationRequest, TokenOutput
from quire_engine.process.transport import Abort, Codec, Hold, Kind, Release
from quire_server.errors import ErrorFacts
from quire_server.metrics.shared_counts import Counts
from quire_server.settings import ServerLimits

# ---------------------------------------------------------------- from the main process


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The first frame: what the API server is to be."""

    settings: str  # `Settings` in JSON
    limits: ServerLimits
    listening: int  # descriptor of its listening socket
    count: int  # of all API servers


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeys:
    """The keys of clients and the tenants that hold now."""

    api: dict[str, str]  # names by the keys' SHA-256 in hexadecimal digits
    tenants: tuple[str, ...]  # each in JSON
    certificates: int = 0  # how often certificates were read again


@dataclass(frozen=True, slots=True, kw_only=True)
class MainState:
    """The state that holds for every API server; sent when it changes."""

    plan: EnginePlan | None  # None: the engine has not been ready yet
    draining: bool
    stopping: bool
    adapters: tuple[tuple[str, Adapter], ...]  # by the names that requests may use
    keys: KnownKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Something to do, answered by `Done` when it is done."""

    token: int
    what: str  # "count": send what was counted; "idle": when no accepted request is left; "refuse"; "close"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Outputs of the API server's requests, and how full the queue of all is."""

    outputs: tuple[TokenOutput, ...] = ()
    taken: int = 0  # sequences that have places in the queue
    most: int = 0  # places
    seats: int = 0  # sequences that are computed at once
    rate: float = 1.0  # sequences that end per second


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """The request has a place in the queue, or is refused."""

    request_id: str
    refusal: ErrorFacts | None = None


# ---------------------------------------------------------------- from an API server


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The API server accepts connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Asks for a place in the queue. `list_tokens`: prompt tokens of all of its client's request, on its first prompt,
    which are held against the tenant's budgets.
    """

    request: GenerationRequest
    account: str  # the tenant or key that its tokens are counted for
    list_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """The names that clients know requests by."""

    names: tuple[str, ...]
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """An order is carried out; `counts`: what was counted since the last one."""

    token: int
    counts: Counts | None = None


# ---------------------------------------------------------------- requests that the main process answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """A client's request, of which the main process is to make the reply: an ASGI scope."""

    stream: int
    method: str
    scheme: str
    http_version: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The main process waits for more of the request."""

    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Came:
    """More of the request's body."""

    stream: int
    body: bytes
    more: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The client has gone away, or has its whole reply."""

    stream: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A piece of the reply; `status` 0: the head was sent before. `failed`: there is no more, and it is not whole."""

    stream: int
    status: int = 0
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    more: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """The piece is on its way to the client, and the next one may come."""

    stream: int


MAX_BYTES = 256 << 20
FROM_MAIN = Codec(
    {40: Start, 41: MainState, 42: Order, 43: Outputs, 44: Placed, 45: Wanted, 46: Sent}, most_bytes=MAX_BYTES
)
FROM_API_SERVER = Codec(
    {
        Kind.ABORT: Abort,
        Kind.HOLD: Hold,
        Kind.RELEASE: Release,
        50: Ready,
        51: Place,
        52: Named,
        53: Done,
        54: Began,
        55: Came,
        56: Left,
        57: Took,
    },
    most_bytes=MAX_BYTES,
)
