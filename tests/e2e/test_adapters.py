"""Adapters over HTTP: by name, in one batch, loaded, replaced and unloaded while streams run, and after `kill -9`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.served import Served
from e2e.streams import Streamed, client, over_kills, stream
from support.adapters import write_adapter
from support.checkpoints import make_checkpoint

pytestmark = pytest.mark.e2e

LONG = 450  # tokens of a stream that still runs when an adapter was replaced beside it


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lora") / "tiny", dtype="bfloat16")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / f"a{i}", model, seed=i) for i in range(3)]


def serve(model: Path, adapters: list[Path], *flags: str) -> Served:
    modules = [f"{path.name}={path}" for path in adapters]
    lora = ["--enable-lora", *(["--lora-modules", *modules] if modules else [])]
    return Served("--model", str(model), "--served-model-name", "tiny", *lora, *flags)


@pytest.fixture(scope="module")
def server(model: Path, adapters: list[Path]) -> Iterator[Served]:
    """With two adapters, and room for two."""
    with serve(model, adapters[:2], "--max-loras", "2", "--max-cpu-loras", "2", "--max-model-len", "512") as started:
        yield started


def body(name: str | None, tokens: int = 24, prompt: str = "Once upon a time", **fields: Any) -> dict[str, Any]:
    asked = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True, "temperature": 0}
    return {**asked, **({} if name is None else {"model": name}), **fields}


def complete(server: Served, name: str | None, **fields: Any) -> httpx.Response:
    return httpx.post(server.url + "/v1/completions", json=body(name, **fields), timeout=60)


def ids(reply: httpx.Response) -> list[int]:
    assert reply.status_code == 200, reply.text
    return list(reply.json()["choices"][0]["token_ids"])


def order(server: Served, what: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{what}_lora_adapter", json=fields, timeout=60)


def test_names_lists_and_orders(server: Served, model: Path, adapters: list[Path], tmp_path: Path) -> None:
    listed = {each["id"]: each for each in httpx.get(server.url + "/v1/models").json()["data"]}
    assert list(listed) == ["tiny", "a0", "a1"]
    assert (listed["tiny"]["parent"], listed["a0"]["parent"], listed["a0"]["root"]) == (
        None,
        "tiny",
        str(adapters[0]),
    )
    assert httpx.get(server.url + "/v1/models/a1").json()["id"] == "a1"
    replies = {name: complete(server, name) for name in ("tiny", "a0", "a1")}
    assert len({tuple(ids(reply)) for reply in replies.values()}) == 3
    assert replies["a0"].json()["model"] == "a0"
    assert replies["a0"].headers["x-quire-adapter"].startswith("a0@sha256:")
    assert "x-quire-adapter" not in replies["tiny"].headers
    assert len({reply.json()["system_fingerprint"] for reply in replies.values()}) == 3
    assert complete(server, "a2").status_code == 404
    assert complete(server, "a2").json()["error"]["code"] == "model_not_found"
    # A third one, though there is room for two.
    reply = order(server, "load", lora_name="a2", lora_path=str(adapters[2]))
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'a2' added successfully.")
    third = ids(complete(server, "a2"))
    assert [ids(complete(server, name)) for name in ("a0", "a1", "a2")] == [
        ids(replies["a0"]), ids(replies["a1"]), third,
    ]  # fmt: skip
    for fields, status, message in (
        ({"lora_name": "a2", "lora_path": str(adapters[2])}, 400, "already been loaded"),
        ({"lora_name": "tiny", "lora_path": str(adapters[2])}, 400, "is the model's own"),
        ({"lora_name": "x", "lora_path": str(tmp_path / "none")}, 400, "no such directory"),
        ({"lora_name": "x", "lora_path": str(model)}, 400, "adapter_config.json"),
        ({"lora_name": "x y", "lora_path": "/"}, 400, "lora_name"),
    ):
        refused = order(server, "load", **fields)
        assert (refused.status_code, message in refused.text) == (status, True), refused.text
    reply = order(server, "unload", lora_name="a2")
    assert (reply.status_code, reply.text) == (200, "Success: LoRA adapter 'a2' removed successfully.")
    assert order(server, "unload", lora_name="a2").status_code == 404
    assert complete(server, "a2").status_code == 404
    chat = {"model": "a1", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert httpx.post(server.url + "/v1/chat/completions", json=chat, timeout=60).json()["model"] == "a1"
    vectors = [
        httpx.post(server.url + "/v1/embeddings", json={"model": name, "input": "Hi"}, timeout=60).json()
        for name in ("tiny", "a0")
    ]
    assert vectors[0]["data"] != vectors[1]["data"]
    server.wait_idle()


def test_two_adapters_go_on_after_kills(server: Served) -> None:
    names = ["a0", "a1", None, "a0", "a1", None]
    wanted = [body(name, tokens=300, prompt=f"Story {i}") for i, name in enumerate(names)]
    restarts = server.metric("quire_engine_restarts_total")

    async def run() -> None:
        async with client(server.url) as http:
            alone = await asyncio.gather(*(stream(http, request) for request in wanted))
            killed = await over_kills(server, http, wanted, [80, 160])
        for before, after in zip(alone, killed, strict=True):
            assert (after.errors, after.token_ids, after.done) == ([], before.token_ids, True)
        assert len({tuple(each.token_ids) for each in alone}) == len(alone)
        assert server.metric("quire_engine_restarts_total") == restarts + 2
        server.wait_idle()

    asyncio.run(run())


def test_replicas_share_the_adapters(model: Path, adapters: list[Path]) -> None:
    """One of them loads an adapter by order, the other one when a stream with it comes over."""
    names = ["a0", "a1", None, "a2"] * 3
    wanted = [body(name, tokens=200, prompt=f"Story {i}") for i, name in enumerate(names)]

    async def run(server: Served) -> None:
        loaded = order(server, "load", lora_name="a2", lora_path=str(adapters[2]))
        assert loaded.status_code == 200, loaded.text
        async with client(server.url) as http:
            alone = [await stream(http, request) for request in wanted]
            tasks = [asyncio.create_task(stream(http, request)) for request in wanted]
            await asyncio.sleep(0.3)
            drained = await http.post("/admin/replicas/1/drain")
            assert drained.status_code == 200, drained.text
            together = await asyncio.gather(*tasks)
        for before, after in zip(alone, together, strict=True):
            assert (after.errors, after.token_ids, after.done) == ([], before.token_ids, True)
        assert order(server, "unload", lora_name="a2").status_code == 200
        server.wait_idle()

    with serve(model, adapters[:2], "--max-loras", "3", "--replicas", "2") as server:
        asyncio.run(run(server))


def test_what_runs_keeps_its_adapter_while_it_is_replaced_and_unloaded(
    server: Served, model: Path, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "x", model, seed=10)
    assert order(server, "load", lora_name="x", lora_path=str(path)).status_code == 200

    async def run() -> None:
        async with client(server.url) as http:
            alone = await stream(http, body("x", tokens=LONG))
            base = await stream(http, body(None, tokens=LONG))
            begun = asyncio.Event()

            def on_chunk(seen: Streamed) -> None:
                if len(seen.token_ids) > 3:
                    begun.set()

            first = asyncio.create_task(stream(http, body("x", tokens=LONG), on_chunk=on_chunk))
            beside = asyncio.create_task(stream(http, body(None, tokens=LONG)))
            await begun.wait()
            write_adapter(path, model, seed=11)
            answer = await http.post(
                "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(path), "load_inplace": True}
            )
            assert answer.status_code == 200, answer.text
            second = await stream(http, body("x", tokens=8))
            assert not first.done()
            assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "x"})).status_code == 200
            assert (await http.post("/v1/completions", json=body("x"))).status_code == 404
            assert (await first).token_ids == alone.token_ids
            assert (await beside).token_ids == base.token_ids
            assert second.token_ids != alone.token_ids[:8]

    asyncio.run(run())


def test_after_a_crash_changed_files_end_a_request_with_an_error(server: Served, model: Path, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "x", model, seed=20)
    assert order(server, "load", lora_name="x", lora_path=str(path)).status_code == 200

    async def run() -> None:
        async with client(server.url) as http:
            begun = asyncio.Event()
            first = asyncio.create_task(stream(http, body("x", tokens=400), on_chunk=lambda _: begun.set()))
            await begun.wait()
            write_adapter(path, model, seed=21)
            os.kill(server.engine().pid, signal.SIGKILL)
            ended = await first
            assert len(ended.errors) == 1
            assert "no longer those that it was loaded from" in str(ended.errors[0])
            assert ids(await http.post("/v1/completions", json=body(None)))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--enable-lora", "--lora-modules", "x=/nowhere"), "--lora-modules x: The adapter cannot be loaded: /nowhere"),
        (("--lora-modules", "x=/nowhere"), "--lora-modules needs --enable-lora"),
        (("--enable-lora", "--max-loras", "3", "--max-cpu-loras", "2"), "--max-cpu-loras 2 is less than the 3"),
    ],
)
def test_a_start_that_cannot_be_says_why_in_one_line(model: Path, flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match="the server exited") as failed, Served("--model", str(model), *flags):
        pass
    assert message in str(failed.value)
