"""Our scheduler step by step, as plain values: for tests and lessons that hold its plans beside those of others.

Promises: the scheduler of the server with its defaults, without a prefix cache; every step takes a second, so that it
counts steps where a server counts time. Must not know: models.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_engine.contract.batch import Batch, SampledToken, StepResult
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.scheduling.scheduler import Scheduler

_LEAST_CLAIM = 16  # tokens of the oldest request in each step, where the others leave as many


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One step: (request, tokens, blocks of its table) of each slice, and the requests that lost their blocks."""

    slices: tuple[tuple[str, int, tuple[int, ...]], ...]
    preempted: tuple[str, ...]


class Stepwise:
    """A scheduler whose steps are taken one by one; a step's tokens are in when anything else is asked."""

    def __init__(self, *, num_blocks: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        """Raises ConfigError for limits that contradict each other."""
        limits = SchedulerLimits(
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_chunk=max_num_batched_tokens,
            min_chunk=min(_LEAST_CLAIM, max_num_batched_tokens - max_num_seqs),
            enable_prefix_caching=False,
            itl_target=0.0,
            step_log=0,
        )
        config = SchedulerConfig(num_blocks=num_blocks, max_model_len=1 << 20, limits=limits)
        self._scheduler = Scheduler(config, columns_from=None)
        self._batch: Batch | None = None
        self._step = self._number = 0

    def add(self, request_id: str, num_prompt_tokens: int, max_new_tokens: int) -> None:
        """Raises InfeasibleRequest if the pool is too small for it."""
        self._take_in()
        self._number += 1
        request = GenerationRequest(
            request_id=request_id,
            prompt_token_ids=(self._number,) * num_prompt_tokens,
            sampling=SamplingParams(temperature=0.0),
            stop=StopParams(max_new_tokens=max_new_tokens),
        )
        self._scheduler.add(request, float(self._step))

    def plan(self) -> Planned:
        """The next step."""
        self._take_in()
        self._step += 1
        live = self._scheduler.roster.live
        before = {name: group.num_preemptions for name, group in live.items()}
        batch = self._batch = self._scheduler.schedule(float(self._step))
        preempted = [name for name, group in live.items() if group.num_preemptions > before[name]]
        sequences = self._scheduler.roster.sequences
        items = () if batch is None else batch.items
        slices = [
            (sequences[item.sequence_id].group.request.request_id, item.num_tokens, item.block_ids) for item in items
        ]
        return Planned(slices=tuple(slices), preempted=tuple(preempted))

    @property
    def num_free(self) -> int:
        """Blocks that no request holds."""
        self._take_in()
        stats = self._scheduler.stats()
        return stats.blocks_total - stats.blocks_used

    def _take_in(self) -> None:
        """The last step's tokens: any will do, since no plan depends on them."""
        batch, self._batch = self._batch, None
        if batch is not None:
            samples: dict[int, tuple[SampledToken, ...]] = {
                item.sequence_id: (SampledToken(token_id=0),) for item in batch.items if item.wants_sample
            }
            self._scheduler.apply(batch, StepResult(samples=samples), float(self._step + 1))
