"""The printed bound on what a service class lacks of its share, on random loads with preemptions and small pools.

Shares, shortness and the tokens of streams are counted here from the steps alone. Schedulers without a part of the rule
break the bound, or the test could not fail.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from property.test_elder_bound import answer
from quire_engine.contract.batch import Batch
from quire_engine.contract.limits import SHARE_WINDOW_STEPS, LeastShares, SchedulerConfig, VictimName
from quire_engine.contract.types import GenerationRequest, ServiceClass
from quire_engine.scheduling.planner import Assigner, PromptTurns
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.sequence import Group
from quire_engine.scheduling.shares import ClassShares
from support.fake_executor import request
from support.limits import scheduler_config

NUM_EXAMPLES = 5  # `make property-test` draws many times as many
NUM_STEPS = 160
SHARES = ((0.7, 0.1), (0.5, 0.5), (0.0, 0.3), (0.9, 0.05))
CLASSES: tuple[ServiceClass, ...] = get_args(ServiceClass)


def draw_config(dice: random.Random) -> SchedulerConfig:
    min_chunk, max_num_seqs = dice.randint(2, 4), dice.choice([8, 20])  # with many, decodes are columns
    most = dice.randint(40, 96)
    interactive, batch = dice.choice(SHARES)
    return scheduler_config(
        num_blocks=dice.choice([100, 300, 1000]),
        block_size=4,
        max_model_len=240,
        max_num_seqs=max_num_seqs,
        min_chunk=min_chunk,
        max_num_batched_tokens=most,
        prefill_chunk=dice.choice([most // 3, most]),
        max_num_partial_prefills=dice.randint(1, 4),
        max_consecutive_chunks=dice.randint(0, 3),
        elder_age_steps=dice.choice([0, 64]),
        itl_target=0.0,
        enable_prefix_caching=False,
        scheduling_policy=dice.choice(["fcfs", "wfq"]),
        preemption_victim=dice.choice(get_args(VictimName)),
        class_share=LeastShares(interactive=interactive, batch=batch),
    )


def draw_arrivals(dice: random.Random) -> list[list[GenerationRequest]]:
    """The requests that come before each step; of each class enough to wait for most of the time, or few."""
    arrivals: list[list[GenerationRequest]] = [[] for _ in range(NUM_STEPS)]
    for name in CLASSES:
        longest, most = dice.choice([80, 200]), dice.choice([1, 3, 12, 40])
        for number in range(dice.choice([20, 120, 120])):
            wanted = request(f"{name}-{number}", dice.randint(1, longest), dice.randint(1, most), penalty=0.0)
            arrivals[dice.randrange(NUM_STEPS * 2 // 3)].append(dataclasses.replace(wanted, service_class=name))
    return arrivals


@dataclasses.dataclass(slots=True)
class Window:
    """Steps in a row that were short for a class, from one on in which it was owed nothing or something."""

    lacking: float = 0.0  # share of the useful tokens less the class's own
    excess: float = 0.0  # tokens of the other class's streams and first claims beyond its share of a step
    num_steps: int = 0


class Witness:
    """Counts one class's tokens beside its share, and holds them against the bound."""

    def __init__(self, name: ServiceClass, config: SchedulerConfig) -> None:
        self._name, self._limits = name, config.limits
        self._share = getattr(config.limits.class_share, name)
        self._window: Window | None = None
        self.owed = 0.0  # in a decaying sum
        self.num_due = 0  # short steps in which the class was due
        self.breaches: list[str] = []

    def see(self, useful: Counter[str], streams: int, prompts: int, *, is_short: bool) -> None:
        """Take a step; `streams` and `prompts`: tokens of the other class for decodes, and for its prompts."""
        total, share, least = useful.total(), self._share, self._limits.min_chunk
        was_owed = self.owed
        lacking = share * total - useful[self._name]
        self.owed = self.owed * (1 - 1 / SHARE_WINDOW_STEPS) + lacking
        if not is_short:
            self._window = None
            return
        if was_owed > 1e-6:
            self.num_due += 1
            if prompts > 2 * least:
                self.breaches.append(f"{self._name} is due, and {prompts} prompt tokens go to the other class")
        if self._window is None:
            if was_owed < 0:
                return
            self._window = Window()
        window = self._window
        window.num_steps += 1
        window.lacking += lacking
        window.excess += max(0.0, streams + min(prompts, 2 * least) - (1 - share) * total)
        bound = self._limits.shortfall(share, window.num_steps)
        bound += (1 + window.num_steps / SHARE_WINDOW_STEPS) * window.excess
        if window.lacking > bound + 1e-6:
            self.breaches.append(f"{self._name} lacks {window.lacking} tokens in {window.num_steps} steps of {bound}")

    def forget(self) -> None:
        """No batch request is there: nothing is owed."""
        self.owed, self._window = 0.0, None


