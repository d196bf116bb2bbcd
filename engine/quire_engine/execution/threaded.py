"""A runner in a thread of its own, so that the next step is planned and outputs are sent while one is computed.

Promises: steps are computed in the order of their launches, with the same tokens as without the thread.
Must not know: scheduling, the model, what a step costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from quire_engine.batch import PENDING, Batch, ScheduledSequence, StepResult


class Computing(Protocol):
    """The part of `runner.Runner` that is called in the thread."""

    def execute(self, batch: Batch) -> StepResult: ...
    def forget_host_blocks(self, blocks: Sequence[int]) -> None: ...


class ThreadedRunner:
    """An executor with up to two steps in flight: one that is computed, one that waits for its tokens.

    The kernels give up the interpreter's lock while they run, but both threads need it between them: on two cores that
    cost more than it gained (benchmarks/RESULTS.md), so it serves only where it is asked for.
    """

    max_in_flight = 2

    def __init__(self, runner: Computing) -> None:
        self._runner = runner
        self._launched: SimpleQueue[Batch] = SimpleQueue()
        self._results: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        # A daemon: when the engine's process ends it ends in the middle of whatever it computes.
        Thread(target=self._compute, name="steps", daemon=True).start()

    def launch(self, batch: Batch) -> None:
        self._launched.put(batch)

    def collect(self) -> StepResult:
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def forget_host_blocks(self, blocks: Sequence[int]) -> None:
        self._runner.forget_host_blocks(blocks)

    def _compute(self) -> None:
        last = StepResult()
        while True:
            batch = _with_tokens(self._launched.get(), last)
            try:
                moves = batch.items or batch.swap_out or batch.swap_in  # swaps are of others than the items
                last = self._runner.execute(batch) if moves else StepResult()
            except BaseException as error:  # the caller's to handle: it may end the process
                self._results.put(error)
                return
            self._results.put(last)


def _with_tokens(batch: Batch, last: StepResult) -> Batch:
    """The batch with the tokens that were pending when it was planned; items without one are dropped.

    Those are of sequences that failed in the last step: what becomes of them here is not looked at.
    """
    items = [_with_token(item, last) if item.token_ids[-1] == PENDING else item for item in batch.items]
    known = tuple(item for item in items if item is not None)
    return replace(batch, items=known, num_tokens=sum(item.num_tokens for item in known))


def _with_token(item: ScheduledSequence, last: StepResult) -> ScheduledSequence | None:
    samples = last.samples.get(item.sequence_id)
    if samples is None or samples[-1].error is not None:
        return None
    return replace(item, token_ids=(samples[-1].token_id,))
