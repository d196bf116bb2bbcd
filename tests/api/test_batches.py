"""Batches: the answers of direct requests, each line once, also after a kill; cancelled, expired, refused."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire_server.batches import runner
from quire_server.batches.usage import usage_of
from support.batches import COMPLETIONS, batching, begin, content_of, ended, has_completed, line, shows, until, upload
from support.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


SIDES = (("prompt", "input_tokens"), ("completion", "output_tokens"))


def tokens(of_input: int, of_output: int) -> dict[str, object]:
    """A batch's usage without cached tokens and thoughts."""
    return {
        "input_tokens": of_input,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": of_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": of_input + of_output,
    }


def texts(results: list[dict[str, Any]]) -> dict[str, str]:
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in results}


async def test_lines_get_the_answers_of_direct_requests(tmp_path: Path) -> None:
    lines = [line(f"l{n}", seed=n, temperature=1) for n in range(40)]
    async with batching(tmp_path) as client:
        batch = await ended(client, await begin(client, lines, metadata={"of": "mine"}))
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert batch["error_file_id"] is None
        assert batch["metadata"] == {"of": "mine"}
        assert batch["in_progress_at"] <= batch["finalizing_at"] <= batch["completed_at"]
        results = await content_of(client, batch["output_file_id"])
        assert [each["custom_id"] for each in results] == [each["custom_id"] for each in lines]
        replies = {each["custom_id"]: (await client.post(COMPLETIONS, json=each["body"])).json() for each in lines}
        direct = {name: reply["choices"][0]["text"] for name, reply in replies.items()}
        assert texts(results) == direct
        usage = [reply["usage"] for reply in replies.values()]
        assert batch["usage"] == tokens(
            sum(each["prompt_tokens"] for each in usage), sum(each["completion_tokens"] for each in usage)
        )
        assert len(set(direct.values())) > 10
        for each in results:
            assert each["error"] is None
            assert each["response"]["status_code"] == 200
            assert each["response"]["request_id"]
        listed = (await client.get("/v1/batches")).json()
        assert listed["data"] == [batch]
        output = (await client.get(f"/v1/files/{batch['output_file_id']}")).json()
        assert output["purpose"] == "batch_output"
        assert (
            'quire_batch_lines_total{model_name="fake",outcome="completed"} 40.0' in (await client.get("/metrics")).text
        )


async def test_lines_with_errors_are_in_a_file_of_their_own(tmp_path: Path) -> None:
    lines = [line("good"), line("bad", temperature=9), line("long", prompt="a" * 2000), line("odd", max_tokens="x")]
    async with batching(tmp_path) as client:
        begun = await begin(client, lines)
        assert begun["usage"] is None
        batch = await ended(client, begun)
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 4, "completed": 1, "failed": 3}
        (good,) = await content_of(client, batch["output_file_id"])
        usage = good["response"]["body"]["usage"]
        assert batch["usage"] == tokens(usage["prompt_tokens"], usage["completion_tokens"])
        assert list(texts(await content_of(client, batch["output_file_id"]))) == ["good"]
        errors = await content_of(client, batch["error_file_id"])
        assert [each["custom_id"] for each in errors] == ["bad", "long", "odd"]
        assert {each["response"]["status_code"] for each in errors} == {400}
        assert errors[0]["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
        ("/v1/score", {"text_1": "a", "text_2": ["b"]}),
    ],
)
async def test_other_endpoints(tmp_path: Path, endpoint: str, body: dict[str, Any]) -> None:
    request = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    async with batching(tmp_path) as client:
        batch = await ended(client, await begin(client, [request], endpoint))
        (result,) = await content_of(client, batch["output_file_id"])
        direct = (await client.post(endpoint, json=body)).json()
        assert result["response"]["body"]["object"] == direct["object"]
        usage = direct["usage"]
        wanted = [usage.get(f"{name}_tokens", usage.get(other, 0)) for name, other in SIDES]
        assert batch["usage"] == tokens(*wanted)
        assert batch["usage"]["total_tokens"] == usage["total_tokens"] > 0


