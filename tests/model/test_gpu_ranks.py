"""Ranks on devices, each with a runner's device of its own: rank 0's results are those of one rank, bit for bit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire_engine.contract.batch import StepResult
from quire_engine.contract.kv_groups import one_group
from quire_engine.execution.executor import Executor
from quire_engine.execution.gpu.rank_commands import DeviceFollower, DeviceLeader, decode, encode
from quire_engine.execution.gpu.runner import GpuRunner
from quire_engine.execution.kv.kv_storage import KVStorage
from quire_engine.execution.models.config import load_model_config
from quire_engine.execution.models.decoder import Decoder
from quire_engine.execution.models.weights import load_decoder
from quire_engine.execution.runner import Runner
from quire_engine.ranks import Rank, heads_of_rank
from quire_kernels.divided import divided
from quire_kernels.ranks import RankLost
from support.both_runners import LIMITS, NAN, NUM_BLOCKS, check, models
from support.checkpoints import shared_checkpoint
from support.device_ranks import Launched, OneOfThem, in_turns
from support.model_steps import CPU, random_ids
from support.simulated_device import SimulatedDevice
from support.simulated_kernels import SIMULATED
from support.step_stories import Story

Tell = Callable[[Story], None]
DIVIDED = replace(SIMULATED, part_of=lambda w, _: w)


def told(story: Story) -> None:
    """Prompts in chunks, decodes, every way to choose, rules, log-probabilities, copies of blocks, preemption."""
    story.add(0, random_ids(5, 0), 7, logit_bias=((7, 30.0), (9, -5.0)), num_logprobs=2)
    story.add(1, random_ids(40, 1), 9, temperature=0.8, seed=-5)
    story.add(2, random_ids(4, 2), 8, temperature=1.3, top_k=7, seed=8, num_logprobs=3, forks=(12, 13))
    story.step()
    story.add(3, random_ids(17, 3), 7, repetition_penalty=1.4, num_prompt_logprobs=2)
    story.add(4, [5, NAN, 6], 4)
    story.step()
    story.preempt(1)
    story.pool(5, random_ids(30, 5), "mean")
    story.add(6, random_ids(9, 6), 5, temperature=1.0, top_p=0.7, min_p=0.05, seed=8)
    story.run()


def story_of(tell: Tell) -> Story:
    """What one rank that is waited for gives."""
    host, _ = models()
    execute = Executor(Runner(host.decoder, host.kv.tensor, 16, CPU), host.kv).execute
    story = Story(execute, num_blocks=NUM_BLOCKS, chunk=11)
    tell(story)
    return story


class OnDevice:
    """One rank's model, pool and device."""

    def __init__(self, collective: OneOfThem) -> None:
        self.exchange = Launched(collective)
        path, rank = shared_checkpoint("qwen3", tie_word_embeddings=False), Rank(collective.rank, collective.size)
        config, kernels = load_model_config(path), divided(DIVIDED, self.exchange)
        given = {"kernels": kernels, "dtype": torch.float32, "device": CPU, "max_model_len": LIMITS.max_model_len}
        self.decoder: Decoder = load_decoder(path, config, **given, rank=rank)
        self.decoder._weights.embedding[NAN] = torch.nan
        layout = one_group(heads_of_rank(config.kv_heads, rank.size))
        self.kv = KVStorage(kernels, config, NUM_BLOCKS + 1, 16, torch.float32, CPU, layout=layout, on_copy=self.copied)
        self.device = SimulatedDevice()
        self.leader: DeviceLeader | None = None

    def copied(self, pairs: Any) -> None:
        if self.leader is not None:
            self.leader.copied(pairs)


def run(story: Story, size: int, *, mixed_rows: int, wrap: Callable[[Any], Any] = lambda decoder: decoder) -> list[Any]:
    """The story's batches by ranks of which all but the first follow; of each the replays of graphs, and the pool."""
    limits = replace(LIMITS, mixed_rows=mixed_rows)
    messages = [deque[bytes]() for _ in range(size)]

    def each(collective: OneOfThem) -> Any:
        own = OnDevice(collective)
        turns = collective._turns
        if collective.rank:

            def receive() -> bytes:
                own.device.finish()  # a device goes on by itself
                turns.until(lambda: bool(messages[collective.rank]))
                return messages[collective.rank].popleft()

            follower = DeviceFollower(own.decoder, own.kv, own.device, limits, own.exchange)
            follower.follow(receive)
            return own.device.replays, own.kv.tensor

        def tell(message: bytes) -> None:
            for queue in messages:
                queue.append(message)
            turns.condition.notify_all()

        own.leader = DeviceLeader(own.exchange, tell)
        runner = GpuRunner(wrap(own.decoder), own.kv.tensor, own.device, limits, others=own.leader)
        executor = Executor(runner, own.kv)
        executor.capture_largest()
        check(executor, story.steps)
        own.leader.end()
        return own.device.replays, own.kv.tensor

    return in_turns(size, each)


# `make rank-test` takes all.
@pytest.mark.parametrize(
    ("size", "mixed_rows"),
    [(2, 512), *(pytest.param(size, rows, marks=pytest.mark.matrix) for size, rows in ((4, 512), (2, 0), (1, 512)))],
)
def test_every_step_has_the_bits_of_one_rank(size, mixed_rows):
    """Of graphs too, one step ahead of the tokens; four ranks have the two heads of keys twice."""
    (replays, kv), *others = run(story_of(told), size, mixed_rows=mixed_rows)
    assert replays > 4
    assert [each for each, _ in others] == [replays] * (size - 1)
    assert all(pool.shape == kv.shape for _, pool in others)


def test_a_rank_that_leaves_a_step_ends_all(caplog):
    """Others wait for what it would have computed: it is no request's fault, and nothing is computed again."""

    class Fails:
        def __init__(self, decoder: Decoder) -> None:
            self._decoder = decoder

        def __getattr__(self, name: str) -> Any:
            return getattr(self._decoder, name)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            raise ValueError("planted")

    with pytest.raises(RankLost, match="rank 0 has left what the others compute: planted"):
        run(story_of(told), 2, mixed_rows=0, wrap=Fails)


@pytest.mark.matrix  # in `make rank-test`
@pytest.mark.parametrize("bad", [pytest.param(10**4, marks=pytest.mark.matrix), -7])
def test_who_fails_before_the_device_is_told_fails_alone(bad):
    def tell(story: Story) -> None:
        story.add(0, random_ids(5, 0), 8)
        story.step()
        story.add(2, [3, bad, 5], 4)
        story.add(3, random_ids(4, 3), 5)
        story.run()

    story = story_of(tell)
    results: list[StepResult] = [step.result for step in story.steps]
    assert set(results[1].errors) == {2}
    run(story, 2, mixed_rows=512)


def test_messages_have_the_numbers_and_arrays_that_were_told():
    from array import array

    sections = {"ids": array("q", [1, -(2**63), 5]), "tables": array("i", []), "lens": array("i", [7, 9])}
    assert decode(encode("hidden", [[1, 2], [3]], sections)) == ("hidden", [[1, 2], [3]], sections)
    assert decode(encode("end")) == ("end", [], {})