@dataclasses.dataclass(slots=True)
class Course:
    """A load's progress, by request."""

    known: Counter[str] = dataclasses.field(default_factory=Counter)  # tokens, output included
    computed: Counter[str] = dataclasses.field(default_factory=Counter)  # the most of them that were ever computed
    begun: set[Group] = dataclasses.field(default_factory=set)  # in the middle of their prompts before the step


def witnesses_of(seed: int) -> dict[ServiceClass, Witness]:
    """Run a load to its last arrival, and a bit longer."""
    dice = random.Random(seed)
    config = draw_config(dice)
    scheduler, course = Scheduler(config), Course()
    witnesses = {name: Witness(name, config) for name in CLASSES}
    for step, wanted in enumerate(draw_arrivals(dice)):
        for one in wanted:
            course.known[one.request_id] = len(one.prompt_token_ids)
            scheduler.add(one, float(step))
        course.begun = {group for group in scheduler._roster.running if group.pending(group.leader) > 1}
        batch = scheduler.schedule(float(step))
        if batch is None:
            continue
        see(scheduler, batch, course, witnesses)
        for output in scheduler.apply(batch, answer(batch), float(step)):
            course.known[output.request_id] += len(output.token_ids)
    return witnesses


def see(scheduler: Scheduler, batch: Batch, course: Course, witnesses: dict[ServiceClass, Witness]) -> None:
    useful, streams, prompts, sizes = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    left: dict[Group, int] = {}  # tokens after the step
    for item in batch.items:
        group = scheduler._roster.sequences[item.sequence_id].group
        name, own = group.request.request_id, group.request.service_class
        gain = max(0, item.end - max(item.start, course.computed[name]))
        course.computed[name] = max(course.computed[name], item.end)
        useful[own] += gain
        sizes[name], left[group] = item.end - item.start, course.known[name] - item.end
        (streams if course.known[name] - item.start == 1 else prompts)[own] += gain
    left |= {group: group.pending(group.leader) for group in scheduler._roster.running if group not in left}
    partial = {group for group, num_tokens in left.items() if num_tokens}
    queues = scheduler._roster.running, scheduler._roster.waiting
    has_batch = any(group.is_batch for queue in queues for group in queue)
    for name, other in zip(CLASSES, reversed(CLASSES), strict=True):
        if not has_batch:
            witnesses[name].forget()
            continue
        short = is_short(scheduler, name, partial, sizes, course.begun)
        witnesses[name].see(useful, streams[other], prompts[other], is_short=short)


def is_short(scheduler: Scheduler, name: str, partial: set[Group], sizes: Counter[str], begun: set[Group]) -> bool:
    """Whether the step that was just planned leaves out prompt tokens of the class that it could have had.

    `partial`, `begun`: the groups in the middle of their prompts after the step, and before it.
    """
    limits = scheduler._config.limits
    if any(sizes[group.request.request_id] < limits.prefill_chunk for group in partial if _is_of(group, name)):
        return True
    sides = Counter(group.side for group in partial | begun)
    return any(
        group.wait_reason == "budget" and sides[group.side] < limits.max_num_partial_prefills
        for group in scheduler._roster.waiting
        if _is_of(group, name)
    )


def _is_of(group: Group, name: str) -> bool:
    return group.request.service_class == name


@given(seed=st.integers(0, 2**32))
@hypothesis_settings(max_examples=NUM_EXAMPLES, deadline=None)
def test_a_class_lacks_no_more_of_its_share_than_the_bound(seed: int) -> None:
    for witness in witnesses_of(seed).values():
        assert witness.breaches == []


def never_due(shares: ClassShares, *_: object, **__: object) -> None:
    shares.due = None


def in_queue_order(_: PromptTurns, prefilling: list[object], waiting: list[object]) -> list[object]:
    return prefilling


FAULTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "shares are ignored": (ClassShares, "note", never_due),
    "prompts do not give way": (PromptTurns, "first", in_queue_order),
    "others enter before a due prompt has its rest": (Assigner, "fill", lambda *_: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_scheduler_without_a_part_of_the_rule_breaks_it(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    assert any(witness.breaches for seed in range(60) for witness in witnesses_of(seed).values())


def test_the_loads_have_steps_in_which_each_class_is_due() -> None:
    due = Counter[str]()
    for seed in range(12):
        due.update({name: witness.num_due for name, witness in witnesses_of(seed).items()})
        if min(due[name] for name in CLASSES) > 30:
            return
    pytest.fail(f"{due}")