def test_cached_tokens_and_thoughts_are_told_apart() -> None:
    chat = b"""{"response": {"status_code": 200, "body": {"usage": {"prompt_tokens": 9, "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 4}, "completion_tokens_details": {"reasoning_tokens": 2}}}}}"""
    response = b"""{"response": {"body": {"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}}}}}"""
    assert usage_of(chat) == usage_of(response)
    shown = (usage_of(chat) + usage_of(response) + usage_of(b'{"response": null}')).shown()
    assert shown == {
        "input_tokens": 18,
        "input_tokens_details": {"cached_tokens": 8},
        "output_tokens": 10,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 28,
    }


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"", "empty_file", None),
        (b"\n\n", "empty_file", None),
        (b"no json\n", "invalid_json_line", 1),
        (b'\n{"custom_id": "a"}', "invalid_request", 2),
        (b"[]", "invalid_request", 1),
        (b'{"custom_id": 1, "method": "POST", "url": "/v1/completions", "body": {}}', "invalid_request", 1),
        (b'{"custom_id": "", "method": "POST", "url": "/v1/completions", "body": {}}', "invalid_request", 1),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": []}', "invalid_request", 1),
        (b'{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "invalid_method", 1),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {}}', "mismatched_url", 1),
        (b'{"custom_id": "a", "method": "POST", "url": "/admin/drain", "body": {}}', "mismatched_url", 1),
        (
            b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"stream": true}}',
            "stream_not_supported",
            1,
        ),
        (
            b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "no"}}',
            "model_not_found",
            1,
        ),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n' * 2, "duplicate_custom_id", 2),
        (b'{"a":' * 100_000, "invalid_json_line", 1),
        (b'{"custom_id": "\xff", "method": "POST", "url": "/v1/completions", "body": {}}', "invalid_json_line", 1),
        (b'{"a":"' + b"x" * (9 << 20), "line_too_long", 1),
    ],
)
async def test_wrong_inputs_fail_as_a_whole(tmp_path: Path, content: bytes, code: str, number: int | None) -> None:
    engine = FakeEngine()
    async with batching(tmp_path, engine=engine) as client:
        batch = await ended(client, await begin(client, content))
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == code
        assert batch["errors"]["data"][0]["line"] == number
        assert (batch["output_file_id"], batch["error_file_id"]) == (None, None)
        assert engine.submitted == []


async def test_bodies_are_as_strict_as_direct_ones(tmp_path: Path) -> None:
    twice = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "prompt": "b"}}'
    async with batching(tmp_path) as client:
        batch = await ended(client, await begin(client, twice))
        (result,) = await content_of(client, batch["error_file_id"])
        assert result["response"]["status_code"] == 400


@pytest.mark.parametrize(
    "wrong",
    [
        {"endpoint": "/admin/abort"},
        {"completion_window": "1y"},
        {"completion_window": "31d"},
        {"input_file_id": None},
        {"metadata": {"a": 1}},
        {"metadata": {str(n): "" for n in range(17)}},
        {"unknown": 1},
    ],
)
async def test_wrong_orders_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    async with batching(tmp_path) as client:
        file = (await upload(client, b"x")).json()["id"]
        asked = {"input_file_id": file, "endpoint": COMPLETIONS, "completion_window": "24h", **wrong}
        reply = await client.post("/v1/batches", json=asked)
        assert reply.status_code == 400, reply.text
        assert (await client.get("/v1/batches")).json()["data"] == []


async def test_a_killed_server_goes_on_where_it_was(tmp_path: Path) -> None:
    lines = [line(f"l{n}", seed=n, temperature=1, max_tokens=12) for n in range(60)]
    engine = FakeEngine(step_seconds=0.002)
    async with batching(tmp_path / "first", engine=engine) as client:
        batch = await begin(client, lines)
        await has_completed(client, batch, 10)
        engine.hold()
        # What a process that was killed has left on the disk, while lines are under way.
        shutil.copytree(tmp_path / "first", tmp_path / "second")
        engine.release()
        await ended(client, batch)
    again = FakeEngine()
    async with batching(tmp_path / "second", engine=again) as client:
        batch = await ended(client, batch)
        assert batch["request_counts"] == {"total": 60, "completed": 60, "failed": 0}
        results = await content_of(client, batch["output_file_id"])
        assert [each["custom_id"] for each in results] == [each["custom_id"] for each in lines]
        assert len(again.submitted) <= 50, "lines with a result are not run again"
        direct = [(await client.post(COMPLETIONS, json=each["body"])).json()["choices"][0]["text"] for each in lines]
        assert list(texts(results).values()) == direct


