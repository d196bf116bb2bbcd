"""Words that must not come, and the log-probabilities of tokens named by their ids, in all shapes of replies."""

from __future__ import annotations

import pytest

from support.fake_engine import FakeEngine
from support.fakes import connect, make_app

pytestmark = pytest.mark.anyio

COMPLETION = {"prompt": "a", "temperature": 0, "max_tokens": 3}
CHAT = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 3}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_words_of_several_tokens_are_sequences() -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        reply = await client.post("/v1/completions", json=COMPLETION | {"bad_words": ["no", "x", " no"]})
    assert reply.status_code == 200
    sampling = engine.submitted[0].sampling
    assert sampling.banned_token_ids == (ord("x"),)
    assert sampling.banned_sequences == (tuple(b"no"), tuple(b" no"))
    assert sampling.reads_output


async def test_completions_name_certain_tokens_in_place_of_the_most_likely() -> None:
    async with connect(make_app()) as client:
        body = COMPLETION | {"logprob_token_ids": [65, 66, 65], "return_tokens_as_token_ids": True}
        choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        assert [list(top) for top in choice["logprobs"]["top_logprobs"]] == [
            [f"token_id:{token}", "token_id:65", "token_id:66"] for token in b"The"
        ]
        assert choice["logprobs"]["top_logprobs"][0]["token_id:65"] == -9.0 - 65 / 8
        both = (await client.post("/v1/completions", json=body | {"logprobs": 2})).json()["choices"][0]
        assert both["logprobs"]["top_logprobs"] == choice["logprobs"]["top_logprobs"]
        echoed = (await client.post("/v1/completions", json=body | {"echo": True})).json()["choices"][0]
        assert len(echoed["logprobs"]["tokens"]) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_chats_name_certain_tokens(stream: bool) -> None:
    from support.events import parse_events

    async with connect(make_app()) as client:
        for asked in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 1}):
            body = CHAT | {"logprob_token_ids": [65], "stream": stream} | asked
            reply = await client.post("/v1/chat/completions", json=body)
            assert reply.status_code == 200
            choices = (
                [choice for event in parse_events(reply.text) if event != "[DONE]" for choice in event["choices"]]
                if stream
                else reply.json()["choices"]
            )
            first = next(choice["logprobs"]["content"][0] for choice in choices if choice["logprobs"])
            assert [each["token"] for each in first["top_logprobs"]] == [first["token"], "A"]
            assert first["top_logprobs"][0]["logprob"] == first["logprob"]
            assert first["top_logprobs"][-1]["logprob"] == -9.0 - 65 / 8


async def test_named_tokens_come_in_their_order_however_likely() -> None:
    async with connect(make_app()) as client:
        body = CHAT | {"logprobs": True, "top_logprobs": 2, "logprob_token_ids": [ord("U"), 65]}
        first = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"]["content"][0]
    own, *named = first["top_logprobs"]
    assert own == {name: first[name] for name in ("token", "logprob", "bytes")}
    assert [each["token"] for each in named] == ["U", "A"]
    assert [each["logprob"] for each in named] == [-9.0 - ord("U") / 8, -9.0 - 65 / 8]
