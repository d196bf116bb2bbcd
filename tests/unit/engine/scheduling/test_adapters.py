"""At most `max_loras` adapters run at once, and nobody waits for ever for the end of another's use."""

from __future__ import annotations

import pytest

from quire_engine.contract.types import Adapter, GenerationRequest
from support.fake_executor import Run, new_run, produced_alone, request


def with_adapter(name: str, adapter: str, prompt: int = 8, tokens: int = 6) -> GenerationRequest:
    return request(name, prompt, tokens).bound_to(Adapter(name=adapter, path=f"/{adapter}", digest=adapter))


def running(run: Run) -> set[str]:
    return {group.adapter for group in run.scheduler._roster.running if group.adapter}


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_adapters_run_than_may(most: int) -> None:
    run = new_run(max_loras=most)
    wanted = [with_adapter(f"r{i}", f"a{i % 4}") for i in range(12)]
    run.add(*wanted, request("base", 8, 6))
    seen = 0
    while run.scheduler.has_work:
        batch = run.one_step()
        found = {item.adapter for item in batch.items if item.adapter} if batch is not None else set()
        assert found <= running(run) | found
        assert len(found) <= most
        seen = max(seen, len(found))
    assert seen == most
    assert produced_alone(run, *wanted)


def test_a_request_without_an_adapter_does_not_wait_for_those_with_one() -> None:
    run = new_run(max_loras=1)
    run.add(with_adapter("a", "a", tokens=40), with_adapter("b", "b"), request("base", 8, 4))
    run.one_step()
    assert run.scheduler.stats().waiting["slots"] == 1
    assert {group.request.request_id for group in run.scheduler._roster.running} == {"a", "base"}
    run.to_end()


def test_a_stream_of_one_adapter_does_not_keep_another_out() -> None:
    run = new_run(max_loras=1, max_num_seqs=4)
    run.add(with_adapter("first", "a", tokens=20), with_adapter("other", "b", tokens=4))
    for i in range(60):
        run.add(with_adapter(f"more{i}", "a", tokens=20))
        run.one_step()
    assert "other" in run.finish_step, "those of the first adapter may overtake it a few times only"
    run.to_end()


def test_the_elder_gets_its_adapter_in() -> None:
    run = new_run(max_loras=1, max_num_seqs=8, elder_age_steps=3, max_bypasses=10_000)
    run.add(with_adapter("first", "a", tokens=10), with_adapter("b", "b", tokens=4))
    for i in range(40):
        run.add(with_adapter(f"a{i}", "a", tokens=60))
        run.one_step()
    assert run.finish_step["b"] < 30
    assert run.scheduler.stats().total_preemptions_by_cause["elder"] >= 3
    run.to_end()


def test_two_adapters_are_kept_apart_from_each_other_and_from_none() -> None:
    run = new_run(max_loras=3)
    for i, adapter in enumerate(("a", "b", "", "a")):
        one = request(f"r{i}", 64, 2)
        if adapter:
            one = one.bound_to(Adapter(name=adapter, path="", digest=adapter))
        run.add(GenerationRequest(**{**_fields(one), "prompt_token_ids": tuple(range(64))}))
        run.to_end()
    cached = {output.request_id: output.num_cached_tokens for output in run.outputs if output.timing is not None}
    assert (cached["r0"], cached["r1"], cached["r2"]) == (0, 0, 0)
    assert cached["r3"] >= 48


def _fields(one: GenerationRequest) -> dict[str, object]:
    return {name: getattr(one, name) for name in GenerationRequest.__dataclass_fields__}