async def test_a_stopped_server_goes_on_too(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.hold()
    async with batching(tmp_path, engine=engine) as client:
        batch = await begin(client, [line("a"), line("b")])
        await until(lambda: len(engine.submitted) >= 2)
    assert len(engine.aborted) == 2
    async with batching(tmp_path) as client:
        batch = await ended(client, batch)
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


async def test_a_cancelled_batch_keeps_what_it_has(tmp_path: Path) -> None:
    def reply(request: Any, choice: int) -> list[int]:
        return [ord("a")]

    engine = FakeEngine(step_seconds=0.001, replies=reply)
    async with batching(tmp_path, engine=engine) as client:
        batch = await begin(client, [line("short"), *(line(f"l{n}", max_tokens=400) for n in range(30))])
        await has_completed(client, batch, 1)
        cancelled = (await client.post(f"/v1/batches/{batch['id']}/cancel")).json()
        assert cancelled["status"] == "cancelling"
        batch = await ended(client, batch)
        assert batch["status"] == "cancelled"
        output = await content_of(client, batch["output_file_id"])
        errors = await content_of(client, batch["error_file_id"])
        assert "short" in texts(output)
        assert len({each["custom_id"] for each in output + errors}) == len(output + errors) == 31
        assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
        assert engine.live == (), "lines under way were aborted"
        again = await client.post(f"/v1/batches/{batch['id']}/cancel")
        assert again.json()["status"] == "cancelled"
        whole = await ended(client, await begin(client, [line("a")]))
        refused = await client.post(f"/v1/batches/{whole['id']}/cancel")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "batch_ended")
        assert (await client.post("/v1/batches/batch_none/cancel")).status_code == 404


async def test_batch_lines_go_after_live_requests(tmp_path: Path) -> None:
    engine = FakeEngine(step_seconds=0.001)
    engine.hold()
    async with batching(tmp_path, engine=engine) as client:
        live = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "live", "max_tokens": 4}))
        await until(lambda: bool(engine.submitted))
        batch = await begin(client, [line(f"l{n}") for n in range(100)])
        await until(lambda: len(engine.submitted) >= 2)
        await asyncio.sleep(0.1)
        running = [each for each in engine.submitted if each.service_class == "batch"]
        assert 1 <= len(running) <= 6, "a tenth of 64 seats"
        assert engine.submitted[0].service_class == "interactive"
        engine.release()
        assert (await live).status_code == 200
        assert (await ended(client, batch))["request_counts"]["completed"] == 100


async def test_a_tenants_batch_is_the_tenants(tmp_path: Path) -> None:
    def write(keys: list[str]) -> None:
        digests = [hashlib.sha256(key.encode()).hexdigest() for key in keys]
        file.write_text(yaml.safe_dump({"tenants": [{"name": "acme", "key_sha256": digests, "weight": 2}]}))

    file, folder = tmp_path / "tenants.yaml", tmp_path / "kept"
    write(["old-key-of-acme", "other-key-of-acme"])
    engine = FakeEngine()
    engine.hold()
    old, other = ({"authorization": f"Bearer {which}-key-of-acme"} for which in ("old", "other"))
    async with batching(folder, engine=engine, tenants=file, headers=old) as client:
        batch = await begin(client, [line("a")])
        assert (await client.get(f"/v1/batches/{batch['id']}", headers=other)).status_code == 200
        await until(lambda: bool(engine.submitted))
        (request,) = engine.submitted
        assert (request.tenant, request.weight, request.service_class) == ("acme", 2, "batch")
        assert request.cache_salt.startswith("tenant acme")
    write(["new-key-of-acme"])
    new = {"authorization": "Bearer new-key-of-acme"}
    async with batching(folder, tenants=file, headers=new) as client:  # the tenant has got another key
        assert (await ended(client, batch))["request_counts"]["completed"] == 1


