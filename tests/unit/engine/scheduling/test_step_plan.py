"""A plan's sums, and what a preemption takes back."""

from __future__ import annotations

import dataclasses

from quire_engine.contract.types import SamplingParams
from quire_engine.scheduling.blocks import PageTable, SequenceKV
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.step_plan import StepPlan
from support.fake_executor import request


def group(first_id: int, choices: int, **sampling: float) -> Group:
    wanted = dataclasses.replace(request(str(first_id), 8, 4, n=choices), sampling=SamplingParams(**sampling))
    one = Group(request=wanted, arrival=first_id, added_step=0)
    for choice in range(choices):
        one.add_choice(
            Sequence(
                sequence_id=first_id + choice,
                choice=choice,
                group=one,
                own_token_ids=list(range(8)),
                num_prompt_tokens=8,
                kv=SequenceKV(tables=(PageTable(4),)),
            )
        )
    one.enter(1.0)
    one.share_prompt()
    return one


def test_a_slice_grows_in_its_place() -> None:
    plan, (first,), (second,) = StepPlan(1, 20), group(0, 1).sequences, group(1, 1).sequences
    plan.assign(first, 3)
    plan.assign(second, 8)
    plan.assign(first, 2)
    batch = plan.batch(step_id=7)
    assert [(item.sequence_id, item.num_tokens, item.wants_sample) for item in batch.items] == [
        (0, 5, False),
        (1, 8, True),
    ]
    assert (batch.step_id, batch.num_tokens, plan.budget) == (7, 13, 7)
    assert plan.planned(first.group) == 5


def test_a_preempted_group_gives_back_tokens_and_copies() -> None:
    plan, family, other = StepPlan(1, 20), group(0, 2), group(5, 1)
    plan.assign(family.sequences[0], 1, ((3, 4),))
    plan.assign(family.sequences[1], 1)
    plan.assign(other.sequences[0], 2, ((6, 7),))
    plan.take_back(family)
    batch = plan.batch(step_id=1)
    assert [item.sequence_id for item in batch.items] == [5]
    assert batch.copies == ((6, 7),)
    assert (plan.budget, batch.num_tokens, plan.num_preempted) == (18, 2, 1)


def test_the_output_travels_for_those_whose_penalties_read_it() -> None:
    for penalty, carried in [(0.0, ()), (0.5, (7, 8))]:
        one = group(0, 1, frequency_penalty=penalty)
        (sequence,) = one.sequences
        sequence.own_token_ids += [7, 8]
        plan = StepPlan(1, 20)
        plan.assign(sequence, 9)
        (item,) = plan.batch(step_id=1).items
        assert item.output_token_ids == carried
        assert item.token_ids == (*range(8), 7)
        assert item.prompt_token_ids == one.request.prompt_token_ids
