"""/debug: what the engine tells of steps, requests and blocks, by every name that a client knows; errors in words."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from quire_engine.contract.errors import EngineDead, Unanswerable
from quire_engine.engine import Engine
from quire_engine.process.loop import inspected
from quire_engine.process.transport import Inspect
from quire_engine.scheduling.log.inspection import MOST_STEPS
from quire_server.engine.request_names import RequestNames
from quire_server.routes import debug
from support.fake_engine import FakeEngine
from support.fake_executor import Run, new_run, request
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio


class Asked:
    """An app whose questions go to a scheduler that the test steps, and whose completions go to a fake engine."""

    def __init__(self, client: httpx.AsyncClient, run: Run, engine: FakeEngine, names: RequestNames) -> None:
        self.client = client
        self.names = names
        self.run = run
        self.engine = engine

    async def get(self, path: str, status: int = 200) -> Any:
        reply = await self.client.get(path)
        assert reply.status_code == status, reply.text
        return reply.json()


@asynccontextmanager
async def asked(**limits: object) -> AsyncIterator[Asked]:
    run, fake = new_run(**limits), FakeEngine()
    engine = Engine(run.scheduler, run.executor)

    async def inspect(what: str, argument: str) -> bytes:
        answer = inspected(engine, Inspect(token=1, what=what, argument=argument))
        if answer.error:
            raise Unanswerable(answer.error)
        return answer.body

    state = make_state(engine=fake)
    state.engines.inspect = inspect
    async with connect(make_app(state), headers={"host": "localhost"}) as client:
        yield Asked(client, run, fake, state.names)


def test_the_server_allows_what_the_engine_answers() -> None:
    assert debug.MOST_STEPS == MOST_STEPS


async def test_steps_are_told_in_pages() -> None:
    async with asked() as it:
        it.run.add(request("a", 20, 5), request("b", 10, 2))
        it.run.to_end()
        whole = await it.get("/debug/steps")
        assert (whole["first"], whole["last"], len(whole["steps"])) == (1, 5, 5)
        assert "events" not in whole
        first = whole["steps"][0]
        assert first["slices"] == [["a", 0, 0, 20], ["b", 0, 0, 10]]
        assert [(each["kind"], each["request_id"]) for each in first["decisions"]] == [
            ("elder", "a"),
            ("enters", "a"),
            ("enters", "b"),
        ]
        assert (first["prefill_tokens"], first["decode_tokens"], first["running"], first["waiting"]) == (30, 0, 2, 0)
        assert [step["ends"] for step in whole["steps"]] == [
            [],
            [["b", 0, "length", 2]],
            [],
            [],
            [["a", 0, "length", 5]],
        ]
        page = await it.get("/debug/steps?after=2&limit=2")
        assert [step["step_id"] for step in page["steps"]] == [3, 4]
        assert (await it.get("/debug/steps?after=5"))["steps"] == []
        assert (await it.get("/debug/steps?after=99"))["steps"] == []


async def test_the_oldest_steps_are_forgotten() -> None:
    async with asked(step_log=4) as it:
        it.run.add(request("a", 20, 10))
        it.run.to_end()
        whole = await it.get("/debug/steps?events=true")
        assert [step["step_id"] for step in whole["steps"]] == [7, 8, 9, 10]
        assert [event["kind"] for event in whole["events"]] == ["end"], "the submission went with its step"
        assert (await it.get("/debug/requests/a"))["requests"][0]["first_token_step"] == 1


async def test_a_request_is_found_by_every_name_that_its_client_knows() -> None:
    async with asked() as it:
        body = {"prompt": ["a", "b"], "max_tokens": 1}
        reply = await it.client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        it.run.add(*it.engine.submitted)
        it.run.one_step()
        for name in ("mine", reply.json()["id"]):
            found = (await it.get(f"/debug/requests/{name}"))["requests"]
            assert [one["request_id"] for one in found] == [one.request_id for one in it.engine.submitted]
            assert {one["client_id"] for one in found} == {"mine"}
        (one,) = (await it.get(f"/debug/requests/{it.engine.submitted[1].request_id}"))["requests"]
        assert one["client_id"] == "mine"
        listed = await it.get("/debug/requests")
        assert [(one["client_id"], one["state"]) for one in listed["ended"]] == [("mine", "done")] * 2


async def test_the_largest_gap_between_the_tokens_of_a_stream_is_told() -> None:
    async with asked() as it:
        await it.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}, headers={"x-request-id": "mine"})
        it.run.add(*it.engine.submitted, request("b", 10, 2))
        it.run.one_step()
        (one,) = (await it.get("/debug/requests/mine"))["requests"]
        assert one["largest_gap"]["milliseconds"] >= 0
        assert one["largest_gap"].keys() == {"milliseconds", "began_at"}
        (one,) = (await it.get("/debug/requests/b"))["requests"]
        assert one["largest_gap"] is None, "this server has not sent it"


async def test_who_waits_is_listed_with_the_reason() -> None:
    async with asked(max_num_seqs=1, max_num_batched_tokens=64) as it:
        it.run.add(request("a", 20, 5), request("b", 10, 2))
        it.run.one_step()
        listed = await it.get("/debug/requests")
        assert [(one["request_id"], one["state"], one["reason"]) for one in listed["live"]] == [
            ("a", "decode", ""),
            ("b", "queue", "slots"),
        ]
        assert listed["num_live"] == 2
        (one,) = (await it.get("/debug/requests/b"))["requests"]
        assert "--max-num-seqs" in one["why"]


async def test_the_request_that_took_the_blocks_has_its_clients_name() -> None:
    async with asked(num_blocks=8, block_size=4, max_num_batched_tokens=64, max_num_seqs=8, min_chunk=4) as it:
        it.names.add(["mine"], ["e1"])
        it.run.add(request("e1", 12, 12), request("e2", 12, 12))
        it.run.to_end()
        (one,) = (await it.get("/debug/requests/e2"))["requests"]
        assert [(each["request_id"], each["client_id"]) for each in one["took_blocks"]] == [("e1", "mine")]
        assert one["preemptions"][0]["by"] == "e1"
        assert "preempted 1 times, for mine (1)" in one["why"]


async def test_the_request_with_the_same_beginning_has_its_clients_name() -> None:
    async with asked(block_size=4, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64) as it:
        it.names.add(["mine"], ["e1"])
        for name, last in (("e1", 7), ("e2", 8)):
            it.run.add(request(name, (*range(100, 110), last), 1))
            it.run.to_end()
        (one,) = (await it.get("/debug/requests/e2"))["requests"]
        assert (one["prefix"]["request_id"], one["prefix"]["client_id"]) == ("e1", "mine")
        assert one["prefix"]["why"] == "It is like mine up to position 10, where it has token 8 and the other one 7."


async def test_a_position_has_its_block_and_a_request_its_slack() -> None:
    """F7 and F8."""
    async with asked(num_blocks=64) as it:
        it.run.add(request("a", 500, 2))
        it.run.one_step()
        (whole,) = (await it.get("/debug/kv/a"))["sequences"]
        assert (whole["num_blocks"], whole["num_computed"], whole["slack"]) == (32, 500, 12)
        (table,) = (await it.get("/debug/kv/a?pos=37"))["sequences"]
        assert (table["block_index"], table["offset"], table["block"]) == (2, 5, whole["blocks"][2])
        assert "blocks" not in table
        pool = await it.get("/debug/kv")
        assert pool["blocks"] == {"total": 64, "used": 32, "cached": 0, "free": 32}
        assert (pool["fragmentation"]["slack"], pool["fragmentation"]["slack_ratio"]) == (12, 12 / 512)
        assert pool["fragmentation"]["largest_free_run"] == 32
        assert pool["tables"] == [{"request_id": "a", "choice": 0, "blocks": 32}]
        beyond = await it.get("/debug/kv/a?pos=512", 404)
        assert "for 512 positions" in beyond["error"]["message"]
        await it.get("/debug/kv/a?pos=-1", 400)


async def test_shared_blocks_are_counted() -> None:
    async with asked() as it:
        prefix = tuple(range(40))
        it.run.add(request("a", prefix, 8))
        it.run.one_step()
        it.run.add(request("b", (*prefix, 99), 8))
        it.run.one_step()
        assert (await it.get("/debug/kv"))["sharing"] == {"shared": 2, "unshared": 2, "saved": 2}


async def test_the_audit_finds_what_is_wrong() -> None:
    async with asked() as it:
        it.run.add(request("a", 20, 5))
        it.run.one_step()
        audit = await it.get("/debug/kv/audit")
        assert (audit["clean"], audit["disagreement"]) == (True, None)
        assert audit["counted"] == {"blocks": 256, "references": 2, "sequences": 1, "requests": 1}
        it.run.scheduler._kv._pool.share(1)
        audit = await it.get("/debug/kv/audit")
        assert audit["clean"] is False
        assert "references" in audit["disagreement"]


@pytest.mark.parametrize("path", ["/debug/requests/nobody", "/debug/kv/nobody"])
async def test_what_is_not_known_is_a_404_in_words(path: str) -> None:
    async with asked() as it:
        error = (await it.get(path, 404))["error"]
        assert error["code"] == "not_remembered"
        assert error["message"].endswith(".")


@pytest.mark.parametrize("query", ["after=-1", "after=x", "limit=0", "limit=257", "events=maybe"])
async def test_what_cannot_be_asked_is_a_400(query: str) -> None:
    async with asked() as it:
        await it.get(f"/debug/steps?{query}", 400)


async def test_an_engine_that_is_gone_is_a_503() -> None:
    state = make_state()

    async def inspect(_what: str, _argument: str) -> bytes:
        raise EngineDead("the engine process ended while it was asked")

    state.engines.inspect = inspect
    async with connect(make_app(state), headers={"host": "localhost"}) as client:
        for path in ("/debug/steps", "/debug/requests", "/debug/requests/a", "/debug/kv", "/debug/kv/audit"):
            reply = await client.get(path)
            assert reply.status_code == 503
            assert reply.headers["retry-after"] == "2"
            assert "ended while" in reply.json()["error"]["message"]


async def test_the_index_lists_every_view_and_the_plan() -> None:
    async with connect(make_app(root_path="/llm"), headers={"host": "localhost"}) as client:
        found = (await client.get("/llm/debug")).json()
        assert set(found["routes"]) == {f"/llm{route.path}" for route in debug.router.routes}
        assert all(sentence.endswith(".") for sentence in found["routes"].values())
        assert any(line.startswith("KV cache ") for line in found["plan"]["fake"])
        assert (await client.get("/llm/debug/", follow_redirects=True)).json() == found
    async with connect(make_app(api_key=("secret",))) as client:
        assert (await client.get("/debug")).status_code in {401, 403}
