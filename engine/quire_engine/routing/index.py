"""The index of the prompt blocks that replicas have cached: exact, from what they tell, and bounded in memory.

Promises: a wrong or lost entry costs time only, since a replica matches by itself what it really has. Must not know:
sockets, clocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from quire_engine.contract.block_hashes import MOST_ROUTED
from quire_engine.contract.types import PrefixChanges

MOST_BLOCKS = 16_384  # known blocks of one replica; the deepest are dropped first
_WORTH_CLEANING = 1024  # entries of a shelf that are not worth a clean-up


class PrefixIndex:
    """A bit mask of replicas for each known block.

    A block counts as cached on a replica if the replica said so, or if a request with it was sent there and is not
    answered yet: else a burst of one prompt would scatter.
    """

    def __init__(self, *, most_blocks: int = MOST_BLOCKS) -> None:
        self._most = most_blocks
        self._holders: dict[int, int] = {}  # by block: the mask of the replicas that said so
        self._sent_to: dict[int, int] = {}  # by block: the mask of those that unanswered requests with it were sent to
        self._shelves: dict[str, _Shelf] = {}
        self._names: list[str] = []  # by bit; empty: free
        self._requests: dict[str, tuple[str, tuple[int, ...]]] = {}  # unanswered: replica, blocks

    def __len__(self) -> int:
        """Blocks that some replica has told of."""
        return len(self._holders)

    @property
    def replicas(self) -> list[str]:
        """The replicas that the index knows."""
        return list(self._shelves)

    def num_blocks(self, name: str) -> int:
        """Blocks that the replica is known to have."""
        shelf = self._shelves.get(name)
        return 0 if shelf is None else shelf.count

    def add(self, name: str) -> None:
        """A replica joins, with nothing cached; one that is known starts anew."""
        self.remove(name)
        bit = self._names.index("") if "" in self._names else len(self._names)
        self._names[bit : bit + 1] = [name]
        self._shelves[name] = _Shelf(bit)

    def remove(self, name: str) -> None:
        """A replica is gone: forget its blocks, and what was sent to it."""
        shelf = self._shelves.pop(name, None)
        if shelf is None:
            return
        self._clear(shelf)
        for request_id in [key for key, (to, _) in self._requests.items() if to == name]:
            del self._requests[request_id]
        for block in shelf.sent:
            _take(self._sent_to, block, shelf.mask)
        self._names[shelf.bit] = ""

    def apply(self, name: str, changes: PrefixChanges) -> bool:
        """Take in a frame; False if one before it is missing: a snapshot is to be asked for.

        Until the snapshot comes nothing is known of the replica: load alone decides.
        """
        shelf = self._shelves[name]
        if changes.number != shelf.number + 1:
            if changes.number > shelf.number:
                self._clear(shelf)
                shelf.number = -1  # no frame follows this number
            return False
        shelf.number = changes.number
        for block in changes.forgotten:
            self._forget(shelf, block)
        for block, depth in zip(changes.registered, changes.depths, strict=True):
            self._register(shelf, block, depth)
        return True

    def replace(self, name: str, snapshot: PrefixChanges) -> None:
        """Take a snapshot for all that is known of the replica; `number` is that of the last frame in it."""
        shelf = self._shelves[name]
        self._clear(shelf)
        shelf.number = snapshot.number
        for block, depth in zip(snapshot.registered, snapshot.depths, strict=True):
            self._register(shelf, block, depth)

    def sent(self, name: str, request_id: str, blocks: tuple[int, ...]) -> None:
        """A request goes to a replica: its blocks count as cached there until `answered`."""
        self.answered(request_id)
        shelf = self._shelves.get(name)
        if shelf is None or not blocks:
            return
        self._requests[request_id] = name, blocks
        for block in blocks:
            count = shelf.sent.get(block, 0)
            shelf.sent[block] = count + 1
            if not count:
                self._sent_to[block] = self._sent_to.get(block, 0) | shelf.mask

    def answered(self, request_id: str) -> None:
        """Count on the replica's word alone from now on: a request's first token has come, or it has ended."""
        name, blocks = self._requests.pop(request_id, ("", ()))
        if not blocks:
            return
        shelf = self._shelves[name]
        for block in blocks:
            count = shelf.sent.pop(block) - 1
            if count:
                shelf.sent[block] = count
            else:
                _take(self._sent_to, block, shelf.mask)

    def depths(self, blocks: Sequence[int]) -> dict[str, int]:
        """Return how many blocks each replica has in a row from the first on, for those that have the first."""
        found: dict[str, int] = {}
        holders, sent_to = self._holders, self._sent_to
        mask = -1
        for depth, block in enumerate(blocks):
            have = mask & (holders.get(block, 0) | sent_to.get(block, 0))
            if have != mask:
                if depth:
                    self._note(found, mask & ~have, depth)
                mask = have
                if not mask:
                    return found
        if blocks:
            self._note(found, mask, len(blocks))
        return found

    def _note(self, found: dict[str, int], mask: int, depth: int) -> None:
        """Every replica in the mask has `depth` blocks in a row."""
        while mask:
            lowest = mask & -mask
            found[self._names[lowest.bit_length() - 1]] = depth
            mask ^= lowest

    def _register(self, shelf: _Shelf, block: int, depth: int) -> None:
        holders = self._holders.get(block, 0)
        if holders & shelf.mask:
            return
        self._holders[block] = holders | shelf.mask if holders else shelf.mask  # one object for most blocks
        shelf.put(block, depth)
        while shelf.count > self._most:
            self._forget(shelf, shelf.deepest(self._holders))
        if shelf.num_entries > 2 * shelf.count + _WORTH_CLEANING:
            shelf.clean(self._holders)

    def _forget(self, shelf: _Shelf, block: int) -> None:
        if self._holders.get(block, 0) & shelf.mask:
            _take(self._holders, block, shelf.mask)
            shelf.count -= 1

    def _clear(self, shelf: _Shelf) -> None:
        """The replica has no blocks that the index knows of."""
        for block in shelf.entries():
            if self._holders.get(block, 0) & shelf.mask:
                _take(self._holders, block, shelf.mask)
        shelf.empty()


class _Shelf:
    """The blocks of one replica by their depth, 8 bytes each. A block that was forgotten stays until it is met."""

    __slots__ = ("_by_depth", "bit", "count", "mask", "num_entries", "number", "sent")

    def __init__(self, bit: int) -> None:
        self.bit, self.mask = bit, 1 << bit
        self.number = 0  # of the last frame that was taken in
        self.count = 0  # blocks that the index knows of
        self.num_entries = 0  # with forgotten ones
        self.sent: dict[int, int] = {}  # by block: unanswered requests with it
        self._by_depth: list[array[int]] = []

    def put(self, block: int, depth: int) -> None:
        depth = min(depth, MOST_ROUTED - 1)
        while len(self._by_depth) <= depth:
            self._by_depth.append(array("Q"))
        self._by_depth[depth].append(block)
        self.count += 1
        self.num_entries += 1

    def deepest(self, holders: dict[int, int]) -> int:
        """The oldest of the deepest blocks that are known, which is removed here."""
        while True:
            while not self._by_depth[-1]:
                self._by_depth.pop()
            block = self._by_depth[-1].pop(0)
            self.num_entries -= 1
            if holders.get(block, 0) & self.mask:
                return block

    def entries(self) -> Iterable[int]:
        return (block for blocks in self._by_depth for block in blocks)

    def clean(self, holders: dict[int, int]) -> None:
        """Remove the forgotten ones, and second entries of blocks that came back."""
        seen: set[int] = set()
        for depth, blocks in enumerate(self._by_depth):
            kept = [block for block in blocks if holders.get(block, 0) & self.mask and block not in seen]
            seen.update(kept)
            self._by_depth[depth] = array("Q", dict.fromkeys(kept))
        self.num_entries = sum(map(len, self._by_depth))

    def empty(self) -> None:
        self._by_depth.clear()
        self.count = self.num_entries = 0


def _take(masks: dict[int, int], block: int, mask: int) -> None:
    """Remove a replica's bit from a block's mask."""
    left = masks[block] & ~mask
    if left:
        masks[block] = left
    else:
        del masks[block]
