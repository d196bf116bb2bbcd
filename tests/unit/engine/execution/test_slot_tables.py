"""What a device keeps of sequences: the changes that are sent are enough, and no more than that."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from quire_engine.contract.types import SamplingParams
from quire_engine.execution.gpu.device import PackedInput
from quire_engine.execution.gpu.tables import DRAWS, LIMITS_K, LIMITS_P, SlotTables
from support.simulated_device import SimulatedDevice

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 100


class Held:
    """Tables, and the way to them."""

    def __init__(self, *, num_slots: int = 3, max_blocks: int = 8) -> None:
        self.device = SimulatedDevice()
        self.tables = SlotTables(
            num_slots=num_slots,
            max_blocks=max_blocks,
            vocab_size=VOCAB,
            spare_block=77,
            device=self.device.torch_device,
        )
        self.packed = PackedInput(self.device, torch.zeros(1 << 14, dtype=torch.uint8))

    def step(self, *sequences: tuple[int, tuple[int, ...]], sampling: SamplingParams = GREEDY) -> dict[str, list[int]]:
        """What one step of (sequence id, blocks) sends; the tables then hold it."""
        self.tables.begin()
        slots = {}
        for sequence_id, blocks in sequences:
            slots[sequence_id], _ = self.tables.find(sequence_id, 0, sampling)
            self.tables.place(sequence_id, blocks)
        deltas = self.send()
        for sequence_id, blocks in sequences:
            assert self.tables.blocks[slots[sequence_id], : len(blocks)].tolist() == list(blocks)
        return {name: list(values) for name, values in deltas.items()}

    def send(self) -> dict[str, array[int]]:
        deltas = self.tables.take_deltas()
        with self.device.work(), torch.inference_mode():
            self.tables.apply(self.packed.send(deltas))
        self.device.finish()
        return deltas


def test_only_changes_are_sent():
    held = Held()
    first = held.step((5, (3, 1)))
    slot = first["set_slots"][0]
    assert first["cells"] == [slot * 8, slot * 8 + 1]
    assert held.step((5, (3, 1))) == {}
    assert held.step((5, (3, 1, 9))) == {"cells": [slot * 8 + 2], "cell_blocks": [9]}
    assert held.step((5, (3, 4, 9))) == {"cells": [slot * 8 + 1], "cell_blocks": [4]}
    assert held.step((5, (3,))) == {}
    assert held.step((5, (3, 4))) == {"cells": [slot * 8 + 1], "cell_blocks": [4]}, "it was given back meanwhile"


def test_the_spare_slot_leads_to_the_spare_block():
    held = Held()
    assert set(held.tables.blocks[held.tables.spare].tolist()) == {77}
    rows = held.tables.choice_rows(torch.tensor([3] * 4), torch.tensor([0]), torch.tensor([0]), 0)
    assert (rows.temperature.tolist(), rows.draws) == ([0.0], False)


def test_the_slot_that_was_not_used_for_longest_is_taken():
    held = Held()
    for sequence_id in (1, 2, 3):
        held.step((sequence_id, (sequence_id,)))
    held.step((1, (1,)))
    sent = held.step((4, (9,)), (3, (3,)))
    assert (len(sent["set_slots"]), sent["cell_blocks"]) == (1, [9]), "2 went, 3 is there"
    assert held.step((2, (2, 5)), (1, (1,)))["cell_blocks"] in ([2, 5], [2, 5, 1])


def test_a_step_never_takes_a_slot_from_itself():
    held = Held()
    with pytest.raises(ValueError, match="more sequences than the 3 slots"):
        held.step(*((i, (i,)) for i in range(4)))


def test_more_blocks_than_a_table_has_are_refused():
    with pytest.raises(ValueError, match="9 blocks"):
        Held().step((1, tuple(range(9))))


def test_after_a_failure_everything_is_sent_again():
    held = Held()
    held.step((1, (4, 5)))
    held.tables.forget()
    assert held.step((1, (4, 5)))["cell_blocks"] == [4, 5]


def test_random_changes_arrive():
    source, held = random.Random(3), Held(num_slots=4)
    blocks: dict[int, tuple[int, ...]] = {}
    for _ in range(200):
        chosen = source.sample(range(9), source.randint(1, 4))
        for sequence_id in chosen:
            known = list(blocks.get(sequence_id, ()))
            if known and source.random() < 0.3:
                known[source.randrange(len(known))] = source.randrange(50)
            if source.random() < 0.2:
                known = known[: source.randrange(len(known) + 1)]
            if len(known) < 8:
                known.append(source.randrange(50))
            blocks[sequence_id] = tuple(known)
        held.step(*((sequence_id, blocks[sequence_id]) for sequence_id in chosen))


@pytest.mark.parametrize(
    ("sampling", "flags"),
    [
        (GREEDY, 0),
        (SamplingParams(temperature=1e-6, top_k=3, top_p=0.5), 0),
        (SamplingParams(temperature=0.5), DRAWS),
        (SamplingParams(top_k=3), DRAWS | LIMITS_K),
        (SamplingParams(top_k=VOCAB, top_p=0.9), DRAWS | LIMITS_P),
        (SamplingParams(temperature=0.0, min_tokens=2), 0),
        (SamplingParams(logit_bias=((1, 1.0),), top_k=10**7), DRAWS),
    ],
)
def test_parameters_are_what_was_asked(sampling, flags):
    held = Held()
    held.tables.begin()
    seeded = SamplingParams(**{**{f: getattr(sampling, f) for f in sampling.__slots__}, "seed": -3, "min_p": 0.1})
    slot, found = held.tables.find(6, 4, seeded)
    assert found == flags
    held.send()
    positions = torch.tensor([12, 13])
    rows = held.tables.choice_rows(torch.tensor([slot, slot, 3, 3]), torch.tensor([1, 0]), positions, found)
    assert rows.temperature.tolist() == [pytest.approx(sampling.temperature if flags & DRAWS else 0.0)] * 2
    assert rows.top_k.tolist() == [min(sampling.top_k, VOCAB)] * 2
    assert rows.top_p.tolist() == [sampling.top_p] * 2
    assert rows.min_p.tolist() == [torch.tensor(0.1).item()] * 2
    assert (rows.seed.tolist(), rows.choice.tolist(), rows.position.tolist()) == ([-3, -3], [4, 4], [12, 13])
    assert (rows.draws, rows.limits_k, rows.limits_p) == tuple(bool(flags & f) for f in (DRAWS, LIMITS_K, LIMITS_P))
