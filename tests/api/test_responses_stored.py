"""Responses that are stored: read, listed, continued, deleted, and nobody else's."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from support.fake_tokenizer import load_tokenizer
from support.fakes import connect, make_app
from support.responses import HEAD, TAIL, respond, saying

pytestmark = pytest.mark.anyio


async def status(client: httpx.AsyncClient, path: str, method: str = "GET") -> int:
    return (await client.request(method, f"/v1/responses/{path}")).status_code


async def test_a_stored_response_is_the_reply() -> None:
    async with connect(make_app(engine=saying())) as client:
        reply = await respond(client)
        assert (await client.get(f"/v1/responses/{reply['id']}")).json() == reply
        deleted = await client.delete(f"/v1/responses/{reply['id']}")
        assert deleted.json() == {"id": reply["id"], "object": "response", "deleted": True}
        gone = await client.get(f"/v1/responses/{reply['id']}")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "response_not_found")
        assert await status(client, reply["id"], "DELETE") == 404


async def test_a_streamed_response_is_stored_too() -> None:
    async with connect(make_app(engine=saying())) as client:
        raw = (await client.post("/v1/responses", json={"input": "hi", "stream": True})).text
        last = raw.rstrip().rpartition("data: ")[2]
        identity = httpx.Response(200, text=last).json()["response"]["id"]
        stored = await client.get(f"/v1/responses/{identity}")
        assert stored.json() == httpx.Response(200, text=last).json()["response"]


async def test_what_must_not_be_stored_is_not() -> None:
    async with connect(make_app(engine=saying())) as client:
        reply = await respond(client, store=False)
        assert reply["store"] is False
        assert await status(client, reply["id"]) == 404
    async with connect(make_app(engine=saying(), response_store_size=0)) as client:
        raw = await client.post("/v1/responses", json={"input": "hi", "store": True})
        assert raw.headers["x-quire-ignored"] == "store"
        assert raw.json()["store"] is False
        assert await status(client, raw.json()["id"]) == 404
        silent = await client.post("/v1/responses", json={"input": "hi"})
        assert "x-quire-ignored" not in silent.headers
        previous = {"input": "hi", "previous_response_id": raw.json()["id"]}
        assert (await client.post("/v1/responses", json=previous)).status_code == 404


async def test_going_on() -> None:
    engine = saying()

    def prompt() -> str:
        return load_tokenizer().decode(engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)

    async with connect(make_app(engine=engine)) as client:
        first = await respond(client, input="one", instructions="be brief")
        second = await respond(client, input="two", previous_response_id=first["id"], store=False)
        assert second["previous_response_id"] == first["id"]
        # Instructions are those of one response only.
        expected = f"{HEAD}user\none{TAIL}{HEAD}assistant\nyes{TAIL}{HEAD}user\ntwo{TAIL}{HEAD}assistant\n"
        assert prompt() == expected
        third = await respond(client, input="three", previous_response_id=first["id"], instructions="be kind")
        await respond(client, input="four", previous_response_id=third["id"])
        assert (
            prompt()
            == "".join(
                f"{HEAD}{role}\n{text}{TAIL}"
                for role, text in (
                    *(("user", "one"), ("assistant", "yes"), ("user", "three"), ("assistant", "yes")),
                    ("user", "four"),
                )
            )
            + f"{HEAD}assistant\n"
        )
        unknown = {"input": "x", "previous_response_id": second["id"]}  # it was not stored
        assert (await client.post("/v1/responses", json=unknown)).status_code == 404


async def test_a_referenced_item_is_as_if_it_were_sent() -> None:
    engine = saying()
    async with connect(make_app(engine=engine)) as client:
        first = await respond(client, input="one")
        output = first["output"][0]["id"]
        items: list[dict[str, Any]] = [{"role": "user", "content": "again"}]
        for reference in ({"type": "item_reference", "id": output}, {"id": output}):
            await respond(client, input=[reference, *items])
            prompt = load_tokenizer().decode(engine.submitted[-1].prompt_token_ids, skip_special_tokens=False)
            assert prompt == f"{HEAD}assistant\nyes{TAIL}{HEAD}user\nagain{TAIL}{HEAD}assistant\n"


async def test_input_items() -> None:
    messages = [{"role": "user", "content": str(number)} for number in range(5)]
    async with connect(make_app(engine=saying())) as client:
        reply = await respond(client, input=messages)
        path = f"/v1/responses/{reply['id']}/input_items"
        newest = (await client.get(path, params={"limit": 2})).json()
        assert [item["content"][0]["text"] for item in newest["data"]] == ["4", "3"]
        assert (newest["object"], newest["has_more"]) == ("list", True)
        assert (newest["first_id"], newest["last_id"]) == tuple(item["id"] for item in newest["data"])
        rest = (await client.get(path, params={"after": newest["last_id"], "limit": 3})).json()
        assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
        assert rest["has_more"] is False
        forward = (await client.get(path, params={"order": "asc"})).json()
        assert [item["content"][0]["text"] for item in forward["data"]] == ["0", "1", "2", "3", "4"]
        assert forward["data"][0]["content"] == [{"type": "input_text", "text": "0"}]
        assert (await client.get(path, params={"after": "msg_x"})).status_code == 400
        assert (await client.get(path, params={"limit": 0})).status_code == 400
        assert await status(client, "resp_x/input_items") == 404


async def test_items_keep_the_ids_that_they_came_with() -> None:
    async with connect(make_app(engine=saying())) as client:
        items = [{"type": "message", "id": "msg_mine", "role": "user", "content": "x"}]
        reply = await respond(client, input=items)
        listed = (await client.get(f"/v1/responses/{reply['id']}/input_items")).json()
        assert [item["id"] for item in listed["data"]] == ["msg_mine"]


async def test_nothing_runs_in_the_background() -> None:
    async with connect(make_app(engine=saying())) as client:
        reply = await respond(client)
        assert await status(client, f"{reply['id']}/cancel", "POST") == 400
        assert await status(client, "resp_x/cancel", "POST") == 404
        assert await status(client, f"{reply['id']}?stream=true") == 400


async def test_a_key_reads_only_its_own() -> None:
    app = make_app(engine=saying(), api_key=("ann", "bob"))
    ann, bob = ({"authorization": f"Bearer {key}"} for key in ("ann", "bob"))
    async with connect(app) as client:
        reply = (await client.post("/v1/responses", json={"input": "hi"}, headers=ann)).json()
        path = f"/v1/responses/{reply['id']}"
        for method, route in (("GET", path), ("GET", path + "/input_items"), ("POST", path + "/cancel")):
            assert (await client.request(method, route, headers=bob)).status_code == 404
        assert (await client.delete(path, headers=bob)).status_code == 404
        body = {"input": "x", "previous_response_id": reply["id"]}
        assert (await client.post("/v1/responses", json=body, headers=bob)).status_code == 404
        body = {"input": [{"type": "item_reference", "id": reply["output"][0]["id"]}]}
        assert (await client.post("/v1/responses", json=body, headers=bob)).status_code == 404
        assert (await client.get(path, headers=ann)).json() == reply


async def test_browsers_may_delete() -> None:
    app = make_app(engine=saying(), allowed_origins=("http://a.test",))
    headers = {"origin": "http://a.test", "access-control-request-method": "DELETE"}
    async with connect(app) as client:
        assert (await client.options("/v1/responses/resp_x", headers=headers)).status_code == 200


async def test_a_refused_method_names_those_that_there_are() -> None:
    async with connect(make_app(engine=saying())) as client:
        for path, allowed in (("/v1/responses/resp_x", "DELETE, GET, HEAD"), ("/v1/responses", "POST")):
            reply = await client.put(path)
            assert (reply.status_code, reply.headers.get_list("allow")) == (405, [allowed])
