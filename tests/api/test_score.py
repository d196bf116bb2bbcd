"""/v1/score: how alike texts are, one against many or pair by pair, in vLLM's shapes."""

from __future__ import annotations

import pytest

from quire_server.dialects.vectors.wire import ScoreResponse
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio


async def score(status=200, path="/v1/score", settings=None, **fields):
    async with connect(make_app(**{"pooling": "mean", **(settings or {})})) as client:
        reply = await client.post(path, json=fields)
    assert reply.status_code == status, reply.text
    if status == 200:
        ScoreResponse.model_validate_json(reply.content, strict=True)
    return reply.json()


async def scores(**fields):
    return [entry["score"] for entry in (await score(**fields))["data"]]


async def vector(text):
    async with connect(make_app(pooling="mean")) as client:
        return (await client.post("/v1/embeddings", json={"input": text})).json()["data"][0]["embedding"]


async def test_a_pair_is_the_cosine_of_the_embeddings():
    reply = await score(text_1="hello", text_2="world", model="fake")
    assert (reply["object"], reply["model"], reply["usage"]["total_tokens"]) == ("list", "fake", 10)
    (entry,) = reply["data"]
    left, right = await vector("hello"), await vector("world")
    assert entry["score"] == pytest.approx(sum(a * b for a, b in zip(left, right, strict=True)), abs=1e-6)


async def test_equal_texts_are_as_alike_as_can_be():
    assert await scores(text_1="hello", text_2="hello") == pytest.approx([1], abs=1e-12)


async def test_one_against_many_and_pair_by_pair():
    many = await scores(text_1="hello", text_2=["world", "hello", "held"])
    assert many == [(await scores(text_1="hello", text_2=text))[0] for text in ("world", "hello", "held")]
    pairs = await scores(text_1=["a", "bc"], text_2=["cab", "dd"])
    assert pairs == [*await scores(text_1="a", text_2="cab"), *await scores(text_1="bc", text_2="dd")]


async def test_other_names_and_the_other_path():
    wanted = await score(text_1="hello", text_2=["a", "b"])
    assert (await score(queries="hello", documents=["a", "b"]))["data"] == wanted["data"]
    assert (await score(path="/score", text_1="hello", text_2=["a", "b"]))["data"] == wanted["data"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"documents": "a"}, "queries"),
        ({"text_1": "a", "text_2": "b", "queries": "c", "documents": "d"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ({"text_1": [], "text_2": "c"}, "text_1"),
        ({"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
        ({"text_1": [1], "text_2": "b"}, "text_1[0]"),
        ({"text_1": "a", "text_2": ["b"] * 2048}, "text_2"),
    ],
)
async def test_what_is_wrong_is_named(fields, param):
    error = (await score(400, **fields))["error"]
    assert error["param"] == param, error


async def test_none_refuses_by_name():
    error = (await score(400, text_1="a", text_2="b", settings={"pooling": "none"}))["error"]
    assert error["code"] == "embeddings_not_supported"
