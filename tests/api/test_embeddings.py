"""/v1/embeddings: OpenAI's shapes, the forms of input, lists longer than the queue, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import math
import struct

import pytest

from quire_server.dialects.vectors.wire import EmbeddingResponse
from support.fake_engine import HIDDEN_SIZE, FakeEngine, fake_embedding
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio


async def embed(client, status=200, **fields):
    reply = await client.post("/v1/embeddings", json=fields)
    assert reply.status_code == status, reply.text
    if status == 200:
        EmbeddingResponse.model_validate_json(reply.content, strict=True)
    return reply.json()


async def run(status=200, engine=None, settings=None, **fields):
    async with connect(make_app(engine=engine, **(settings or {}))) as client:
        return await embed(client, status, **fields)


async def test_a_text_has_openai_s_shape():
    reply = await run(input="abc", model="fake", user="someone")
    assert (reply["object"], reply["model"]) == ("list", "fake")
    assert reply["id"].startswith("embd-")
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] == 3
    (entry,) = reply["data"]
    assert (entry["object"], entry["index"], len(entry["embedding"])) == ("embedding", 0, HIDDEN_SIZE)
    assert math.hypot(*entry["embedding"]) == pytest.approx(1, abs=1e-6)


async def test_every_form_of_input_is_the_same_text():
    ids = list(b"abc")
    forms = ["abc", ["abc"], ids, [ids]]
    vectors = [(await run(input=form))["data"] for form in forms]
    assert all(found == vectors[0] for found in vectors)


async def test_several_texts_come_in_their_order():
    texts = ["a", "bb", "c", "dddd"]
    together = (await run(input=texts))["data"]
    assert [entry["index"] for entry in together] == [0, 1, 2, 3]
    for entry, text in zip(together, texts, strict=True):
        assert entry["embedding"] == (await run(input=text))["data"][0]["embedding"]


async def test_base64_is_the_same_numbers():
    numbers = (await run(input="hello"))["data"][0]["embedding"]
    text = (await run(input="hello", encoding_format="base64"))["data"][0]["embedding"]
    assert list(struct.unpack(f"<{HIDDEN_SIZE}f", base64.b64decode(text, validate=True))) == numbers


async def test_the_vector_is_the_engine_s():
    engine = FakeEngine()
    raw = (await run(engine=engine, input="hello", normalize=False))["data"][0]["embedding"]
    (request,) = engine.submitted
    assert raw == pytest.approx(fake_embedding(request), abs=1e-7)
    assert (request.stop.max_new_tokens, request.pooling) == (0, "last")


async def test_dimensions_cut_and_make_the_length_1_again():
    whole = (await run(input="hello world", settings={"pooling": "mean"}))["data"][0]["embedding"]
    cut = (await run(input="hello world", dimensions=3, settings={"pooling": "mean"}))["data"][0]["embedding"]
    length = math.hypot(*whole[:3])
    assert cut == pytest.approx([value / length for value in whole[:3]], abs=1e-6)


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_the_operator_chooses_what_is_pooled(pooling):
    engine = FakeEngine()
    await run(engine=engine, input="hello", settings={"pooling": pooling})
    assert engine.submitted[0].pooling == pooling


async def test_none_refuses_by_name():
    error = (await run(400, input="hello", settings={"pooling": "none"}))["error"]
    assert error["code"] == "embeddings_not_supported"
    assert "--pooling none" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [260]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": HIDDEN_SIZE + 1}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": ["a", "b" * 513]}, "input[1]"),
        ({"input": "a", "audio": {}}, "audio"),
    ],
)
async def test_what_is_wrong_is_named(fields, param):
    error = (await run(400, **fields))["error"]
    assert error["param"] == param, error


async def test_a_wrong_model_is_not_found():
    assert (await run(404, input="a", model="other"))["error"]["code"] == "model_not_found"


async def test_a_text_is_cut_where_it_is_asked_for():
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        await embed(client, input="abcdef", truncate_prompt_tokens=3)
        await embed(client, input="abcdef", truncate_prompt_tokens=3, truncation_side="left")
        await embed(client, input="x" * 600, truncate_prompt_tokens=-1)
        await embed(client, input=list(b"abcdef"), truncate_prompt_tokens=2)
    found = [bytes(request.prompt_token_ids) for request in engine.submitted]
    assert found == [b"abc", b"def", b"x" * 512, b"ab"]


async def test_unknown_fields_are_reported():
    async with connect(make_app()) as client:
        reply = await client.post("/v1/embeddings", json={"input": "a", "colour": "red", "priority": 3})
    assert reply.headers["x-quire-ignored"] == "colour, priority"


async def test_a_list_longer_than_the_queue_is_fed_in_pieces():
    engine = FakeEngine()
    state = make_state(engine=engine, max_queued_sequences=70)
    most = 0

    def watch(submit):
        def submitted(request):
            nonlocal most
            submit(request)
            most = max(most, len(engine.live))

        return submitted

    engine.submit = watch(engine.submit)
    texts = [f"text {number}" for number in range(300)]
    async with connect(make_app(state)) as client:
        reply = await embed(client, input=texts)
        alone = await embed(client, input=texts[250])
    assert most == 64  # the seats: others find room
    assert reply["data"][250]["embedding"] == alone["data"][0]["embedding"]
    assert state.client.in_flight == 0


async def test_a_full_queue_refuses_the_whole_list_and_a_place_lets_it_through():
    engine = FakeEngine()
    state = make_state(engine=engine, max_queued_sequences=1)
    async with connect(make_app(state)) as client:
        assert len((await embed(client, input=["a", "b", "c"]))["data"]) == 3
        engine.hold()
        held = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}))
        while not engine.live:  # noqa: ASYNC110 - it has no event for that
            await asyncio.sleep(0.01)
        refused = await client.post("/v1/embeddings", json={"input": ["a", "b"]})
        assert refused.status_code == 429
        engine.release()
        assert (await held).status_code == 200


async def test_a_failure_ends_all_of_it():
    engine = FakeEngine(fail_after=0)
    state = make_state(engine=engine)
    async with connect(make_app(state)) as client:
        reply = await client.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "engine_error"
    assert state.client.in_flight == 0


async def test_they_count_as_requests_without_tokens():
    async with connect(make_app()) as client:
        await embed(client, input=["abc", "de"])
        text = (await client.get("/metrics")).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("quire_"))
    labels = '{model_name="fake"}'
    assert float(lines["quire_prompt_tokens_total" + labels]) == 5
    assert float(lines["quire_generation_tokens_total" + labels]) == 0
    assert float(lines['quire_requests_total{model_name="fake",outcome="stop"}']) == 2
