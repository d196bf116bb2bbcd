"""Adapters and ranks of several models: each answers as it does alone, over loads, ends and orders."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from e2e.served import Served
from e2e.test_adapters import body, complete, ids, order
from several.server import order as model_order
from several.server import row
from support.adapters import write_adapter
from support.checkpoints import make_checkpoint
from support.processes import children_running, lives

pytestmark = pytest.mark.e2e

FLAGS = ("--kv-memory", "2MiB", "--max-model-len", "256", "--allow-local-admin", "--enable-lora", "--num-threads", "2")


def test_adapters_and_ranks_of_two_models(tmp_path: Path) -> None:
    models = {name: make_checkpoint(tmp_path / name, dtype="bfloat16") for name in ("one", "two")}
    adapters = {f"a{i}": write_adapter(tmp_path / f"a{i}", models["one"], seed=i) for i in range(3)}
    expected: dict[str, list[int]] = {}
    with Served(
        "--model", str(models["one"]), "--lora-modules", *(f"{n}={p}" for n, p in adapters.items()), *FLAGS
    ) as alone:
        for name in ("one", *adapters):
            expected[name] = ids(complete(alone, name))
    assert len({tuple(tokens) for tokens in expected.values()}) == 4
    file = tmp_path / "models.yaml"
    file.write_text(
        "models:\n"
        f"- {{model: {models['one']}, tensor_parallel_size: 2, lora_modules: [a0={adapters['a0']}]}}\n"
        f"- {{model: {models['two']}, lora_modules: [a1={adapters['a1']}]}}\n"
    )
    with Served("--models", str(file), *FLAGS, start_seconds=240.0) as sizes:
        taken = {name: row(sizes, name)["loaded_bytes"] for name in models}
    assert taken["one"] - taken["two"] > 200 << 20, "the process of the second rank is not counted"
    budget = ("--model-memory", str(max(taken.values()) + (8 << 20)))
    with Served("--models", str(file), *FLAGS, *budget, limits="model_turn=0.5", start_seconds=240.0) as server:
        listed = {each["id"]: each for each in httpx.get(server.url + "/v1/models", timeout=60).json()["data"]}
        assert {name: each["parent"] for name, each in listed.items()} == {
            "one": None, "a0": "one", "two": None, "a1": "two",
        }  # fmt: skip
        for _ in range(2):  # each time one model makes way for the other, and its adapter is read again
            for name in ("a0", "a1", "one", "two"):
                reply = complete(server, name)
                assert ids(reply) == expected[name if name.startswith("a") else "one"], name
        assert [row(server, name)["state"] for name in models] != ["loaded", "loaded"]
        assert model_order(server, "load", "one").status_code == 200
        ranks = [child.pid for child in children_running(row(server, "one")["pid"], "quire_engine.process.rank")]
        assert len(ranks) == 1
        # By an order while the model has no engine, for the model that is named.
        load = {"lora_name": "a2", "lora_path": str(adapters["a2"])}
        assert order(server, "load", **load, base_model_name="three").status_code == 404
        taken_name = order(server, "load", lora_name="a0", lora_path=str(adapters["a2"]), base_model_name="two")
        assert (taken_name.status_code, "is another model's" in taken_name.text) == (400, True)
        assert order(server, "load", **load, base_model_name="two").status_code == 200
        assert httpx.get(server.url + "/v1/models/a2", timeout=60).json()["parent"] == "two"
        assert ids(complete(server, "a2")) == expected["a2"]
        assert not any(lives(pid) for pid in ranks), "a rank is left behind"
        # A stream of an adapter is held while its model has no engine, and goes on with the same tokens.
        long = httpx.post(server.url + "/v1/completions", json=body("a2", tokens=200), timeout=120)
        with httpx.stream(
            "POST", server.url + "/v1/completions", json={**body("a2", tokens=200), "stream": True}, timeout=120
        ) as held:
            lines = held.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            assert ids(complete(server, "one")) == expected["one"]
            chunks = [first, *(line for line in lines if line.startswith("data: {"))]
        streamed = [token for chunk in chunks for token in _ids_of(chunk)]
        assert streamed == ids(long)
        assert order(server, "unload", lora_name="a2").status_code == 200
        assert complete(server, "a2").status_code == 404
        assert server.metric("quire_engine_restarts_total", model_name="one") == 0


def _ids_of(line: str) -> list[int]:
    choices = httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"]
    return list(choices[0]["token_ids"] or []) if choices else []
