"""GET /usage and /admin/usage, the file of the counts, and budgets by day and month."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import yaml

from api.test_reload import OPERATOR, entry
from quire_engine.contract.errors import ConfigError
from quire_server.metrics.usage import KEPT_DAYS, UsageBook
from quire_server.routes.usage import OwnUsage
from support.fake_engine import FakeEngine
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()
DAY = 86_400.0
MESSAGES = [{"role": "user", "content": "hi"}]
CALLS = {
    "/v1/completions": {"prompt": ["hello", "you"], "max_tokens": 4, "n": 2},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/responses": {"input": "hi", "max_output_tokens": 6},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 7},
    "/v1/embeddings": {"input": ["a", "bc"]},
}
CALLED = [*((path, False) for path in CALLS), *((path, True) for path in CALLS if path != "/v1/embeddings")]


class Clock:
    """Seconds since the epoch that a test sets."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def served(
    clock: Clock, engine: FakeEngine | None = None, **settings: object
) -> AsyncIterator[httpx.AsyncClient]:
    settings.setdefault("admin_api_key", ("operator-key",))
    state = make_state(engine=engine, clock=clock, **settings)
    async with connect(make_app(state)) as client:
        yield client
    state.metrics.usage.close()


def tenants_file(folder: Path, *entries: dict[str, object], **more: object) -> Path:
    path = folder / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": list(entries), **more}))
    return path


def key(name: str) -> dict[str, str]:
    return {"x-api-key": name}


async def ask(client: httpx.AsyncClient, name: str, max_tokens: int = 4, **fields: object) -> httpx.Response:
    body = {"prompt": "hello", "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | fields
    return await client.post("/v1/completions", json=body, headers=key(name))


def numbers(row: dict) -> tuple[int, int, int, int]:
    return row["requests"], row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]


@pytest.mark.parametrize(("path", "stream"), CALLED)
async def test_what_is_counted_is_what_replies_tell(path: str, stream: bool) -> None:
    engine = FakeEngine(num_cached_tokens=2)
    async with served(Clock(), engine, api_key=("alice=key-of-alice", "bob=key-of-bob1")) as client:
        reply = await client.post(path, json=CALLS[path], headers=key("key-of-alice"))
        assert reply.status_code == 200, reply.text
        told = reply.json().get("usage")
        if stream:
            streamed = await client.post(path, json=CALLS[path] | {"stream": True}, headers=key("key-of-alice"))
            assert streamed.status_code == 200
        own = (await client.get("/usage", headers=key("key-of-alice"))).json()
        other = (await client.get("/usage", headers=key("key-of-bob1"))).json()
    OwnUsage.model_validate(own)
    times = 2 if stream else 1
    (row,) = own["usage"]
    assert (row["day"], row["tenant"], row["model"]) == ("2026-01-31", "alice", "fake")
    if told is not None:
        prompt = told.get("prompt_tokens", told.get("input_tokens", 0)) + told.get("cache_read_input_tokens", 0)
        output = told.get("completion_tokens", told.get("output_tokens", 0))
        assert (row["prompt_tokens"], row["output_tokens"]) == (times * prompt, times * output)
    assert row["requests"] == len(engine.submitted)
    assert row["cached_tokens"] == 2 * len(engine.submitted)
    assert (other["usage"], own["tenant"], other["tenant"]) == ([], "alice", "bob")
    assert own["since"] == "2026-01-31T12:00:00+00:00"
    assert own["survives_restart"] is False


async def test_keys_without_a_name_are_told_apart_and_none_sees_another(tmp_path: Path) -> None:
    file = tenants_file(tmp_path, entry("acme", "key-of-acme"))
    async with served(Clock(), api_key=("first-key", "second-key"), tenants=file) as client:
        for name, times in (("first-key", 1), ("second-key", 2), ("key-of-acme", 3)):
            for _ in range(times):
                assert (await ask(client, name)).status_code == 200
        own = {name: (await client.get("/usage", headers=key(name))).json() for name in ("first-key", "second-key")}
        assert (await client.get("/usage")).status_code == 401
        assert (await client.get("/admin/usage", headers=key("first-key"))).status_code == 401
        whole = (await client.get("/admin/usage", headers=OPERATOR)).json()
        of_acme = (await client.get("/admin/usage?tenant=acme&day=2026-01-31", headers=OPERATOR)).json()
        of_before = (await client.get("/admin/usage?day=2026-01-30", headers=OPERATOR)).json()
        wrong = await client.get("/admin/usage?day=yesterday", headers=OPERATOR)
    names = [own[name]["tenant"] for name in own]
    assert len(set(names)) == 2
    assert all(name.startswith("key-") and len(name) == 12 for name in names)
    assert [numbers(own[name]["usage"][0])[0] for name in own] == [1, 2]
    assert {row["tenant"]: row["requests"] for row in whole["usage"]} == dict(
        zip([*names, "acme"], (1, 2, 3), strict=True)
    )
    assert [row["tenant"] for row in of_acme["usage"]] == ["acme"]
    assert of_before["usage"] == []
    assert (wrong.status_code, set(wrong.json())) == (400, {"error"})


