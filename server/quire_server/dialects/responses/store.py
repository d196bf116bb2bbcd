"""Stores responses for later reads and continuations: bounded in number and in bytes, evicted by least recent use.

An owner cannot see the responses of another. A response keeps the ones that it continues alive.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


class ResponseStore:
    """At most `max_responses` responses, in at most `max_bytes` of memory with the ones that they continue."""

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._listed: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._listed)

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    def put(self, owner: str, response: StoredResponse) -> None:
        """Store a new response; one that does not fit even alone is evicted at once."""
        self._listed[owner, response.id] = response
        self._add_refs(response)
        while len(self._listed) > self._max_responses or self.num_bytes > self._max_bytes:
            _, oldest = self._listed.popitem(last=False)
            self._drop_refs(oldest)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        response = self._listed.get((owner, response_id))
        if response is not None:
            self._listed.move_to_end((owner, response_id))
        return response

    def item(self, owner: str, item_id: str) -> StoredItem | None:
        """An item of a stored response by its id."""
        response = self.get(owner, response_of(item_id))
        if response is None:
            return None
        return next((item for item in (*response.input, *response.output) if item.id == item_id), None)

    def delete(self, owner: str, response_id: str) -> bool:
        """False if there is no such response. Responses that continue it keep its items."""
        response = self._listed.pop((owner, response_id), None)
        if response is None:
            return False
        self._drop_refs(response)
        return True

    def _add_refs(self, response: StoredResponse | None) -> None:
        while response is not None and response.add_ref():
            self.num_bytes += response.size
            response = response.previous

    def _drop_refs(self, response: StoredResponse | None) -> None:
        while response is not None and response.drop_ref():
            self.num_bytes -= response.size
            response = response.previous
