"""A step's record with its places on the device, as the sections that one copy sends.

Promises: nothing of the device is touched; lengths and blocks are checked before anything is sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_engine.execution.gpu.tables import ADAPTED, SlotTables, padded_rows
from quire_engine.execution.step_tensors import StepTensors


@dataclass(slots=True)
class StepArrays:
    """A step, and where the device finds what it takes. Padding makes the step's own arrays longer."""

    step: StepTensors = field(default_factory=StepTensors)
    source: array[int] = field(default_factory=lambda: array("q"))  # [T], the word of the device that holds the id
    table_slots: array[int] = field(default_factory=lambda: array("q"))  # [B]
    choice_slots: array[int] = field(default_factory=lambda: array("q"))  # [R], and spare ones
    choice_positions: array[int] = field(default_factory=lambda: array("q"))  # [R], of the token to choose
    row_places: array[int] = field(default_factory=lambda: array("i"))  # [T] with adapters: each row's place, or -1
    flags: int = 0  # of all choices, and whether there are adapters
    num_padding_rows: int = 0  # of the rows, at their end: so that a step has one of few sizes

    @property
    def only_decodes(self) -> bool:
        """Whether every sequence has one row, and one token is chosen from each; nothing is scored or pooled."""
        step = self.step
        return step.samples_at_most_once and step.num_rows == len(self.table_slots) == len(step.choices) == len(
            step.sample_rows
        )

    def sections(self) -> dict[str, array[int]]:
        """All that is sent. First the sections whose lengths follow from T, B, S and R, so that they stay where they
        are, R's last of them: where the others lie does not follow from it.
        """
        step = self.step
        return {
            "ids": step.ids,
            "source": self.source,
            "positions": step.positions,
            "kv_slots": step.kv_slots,
            "table_slots": self.table_slots,
            "query_starts": step.query_starts,
            "context_lens": step.context_lens,
            "sample_rows": step.sample_rows,
            **({"sampled_starts": step.sampled_starts} if len(step.sample_rows) < step.num_rows else {}),
            **({"row_places": self.row_places} if self.flags & ADAPTED else {}),
            "choice_slots": self.choice_slots,
            "choice_positions": self.choice_positions,
            "choice_rows": step.choice_rows,
            **step.asked(),
        }


def build_step_arrays(
    step: StepTensors, tables: SlotTables, max_model_len: int, sampled: Mapping[int, int], first_word: int
) -> StepArrays:
    """The places of a step whose rows with drafts are apart; `tables` collects what has changed.

    `sampled[sequence_id]` is the word of the device that holds the id sampled by the step before, `first_word` the
    word where this step's first id will lie. Raises ValueError for what cannot be computed.
    """
    arrays = StepArrays(step, array("q", range(first_word, first_word + step.num_rows)))
    for row, sequence_id in step.pending.items():
        if sequence_id not in sampled:
            raise ValueError(f"the step before samples no token of sequence {sequence_id}")
        arrays.source[row] = sampled[sequence_id]
    tables.begin()
    if step.decodes is not None:
        longest = max(step.context_lens[: step.num_decodes])
        if longest > max_model_len:
            raise ValueError(f"a sequence of {longest} tokens is longer than {max_model_len}")
        own, arrays.flags = tables.find_rows(step.decodes)
        arrays.table_slots.extend(own)
        arrays.choice_slots.extend(own)
    for item in step.items:
        if item.end > max_model_len:
            raise ValueError(f"a sequence of {item.end} tokens is longer than {max_model_len}")
        slot, flags = tables.find(item.sequence_id, item.choice, item.sampling)
        tables.place(item.sequence_id, item.block_ids)
        slots = [slot] * (1 + item.num_drafts)
        arrays.table_slots.extend(slots)
        if not item.wants_sample:
            continue
        arrays.choice_slots.extend(slots)
        arrays.flags |= flags
        for fork in item.forks:
            slot, flags = tables.find(fork.sequence_id, fork.choice, item.sampling)
            arrays.choice_slots.append(slot)
            arrays.flags |= flags
    arrays.choice_positions.extend(row.position for row in step.choices)
    pad_slots(arrays, len(step.choices), tables.spare)
    return arrays


def pad_slots(arrays: StepArrays, num_rows: int, spare: int) -> None:
    """Pad the slots of choices, so that `padded_rows` of them follow wherever a part of the rows begins."""
    arrays.choice_slots.extend([spare] * (padded_rows(num_rows) + 4 - len(arrays.choice_slots)))
