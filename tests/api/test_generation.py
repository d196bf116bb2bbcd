"""What generation does around the text: clients that leave, metrics, many requests at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire_engine.contract.types import GenerationRequest
from quire_server.state import ServerState
from support.events import choice_texts, parse_events, stream, until
from support.fake_engine import REPLY, FakeEngine
from support.fakes import connect, listening, make_app, make_state

pytestmark = pytest.mark.anyio
GREEDY = {"model": "fake", "prompt": "hello", "temperature": 0, "max_tokens": 400}
FOX = REPLY.decode()


def request_bytes(body: dict, path: str = "/v1/completions") -> bytes:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    return head.encode() + raw


def sample(state: ServerState, name: str, **labels: str) -> float:
    """One value of the exposition."""
    found = [
        sample.value
        for family in text_string_to_metric_families(state.metrics.render().decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, (name, labels, found)
    return found[0]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_leaves_ends_the_engines_work(streamed: bool) -> None:
    engine = FakeEngine(step_seconds=0.005)
    state = make_state(engine=engine)
    async with listening(make_app(state)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_bytes(GREEDY | {"stream": streamed, "n": 2, "prompt": ["a", "b"]}))
        await until(lambda: engine.step_id >= 3)
        if streamed:
            assert await reader.read(100)
        writer.close()
        await until(lambda: engine.live == ())
        assert len(engine.aborted) == 2
        assert state.client.in_flight == 0
        await until(lambda: sample(state, "quire_requests_total", outcome="abort") == 2)


async def test_clients_that_leave_at_random_times_leave_nothing_behind() -> None:
    engine = FakeEngine(step_seconds=0.001)
    state = make_state(engine=engine)
    chance = random.Random(5)

    async def leave(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes(GREEDY | {"stream": chance.random() < 0.7, "max_tokens": 30}))
        await asyncio.sleep(chance.random() * 0.08)
        writer.transport.abort()

    async with listening(make_app(state)) as server:
        for _ in range(5):
            await asyncio.gather(*(leave(server.port) for _ in range(20)))
        await until(lambda: engine.live == () and state.client.in_flight == 0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            reply = await client.post("/v1/completions", json=GREEDY | {"max_tokens": 5})
            assert reply.json()["choices"][0]["text"] == FOX[:5]


async def test_requests_at_once_do_not_mix() -> None:
    engine = FakeEngine(replies=lambda request, choice: (*request.prompt_token_ids, 48 + choice))

    async def one(client: httpx.AsyncClient, number: int) -> None:
        name = f"<{number}>"
        body = GREEDY | {"prompt": name, "n": 2, "max_tokens": 20, "request_id": "same"}
        expected = {i: (f"{name}{i}" * 20)[:20] for i in range(2)}
        if number % 2:
            assert choice_texts(await stream(client, "/v1/completions", body)) == expected
        else:
            reply = (await client.post("/v1/completions", json=body)).json()
            assert {c["index"]: c["text"] for c in reply["choices"]} == expected

    async with connect(make_app(engine=engine)) as client:
        await asyncio.gather(*(one(client, number) for number in range(40)))


async def test_a_prompt_that_is_done_does_not_wait_for_the_others() -> None:
    """A stop string ends it here: the engine hears of it at once, while another prompt of the request goes on."""
    engine = FakeEngine(replies=lambda request, choice: request.prompt_token_ids, step_seconds=0.001)
    body = GREEDY | {"prompt": ["ab!", "cde"], "n": 2, "stop": "!", "max_tokens": 100}
    async with connect(make_app(engine=engine)) as client:
        posting = asyncio.create_task(client.post("/v1/completions", json=body))
        await until(lambda: len(engine.aborted) == 1)
        first, second = (request.request_id for request in engine.submitted)
        assert (engine.aborted, engine.live) == ([first], (second,))
        choices = (await posting).json()["choices"]
    assert [choice["text"] for choice in choices] == ["ab", "ab", *[("cde" * 34)[:100]] * 2]
    assert engine.aborted == [first]


async def test_metrics_count_each_prompt_and_token_once() -> None:
    state = make_state(engine=FakeEngine(num_cached_tokens=2))
    async with connect(make_app(state)) as client:
        await client.post("/v1/completions", json=GREEDY | {"prompt": ["ab", "cde"], "n": 2, "max_tokens": 4})
        await stream(client, "/v1/completions", GREEDY | {"max_tokens": 6, "stop": "qu"})
    assert sample(state, "quire_requests_total", outcome="length") == 2
    assert sample(state, "quire_requests_total", outcome="stop") == 1
    assert sample(state, "quire_generation_tokens_total") == 2 * 2 * 4 + 6
    assert sample(state, "quire_prompt_tokens_total") == 2 + 3 + 5
    assert sample(state, "quire_time_to_first_token_seconds_count") == 3
    assert sample(state, "quire_inter_token_latency_seconds_count") == 4 * 3 + 5


async def test_metrics_of_what_failed() -> None:
    state = make_state(engine=FakeEngine(fail_after=2))
    async with connect(make_app(state)) as client:
        await client.post("/v1/completions", json=GREEDY)
    assert sample(state, "quire_requests_total", outcome="error") == 1


async def test_a_real_socket_gets_the_same_stream() -> None:
    async with listening(make_app(engine=FakeEngine())) as server, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        reply = await client.post(url, json=GREEDY | {"max_tokens": 30, "stream": True})
    assert choice_texts(parse_events(reply.text)) == {0: FOX[:30]}


async def test_an_engine_that_ends_a_request_early_is_an_error() -> None:
    engine = FakeEngine()
    engine.hold()
    state = make_state(engine=engine)
    async with connect(make_app(state)) as client:
        posting = asyncio.create_task(client.post("/v1/completions", json=GREEDY))
        await until(lambda: bool(engine.live))
        for live in list(state.client._streams.values()):
            live.close()
        reply = await posting
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "engine_error"


async def test_the_documents_describe_both_forms() -> None:
    async with connect(make_app()) as client:
        document = (await client.get("/openapi.json")).json()
    for path, whole in (("/v1/completions", "CompletionResponse"), ("/v1/chat/completions", "ChatCompletionResponse")):
        operation = document["paths"][path]["post"]
        content = operation["responses"]["200"]["content"]
        assert content["application/json"]["schema"] == {"$ref": f"#/components/schemas/{whole}"}
        event = content["text/event-stream"]["schema"]["properties"]
        assert "choices" in event["data"]["anyOf"][0]["contentSchema"]["properties"]
        assert "$ref" not in json.dumps(content["text/event-stream"])
        assert {"400", "404", "429", "500", "503"} <= operation["responses"].keys()
        assert operation["requestBody"]["content"]["application/json"]["schema"]


OPTIONS = {
    "logprobs": {"logprobs": 3},
    "n": {"n": 3},
    "penalties": {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.2},
    "seed": {"seed": 7, "temperature": 1},
    "stop": {"stop": ["fox", "qu"]},
    "stop ids": {"stop_token_ids": [107], "include_stop_str_in_output": True},
    "echo": {"echo": True},
    "bias": {"logit_bias": {"97": 5}},
    "allowed": {"allowed_token_ids": [97, 98]},
    "banned": {"bad_words": ["z", "several tokens"]},
    "certain ids": {"logprob_token_ids": [97, 5]},
    "least": {"min_tokens": 3, "ignore_eos": True},
    "nothing": {"max_tokens": 0},
    "prompts": {"prompt": ["a", "bc"]},
    "prompt logprobs": {"prompt_logprobs": 2},
    "ids": {"return_token_ids": True, "return_tokens_as_token_ids": True},
    "usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "cut": {"truncate_prompt_tokens": 2},
}


async def test_all_pairs_of_options_are_answered_or_refused() -> None:
    engine = FakeEngine()
    answered = 0
    async with connect(make_app(engine=engine)) as client:
        for first, second in itertools.combinations(OPTIONS, 2):
            body = GREEDY | {"max_tokens": 5} | OPTIONS[first] | OPTIONS[second]
            for streamed in (False, True):
                reply = await client.post("/v1/completions", json=body | {"stream": streamed})
                assert reply.status_code in {200, 400}, (first, second, reply.text)
                if reply.status_code == 200:
                    answered += 1
                    if streamed:
                        assert "error" not in parse_events(reply.text)[-1]
    assert engine.live == ()
    assert answered > 150


@pytest.mark.parametrize(
    "text",
    ["<|im_end|>" * 50, "<|bos|><|end|>", "\0", "\ufeff", "\u202e", "e" + "\u0301" * 300, "{{7*7}}{% raw %}"],
    ids=ascii,
)
async def test_strange_texts_are_only_text(text: str) -> None:
    engine = FakeEngine(replies=lambda request, choice: text.encode())
    async with connect(make_app(engine=engine, max_model_len=2048)) as client:
        body = GREEDY | {"prompt": text, "echo": True, "skip_special_tokens": False, "max_tokens": len(text.encode())}
        assert choice_texts(await stream(client, "/v1/completions", body)) == {0: text * 2}
        chat = {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": len(text.encode())}
        assert choice_texts(await stream(client, "/v1/chat/completions", chat)) == {0: text}


async def test_request_parameters_are_logged_when_asked_for_but_no_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="quire.requests"):
        async with connect(make_app(enable_log_requests=True)) as client:
            await client.post("/v1/completions", json=GREEDY | {"prompt": "secret", "max_tokens": 7})
        async with connect(make_app()) as client:
            await client.post("/v1/completions", json=GREEDY)
    [record] = [record for record in caplog.records if record.name == "quire.requests"]
    assert "6 prompt tokens, n 1, max_tokens 7" in record.getMessage()
    assert "secret" not in record.getMessage()
    assert record.request_id


async def test_many_prompts_are_prepared_in_turns_and_queued_in_one() -> None:
    """Others run between the prompts of a list; a list gets all its places in the queue, or none."""
    turns = 0
    queued: list[int] = []

    class Watched(FakeEngine):
        def submit(self, request: GenerationRequest) -> None:
            queued.append(turns)
            super().submit(request)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    async with connect(make_app(make_state(engine=Watched()))) as client:
        body = GREEDY | {"prompt": [f"number {i}" for i in range(64)], "max_tokens": 2, "stop": ["x" * 200] * 4}
        reply = await client.post("/v1/completions", json=body)
    counting.cancel()
    assert len(reply.raise_for_status().json()["choices"]) == len(queued) == 64
    assert len(set(queued)) == 1
    assert queued[0] >= 3 * 63, "turns for the tokens, the seed and the choices of each prompt but the first"
