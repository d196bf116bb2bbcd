"""Stores responses for later reads and continuations: bounded in number and in bytes, shared by owners.

An owner cannot see the responses of another. A response keeps the ones that it continues alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quire_server.dialects.responses.rendering import response_of

_TURN_BYTES, _ITEM_BYTES = 1024, 192  # approximate bytes of the Python objects


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    id: str
    raw: bytes  # JSON


class StoredResponse:
    """One response with its input and output items, and the response that it continues."""

    __slots__ = ("_refs", "id", "input", "output", "previous", "raw", "size")

    def __init__(
        self,
        *,
        id: str,
        raw: bytes,
        input: Sequence[StoredItem],
        output: Sequence[StoredItem],
        previous: StoredResponse | None,
    ) -> None:
        """`raw`: the whole response as JSON; `input`: the items of its own request."""
        self.id = id
        self.raw = raw
        self.input = tuple(input)
        self.output = tuple(output)
        self.previous = previous
        items = (*self.input, *self.output)
        self.size = _TURN_BYTES + len(raw) + sum(_ITEM_BYTES + len(item.raw) for item in items)
        self._refs = 0  # references: the store's, and those of responses that continue it

    def history(self) -> list[StoredItem]:
        """All items up to the end of this response, the oldest first."""
        turns = [self, *self._earlier()]
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.output)]

    def add_ref(self) -> bool:
        """True for the first reference."""
        self._refs += 1
        return self._refs == 1

    def drop_ref(self) -> bool:
        """True if no reference is left."""
        self._refs -= 1
        return self._refs == 0

    def _earlier(self) -> Iterator[StoredResponse]:
        turn = self.previous
        while turn is not None:
            yield turn
            turn = turn.previous


@dataclass(slots=True)
class _Shelf:
    """The responses of one owner."""

    listed: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)  # least recently used first
    num_bytes: int = 0  # of those and of the ones that they continue
    weight: float = 1.0  # of its newest response

    @property
    def share_of_number(self) -> float:
        return len(self.listed) / self.weight

    @property
    def share_of_bytes(self) -> float:
        return self.num_bytes / self.weight


class ResponseStore:
    """A store of at most `max_responses` responses, in at most `max_bytes` of memory with the ones that they continue.

    Owners share this space: where it is full, the owner that has most for its weight loses its least recently used
    response, so that one owner's flood evicts only what is above the others' shares.
    """

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}  # by owner; none is empty
        self._num_listed = 0

    def __len__(self) -> int:
        return self._num_listed

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    def put(self, owner: str, response: StoredResponse, *, weight: float = 1.0) -> None:
        """Store a new response; one that does not fit even alone is evicted at once. `weight`: the owner's."""
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.weight = weight
        shelf.listed[response.id] = response
        self._num_listed += 1
        self._add_refs(shelf, response)
        while self._num_listed > self._max_responses:
            self._evict(max(self._shelves, key=lambda each: self._shelves[each].share_of_number))
        while self.num_bytes > self._max_bytes:
            self._evict(max(self._shelves, key=lambda each: self._shelves[each].share_of_bytes))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        shelf = self._shelves.get(owner)
        response = None if shelf is None else shelf.listed.get(response_id)
        if shelf is not None and response is not None:
            shelf.listed.move_to_end(response_id)
        return response

    def item(self, owner: str, item_id: str) -> StoredItem | None:
        """An item of a stored response by its id."""
        response = self.get(owner, response_of(item_id))
        if response is None:
            return None
        return next((item for item in (*response.input, *response.output) if item.id == item_id), None)

    def delete(self, owner: str, response_id: str) -> bool:
        """False if there is no such response. Responses that continue it keep its items."""
        if self.get(owner, response_id) is None:
            return False
        self._remove(owner, response_id)
        return True

    def _evict(self, owner: str) -> None:
        self._remove(owner, next(iter(self._shelves[owner].listed)))

    def _remove(self, owner: str, response_id: str) -> None:
        shelf = self._shelves[owner]
        self._drop_refs(shelf, shelf.listed.pop(response_id))
        self._num_listed -= 1
        if not shelf.listed:
            del self._shelves[owner]

    def _add_refs(self, shelf: _Shelf, response: StoredResponse | None) -> None:
        while response is not None and response.add_ref():
            shelf.num_bytes += response.size
            self.num_bytes += response.size
            response = response.previous

    def _drop_refs(self, shelf: _Shelf, response: StoredResponse | None) -> None:
        while response is not None and response.drop_ref():
            shelf.num_bytes -= response.size
            self.num_bytes -= response.size
            response = response.previous
