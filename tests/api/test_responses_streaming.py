"""Streamed responses over the whole application: events, errors before and after the first, the SDK."""

from __future__ import annotations

import openai
import pytest

from support.fake_engine import FakeEngine
from support.fake_tokenizer import IM_END
from support.fakes import connect, listening, make_app
from support.responses import parse_events, rebuilt

pytestmark = pytest.mark.anyio

BODY = {"input": "hi", "temperature": 0, "max_output_tokens": 12}


async def test_a_stream_tells_what_the_whole_reply_says() -> None:
    async with connect(make_app(engine=FakeEngine())) as client:
        reply = await client.post("/v1/responses", json={**BODY, "stream": True})
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = parse_events(reply.text)
        whole = (await client.post("/v1/responses", json=BODY)).json()
    assert events[-1]["type"] == "response.incomplete"
    streamed = events[-1]["response"]
    assert rebuilt(events) == streamed["output"]
    for name in ("output", "id", "created_at"):
        own, other = streamed.pop(name), whole.pop(name)
        if name == "output":
            assert [item["content"] for item in own] == [item["content"] for item in other]
    assert streamed == whole


async def test_an_early_error_is_a_status() -> None:
    async with connect(make_app(engine=FakeEngine(fail_after=0))) as client:
        reply = await client.post("/v1/responses", json={**BODY, "stream": True})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "engine_error")


async def test_a_later_error_is_an_event() -> None:
    app = make_app(engine=FakeEngine(fail_after=3, error="bad luck"))
    async with connect(app) as client:
        reply = await client.post("/v1/responses", json={**BODY, "stream": True})
        events = parse_events(reply.text)
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert events[-2]["message"] == "bad luck"
        failed = events[-1]["response"]
        assert failed["output"][0]["content"][0]["text"] == "The"
        assert (await client.get(f"/v1/responses/{failed['id']}")).status_code == 404


async def test_the_openai_package() -> None:
    engine = FakeEngine(replies=lambda request, choice: (*b"yes sir", IM_END))
    async with listening(make_app(engine=engine)) as server:
        base_url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as api:
            reply = await api.responses.create(model="fake", input="hi", metadata={"a": "b"})
            assert (reply.output_text, reply.metadata) == ("yes sir", {"a": "b"})
            assert reply._request_id
            again = await api.responses.retrieve(reply.id)
            assert again.output_text == "yes sir"
            items = [item async for item in api.responses.input_items.list(reply.id)]
            assert [item.type for item in items] == ["message"]
            async with api.responses.stream(model="fake", input="and?", previous_response_id=reply.id) as stream:
                kinds = [event.type async for event in stream]
                final = await stream.get_final_response()
            assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
            assert final.output_text == "yes sir"
            counted = await api.responses.input_tokens.count(model="fake", input="hi")
            assert reply.usage is not None
            assert counted.input_tokens == reply.usage.input_tokens
            await api.responses.delete(reply.id)
            with pytest.raises(openai.NotFoundError) as caught:
                await api.responses.create(model="fake", input="x", previous_response_id=reply.id)
            assert caught.value.code == "previous_response_not_found"


async def test_the_openai_package_sees_a_failure() -> None:
    async with listening(make_app(engine=FakeEngine(fail_after=3))) as server:
        base_url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as api:
            events = [event async for event in await api.responses.create(model="fake", input="hi", stream=True)]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
