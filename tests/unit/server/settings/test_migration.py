"""Command lines of other servers: what is translated is understood here, and the page has every row of the tables."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from quire_server import cli
from quire_server.dialects.completions.wire import CompletionRequest
from quire_server.flags import parse_flags
from quire_server.settings import Settings
from quire_server.settings.migration import SERVERS, Row, Server, flag, translate_words
from support.covering import few
from support.documents import text

PAGE = "docs/migrating.md"
each_server = pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("QUIRE_", "VLLM_")):
            monkeypatch.delenv(name)


@each_server
def test_a_name_has_one_row(server: Server) -> None:
    names = [name for row in server.rows for name in row.names]
    assert len(set(names)) == len(names)


@each_server
def test_the_rows_name_settings_that_there_are_and_reasons(server: Server) -> None:
    for row in server.rows:
        assert not row.setting or row.setting in Settings.model_fields, row.names
        assert row.text or row.fate == "setting", row.names
        for mentioned in re.findall(r"(?<![\w-])--[a-z][a-z-]+", row.text):
            ours = mentioned.removeprefix("--").replace("-", "_") in Settings.model_fields
            assert ours or server.row(mentioned), (row.names, mentioned)


# A value for each setting that another server's flag becomes, as that server takes it.
VALUES = {
    "allowed_origins": "https://a.b",
    "chat_template": "{file}",
    "device": "0",
    "download_dir": "/models",
    "dtype": "bfloat16",
    "gpu_memory_utilization": "0.5",
    "kv_cache_dtype": "q8_0",
    "max_num_batched_tokens": "512",
    "model": "/m",
    "pooling": "mean",
    "reasoning_parser": "qwen3",
    "scheduling_policy": "lpm",
    "tool_call_parser": "hermes",
}
CASES = [
    (server, name, row)
    for server in SERVERS.values()
    for row in server.rows
    if row.fate == "setting"
    for name in row.names
]


KEPT = {(server.name, row.takes, bool(row.convert)): (server, name, row) for server, name, row in CASES}


@pytest.mark.parametrize(
    ("server", "name", "row"),
    few(CASES, *KEPT.values()),
    ids=[f"{server.name} {name}" for server, name, _ in CASES],
)
def test_what_becomes_a_setting_is_understood(server: Server, name: str, row: Row, tmp_path: Path) -> None:
    """By the real parser, with a value that the other server takes."""
    (tmp_path / "file").write_text("a template")
    value = VALUES.get(row.setting, "7").replace("{file}", str(tmp_path / "file"))
    flagged = [name] if row.takes == "nothing" else [name, value]
    found = translate_words(server, [f"{name}={value}"] if server.has_variables else flagged)
    assert found.problems == ()
    parse_flags(found.words)
    if not row.convert:
        assert flag(row.setting) in found.words


@each_server
def test_the_ports_of_their_defaults_stay(server: Server) -> None:
    """Clients that know the other server's port find this one there."""
    found = parse_flags(translate_words(server, []).words)
    assert {name: str(getattr(found, name)) for name in server.defaults} == dict(server.defaults)
    moved = ["OLLAMA_HOST=h:9"] if server.has_variables else ["--port", "9"]
    assert translate_words(server, moved).words.count("--port") == 1
    assert parse_flags(translate_words(server, moved).words).port == 9


@pytest.mark.parametrize(
    ("name", "words", "expected"),
    [
        ("llama-server", "-c 0 -np -1 -t -1 -ctk f16", "--port 8080"),
        (
            "llama-server",
            "--model=a.gguf --top-k 5 -n -1",
            "--model a.gguf --override-generation-config.top_k 5 --port 8080",
        ),
        ("llama-server", "-a a,b -v --port=9", "--served-model-name a b --log-level debug --port 9"),
        ("llama-server", "-cram 2048 -md /draft", "--speculation model:/draft --port 8080"),
        ("sglang", "--chunked_prefill_size -1 --tp 1 --dp 2", "--replicas 2 --port 30000"),
        ("tgi", "--num-shard 1 --sharded true -p 1", "--port 1 --host 0.0.0.0"),
        ("ollama", "OLLAMA_HOST=http://h OLLAMA_DEBUG=0", "--host h --port 11434"),
    ],
)
def test_values_are_translated_too(name: str, words: str, expected: str) -> None:
    found = translate_words(SERVERS[name], words.split())
    assert " ".join(found.words) == expected
    assert found.problems == ()


@pytest.mark.parametrize(
    ("name", "words", "problem"),
    [
        ("llama-server", "-ctk q4_0", "-ctk q4_0: the KV cache is the model's type (f16, bf16) or int8 (q8_0)"),
        ("llama-server", "--mmproj a", "--mmproj is not there: only text is computed"),
        ("sglang", "--grammar-backend a b", "--grammar-backend of SGLang has no translation"),
        ("sglang", "--schedule-policy random", "--schedule-policy random: fcfs or lpm"),
        ("tgi", "--quantize awq", "--quantize is not there: weights have the format of their file"),
        ("ollama", "OLLAMA_HOST=h:p", "OLLAMA_HOST h:p: expected HOST:PORT"),
        ("ollama", "serve", "serve of Ollama has no translation"),
    ],
)
def test_what_cannot_be_is_told(name: str, words: str, problem: str) -> None:
    (found,) = translate_words(SERVERS[name], words.split()).problems
    assert found.startswith(problem)
    assert "\n" not in found


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "from", "tgi", "--", "--model-id", "a b", "--max-batch-size", "0"]) == 2
    said = capsys.readouterr()
    assert said.out == "quire serve --model 'a b' --max-num-seqs 0 --port 3000 --host 0.0.0.0\n"
    assert said.err.startswith("quire config from: --max-num-seqs: must be at least 1")
    for words in (["config", "from"], ["config", "from", "vllm"]):
        assert cli.main(words) == 2
        assert "expected one of ollama, llama-server, sglang, tgi" in capsys.readouterr().err


def test_the_page_has_every_row() -> None:
    page = text(PAGE)
    for server in SERVERS.values():
        rows = [row for row in server.rows if row.fate == "setting"]
        lines = [
            f"| {', '.join(name.lstrip('-') for name in row.names)} | `{flag(row.setting)}` | {row.text} |"
            for row in rows
        ]
        assert "\n".join(lines) + "\n" in page, f"{PAGE} lacks these rows of {server.title}"


def test_the_examples_of_the_page_print_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```console\n\$ (quire .*)\n((?:.*\n)*?)```$", text(PAGE), re.MULTILINE)
    assert len(blocks) == 4
    for command, output in blocks:
        assert cli.main(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out == output


def test_the_fields_of_the_page_are_there() -> None:
    rows = re.findall(r"^\| (?!`)[^|]*\| (`[a-z_`, ]+) \|$", text(PAGE), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert len(named) > 15
    assert named <= set(CompletionRequest.model_fields)
