"""KV blocks that another engine has computed give the tokens and log-probabilities of own ones, to the last bit.

Whatever happens on the way makes a request compute what has not come, with the same answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from model.test_bitwise import engine
from quire_engine.build import BuiltEngine
from quire_engine.contract.config import KVTransferConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.types import EngineStats, GenerationRequest, KVSource, SamplingParams, StepOutput, StopParams
from quire_engine.engine import Engine
from support.checkpoints import VOCAB_SIZE
from support.covering import few
from support.kv_wire import KVWire

PROMPT = tuple(3 + 37 * i % (VOCAB_SIZE - 3) for i in range(330))
SIZE = 16
BLOCKS = len(PROMPT) // SIZE
LONG = 60.0  # seconds that computing is said to take, where a test is not about time


def asked(name: str, *last: int, max_new_tokens: int = 6) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.8, seed=5, num_logprobs=2 if max_new_tokens else None)
    stop = StopParams(max_new_tokens=max_new_tokens)
    return GenerationRequest(request_id=name, prompt_token_ids=(*PROMPT, *last), sampling=sampling, stop=stop)


class Side:
    """One engine, driven by the test."""

    def __init__(self, model: str, digest: str = "the model", **changes: object) -> None:
        transfer = KVTransferConfig(listen="127.0.0.1:0")
        self.built = self.build(model, {"kv_transfer": transfer, **changes})
        assert self.built.peers is not None
        self.engine = Engine(self.built.scheduler, self.built.executor, check_invariants=True)
        self.engine.on_step = self._take
        if digest:
            self.engine.control("name_model", {"digest": digest})
        self.address = self.built.plan.transfer.address
        self.said: dict[str, list[object]] = {}
        self.cached: dict[str, int] = {}

    def build(self, model: str, changes: dict[str, object]) -> BuiltEngine:
        return engine(model, enable_prefix_caching=True, **changes)

    def _take(self, step: StepOutput) -> None:
        for output in step.outputs:
            assert output.error is None, output.error
            self.said.setdefault(output.request_id, []).append((output.token_ids, output.logprobs))
            self.cached.setdefault(output.request_id, output.num_cached_tokens)

    def run(self, *requests: GenerationRequest, until: Callable[[], bool] = lambda: False) -> None:
        for each in requests:
            self.engine.submit(each)
        while self.engine.has_work and not until():
            self.engine.step()

    @property
    def stats(self) -> EngineStats:
        return self.built.scheduler.stats()

    def leased(self) -> int:
        """After a moment in which what has ended is noticed."""
        deadline = time.monotonic() + 300
        while self.stats.leased_blocks and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.stats.leased_blocks


@contextmanager
def sides(
    *models: str, digests: tuple[str, ...] = ("the model", "the model"), **changes: object
) -> Iterator[list[Side]]:
    with ExitStack() as stack:
        made = [Side(model, digest, **changes) for model, digest in zip(models, digests, strict=True)]
        for each in made:
            stack.callback(each.built.close)
        yield made


def source(address: str, *, is_computing: bool = False, own_seconds: float = LONG) -> KVSource:
    return KVSource(address=address, is_computing=is_computing, own_seconds=own_seconds)


@pytest.mark.parametrize("model", few(["qwen3", "bf16", "int8-kv", "experts-int4"], "qwen3", "int8-kv"))
def test_fetched_blocks_have_the_bits_of_computed_ones(model: str) -> None:
    with sides(model, model) as (prefill, decode):
        prefill.run(asked("p", 5, 6, max_new_tokens=0))
        decode.run(replace(asked("d", 5, 6), kv_source=source(prefill.address)))
        assert decode.cached["d"] == BLOCKS * SIZE
        alone = Side(model)
        alone.run(asked("d", 5, 6))
        assert decode.said == alone.said
        alone.built.close()
        assert decode.stats.total_transfers == {"sent": 0, "received": BLOCKS, "missed": 0, "refused": 0}
        assert prefill.stats.total_transfers["sent"] == BLOCKS
        assert prefill.leased() == 0
        # What has come can be lent on.
        assert decode.stats.total_transfer_bytes["received"] == BLOCKS * decode.built.plan.pool.bytes_per_block


def test_blocks_come_while_the_other_engine_computes() -> None:
    with sides("qwen3", "qwen3", max_num_batched_tokens=64, max_num_seqs=4) as (prefill, decode):
        decode.engine.submit(replace(asked("d"), kv_source=source(prefill.address, is_computing=True)))
        decode.engine.step()
        assert decode.stats.total_prefix_hit_tokens == 0
        prefill.engine.submit(asked("p", max_new_tokens=0))
        while prefill.engine.has_work:
            prefill.engine.step()
            decode.engine.step()
        decode.run()
        assert decode.cached["d"] == BLOCKS * SIZE
        assert 0 < decode.stats.total_transfer_wait_seconds < LONG


def test_another_model_or_none_yet_is_a_miss() -> None:
    for digests in (("one", "two"), ("", "one"), ("one", "")):
        with sides("qwen3", "qwen3", digests=digests) as (prefill, decode):
            prefill.run(asked("p", max_new_tokens=0))
            decode.run(replace(asked("d"), kv_source=source(prefill.address)))
            assert decode.cached["d"] == 0
            assert decode.stats.total_transfers["missed"] == BLOCKS


def test_a_flipped_byte_is_a_miss_from_there_on() -> None:
    with sides("qwen3", "qwen3") as (prefill, decode), KVWire(prefill.address) as wire:
        prefill.run(asked("p", max_new_tokens=0))
        wire.flip_at = 10 * decode.built.plan.pool.bytes_per_block
        decode.run(replace(asked("d"), kv_source=source(wire.address)))
        assert 0 < decode.cached["d"] < BLOCKS * SIZE
        assert decode.stats.total_transfers["refused"] == 1
        alone = Side("qwen3")
        alone.run(asked("d"))
        assert decode.said == alone.said
        alone.built.close()


def test_a_lost_wire_is_a_miss_and_nothing_stays_leased() -> None:
    with sides("qwen3", "qwen3") as (prefill, decode), KVWire(prefill.address) as wire:
        decode.engine.submit(replace(asked("d"), kv_source=source(wire.address, is_computing=True)))
        while not prefill.stats.leased_blocks:
            decode.engine.step()
        assert prefill.stats.leased_blocks == BLOCKS
        wire.cut()
        decode.run()
        assert decode.cached["d"] == 0
        assert prefill.leased() == 0


def test_who_computes_nothing_is_not_waited_for_long_and_an_abort_ends_the_lease() -> None:
    with sides("qwen3", "qwen3") as (prefill, decode):
        decode.run(replace(asked("d"), kv_source=source(prefill.address, is_computing=True, own_seconds=0.1)))
        assert decode.cached["d"] == 0
        assert 0.015 < decode.stats.total_transfer_wait_seconds < 20
        decode.engine.submit(replace(asked("e", 9), kv_source=source(prefill.address, is_computing=True)))
        assert decode.engine.has_work
        decode.engine.abort("e")
        assert prefill.leased() == 0


def test_a_block_that_comes_in_wrong_changes_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above can fail."""
    with sides("qwen3", "qwen3") as (prefill, decode):
        prefill.run(asked("p", 5, 6, max_new_tokens=0))
        monkeypatch.setattr(decode.built.peers, "place", lambda *_: None)
        decode.run(replace(asked("d", 5, 6), kv_source=source(prefill.address)))
        alone = Side("qwen3")
        alone.run(asked("d", 5, 6))
        assert decode.said != alone.said
        alone.built.close()


@pytest.mark.parametrize(
    ("model", "changes", "line"),
    [
        ("qwen3", {"enable_prefix_caching": False}, "kv_listen=127.0.0.1:0 is not possible: what it keeps are"),
        ("qwen3", {"kv_transfer": KVTransferConfig(listen="192.0.2.1:1")}, "--kv-listen 192.0.2.1:1 is beyond this"),
        (
            "qwen3",
            {"kv_transfer": KVTransferConfig(listen="127.0.0.1:0", transport="nixl")},
            "kv_transport=nixl encrypts no block on its way: set kv_trust_network too",
        ),
        ("qwen3", {"kv_transfer": KVTransferConfig(listen="127.0.0.1:0", cert="c")}, "belong together: set all three"),
    ],
)
def test_what_cannot_be_is_one_line(model: str, changes: dict[str, object], line: str) -> None:
    given = {"enable_prefix_caching": True, "kv_transfer": KVTransferConfig(listen="127.0.0.1:0"), **changes}
    with pytest.raises(ConfigError, match=line):
        engine(model, **given)
