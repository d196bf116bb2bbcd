"""Tenants, their limits, classes and deadlines over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from pathlib import Path

import pytest
import yaml

from quire_server.flags import parse_flags
from quire_server.settings import Settings, SettingsError
from support.events import until
from support.fake_engine import FakeEngine
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio
COMPLETION, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
BODY = {"model": "fake", "prompt": "hello", "temperature": 0, "max_tokens": 4}
CHAT_BODY = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
KEYS = {"acme": "key-of-acme", "lab": "key-of-lab"}


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def tenants_file(folder: Path, **limits: dict[str, object]) -> Path:
    """A file with all of KEYS; `limits` are more fields of some."""
    entries = [{"name": name, "key_sha256": digest(key), **limits.get(name, {})} for name, key in KEYS.items()]
    path = folder / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": entries}))
    return path


def bearing(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


async def test_a_key_of_the_file_lets_in_and_says_whose_the_request_is(tmp_path: Path) -> None:
    file = tenants_file(tmp_path, acme={"weight": 2.5, "max_running": 3}, lab={"class": "batch"})
    engine = FakeEngine()
    async with connect(make_app(engine=engine, tenants=file, api_key=("plain-key-1",))) as client:
        for key in ("key-of-acme", "key-of-lab", "plain-key-1"):
            assert (await client.post(COMPLETION, json=BODY, headers={"x-api-key": key})).status_code == 200
        assert (await client.post(COMPLETION, json=BODY)).status_code == 401
        assert (
            await client.post(COMPLETION, json=BODY, headers={"x-api-key": digest("key-of-acme")})
        ).status_code == 401
    seen = [(each.tenant, each.weight, each.service_class, each.max_running) for each in engine.submitted]
    assert seen == [("acme", 2.5, "interactive", 3), ("lab", 1.0, "batch", 0), ("", 1.0, "interactive", 0)]


async def test_with_fair_queueing_keys_with_names_are_tenants() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine, api_key=("alice=secret-of-alice",), scheduling_policy="wfq")
    async with connect(make_app(state)) as client:
        await client.post(COMPLETION, json=BODY, headers={"x-api-key": "secret-of-alice"})
    assert engine.submitted[0].tenant == "alice"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected `tenants:`"),
        ("tenants: []", "expected `tenants:`"),
        ("tenants: [{name: a}]", "tenant 1 ('a'): key_sha256: Field required"),
        ("tenants: [{name: a, key_sha256: secret}]", "a digest is 64 digits"),
        (f"tenants: [{{name: 'a b', key_sha256: {digest('k')}}}]", "name: String should match pattern"),
        (f"tenants: [{{name: a, key_sha256: {digest('k')}, rate: 3}}]", "rate: Extra inputs are not permitted"),
        (f"tenants: [{{name: a, key_sha256: {digest('k')}, weight: 0}}]", "weight: Input should be greater than"),
        (f"tenants: [{{name: a, key_sha256: {digest('k')}, class: slow}}]", "class: Input should be"),
        (
            f"tenants: [{{name: a, key_sha256: {digest('k')}}}, {{name: a, key_sha256: {digest('l')}}}]",
            "two tenants have the name a",
        ),
        (
            f"tenants: [{{name: a, key_sha256: {digest('k')}}}, {{name: b, key_sha256: {digest('k')}}}]",
            "two tenants have the key of",
        ),
        ("tenants: [", "not YAML"),
    ],
)
def test_a_file_that_cannot_be_kept_is_refused_at_the_start(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        parse_flags(["--tenants", str(file)])
    assert words in str(caught.value)
    assert "--tenants" in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        parse_flags(["--tenants", str(tmp_path / "none.yaml")])
    assert not Settings().needs_key


async def test_over_its_rate_a_tenant_is_refused_and_others_are_not(tmp_path: Path) -> None:
    file = tenants_file(tmp_path, acme={"requests_per_minute": 2})
    async with connect(make_app(tenants=file)) as client:
        statuses = [(await client.post(COMPLETION, json=BODY, headers=bearing("acme"))).status_code for _ in range(2)]
        refused = await client.post(COMPLETION, json=BODY, headers=bearing("acme"))
        other = await client.post(COMPLETION, json=BODY, headers=bearing("lab"))
        metrics = (await client.get("/metrics")).text
    assert (statuses, other.status_code, refused.status_code) == ([200, 200], 200, 429)
    assert refused.json()["error"]["code"] == "tenant_requests"
    assert int(refused.headers["retry-after"]) == 30  # two a minute
    assert 'quire_tenant_requests_total{model_name="fake",tenant="acme"} 2.0' in metrics
    assert 'quire_tenant_rejected_total{model_name="fake",reason="tenant_requests",tenant="acme"} 1.0' in metrics
    assert 'quire_tenant_rejected_total{model_name="fake",reason="tenant_queue",tenant="lab"} 0.0' in metrics
    assert 'quire_rejected_total{model_name="fake",reason="tenant"} 1.0' in metrics


async def test_over_its_quota_of_waiting_requests_a_tenant_is_refused(tmp_path: Path) -> None:
    file = tenants_file(tmp_path, acme={"max_queued": 2})
    engine = FakeEngine()
    engine.hold()
    async with connect(make_app(engine=engine, tenants=file)) as client:
        accepted = [asyncio.create_task(client.post(COMPLETION, json=BODY, headers=bearing("acme"))) for _ in range(2)]
        await until(lambda: len(engine.submitted) == 2)
        refused = await client.post(COMPLETION, json=BODY, headers=bearing("acme"))
        engine.release()
        replies = await asyncio.gather(*accepted)
        again = await client.post(COMPLETION, json=BODY, headers=bearing("acme"))
    assert [reply.status_code for reply in replies] == [200, 200]
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_queue")
    assert again.status_code == 200, "what has ended waits no more"


async def test_flex_is_batch_and_other_tiers_are_reported() -> None:
    engine = FakeEngine()
    async with connect(make_app(engine=engine)) as client:
        replies = [
            await client.post(path, json=body | {"service_tier": tier})
            for path, body in ((COMPLETION, BODY), (CHAT, CHAT_BODY), (EMBEDDINGS, {"input": "a"}))
            for tier in ("flex", "default", "priority")
        ]
        response = await client.post("/v1/responses", json={"input": "hi", "service_tier": "flex"})
    assert {reply.status_code for reply in [*replies, response]} == {200}
    assert [each.service_class for each in engine.submitted] == ["batch", "interactive", "interactive"] * 3 + ["batch"]
    assert ["service_tier" in reply.headers.get("x-quire-ignored", "") for reply in replies] == [False, False, True] * 3
    assert response.json()["service_tier"] == "flex"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETION, BODY),
        (CHAT, CHAT_BODY),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": CHAT_BODY["messages"], "max_tokens": 4}),
        (EMBEDDINGS, {"input": "a"}),
    ],
)
@pytest.mark.parametrize("how", ["field", "header"])
async def test_at_its_deadline_a_request_that_waits_ends(path: str, body: dict[str, object], how: str) -> None:
    for seconds in (0.15, 1.2, 9.6):  # a busy machine may be over the first ones before the engine has the request
        engine = FakeEngine()
        engine.hold()
        headers = {"X-Request-Timeout": str(seconds if how == "header" else 600)}
        async with connect(make_app(engine=engine)) as client:
            started = time.monotonic()
            fields = {"timeout": seconds} if how == "field" else {}
            reply = await client.post(path, json=body | fields, headers=headers)
        assert reply.status_code == 504, reply.text
        assert "deadline_exceeded" in reply.text
        assert reply.headers["x-should-retry"] == "false"
        assert seconds <= time.monotonic() - started < 300
        assert engine.live == (), "the engine goes on computing it"
        if engine.submitted:
            break
    assert len(engine.aborted) == 1


async def test_a_stream_that_has_begun_ends_with_one_error() -> None:
    engine = FakeEngine(step_seconds=0.02)
    state = make_state(engine=engine)
    async with connect(make_app(state)) as client:
        reply = await client.post(CHAT, json=CHAT_BODY | {"stream": True, "timeout": 0.3, "max_tokens": 400})
        metrics = (await client.get("/metrics")).text
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    errors = [json.loads(event)["error"] for event in events[:-1] if "error" in json.loads(event)]
    assert [error["code"] for error in errors] == ["deadline_exceeded"]
    assert len(events) > 5
    assert engine.live == ()
    assert 'quire_deadlines_exceeded_total{model_name="fake"} 1.0' in metrics
    assert state.client._deadlines == {}


async def test_a_request_that_ends_in_time_is_not_touched_by_its_deadline() -> None:
    engine = FakeEngine()
    state = make_state(engine=engine)
    async with connect(make_app(state)) as client:
        reply = await client.post(COMPLETION, json=BODY | {"timeout": 5, "n": 3})
    assert reply.status_code == 200
    assert engine.submitted[0].deadline == pytest.approx(engine.submitted[0].arrival_time + 5, abs=0.5)
    assert (engine.aborted, state.client._deadlines) == ([], {})


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf", "1e9", ""])
async def test_a_timeout_that_is_none_is_refused(value: str) -> None:
    async with connect(make_app()) as client:
        reply = await client.post(COMPLETION, json=BODY, headers={"X-Request-Timeout": value})
        field = await client.post(COMPLETION, json=BODY | {"timeout": 0})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-request-timeout")
    assert (field.status_code, field.json()["error"]["param"]) == (400, "timeout")