async def test_a_server_without_keys_counts_all_together() -> None:
    async with connect(make_app(make_state(clock=Clock())), headers={"host": "localhost"}) as client:
        await ask(client, "")
        own, whole = (await client.get("/usage")).json(), (await client.get("/admin/usage")).json()
    assert own["tenant"] == ""
    assert own["usage"] == whole["usage"]
    assert numbers(own["usage"][0]) == (1, 5, 0, 4)


async def test_the_counts_survive_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    file = tenants_file(tmp_path, entry("acme", "key-of-acme"), usage_file="usage.json")
    for day in range(3):
        clock.now = NOON + day * DAY
        async with served(clock, tenants=file) as client:
            for _ in range(2):
                assert (await ask(client, "key-of-acme")).status_code == 200
            told = (await client.get("/usage", headers=key("key-of-acme"))).json()
        assert (told["since"], told["survives_restart"]) == ("2026-01-31T12:00:00+00:00", True)
        assert [row["day"] for row in told["usage"]] == ["2026-02-02", "2026-02-01", "2026-01-31"][2 - day :]
        assert {numbers(row) for row in told["usage"]} == {(2, 10, 0, 8)}
    assert (tmp_path / "usage.json").stat().st_mode & 0o777 == 0o600
    assert "key-of" not in (tmp_path / "usage.json").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no file of counts"),
        ('{"days": 3}', "is no file of counts"),
        ('{"format": 2, "since": "", "days": {}}', "2"),
    ],
)
def test_a_file_that_cannot_be_gone_on_with_ends_the_start(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "usage.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"usage_file .*usage\.json: ") as caught:
        UsageBook("m", file=file)
    assert words in str(caught.value)
    assert file.read_text() == text


def test_a_file_has_one_server_and_a_folder(tmp_path: Path) -> None:
    book = UsageBook("m", file=tmp_path / "usage.json")
    with pytest.raises(ConfigError, match="another server counts in it"):
        UsageBook("m", file=tmp_path / "usage.json")
    book.close()
    UsageBook("m", file=tmp_path / "usage.json").close()
    with pytest.raises(ConfigError, match="cannot be read and written: No such file"):
        UsageBook("m", file=tmp_path / "nowhere" / "usage.json")


def test_what_cannot_be_written_is_told_once_and_counted_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = UsageBook("m", file=tmp_path / "usage.json", clock=Clock())

    def full(_file: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr("quire_server.metrics.usage.os.fsync", full)
        for _ in range(3):
            book.add("acme", requests=1, prompt=3)
            book.save()
    assert [each.getMessage() for each in caplog.records] == [
        f"usage_file {tmp_path / 'usage.json'}: cannot be written: No space left on device; counts go on"
    ]
    assert json.loads((tmp_path / "usage.json").read_text())["days"] == {}, "the file from before is whole"
    book.close()
    assert json.loads((tmp_path / "usage.json").read_text())["days"]["2026-01-31"]["acme"]["m"]["requests"] == 3


def test_days_are_kept_for_two_months() -> None:
    clock = Clock()
    book = UsageBook("m", clock=clock)
    for day in range(200):
        clock.now = NOON + day * DAY
        book.add("acme", requests=1, prompt=1)
        assert book.tokens("acme", book.today) == 1
        assert book.tokens("acme", book.today.replace(day=1)) == min(book.today.day, day + 1)
    assert len(list(book.by_day())) == KEPT_DAYS


async def test_a_day_and_a_month_have_budgets(tmp_path: Path) -> None:
    clock = Clock()
    file = tenants_file(
        tmp_path, entry("acme", "key-of-acme", tokens_per_day=20, tokens_per_month=25), entry("lab", "key-of-lab1")
    )
    async with served(clock, tenants=file) as client:
        assert [(await ask(client, "key-of-acme")).status_code for _ in range(2)] == [200, 200]
        refused = await ask(client, "key-of-acme")
        assert (await ask(client, "key-of-lab1")).status_code == 200
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (429, "tenant_day_budget", "rate_limit_error")
        assert "budget of 20 tokens a day has 2 left, the prompt has 5" in error["message"]
        assert "the next day begins at 2026-02-01T00:00:00Z" in error["message"]
        assert refused.headers["retry-after"] == "59"
        assert refused.headers["x-should-retry"] == "false"
        told = (await client.get("/usage", headers=key("key-of-acme"))).json()["budgets"]
        assert told == [
            {"period": "day", "limit": 20, "used": 18, "resets_at": "2026-02-01T00:00:00+00:00"},
            {"period": "month", "limit": 25, "used": 18, "resets_at": "2026-02-01T00:00:00+00:00"},
        ]
        clock.now = NOON + DAY / 2 - 10  # the tenth second before midnight
        soon = await ask(client, "key-of-acme")
        assert (soon.headers["retry-after"], soon.headers.get("x-should-retry")) == ("10", None)
        clock.now = NOON + DAY / 2
        assert [(await ask(client, "key-of-acme")).status_code for _ in range(3)] == [200, 200, 429]
        clock.now = NOON + 2 * DAY
        spent = await ask(client, "key-of-acme", prompt="hello hello")
        assert spent.json()["error"]["code"] == "tenant_month_budget"
        assert "the next month begins at 2026-03-01T00:00:00Z" in spent.json()["error"]["message"]
        metrics = (await client.get("/metrics")).text
    assert 'quire_tenant_rejected_total{model_name="fake",reason="tenant_day_budget",tenant="acme"} 3.0' in metrics
    assert 'quire_tenant_rejected_total{model_name="fake",reason="tenant_month_budget",tenant="acme"} 1.0' in metrics


@pytest.mark.parametrize(("path", "stream"), CALLED)
async def test_every_dialect_is_refused_before_anything_is_queued(path: str, stream: bool, tmp_path: Path) -> None:
    engine = FakeEngine()
    file = tenants_file(tmp_path, entry("acme", "key-of-acme", tokens_per_day=100))
    state = make_state(engine=engine, clock=Clock(), tenants=file)
    state.metrics.usage.add("acme", prompt=60, output=40)
    async with connect(make_app(state)) as client:
        body = CALLS[path] | ({"stream": True} if stream else {})
        refused = await client.post(path, json=body, headers=key("key-of-acme"))
    assert refused.status_code == 429, refused.text
    assert "tenant_day_budget" in refused.text
    assert "2026-02-01T00:00:00Z" in refused.text
    assert engine.submitted == []


async def test_a_prompt_that_never_fits_is_not_asked_for_again(tmp_path: Path) -> None:
    clock = Clock()
    clock.now = NOON + DAY / 2 - 1
    file = tenants_file(tmp_path, entry("acme", "key-of-acme", tokens_per_day=3))
    async with served(clock, tenants=file) as client:
        refused = await ask(client, "key-of-acme")
    assert (refused.status_code, refused.headers["x-should-retry"]) == (429, "false")


async def test_prompts_of_one_request_are_checked_together(tmp_path: Path) -> None:
    engine = FakeEngine()
    file = tenants_file(tmp_path, entry("acme", "key-of-acme", tokens_per_day=12))
    async with served(Clock(), engine, tenants=file) as client:
        assert (await ask(client, "key-of-acme", prompt=["hello"] * 3)).status_code == 429
        embedded = {"input": ["hello"] * 3}
        assert (await client.post("/v1/embeddings", json=embedded, headers=key("key-of-acme"))).status_code == 429
        assert engine.submitted == []
        assert (await ask(client, "key-of-acme", prompt=["hello"] * 2, max_tokens=1)).status_code == 200


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", 10**16])
def test_budgets_are_whole_numbers(tmp_path: Path, value: object) -> None:
    from quire_server.settings.keys import read_tenants

    for name in ("tokens_per_day", "tokens_per_month"):
        with pytest.raises(ValueError, match=name):
            read_tenants(tenants_file(tmp_path, entry("acme", "k", **{name: value})))


async def test_a_thousand_tenants_hold_nothing_up() -> None:
    """The reply of an operator comes in pieces, between which streams run."""
    clock = Clock()
    state = make_state(clock=clock, admin_api_key=("operator-key",))
    for day in range(20):
        clock.now = NOON + day * DAY
        for number in range(1000):
            state.metrics.usage.add(f"tenant-{number}", requests=1, prompt=2, output=3)
    async with connect(make_app(state)) as client:
        reply = await client.get("/admin/usage", headers=OPERATOR)
    rows = reply.json()["usage"]
    assert len(rows) == 20_000
    assert len({(row["day"], row["tenant"]) for row in rows}) == 20_000
    assert reply.headers.get("content-length") is None, "it is not made as a whole"
