"""Many prompts through one engine: order, how many are under way, failures, cancellation, warnings."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from quire.batch import prepare_all, run_all
from quire.outputs import RequestOutput
from quire.prompts import chats, completions
from quire.sampling_params import SamplingParams
from quire_engine.contract.types import GenerationRequest
from quire_server.errors import EngineFailed
from quire_server.state import ServerState
from support.events import until
from support.fake_engine import FakeEngine
from support.fakes import make_state

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def run(state: ServerState, prompts: list[str], params: SamplingParams) -> list[RequestOutput]:
    jobs = await prepare_all(state, completions(prompts, [params] * len(prompts)))
    return await run_all(state, jobs, itertools.count(5), lambda _: None)


def reversing(request: GenerationRequest, choice: int) -> tuple[int, ...]:
    return (*request.prompt_token_ids[::-1], 48 + choice)


async def test_outputs_are_in_the_order_of_the_prompts_whoever_ends_first() -> None:
    state = make_state(engine=FakeEngine(replies=reversing))
    prompts = ["abcdef", "gh", "ijkl"]
    params = [SamplingParams(max_tokens=len(prompt)) for prompt in prompts]
    heard: list[str] = []
    jobs = await prepare_all(state, completions(prompts, params))
    outputs = await run_all(state, jobs, itertools.count(5), lambda output: heard.append(output.prompt or ""))
    assert [output.outputs[0].text for output in outputs] == ["fedcba", "hg", "lkji"]
    assert [output.request_id for output in outputs] == ["5", "6", "7"]
    assert heard == ["gh", "ijkl", "abcdef"]


async def test_only_as_many_as_the_queue_takes_are_under_way() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, max_queued_sequences=5)
    engine.hold()
    running = asyncio.create_task(run(state, [f"prompt {i}" for i in range(7)], SamplingParams(n=2, max_tokens=3)))
    await until(lambda: len(engine.submitted) == 2)
    await asyncio.sleep(0.02)
    assert len(engine.submitted) == 2, "a third would have filled the queue over its end"
    engine.release()
    outputs = await running
    assert [output.prompt for output in outputs] == [f"prompt {i}" for i in range(7)]
    assert all([choice.index for choice in output.outputs] == [0, 1] for output in outputs)


async def test_one_failure_aborts_the_others_and_says_why() -> None:
    engine = FakeEngine(fail_after=2, error="the step failed")
    state = make_state(engine=engine)
    with pytest.raises(EngineFailed, match="the step failed"):
        await run(state, ["a", "b", "c"], SamplingParams(max_tokens=5))
    assert engine.live == ()
    assert state.client.in_flight == 0


async def test_a_cancelled_run_leaves_nothing() -> None:
    engine = FakeEngine(step_seconds=0.001)
    state = make_state(engine=engine, max_queued_sequences=2)
    running = asyncio.create_task(run(state, ["a", "b", "c"], SamplingParams(max_tokens=500)))
    await until(lambda: engine.step_id > 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(engine.aborted) == 2
    assert (engine.live, state.client.in_flight) == ((), 0)


async def test_one_bad_prompt_is_named_before_anything_runs() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, max_model_len=20)
    with pytest.raises(ValueError, match=r"^prompt 1: .*20 tokens, but the prompt has 30"):
        await run(state, ["a", "b" * 30], SamplingParams())
    with pytest.raises(ValueError, match=r"^This model's maximum"):
        await run(state, ["b" * 30], SamplingParams())
    assert engine.submitted == []


async def test_what_the_chat_template_does_not_name_is_warned_of() -> None:
    requests = chats(
        [[{"role": "user", "content": "Hello"}]],
        [SamplingParams()],
        add_generation_prompt=None,
        continue_final_message=False,
        chat_template_kwargs={"mood": "sunny"},
    )
    with pytest.warns(UserWarning, match="the chat template does not name the variable mood"):
        await prepare_all(make_state(), requests)


async def test_what_has_no_effect_is_warned_of() -> None:
    state = make_state()
    message = {"role": "user", "content": "Hello", "mood": "sunny"}
    requests = chats(
        [[message]],
        [SamplingParams()],
        add_generation_prompt=None,
        continue_final_message=False,
        chat_template_kwargs=None,
    )
    with pytest.warns(UserWarning, match=r"without effect: messages\.mood"):
        await prepare_all(state, requests)
