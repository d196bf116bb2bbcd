"""Recovery from a batch that raises: it is computed in halves until the item that raises alone is found.

Promises: the other items get the tokens that they would have got; running out of memory, the device's or the host's,
is blamed on no request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch

from quire_engine.contract.batch import Batch, ScheduledSequence, StepResult
from quire_engine.contract.types import MODEL_FAILED
from quire_kernels.ranks import RankLost

_log = logging.getLogger(__name__)


def recover(
    batch: Batch,
    error: Exception,
    compute: Callable[[Batch, int], StepResult],
    release: Callable[[], None],
) -> StepResult:
    """The result of a batch that raised `error` when computed whole. Raises what no single item can be blamed for.

    `compute(part, i)` computes a batch of the items from the i-th on. The items write the same keys and values to the
    same slots again, so neither what a failed attempt has written nor the repetition of healthy ones changes anything.
    A culprit among n items costs about 2 log2(n) smaller steps, which are one whole step and a little more of work.
    `release` gives back what memory the device can spare.
    """
    if is_fatal(error):
        raise error
    num_items = len(batch.items)
    if num_items == 1 and not is_out_of_memory(error):
        _tell(batch, 0, error)
        return _failed(batch, {0: error})
    if is_out_of_memory(error):
        _log.warning("step %d does not fit the memory: it is computed in parts", batch.step_id)
    error.__traceback__ = None  # its frames keep the failed step's tensors alive
    release()
    whole = StepResult()
    failed: dict[int, Exception] = {}  # by place in the batch
    todo = [(0, num_items)] if num_items == 1 else _halves(0, num_items)
    while todo:
        first, last = todo.pop()
        result, failure = _attempt(_part(batch, first, last), first, compute)
        if failure is None:
            _add(whole, result)
            continue
        if last - first > 1:
            todo += _halves(first, last)
        elif is_out_of_memory(failure):
            _log.warning("step %d: not even sequence %d alone fits", batch.step_id, batch.items[first].sequence_id)
            whole.starved.add(batch.items[first].sequence_id)
        else:
            _tell(batch, first, failure)
            failed[first] = failure
        failure.__traceback__ = None
    _add(whole, _failed(batch, failed))
    return whole


def is_out_of_memory(error: Exception) -> bool:
    """Whether there was too little memory, which the process survives; torch has no type for the host's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)


def is_fatal(error: Exception) -> bool:
    """Whether the process cannot go on: after a CUDA error every later call fails too, even other sequences', and so
    it is without another rank.
    """
    if is_out_of_memory(error):
        return False
    # torch before 2.8 raises a plain RuntimeError with this text.
    return isinstance(error, _DEVICE_ERRORS) or str(error).startswith("CUDA error")


_DEVICE_ERRORS: tuple[type[Exception], ...] = (
    (RankLost, torch.AcceleratorError) if hasattr(torch, "AcceleratorError") else (RankLost,)
)


def _attempt(
    part: Batch, first: int, compute: Callable[[Batch, int], StepResult]
) -> tuple[StepResult, Exception | None]:
    """The result of a part, or what it raised."""
    try:
        return compute(part, first), None
    except Exception as error:
        if is_fatal(error):
            raise
        return StepResult(), error


def _halves(first: int, last: int) -> list[tuple[int, int]]:
    """The second one first: the caller takes from the end."""
    middle = (first + last) // 2
    return [(middle, last), (first, middle)]


def _part(batch: Batch, first: int, last: int) -> Batch:
    """Some of the items; the copies before the step were made."""
    items = batch.items[first:last]
    return replace(
        batch.whole(),
        items=items,
        num_tokens=sum(item.num_tokens for item in items),
        num_decodes=sum(item.is_decode for item in items),
        copies=(),
    )


def _add(whole: StepResult, part: StepResult) -> None:
    whole.samples.update(part.samples)
    whole.prompt_logprobs.update(part.prompt_logprobs)
    whole.pooled.update(part.pooled)
    whole.errors.update(part.errors)
    whole.non_finite.update(part.non_finite)


def _tell(batch: Batch, at: int, error: Exception) -> None:
    _log.error("step %d: sequence %d failed", batch.step_id, batch.items[at].sequence_id, exc_info=error)


def _failed(batch: Batch, failures: dict[int, Exception]) -> StepResult:
    """Errors of the failed items. Where all of several items fail, none of them is named as the cause."""
    begin = "the model failed" if len(failures) == len(batch.items) > 1 else MODEL_FAILED
    result = StepResult()
    for at, error in failures.items():
        item = batch.items[at]
        # The exception's own text may hold addresses or paths: the client gets its kind only.
        result.errors.update(dict.fromkeys(_sequence_ids(item), f"{begin} ({type(error).__name__})"))
    return result


def _sequence_ids(item: ScheduledSequence) -> list[int]:
    return [item.sequence_id, *(fork.sequence_id for fork in item.forks)]