async def test_lines_of_a_key_that_holds_no_more_are_refused(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.hold()
    async with batching(
        tmp_path, engine=engine, api_key=("ann=key-of-ann", "key-of-bob"), headers={"x-api-key": "key-of-ann"}
    ) as client:
        batch = await begin(client, [line("a")])
        path = f"/v1/batches/{batch['id']}"
        assert (await client.get(path, headers={"x-api-key": "key-of-bob"})).status_code == 404
    async with batching(tmp_path, api_key=("key-of-bob",), headers={"x-api-key": "key-of-bob"}) as client:
        sample = 'quire_batch_lines_total{model_name="fake",outcome="failed"} 1.0'
        await shows(client, sample)
        assert (await client.get(path)).status_code == 404


async def test_nobody_makes_a_request_look_like_a_line(tmp_path: Path) -> None:
    async with batching(tmp_path, api_key=("key-of-bob",)) as client:
        for headers in ({"quire.vouched": "x"}, {"x-quire-vouched": "x"}, {"authorization": "Bearer "}):
            reply = await client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
            assert reply.status_code == 401


async def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    async with batching(tmp_path):
        with pytest.raises(Exception, match="another server uses it"):
            async with batching(tmp_path):
                pass


async def test_failures_of_the_server_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST_WAIT", 0.1)
    engine = FakeEngine(fail_after=1)
    async with batching(tmp_path, engine=engine) as client:
        batch = await begin(client, [line("a")])
        await until(lambda: len(engine.submitted) >= 2)
        engine.fail_after = None
        batch = await ended(client, batch)
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}


async def test_a_full_queue_only_delays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MOST_WAIT", 0.1)
    async with batching(tmp_path, engine=FakeEngine(), max_queued_sequences=2) as client:
        batch = await ended(client, await begin(client, [line(f"l{n}") for n in range(12)]))
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}


async def test_a_batch_expires_with_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire_server.batches.store import BatchStore

    monkeypatch.setattr(runner, "TICK_SECONDS", 0.05)
    engine = FakeEngine()
    async with batching(tmp_path, engine=engine) as client:
        engine.hold()
        batch = await begin(client, [line("a"), line("b")], completion_window="1m")
        assert batch["expires_at"] == batch["created_at"] + 60
        await until(lambda: len(engine.submitted) >= 2)
        monkeypatch.setattr(BatchStore, "now", lambda self: batch["expires_at"])
        batch = await ended(client, batch)
        assert batch["status"] == "expired"
        assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
        errors = await content_of(client, batch["error_file_id"])
        assert [each["error"]["code"] for each in errors] == ["batch_expired"] * 2
        assert engine.live == ()


async def test_at_its_bound_of_bytes_a_client_gets_no_further_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 40_000
    lines = [line(f"l{n}", max_tokens=400) for n in range(40)]
    async with batching(tmp_path, max_files_bytes=most) as client:
        batch = await ended(client, await begin(client, lines))
        assert batch["status"] == "completed"
        assert batch["request_counts"]["failed"] > 0
        assert batch["request_counts"]["completed"] > 0
        (error, *_) = await content_of(client, batch["error_file_id"])
        assert (error["response"], error["error"]["code"]) == (None, "file_quota_exceeded")
        assert sum(each.stat().st_size for each in (tmp_path / "files").iterdir()) <= most
        asked = {"input_file_id": batch["input_file_id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
        again = await ended(client, (await client.post("/v1/batches", json=asked)).json())
        assert again["status"] == "failed", "its refusals alone have no room"
        assert [each["code"] for each in again["errors"]["data"]] == ["file_quota_exceeded"]
        left = most - sum(file["bytes"] for file in (await client.get("/v1/files")).json()["data"])
        assert [(await upload(client, b"x" * size)).status_code for size in (left + 1, left)] == [400, 200]
        reply = await client.post("/v1/batches", json=asked)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "file_quota_exceeded")
        assert sum(each.stat().st_size for each in (tmp_path / "files").iterdir()) == most
        for file in (await client.get("/v1/files")).json()["data"]:
            if file["id"] != batch["input_file_id"]:
                assert (await client.delete(f"/v1/files/{file['id']}")).status_code == 200
        monkeypatch.setattr(runner, "MAX_ANSWER_BYTES", 10)
        batch = await ended(client, (await client.post("/v1/batches", json=asked)).json())
        codes = {each["error"]["code"] for each in await content_of(client, batch["error_file_id"])}
        assert codes == {"answer_too_large"}
