"""Injects faults for tests, at the point where a batch or a part of it is about to be computed.

Owns the count of steps. Must not know: queues.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from quire_engine.contract.batch import Batch, ScheduledSequence
from quire_engine.contract.config import STEP_POINTS, Fault

EXIT_CODE = 86
_NO_NUMBER = 0xFF  # as every byte it is NaN in each floating type, and the scale of an int8 pool with it


class FaultPoints:
    """Counts a runner's steps and lets faults happen in them."""

    def __init__(self, faults: Iterable[Fault], pool: Tensor, block_size: int) -> None:
        """`pool`: all KV blocks, the block its first dimension."""
        self._faults = [fault for fault in faults if fault.point in STEP_POINTS]
        self._pool, self._block_size = pool, block_size
        self._steps = 0
        self._last_step = -1
        self._happened: set[Fault] = set()  # of those that come once

    def before(self, batch: Batch) -> None:
        """Let happen what is due before a batch, or a part of one, is computed. A step in parts is one step."""
        self._steps += batch.step_id != self._last_step
        self._last_step = batch.step_id
        for fault in self._faults:
            if fault not in self._happened and self._steps >= fault.nth:
                concerned = [item for item in batch.items if fault.seed in (None, item.sampling.seed)]
                self._happen(fault, concerned)

    def _happen(self, fault: Fault, items: list[ScheduledSequence]) -> None:
        if fault.point == "step.nan":
            items = [item for item in items if item.start > 0]  # what it is about to read can be spoiled
        if not items:
            return
        if fault.nth:
            self._happened.add(fault)
        match fault.point:
            case "step.raise":
                raise RuntimeError("injected: step.raise")
            case "alloc.fail":
                raise MemoryError("injected: alloc.fail")
            case "oom":
                raise torch.OutOfMemoryError("injected: oom")
            case "engine.exit":
                os._exit(EXIT_CODE)
            case "step.hang":
                while True:
                    time.sleep(1.0)
            case "step.nan":
                for item in items:
                    block = item.block_ids[(item.start - 1) // self._block_size]
                    self._pool[block].view(torch.uint8).fill_(_NO_NUMBER)
