"""Predicted TTFT never falls with more load, fewer hits or a slower replica; the running mean of its errors."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from quire_engine.contract.batch import Batch, SampledToken, StepResult
from quire_engine.contract.limits import SchedulerConfig, SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.cost_model import CostModel
from quire_engine.routing.prediction import Slowness, predicted_ttft, prompt_tokens_a_step
from quire_engine.routing.views import ReplicaView, RouteRequest
from quire_engine.scheduling.scheduler import Scheduler

COST = CostModel(
    step=0.01, row=1e-4, context=1e-8, prompt=((1, 0.011), (512, 0.05), (2048, 0.18)), chunk_context=1e-9, request=0.001
)
LIMITS = SchedulerLimits(block_size=16, max_num_batched_tokens=512, prefill_chunk=512, itl_target=0.0)
VIEWS = st.builds(
    ReplicaView,
    name=st.just("r"),
    cohort=st.just(""),
    state=st.just("ready"),
    cost=st.just(COST),
    limits=st.sampled_from([LIMITS, replace(LIMITS, itl_target=0.03)]),
    prompt_tokens_ahead=st.integers(0, 20_000),
    decodes=st.integers(0, 64),
    context=st.integers(0, 100_000),
    blocks_free=st.integers(0, 500),
    blocks_freed_rate=st.sampled_from([0.0, 5.0, 200.0]),
    step_ends_in=st.floats(0, 1),
    slowness=st.floats(1, 4),
)


@given(view=VIEWS, prompt=st.integers(1, 8_000), hit=st.integers(0, 200), more=st.integers(1, 5_000))
def test_more_load_is_never_faster(view: ReplicaView, prompt: int, hit: int, more: int) -> None:
    request = RouteRequest(request_id="a", prompt_tokens=prompt)

    def ttft(other: ReplicaView, hit_blocks: int = hit) -> float:
        return predicted_ttft(other, request, hit_blocks)[0] + 1e-9

    now = predicted_ttft(view, request, hit)[0]
    assert ttft(replace(view, prompt_tokens_ahead=view.prompt_tokens_ahead + more)) >= now
    assert ttft(replace(view, context=view.context + more)) >= now
    assert ttft(replace(view, step_ends_in=view.step_ends_in + more / 1e3)) >= now
    assert ttft(replace(view, blocks_free=max(view.blocks_free - more, 0))) >= now
    assert ttft(replace(view, slowness=view.slowness + more / 1e3)) >= now
    assert ttft(view, max(hit - more, 0)) >= now


def test_it_is_what_the_scheduler_takes() -> None:
    """A prompt behind another, beside nothing: the scheduler's own steps, by the same cost model."""
    limits = replace(LIMITS, scheduling_policy="fcfs", max_num_partial_prefills=1, max_consecutive_chunks=0)
    scheduler, now = Scheduler(SchedulerConfig(num_blocks=1000, max_model_len=8192, limits=limits)), 0.0
    for name, length in (("ahead", 1500), ("own", 2000)):
        prompt = tuple(range(length)) if name == "own" else tuple(range(9000, 9000 + length))
        stop = StopParams(max_new_tokens=1)
        sampling = SamplingParams(temperature=0.0)
        scheduler.add(GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, stop=stop), now)
    ended: dict[str, float] = {}
    while scheduler.has_work:
        batch = scheduler.schedule(now)
        assert isinstance(batch, Batch)
        now += COST.seconds(batch)
        samples = {item.sequence_id: (SampledToken(token_id=1),) for item in batch.items if item.wants_sample}
        ended |= {output.request_id: now for output in scheduler.apply(batch, StepResult(samples=samples), now)}
    view = ReplicaView(
        name="r", cohort="", state="ready", cost=COST, limits=limits, prompt_tokens_ahead=1500, blocks_free=1000
    )
    predicted, _ = predicted_ttft(view, RouteRequest(request_id="own", prompt_tokens=2000), 0)
    assert abs(predicted - COST.request - ended["own"]) < 0.1 * ended["own"]


def test_the_target_between_tokens_limits_a_chunk() -> None:
    view = ReplicaView(
        name="r", cohort="", state="ready", cost=COST, limits=replace(LIMITS, itl_target=0.03), decodes=8
    )
    tokens = prompt_tokens_a_step(view)
    assert COST.prompt_seconds(tokens + 8) <= 0.03 < COST.prompt_seconds(tokens + 9)
    assert prompt_tokens_a_step(replace(view, decodes=0)) == LIMITS.max_num_batched_tokens


TABLES = st.lists(st.tuples(st.integers(1, 900), st.floats(1e-4, 1.0)), max_size=5, unique_by=lambda entry: entry[0])


@given(table=TABLES, seconds=st.floats(0, 2.0), most=st.integers(1, 2_000))
def test_tokens_within_a_time_are_the_most_that_take_no_longer(
    table: list[tuple[int, float]], seconds: float, most: int
) -> None:
    rising = tuple(zip(sorted(tokens for tokens, _ in table), sorted(time for _, time in table), strict=True))
    cost = CostModel(step=0.01, row=1e-4, prompt=rising)
    found = cost.prompt_tokens_within(seconds, most)
    assert 0 <= found <= most
    assert not found or cost.prompt_seconds(found) <= seconds
    assert found == most or cost.prompt_seconds(found + 1) > seconds - 1e-9


def test_steps_that_take_the_same_whatever_they_compute() -> None:
    unit = CostModel(step=1.0)
    assert (unit.prompt_tokens_within(1.0, 512), unit.prompt_tokens_within(0.1, 512)) == (512, 0)
    view = ReplicaView(name="r", cohort="", state="ready", cost=unit, limits=replace(LIMITS, itl_target=0.1), decodes=8)
    assert prompt_tokens_a_step(view) == LIMITS.min_chunk


def test_a_replica_that_is_three_times_as_slow_is_seen_and_forgiven() -> None:
    slowness, now = Slowness(), 0.0
    for _ in range(40):
        slowness.observe(predicted=0.5, seen=1.5, now=now)
        now += 1.0
    assert 2.4 < slowness.ratio(now) < 3.0
    assert slowness.ratio(now + 300) < 1.01


def test_short_first_tokens_say_little() -> None:
    slowness = Slowness()
    for number in range(5):
        slowness.observe(predicted=0.01, seen=0.03, now=float(number))
    assert slowness.ratio(5.0) < 1.1
