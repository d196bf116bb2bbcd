"""What follows when a batch raises: its items are computed one by one, and who raises again fails alone.

Promises: batch-mates of the culprit get the tokens they would have got anyway; running out of a device's memory is
nobody's fault. Must not know: how a batch is computed, schedules.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from quire_engine.batch import Batch, ScheduledSequence, StepResult

_log = logging.getLogger(__name__)


def compute_alone(
    batch: Batch,
    error: Exception,
    compute: Callable[[Batch, int], StepResult],
    release: Callable[[], None],
) -> StepResult:
    """The batch's result although computing it whole raised `error`. Raises what no single item can be blamed for.

    `compute(one, i)` computes a batch of the i-th item alone. The items write the same keys and values to the same
    slots again, so repeating the healthy ones changes nothing. `release` gives back what memory the device can spare.
    """
    if is_fatal(error):
        raise error
    if len(batch.items) == 1 and not is_out_of_memory(error):
        return _failed(batch, batch.items[0], error)
    if is_out_of_memory(error):
        _log.warning("step %d does not fit the memory of the device: its items run one by one", batch.step_id)
    error.__traceback__ = None  # its frames keep the failed step's tensors alive
    release()
    whole = StepResult()
    for index, item in enumerate(batch.items):
        one = replace(batch, items=(item,), num_tokens=item.num_tokens, num_decodes=int(item.is_decode), copies=())
        try:
            result = compute(one, index)
        except Exception as again:
            if is_fatal(again):
                raise
            if is_out_of_memory(again):
                _log.warning("step %d: not even sequence %d alone fits", batch.step_id, item.sequence_id)
                whole.starved.add(item.sequence_id)
                continue
            result = _failed(batch, item, again)
        whole.samples.update(result.samples)
        whole.prompt_logprobs.update(result.prompt_logprobs)
        whole.pooled.update(result.pooled)
        whole.errors.update(result.errors)
    return whole


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device's memory was too small, which the process survives."""
    return isinstance(error, torch.OutOfMemoryError)


def is_fatal(error: Exception) -> bool:
    """Whether the process cannot go on: after a CUDA error every later call fails too, even other sequences'."""
    if is_out_of_memory(error):
        return False
    # torch before 2.8 raises a plain RuntimeError with this text.
    return isinstance(error, (MemoryError, *_DEVICE_ERRORS)) or str(error).startswith("CUDA error")


_DEVICE_ERRORS: tuple[type[Exception], ...] = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()


def _failed(batch: Batch, item: ScheduledSequence, error: Exception) -> StepResult:
    _log.error("step %d: sequence %d failed", batch.step_id, item.sequence_id, exc_info=error)
    # The exception's own text may hold addresses or paths: the client gets its kind only.
    text = f"the model failed on this request ({type(error).__name__})"
    ids = [item.sequence_id, *(fork.sequence_id for fork in item.forks)]
    return StepResult(errors=dict.fromkeys(ids, text))
