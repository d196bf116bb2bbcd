"""Swaps of the GPU's runner on the simulated device: in a lane beside the steps, as if each had been done in its place.

Each run draws swaps of many sizes between steps that write to the same blocks, with the lane as late as it may be and
as early as it can. What is compared is every byte of the pool's scheduled blocks, with the runner that is waited for.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from quire_engine.execution.gpu import swaps
from quire_engine.execution.gpu.swaps import StreamedKV, staging_blocks
from quire_engine.execution.kv.kv_storage import HostKV
from quire_engine.execution.kv.pool_rows import PoolRows, block_rows
from support.simulated_device import SimulatedDevice

NUM_BLOCKS, NUM_HOST, NUM_BYTES = 14, 9, 32


class Pool:
    """The part of a KV storage that is needed, with a copy that a GPU does without a wait."""

    def __init__(self, num_blocks: int) -> None:
        self.tensor = torch.zeros(num_blocks, 2, 16, dtype=torch.uint8)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        found = [self.tensor[source].clone() for source, _ in pairs]
        for value, (_, target) in zip(found, pairs, strict=True):
            self.tensor[target].copy_(value)


def drawn_swaps(dice: random.Random, known: set[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Blocks out, and in what is on the host, then or already; no target twice."""
    out = list(
        zip(
            dice.choices(range(NUM_BLOCKS), k=(count := dice.choice([0, 0, 1, 2, 5, 9]))),
            dice.sample(range(NUM_HOST), k=count),
            strict=True,
        )
    )
    there = sorted(known | {target for _, target in out})
    targets = dice.sample(range(NUM_BLOCKS), k=dice.choice([0, 0, 1, 2, 5, 9])) if there else []
    return out, [(dice.choice(there), target) for target in targets]


def play(seed: int, monkeypatch: pytest.MonkeyPatch, plant: Callable[[StreamedKV], None] = lambda _: None) -> None:
    """`plant` may put a fault into the runner's swaps."""
    dice = random.Random(seed)
    monkeypatch.setattr(swaps, "STAGING_BYTES", dice.choice([1, 2, 3]) * NUM_BYTES)
    monkeypatch.setattr(swaps, "_SLAB_BYTES", dice.choice([1, 4, 100]) * NUM_BYTES)
    right = torch.zeros(NUM_BLOCKS, 2, 16, dtype=torch.uint8)
    host = HostKV(PoolRows(right), NUM_HOST)
    device, kv = SimulatedDevice(), Pool(NUM_BLOCKS + 1 + staging_blocks(NUM_BYTES, NUM_HOST))
    device.eager_lanes = dice.random() < 0.5
    streamed = StreamedKV(kv, device, first_staging=NUM_BLOCKS + 1, num_blocks=NUM_HOST)
    plant(streamed)
    known: set[int] = set()
    for step in range(12):
        out, into = drawn_swaps(dice, known)
        known |= {target for _, target in out}
        host.swap(out, into)
        written = dice.sample(range(NUM_BLOCKS), k=5)
        with device.work(), torch.inference_mode():
            streamed.swap(out, into)
            for block in written:
                kv.tensor[block].fill_(step + 16 * block % 256)
        for block in written:
            right[block].fill_(step + 16 * block % 256)
        if dice.random() < 0.3:  # the host waits for a step now and then, by its event
            with device.work():
                device.record().wait()
    assert device.waits.count("event") == len(device.waits)
    device.finish()
    assert torch.equal(block_rows(kv.tensor)[:NUM_BLOCKS], block_rows(right))


def test_the_pool_is_as_if_swaps_were_done_in_their_places(monkeypatch):
    for seed in range(40):
        play(seed, monkeypatch)


def no_event(streamed: StreamedKV, which: str) -> None:
    """One of the two kinds of events is not followed."""
    target = streamed._lane if which == "lane" else streamed._device
    target.follow = lambda _: None


class Careless:
    """A stage that is thought to be empty."""

    def __init__(self, first: int) -> None:
        self.first = first

    emptied = property(lambda self: None, lambda self, value: None)


FAULTS: dict[str, Callable[[StreamedKV], None]] = {
    "the lane copies out before the work has filled the stage": lambda s: no_event(s, "lane"),
    "the work takes from a stage before the lane has filled it": lambda s: no_event(s, "device"),
    "a stage is filled again before it is on the host": lambda s: setattr(
        s, "_leaving", [Careless(stage.first) for stage in s._leaving]
    ),
    "a stage is filled again before it is in the pool": lambda s: setattr(
        s, "_coming", [Careless(stage.first) for stage in s._coming]
    ),
    "blocks come in before others have gone out": lambda s: setattr(s, "swap", reversed_swap(s)),
}


def reversed_swap(streamed: StreamedKV) -> Callable[..., None]:
    def swap(out: list[tuple[int, int]], into: list[tuple[int, int]]) -> None:
        StreamedKV.swap(streamed, [], into)
        StreamedKV.swap(streamed, out, [])

    return swap


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    def many() -> None:
        for seed in range(60):
            play(seed, monkeypatch, FAULTS[fault])

    with pytest.raises(AssertionError):
        many()


class Files:
    """What the runner tells its files, in order."""

    def __init__(self) -> None:
        self.told: list[tuple] = []

    def replace(self, blocks, keys) -> None:
        self.told.append(("replace", blocks, keys))

    def write(self, blocks, keys, wait) -> None:
        self.told.append(("write", blocks, keys))
        self.wait = wait


@pytest.mark.parametrize("eager", [True, False])
def test_files_are_told_before_a_block_is_replaced_and_wait_for_its_content(eager):
    device, kv = SimulatedDevice(), Pool(NUM_BLOCKS + 1 + staging_blocks(NUM_BYTES, NUM_HOST))
    device.eager_lanes = eager
    streamed = StreamedKV(kv, device, first_staging=NUM_BLOCKS + 1, num_blocks=NUM_HOST)
    files = streamed._files = Files()
    with device.work(), torch.inference_mode():
        kv.tensor[3].fill_(7)
        streamed.swap([], [(1, 2)])
        streamed.swap([(3, 5)], [], [b"key"])
        kv.tensor[3].fill_(9)
    assert files.told == [("replace", [5], [b"key"]), ("write", [5], [b"key"])]
    files.wait()
    assert streamed._host_row(5).tolist() == [7] * NUM_BYTES
