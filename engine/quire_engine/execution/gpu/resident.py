"""The state of a device between steps beside weights and pool: tables, a step's input, outcomes, graphs.

Promises: in all ranks of a model the same things lie at the same places. Must not know: sequences, processes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.execution.gpu.device import ALIGNMENT, Device, Packed, PackedInput, aligned
from quire_engine.execution.gpu.forward import Forward, Model, region_at, region_bytes
from quire_engine.execution.gpu.graphs import StepGraphs
from quire_engine.execution.gpu.tables import SlotTables, padded_rows
from quire_kernels.low_rank import Places

WORD = 8  # bytes
GRAPHS = 2  # of the regions: where graphs leave their outcome. The others take turns: 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerLimits:
    """The sizes that memory on the device and on the host is allocated for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    spare_block: int  # of the pool, for the keys and values of padding rows alone
    drafted_rows: int = 0  # of a step with drafts at most; 0: there are none
    graphs: bool = True  # steps may be graphs
    # Of steps with prompts that are graphs too, for kernels whose launches follow from bounds; 0: none is.
    mixed_rows: int = 0


class Resident:
    """Owns it. `regions`: where steps leave their outcomes, one of them for graphs; `first_word`: of a step's ids."""

    def __init__(
        self,
        model: Model,
        kv: Tensor,
        device: Device,
        limits: RunnerLimits,
        *,
        num_buffers: int = 2,
        places: Places | None = None,
    ) -> None:
        """`kv`: the pool, as the kernels lay it out. `places`: of adapters."""
        block_size = limits.block_size
        self.graphs = StepGraphs(
            device,
            max_rows=max(limits.max_num_seqs, limits.drafted_rows),
            max_context=limits.max_model_len,
            mixed_rows=min(limits.mixed_rows, limits.max_num_batched_tokens),
            adapted=places is not None,
        )
        # Beside drafts a prompt may end, and all of its choices with it.
        self.max_rows = max(limits.max_num_seqs + limits.drafted_rows, self.graphs.largest.num_rows)
        self.max_cells = max(4096, 2 * -(-limits.max_model_len // block_size))
        self.spare_slots = range(limits.spare_block * block_size, (limits.spare_block + 1) * block_size)
        each = region_bytes(self.max_rows)
        with device.work(), torch.inference_mode():
            self.tables = SlotTables(
                num_slots=limits.max_num_seqs,
                max_blocks=-(-limits.max_model_len // block_size),
                vocab_size=model.config.vocab_size,
                spare_block=limits.spare_block,
                device=device.torch_device,
            )
            num_bytes = 3 * each + self._input_bytes(limits)
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device.torch_device)
        self.regions = [region_at(buffer, i * each, self.max_rows) for i in range(3)]
        self.first_word = 3 * each // WORD
        self.forward = Forward(model, kv, self.tables, buffer.view(torch.int64), block_size, places)
        self._input = PackedInput(device, buffer[3 * each :], num_buffers=num_buffers)

    def send(self, sections: Mapping[str, array[int]]) -> Packed:
        """Send what a step takes, and issue the changes of tables that are among it."""
        packed = self._input.send(sections)
        self.tables.apply(packed)
        return packed

    def _input_bytes(self, limits: RunnerLimits) -> int:
        """Bytes of the largest step's sections and of at most `max_cells` changes of block tables."""
        mixed = self.graphs.largest_mixed
        rows = padded_rows(max(self.max_rows, mixed.num_sequences if mixed else 0))
        tokens = max(limits.max_num_batched_tokens, rows, mixed.num_rows if mixed else 0)
        # ids, sources, positions, slots, sample and logit rows, scored rows and ids, and places of adapters
        of_tokens = 9 * WORD * tokens
        of_sequences = 6 * WORD * rows
        of_choices = 10 * WORD * rows  # with a slot's parameters
        return aligned(of_tokens + of_sequences + of_choices + 12 * self.max_cells + 24 * ALIGNMENT)
