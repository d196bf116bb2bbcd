"""Steps made as large as the graph that serves them.

Promises: what is added changes no result and writes to spare slots alone. Must not know: graphs, copies, the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_engine.execution.gpu.step_arrays import StepArrays, pad_slots
from quire_engine.execution.gpu.tables import SlotTables


def pad_decodes(
    step: StepArrays, num_rows: int, tables: SlotTables, spare_slots: Sequence[int], first_word: int
) -> None:
    """Make a step of decodes one of `num_rows`: the rows added are token 0 at position 0, written to `spare_slots`."""
    have, missing = step.num_rows, num_rows - step.num_rows
    _pad_rows(step, num_rows, spare_slots, first_word)
    step.table_slots.extend([tables.spare] * missing)
    step.query_starts.extend(range(have + 1, num_rows + 1))
    step.context_lens.extend([1] * missing)
    pad_slots(step, num_rows, tables.spare)
    step.choice_rows.extend(range(have, num_rows))
    step.sample_rows.extend(range(have, num_rows))
    step.choice_positions.extend([0] * missing)


def pad_mixed(  # noqa: PLR0917 - sizes, and what is added
    step: StepArrays,
    num_rows: int,
    num_sequences: int,
    tables: SlotTables,
    spare_slots: Sequence[int],
    first_word: int,
) -> None:
    """Make a step whose sequences are asked for their last rows at most one of `num_rows` and `num_sequences`.

    The rows added are no sequence's, the sequences added have no rows; of each sequence there is one sample row, those
    that were asked for first. What is chosen stays as it is.
    """
    missing = num_sequences - len(step.table_slots)
    end, sampled = step.num_rows, len(step.sample_rows)
    _pad_rows(step, num_rows, spare_slots, first_word)
    step.table_slots.extend([tables.spare] * missing)
    step.query_starts.extend([end] * missing)
    step.context_lens.extend([1] * missing)
    step.sampled_starts.extend([sampled] * missing)
    step.sample_rows.extend([0] * (num_sequences - sampled))


def _pad_rows(step: StepArrays, num_rows: int, spare_slots: Sequence[int], first_word: int) -> None:
    """Token 0 at position 0."""
    have, missing = step.num_rows, num_rows - step.num_rows
    step.num_padding_rows = missing
    step.ids.extend([0] * missing)
    step.source.extend(range(first_word + have, first_word + num_rows))
    step.positions.extend([0] * missing)
    step.kv_slots.extend(spare_slots[i % len(spare_slots)] for i in range(missing))
