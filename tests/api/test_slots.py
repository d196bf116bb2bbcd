"""/props and /slots as llama-server's clients read them, and what /v1/models says of a model's abilities."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from quire_engine.engine import Engine
from quire_engine.process.loop import inspected
from quire_engine.process.transport import Inspect
from support.fake_engine import FakeEngine
from support.fake_executor import new_run
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio

KEY, OTHER = "first-key", "second-key"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


_TASKS: set[asyncio.Task[Any]] = set()


async def reached(engine: FakeEngine, asking: Coroutine[Any, Any, Any]) -> None:
    """Send a request and wait until the engine has it."""
    before = len(engine.submitted)
    task = asyncio.create_task(asking)
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)
    async with asyncio.timeout(300):
        while len(engine.submitted) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_props_have_what_clients_ask_for() -> None:
    state = make_state(max_model_len=300, model_names=("served", "/home/me/model"))
    async with connect(make_app(state)) as client:
        props = (await client.get("/props")).json()
        info = (await client.get("/tokenizer_info")).json()
    assert props["default_generation_settings"]["n_ctx"] == 300
    assert props["total_slots"] == state.client.num_seats
    assert (props["model_alias"], props["model_path"]) == ("served", "served")
    assert props["modalities"] == {"vision": False, "audio": False}
    assert (props["chat_template"], props["eos_token"]) == (info["chat_template"], info["eos_token"])
    assert props["chat_template"]


async def test_slots_are_the_running_sequences_and_the_free_places() -> None:
    fake, run = FakeEngine(), new_run(max_num_seqs=4, max_num_batched_tokens=64)
    fake.hold()
    state = make_state(engine=fake, api_key=(KEY, OTHER))
    state.client.resize(seats=4, max_sequences=100)
    engine = Engine(run.scheduler, run.executor)

    async def inspect(what: str, argument: str) -> bytes:
        return inspected(engine, Inspect(token=1, what=what, argument=argument)).body

    state.engines.inspect = inspect
    async with connect(make_app(state)) as client:

        async def slots(key: str) -> list[dict[str, Any]]:
            return (await client.get("/slots", headers=bearer(key))).json()  # type: ignore[no-any-return]

        assert [slot["is_processing"] for slot in await slots(KEY)] == [False] * 4
        assert (await client.get("/slots")).status_code == 401
        for name, key, fields in (("one", KEY, {"n": 2}), ("two", OTHER, {"prompt": "secret words"})):
            body = {"prompt": "abc", "max_tokens": 9} | fields
            asking = client.post("/v1/completions", json=body, headers={"x-request-id": name, **bearer(key)})
            await reached(fake, asking)
        run.add(*fake.submitted)
        run.one_step()
        mine, others = await slots(KEY), await slots(OTHER)
        assert [slot["id"] for slot in mine] == [0, 1, 2, 3]
        assert [(slot["is_own"], slot["request_id"]) for slot in mine] == [
            *[(True, "one")] * 2,
            (False, None),
            (False, None),
        ]
        assert [slot["request_id"] for slot in others] == [None, None, "two", None]
        assert [slot["phase"] for slot in mine] == ["decode", "decode", "decode", None]
        assert [slot["n_prompt_tokens"] for slot in mine] == [3, 3, 12, 0]
        assert [slot["n_ctx"] for slot in mine] == [state.max_model_len] * 4
        assert "secret" not in msgspec.json.encode(mine).decode()
        full = await client.get("/slots?fail_on_no_slot=1", headers=bearer(KEY))
        assert full.status_code == 200
        await reached(fake, client.post("/v1/completions", json={"prompt": "d"}, headers=bearer(KEY)))
        run.add(fake.submitted[-1])
        run.one_step()
        full = await client.get("/slots?fail_on_no_slot=1", headers=bearer(KEY))
        assert (full.status_code, full.json()["error"]["code"]) == (503, "no_slot")
        fake.release()


async def test_slots_of_an_engine_that_does_not_answer() -> None:
    fake = FakeEngine()
    fake.hold()
    async with connect(make_app(engine=fake)) as client:
        await reached(fake, client.post("/v1/completions", json={"prompt": "a"}))
        assert (await client.get("/slots")).status_code == 503
        fake.release()


async def test_models_tell_their_context_and_what_they_can_do() -> None:
    async with connect(make_app(max_model_len=300)) as client:
        model, *_ = (await client.get("/v1/models")).json()["data"]
        shown = (await client.post("/api/show", json={"model": model["id"]})).json()
    assert (model["context_length"], model["max_model_len"]) == (300, 300)
    assert model["capabilities"] == shown["capabilities"]
    assert {"completion", "tools"} <= set(model["capabilities"])
    async with connect(make_app(template=None)) as client:
        model, *_ = (await client.get("/v1/models")).json()["data"]
        assert "tools" not in model["capabilities"]
