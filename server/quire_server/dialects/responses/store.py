"""Past responses, to be read again and gone on from: bounded in number and in bytes, those unused for longest go first.

One owner's are not there for another; what a response goes on from stays for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire_server.dialects.responses.rendering import response_of

_TURN_BYTES, _ITEM_BYTES = 1024, 192  # what the objects themselves take, about


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    id: str
    raw: bytes  # JSON


class StoredResponse:
    """One response with what came in and what came out, and the one before it."""

    __slots__ = ("_num_holders", "id", "input", "output", "previous", "raw", "size")

    def __init__(
        self,
        *,
        id: str,
        raw: bytes,
        input: Sequence[StoredItem],
        output: Sequence[StoredItem],
        previous: StoredResponse | None,
    ) -> None:
        """`raw` is the whole response as JSON; `input` are the items that came with its request alone."""
        self.id = id
        self.raw = raw
        self.input = tuple(input)
        self.output = tuple(output)
        self.previous = previous
        items = (*self.input, *self.output)
        self.size = _TURN_BYTES + len(raw) + sum(_ITEM_BYTES + len(item.raw) for item in items)
        self._num_holders = 0  # the store, where it is listed, and the responses that go on from it

    def history(self) -> list[StoredItem]:
        """All items up to its end, the oldest first."""
        turns = [self, *self._earlier()]
        return [item for turn in reversed(turns) for item in (*turn.input, *turn.output)]

    def hold(self) -> bool:
        """Whether it was not held before."""
        self._num_holders += 1
        return self._num_holders == 1

    def let_go(self) -> bool:
        """Whether nobody holds it any more."""
        self._num_holders -= 1
        return self._num_holders == 0

    def _earlier(self) -> Iterator[StoredResponse]:
        turn = self.previous
        while turn is not None:
            yield turn
            turn = turn.previous


class ResponseStore:
    """At most `max_responses` responses; with what they go on from at most `max_bytes` of memory."""

    def __init__(self, *, max_responses: int, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._listed: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()  # the longest unused first

    def __len__(self) -> int:
        return len(self._listed)

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0

    def put(self, owner: str, response: StoredResponse) -> None:
        """List a new response. One that has no room even alone is gone at once."""
        self._listed[owner, response.id] = response
        self._hold(response)
        while len(self._listed) > self._max_responses or self.num_bytes > self._max_bytes:
            _, oldest = self._listed.popitem(last=False)
            self._let_go(oldest)

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        response = self._listed.get((owner, response_id))
        if response is not None:
            self._listed.move_to_end((owner, response_id))
        return response

    def item(self, owner: str, item_id: str) -> StoredItem | None:
        """An item of a listed response, by the id that it got here."""
        response = self.get(owner, response_of(item_id))
        if response is None:
            return None
        return next((item for item in (*response.input, *response.output) if item.id == item_id), None)

    def delete(self, owner: str, response_id: str) -> bool:
        """Whether there was such a response. What goes on from it keeps its items."""
        response = self._listed.pop((owner, response_id), None)
        if response is None:
            return False
        self._let_go(response)
        return True

    def _hold(self, response: StoredResponse | None) -> None:
        while response is not None and response.hold():
            self.num_bytes += response.size
            response = response.previous

    def _let_go(self, response: StoredResponse | None) -> None:
        while response is not None and response.let_go():
            self.num_bytes -= response.size
            response = response.previous
