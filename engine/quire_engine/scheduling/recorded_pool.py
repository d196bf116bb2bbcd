"""Keeps a record of what the pool's blocks hold, and begins with that of the engine process before this one.

Promises: only what steps have computed whose results were applied is recorded, and it is taken back before a plan is
carried out that may write over it. So whenever the process is killed, the next one may believe the record.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire_engine.contract.batch import Batch
from quire_engine.contract.block_record import BlockRecord
from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.sequence import Sequence


class RecordedPool:
    """A recorder of the pool's blocks, for an executor that computes each step before the next one is planned.

    Full blocks are recorded as they become matchable, those that running sequences have begun with every step, except
    those with rows: the blocks of many sequences are recorded as they fill.
    """

    def __init__(self, kv: KVAllocator, roster: Roster, record: BlockRecord) -> None:
        self._kv, self._roster, self._record = kv, roster, record
        self._new: dict[int, tuple[bytes, int]] = {}  # by block what can be matched, but is not computed for sure
        self._begun: dict[int, int] = {}  # by sequence id the block that it has begun, as recorded
        found = list(record.found())
        taken = kv.take_over(found)
        for each in found:
            if each.tokens or each.block not in taken:
                record.lose(each.block)  # who goes on with a block that is not full gets a copy
        self.num_found = len(taken)  # blocks that this engine begins with
        kv.record_in(self)

    def register(self, block: int, content: bytes, group: int) -> None:
        """The block can be matched; it is computed when the next result is applied."""
        self._new[block] = content, group

    def forget(self, block: int) -> None:
        """The block cannot be matched any more, and may be written to."""
        self._new.pop(block, None)
        self._record.lose(block)

    def planned(self, released: Iterable[int]) -> None:
        """A step is about to be computed; these sequences have lost their blocks since the last one."""
        for sequence_id in released:
            self._close(sequence_id)

    def applied(self, batch: Batch) -> None:
        """The step's result is applied: everything that was registered is computed."""
        for block, (content, group) in self._new.items():
            self._record.fill(block, content, group, self._kv.scope_of(block))
        self._new.clear()
        if self._kv.by_window:  # whose blocks are matched in whole alone
            return
        sequences = self._roster.sequences
        for item in batch.others:
            self._note(item.sequence_id, sequences.get(item.sequence_id))
            for fork in item.forks:
                self._note(fork.sequence_id, sequences.get(fork.sequence_id))

    def _note(self, sequence_id: int, sequence: Sequence | None) -> None:
        """Record the block that the sequence has begun."""
        size = self._kv.block_size
        index, count = (0, 0)
        if sequence is not None and sequence.row is None and len(sequence.kv.table):
            index, count = divmod(sequence.kv.num_certain, size)
        block = sequence.kv.table.block_ids[index] if sequence is not None and count else None
        if block is not None and self._kv.is_registered(block):
            block = None
        if block != self._begun.get(sequence_id):
            self._close(sequence_id)
        if sequence is not None and block is not None:
            tokens = sequence.token_ids[index * size : index * size + count]
            self._record.begin(block, self._kv.parent_of(sequence, index), tokens, self._kv.scope_of(block))
            self._begun[sequence_id] = block

    def _close(self, sequence_id: int) -> None:
        """The sequence does not write to the block any more that it had begun; others may, once it is free."""
        block = self._begun.pop(sequence_id, None)
        if block is not None and not self._kv.is_registered(block):
            self._record.lose(block)
