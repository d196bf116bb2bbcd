"""Batches of a real server with the unmodified openai package, over `kill -9`; and `quire run-batch`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.served import Served

pytestmark = pytest.mark.e2e

KEY = "test-key"
MODEL = "quire-demo"


def request(number: int, **body: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": f"Once {number}", "max_tokens": 24, "seed": number, "temperature": 1, **body}
    return {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return path


def texts(results: str) -> dict[str, str]:
    lines = [json.loads(line) for line in results.splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, timeout=60)


def finished(api: openai.OpenAI, batch_id: str) -> Any:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        batch = api.batches.retrieve(batch_id)
        if batch.status in {"completed", "failed", "expired", "cancelled"}:
            return batch
        time.sleep(0.1)
    raise TimeoutError(batch_id)


def test_the_sdks_batches_go_on_after_kill_9(tmp_path: Path) -> None:
    flags = ("--api-key", KEY, "--batch-dir", str(tmp_path / "kept"), "--max-num-seqs", "4")
    requests = [request(number) for number in range(200)]
    with Served(*flags) as server, client_of(server) as api:
        file = api.files.create(file=write(tmp_path / "in.jsonl", requests), purpose="batch")
        assert [each.id for each in api.files.list()] == [file.id]
        batch = api.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"a": "b"}
        )
        while (counts := api.batches.retrieve(batch.id).request_counts) is None or counts.completed < 20:
            time.sleep(0.02)
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with Served(*flags) as server, client_of(server) as api:
        batch = finished(api, batch.id)
        assert batch.status == "completed"
        assert (batch.request_counts.total, batch.request_counts.completed) == (200, 200)
        got = texts(api.files.content(batch.output_file_id).text)
        assert list(got) == [each["custom_id"] for each in requests]
        for each in requests[::20]:
            assert api.completions.create(**each["body"]).choices[0].text == got[each["custom_id"]]
        assert [each.id for each in api.batches.list()] == [batch.id]
        assert api.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            api.files.retrieve(file.id)


def run_batch(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "quire_server.cli", "run-batch", "--max-num-seqs", "4"]
    return subprocess.Popen([*command, *map(str, arguments)], stderr=subprocess.PIPE, text=True)


def test_run_batch_goes_on_where_it_was(tmp_path: Path) -> None:
    requests = [request(number, max_tokens=60) for number in range(150)]
    requests[7]["body"]["temperature"] = 9
    output, state = tmp_path / "out.jsonl", tmp_path / "out.jsonl.state"
    files = ("-i", write(tmp_path / "in.jsonl", requests), "-o", output, "--model", MODEL)
    first = run_batch(*files)
    deadline = time.monotonic() + 300
    while not (state / "batches.sqlite-wal").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    first.kill()
    first.communicate()
    assert state.is_dir()
    assert not output.exists()
    write(tmp_path / "other.jsonl", requests[:1])
    other = run_batch("-i", tmp_path / "other.jsonl", "-o", output, "--model", MODEL)
    assert "another input" in other.communicate()[1]
    assert other.returncode == 2
    again = run_batch(*files)
    said = again.communicate()[1]
    assert again.returncode == 0, said
    assert "150 lines: 149 answered, 1 with errors" in said
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [each["custom_id"] for each in results] == [each["custom_id"] for each in requests]
    assert [each["response"]["status_code"] for each in results] == [400 if n == 7 else 200 for n in range(150)]
    assert not state.exists()


def test_run_batch_refuses_a_wrong_input(tmp_path: Path) -> None:
    wrong = write(tmp_path / "in.jsonl", [request(0), {"custom_id": "x"}])
    process = run_batch("-i", wrong, "-o", tmp_path / "out.jsonl", "--model", MODEL)
    assert "line 2: not a request" in process.communicate()[1]
    assert process.returncode == 2
    assert [each.name for each in tmp_path.iterdir()] == ["in.jsonl"]
