"""Command lines of other servers: every flag that they have has its fate, and what is translated is understood here."""

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
from quire_server.settings.migration import Row, Server, flag, markdown, translate_words
from quire_server.settings.migration_tables import SERVERS
from support.documents import ROOT, text

RECORDED = ROOT / "tests" / "data" / "other_servers"
PAGE = "docs/migrating.md"
# Flags that are recorded, so that a record which was cut off is noticed.
COUNTS = {"ollama": 26, "llama-server": 415, "sglang": 554, "tgi": 59}
each_server = pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("QUIRE_", "VLLM_")):
            monkeypatch.delenv(name)


def recorded(server: Server) -> list[str]:
    lines = (RECORDED / f"{server.name}.txt").read_text().splitlines()
    return [line for line in lines if not line.startswith("#")]


def exact(server: Server) -> list[tuple[str, Row]]:
    return [(name, row) for row in server.rows for name in row.names if "*" not in name]


@each_server
def test_every_flag_has_a_fate_and_every_row_a_flag(server: Server) -> None:
    names = recorded(server)
    assert len(set(names)) == len(names) == COUNTS[server.name]
    assert [name for name in names if server.row(name) is None] == []
    rows = {id(server.row(name)) for name in names}
    assert [row.names for row in server.rows if id(row) not in rows] == []
    named = [name for name, _ in exact(server)]
    assert sorted(set(named)) == sorted(named)
    assert {name for name in named if name not in names} == set()


@each_server
def test_the_rows_name_settings_that_there_are_and_reasons(server: Server) -> None:
    for row in server.rows:
        assert not row.setting or row.setting in Settings.model_fields, row.names
        assert row.text or row.fate == "setting", row.names
        for mentioned in re.findall(r"(?<![\w-])--[a-z][a-z-]+", row.text):
            ours = mentioned.removeprefix("--").replace("-", "_") in Settings.model_fields
            assert ours or mentioned in recorded(server), (row.names, mentioned)


# A value for each setting that another server's flag becomes, as that server takes it.
VALUES = {
    "allowed_origins": "https://a.b",
    "api_key_file": "{keys}",
    "async_scheduling": "",
    "attention": "",
    "block_size": "16",
    "chat_template": "{file}",
    "default_chat_template_kwargs": '{"a": 1}',
    "device": {"llama-server": "none", "sglang": "cpu"},
    "download_dir": "/models",
    "drain_timeout": "20",
    "dtype": "bfloat16",
    "gpu_memory_utilization": "0.5",
    "generation_config": "openai",
    "host": {"ollama": "127.0.0.1:9"},
    "kv_cache_dtype": {"ollama": "q8_0", "llama-server": "q8_0", "sglang": "bf16", "tgi": "fp8_e4m3fn"},
    "kv_events_config": '{"enable_kv_cache_events": false}',
    "log_level": {"sglang": "warning", "ollama": "1"},
    "lora_modules": "a=/b",
    "max_num_batched_tokens": "512",
    "model": "/m",
    "otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces",
    "override_generation_config": {"llama-server": "1", "sglang": '{"temperature": 0.5}'},
    "pooling": "mean",
    "root_path": "/llm",
    "route_policy": "round_robin",
    "scheduling_policy": "lpm",
    "speculation": {"llama-server": "ngram-simple", "sglang": "NGRAM", "tgi": "3"},
    "ssl_certfile": "{file}",
    "ssl_keyfile": "{file}",
    "ssl_ca_certs": "{file}",
}
NEEDS = {
    "ssl_keyfile": ("--ssl-certfile", "{file}"),
    "ssl_ca_certs": ("--ssl-certfile", "{file}"),
    "max_cpu_loras": ("--max-loras", "1"),
    "reasoning_parser": (),
}
SWITCHES = re.compile(r"disable|enable|verbose|jsonl|no-cache|log-requests|json-output|default-include|spec-default")
DRAFTS = re.compile(r"draft")
PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
CASES = [(server, name, row) for server in SERVERS.values() for name, row in exact(server) if row.fate == "setting"]


@pytest.mark.parametrize(("server", "name", "row"), CASES, ids=[f"{server.name} {name}" for server, name, _ in CASES])
def test_what_becomes_a_setting_is_understood(server: Server, name: str, row: Row, tmp_path: Path) -> None:
    """By the real parser, with a value that the other server takes."""
    files = {"file": tmp_path / "file", "keys": tmp_path / "keys"}
    for path in files.values():
        path.write_text("a-key")
        path.chmod(0o600)
    given = VALUES.get(row.setting, PARSERS.get(row.setting, "7"))
    value = given if isinstance(given, str) else given.get(server.name, "7")
    if DRAFTS.search(name):
        value = "/draft"
    value = re.sub(r"\{(file|keys)\}", lambda found: str(files[found[1]]), value)
    flagged = [name] if SWITCHES.search(name) else [name, value]
    words = [f"{name}={value}"] if server.has_variables else flagged
    found = translate_words(server, words)
    assert found.problems == ()
    needs = [word.replace("{file}", str(files["file"])) for word in NEEDS.get(row.setting, ())]
    parse_flags([*found.words, *needs])
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
        ("llama-server", "-c 0 -np -1 --seed -1 -ctk f16", "--port 8080"),
        (
            "llama-server",
            "--model=a.gguf --temp 0.5 -n -1",
            "--model a.gguf --override-generation-config.temperature 0.5 --port 8080",
        ),
        ("llama-server", "-a a,b --no-cache-prompt", "--served-model-name a b --no-enable-prefix-caching --port 8080"),
        ("llama-server", "-cram 2048 -md /draft", "--speculation model:/draft --port 8080"),
        ("sglang", "--chunked_prefill_size -1 --tp 1 --dp 2", "--replicas 2 --port 30000"),
        (
            "sglang",
            "--speculative-algorithm STANDALONE --speculative-draft-model /d",
            "--speculation model:/d --port 30000",
        ),
        (
            "tgi",
            "--num-shard 1 --lora-adapters a=/b,c=/d -p 1",
            "--enable-lora --lora-modules a=/b c=/d --port 1 --host 0.0.0.0",
        ),
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
        ("llama-server", "--mmproj a", "--mmproj: is not there: only text is computed"),
        (
            "sglang",
            "--scheduel-policy lpm",
            "--scheduel-policy is not known of SGLang; did you mean --schedule-policy?",
        ),
        ("sglang", "--schedule-policy random", "--schedule-policy random: fcfs or lpm"),
        ("tgi", "--lora-adapters user/adapter", "--lora-adapters user/adapter: expected NAME=DIRECTORY"),
        ("ollama", "OLLAMA_HOST=h:p", "OLLAMA_HOST h:p: expected HOST:PORT"),
        ("ollama", "serve", "serve is not known of Ollama"),
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
        lines = markdown(server)
        assert len(lines) > 5
        assert "\n".join(lines) in page, f"{PAGE} lacks the rows that `markdown` makes of {server.title}"


def test_the_examples_of_the_page_print_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```console\n\$ (quire .*)\n((?:.*\n)*?)```$", text(PAGE), re.MULTILINE)
    assert len(blocks) == 4
    for command, output in blocks:
        assert cli.main(shlex.split(command)[1:]) == 0
        assert capsys.readouterr().out == output


def test_the_fields_of_the_page_are_there() -> None:
    rows = re.findall(r"^\| (?!`)[^|]*\| (`[a-z_`, ]+)(?:, the adapter's name)? \|$", text(PAGE), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert len(named) > 15
    assert named <= set(CompletionRequest.model_fields)
