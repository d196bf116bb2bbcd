"""The scheduler under arbitrary calls, against a plain-Python model of what may be seen from outside.

The invariants are those of `Scheduler.check_invariants`; a twin that gets the same calls must make the same plans.
Shares of tenants (I11) are looked at in `test_fair_machine`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire_engine.contract.batch import Batch
from quire_engine.contract.errors import InfeasibleRequest
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.types import GenerationRequest
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.sequence import Group
from support.fake_executor import FakeExecutor, Run, expected_embedding, expected_tokens
from support.fake_model import expected_beams
from support.scheduler_model import (
    check_prompt_logprobs,
    configs,
    feasible,
    filled_slots,
    policies,
    requests,
    shrunk_to_fit,
    truly_resumed,
    work_left,
)

NUM_EXAMPLES = 17  # `make schedule-test` draws many times as many
NUM_STEPS = 50


def has_entered(group: Group, num_preemptions: int) -> bool:
    """Whether it has entered in this step, in which it may have lost its blocks to another group again."""
    return group.state == "running" or group.num_preemptions > num_preemptions


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, step, abort, fail, hold, release; the twin does all of it too."""

    @initialize(config=configs())
    def start(self, config: SchedulerConfig) -> None:
        self.config = config
        self.run, self.twin = (
            Run(
                scheduler=Scheduler(config, policies=policies(config.limits)),
                executor=FakeExecutor(config.limits.block_size, windows=config.windows),
            )
            for _ in range(2)
        )
        self.requests: dict[str, GenerationRequest] = {}
        self.unfinished: dict[str, set[int]] = {}
        self.deadline: dict[str, int] = {}
        self.held: set[str] = set()
        self.bypasses: Counter[str] = Counter()

    # ---- rules

    @rule(wanted=requests(), more=st.lists(requests(), max_size=3))
    def submit(self, wanted: GenerationRequest, more: list[GenerationRequest]) -> None:
        for each in [wanted, *more]:
            self.add_both(shrunk_to_fit(self.config, each))

    @rule(wanted=requests())
    def submit_anything(self, wanted: GenerationRequest) -> None:
        if feasible(self.config, wanted):
            self.add_both(wanted)
            return
        for run in (self.run, self.twin):
            with pytest.raises(InfeasibleRequest):  # I9: refused now, never later
                run.add(wanted)

    @rule(count=st.integers(1, 20))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.step_both()

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end_one(data.draw(st.sampled_from(sorted(self.unfinished))), None)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.end_one(data.draw(st.sampled_from(sorted(self.unfinished))), "out of luck")

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def abort_during_a_step(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.unfinished)))
        self.step_both(abort=name)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        self.hold_one(data.draw(st.sampled_from(sorted(self.unfinished))))

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def hold_during_a_step(self, data: st.DataObject) -> None:
        self.step_both(hold=data.draw(st.sampled_from(sorted(self.unfinished))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_one(data.draw(st.sampled_from(sorted(self.held))))

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def model_fails_a_slice(self, data: st.DataObject) -> None:
        self.step_both(fail_item=data.draw(st.integers(0, 10)))

    def teardown(self) -> None:
        if not hasattr(self, "run"):
            return
        for name in sorted(self.held):
            self.release_one(name)
        while self.unfinished:
            self.step_both()
        stats = self.run.scheduler.stats()
        assert stats.blocks_used == 0  # I15
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert not self.run.scheduler.has_work

    # ---- invariants between steps

    @invariant()
    def gauges_equal_recomputed_state(self) -> None:
        """I16, by counting choices in the model and slots in the tables."""
        if not hasattr(self, "run"):
            return
        self.run.scheduler.check_invariants()  # I1, I2, I4, I19, I20 on the scheduler's own books
        stats, roster = self.run.scheduler.stats(), self.run.scheduler._roster
        unfinished = sum(
            len(choices) if self.requests[name].beam is None else self.requests[name].num_sequences
            for name, choices in self.unfinished.items()
        )
        assert stats.running + sum(stats.waiting.values()) + stats.held == unfinished
        assert set(roster.held) == self.held
        assert set(roster.live) == set(self.unfinished)
        filled = filled_slots(roster, self.config.limits.block_size)
        assert stats.blocks_used == len(filled)
        held = Counter(block for s in roster.sequences.values() for table in s.kv.tables for block in table.held)
        assert stats.blocks_shared == sum(tables > 1 for tables in held.values())
        assert stats.blocks_unshared == sum(tables == 1 for tables in held.values())
        assert stats.blocks_saved == sum(held.values()) - len(held)
        assert stats.slots_allocated == len(filled) * self.config.limits.block_size
        assert stats.slots_unused == stats.slots_allocated - sum(filled.values())

    # ---- the step, watched

    def add_both(self, wanted: GenerationRequest) -> None:
        name = f"r{len(self.requests)}"
        wanted = truly_resumed(dataclasses.replace(wanted, request_id=name))
        for run in (self.run, self.twin):
            run.add(wanted)
        self.requests[name] = wanted
        self.unfinished[name] = set(range(wanted.n)) - set(wanted.finished_choices)
        self.deadline[name] = self.run.step + self.run.scheduler.wait_bound(name)

    def hold_one(self, name: str) -> None:
        for run in (self.run, self.twin):
            assert run.scheduler.hold(name) == (name not in self.held)
        self.held.add(name)

    def release_one(self, name: str) -> None:
        for run in (self.run, self.twin):
            assert run.scheduler.release(name)
        self.held.discard(name)
        self.deadline[name] = self.run.step + self.run.scheduler.wait_bound(name)

    def end_one(self, name: str, message: str | None) -> None:
        for run in (self.run, self.twin):
            if message is None:
                assert run.scheduler.abort(name)
                assert not run.scheduler.abort(name)
                continue
            outputs = run.scheduler.fail(name, message)
            assert {o.choice for o in outputs} == self.unfinished[name]
            assert all(o.finish == "error" and o.error == message for o in outputs)
            assert run.scheduler.fail(name, message) == []
        del self.unfinished[name]
        self.held.discard(name)

    def step_both(self, abort: str | None = None, fail_item: int | None = None, hold: str | None = None) -> None:
        before = self.snapshot()
        batches = []
        for run in (self.run, self.twin):
            batch = run.scheduler.schedule(float(run.step))
            batches.append(batch)
            if batch is None:
                continue
            run.step += 1
            if run is self.run:
                self.check_plan(batch, before)
            if fail_item is not None:
                run.executor.errors[batch.items[fail_item % len(batch.items)].sequence_id] = "the model failed"
            result = run.executor.execute(batch)
            if hold is not None:
                run.scheduler.hold(hold)
            if abort is not None:
                run.scheduler.abort(abort)
            run.take(run.scheduler.apply(batch, result, float(run.step)))
        batch = batches[0]
        if batch is None:
            assert batches[1] is None
            assert set(self.unfinished) == self.held  # I8: no empty plan while anything is unfinished and not held
            return
        if hold is not None:
            self.held.add(hold)
        self.compare(batch, batches[1])
        if abort is not None:
            del self.unfinished[abort]
            self.held.discard(abort)
        self.settle()
        self.check_elder(before)

    def snapshot(self) -> dict[str, object]:
        roster = self.run.scheduler._roster
        elder = self.run.scheduler._planner.elder
        return {
            "decodes": {s.sequence_id: g for g in roster.running for s in g.computing if g.pending(s) == 1},
            "waiting": {g: g.num_preemptions for g in roster.waiting},
            "elder": elder,
            "elder_work": work_left(elder),
        }

    def check_plan(self, batch: Batch, before: dict[str, object]) -> None:
        config, scheduler = self.config, self.run.scheduler
        assert batch.items
        assert (
            batch.num_tokens == sum(item.num_tokens for item in batch.items) <= config.limits.max_num_batched_tokens
        )  # I5
        assert scheduler.stats().running <= config.limits.max_num_seqs
        assert len({item.sequence_id for item in batch.items}) == len(batch.items)
        written, shared = Counter[int](), set[int]()
        for item in batch.items:
            assert 1 <= item.num_tokens <= config.limits.prefill_chunk
            assert item.wants_sample == (
                item.end == item.num_prompt_tokens + len(item.output_token_ids) and item.stop.max_new_tokens > 0
            )
            blocks = range(item.start // config.limits.block_size, -(-item.end // config.limits.block_size))
            written.update(item.block_ids[index] for index in blocks)
            if item.end == item.num_prompt_tokens:  # the other choices hold it from now on, and read it after this step
                shared.update(item.block_ids[index] for index in blocks)
        for block, writers in written.items():
            assert writers == 1, f"block {block} has {writers} writers"
            assert not scheduler._kv._cache.holds(block), f"I3: block {block} is cached and would be written"
            assert scheduler._kv.is_writable(block) or block in shared, f"I3: block {block} is shared and written"
        scheduled = {item.sequence_id for item in batch.items}
        for sequence_id, group in before["decodes"].items():
            assert sequence_id in scheduled or group.state == "preempted", "I6: a running decode stood still"
        self.count_bypasses(before["waiting"])

    def count_bypasses(self, waiting: dict[Group, int]) -> None:
        """Of groups that waited before the step, given with how often each had been preempted by then."""
        if self.config.limits.scheduling_policy in {"lpm", "dlpm"}:
            return  # those ask others first: nobody is overtaken by that
        scheduler = self.run.scheduler
        key = scheduler._roster._order.key
        entered = [g for g in waiting if g.state == "running" and g is not scheduler._planner.elder]
        for group, num_preemptions in waiting.items():
            if not has_entered(group, num_preemptions) and group.wait_reason != "prefix":
                name = group.request.request_id
                self.bypasses[name] += sum(key(other) > key(group) for other in entered)
                assert self.bypasses[name] <= self.config.limits.max_bypasses  # I20

    def check_elder(self, before: dict[str, object]) -> None:
        elder = self.run.scheduler._planner.elder
        if elder is None or elder.state == "finished":
            return
        assert elder.state == "running", "I7: the elder was preempted"
        if elder is before["elder"]:
            assert work_left(elder) < before["elder_work"]  # I7

    def compare(self, batch: Batch, twin: Batch | None) -> None:
        """I10: the same calls make the same plans and the same outputs."""
        assert twin is not None
        assert batch == twin
        assert self.run.outputs == self.twin.outputs

    def settle(self) -> None:
        """Compare what ended with what each request must produce alone (I12), and when (I17)."""
        for (name, choice), output in list(self.run.finishes.items()):
            if name not in self.unfinished or choice not in self.unfinished[name]:
                continue
            self.unfinished[name].discard(choice)
            assert self.run.step <= self.deadline[name], "I17: it waited longer than the printed bound"
            if output.finish == "error":
                assert output.error == "the model failed"
                continue
            wanted = self.requests[name]
            check_prompt_logprobs(wanted, choice, self.run.outputs)
            if wanted.beam is not None:
                found = (tuple(self.run.tokens[name, choice]), output.beam_score, output.finish)
                assert found == expected_beams(wanted)[choice]
                continue
            resumed = wanted.resumed_token_ids[choice] if wanted.resumed_token_ids else ()
            tokens = expected_tokens(wanted, choice)
            assert (*resumed, *self.run.tokens[name, choice]) == tokens
            stopped = bool(tokens) and tokens[-1] in wanted.stop.stop_token_ids
            assert output.finish == ("stop" if stopped else "length")
            assert output.stop_token_id == (tokens[-1] if stopped else None)
            assert output.embedding == expected_embedding(wanted)
        for name in [name for name, choices in self.unfinished.items() if not choices]:
            del self.unfinished[name]
        for name in self.unfinished.keys() - self.held:
            assert self.run.step < self.deadline[name], "I17: it is alive after the printed bound"


SchedulerMachine.TestCase.settings = settings(
    max_examples=NUM_EXAMPLES,
    stateful_step_count=NUM_STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
TestScheduler = SchedulerMachine.TestCase
