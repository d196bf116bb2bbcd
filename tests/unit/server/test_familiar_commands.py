"""Command lines of llama-server and Ollama: taken where they mean the same, else answered by one line of help."""

from __future__ import annotations

import os
import shlex

import pytest

from quire_server import cli
from quire_server.flags import check_command_line, parse_command_line
from quire_server.settings import SettingsError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("QUIRE_", "VLLM_", "OLLAMA_")):
            monkeypatch.delenv(name)


TAKEN = {
    "-m a.gguf": {"model": "a.gguf"},
    "a.gguf -c 4096 -ngl 99": {"model": "a.gguf", "max_model_len": 4096, "device": "auto"},
    "-ngl 0 a.gguf": {"model": "a.gguf", "device": "cpu"},
    "-m a.gguf --port 8080 --host 0.0.0.0 --api-key secret": {"port": 8080, "host": "0.0.0.0"},
    "-hf ggml-org/gemma-3-1b-it-GGUF:Q4_K_M": {"model": "ggml-org/gemma-3-1b-it-GGUF:Q4_K_M"},
    "--hf-repo ggml-org/gemma-3-1b-it-GGUF --ctx-size 8192": {
        "model": "ggml-org/gemma-3-1b-it-GGUF",
        "max_model_len": 8192,
    },
    "-m a.gguf -c 0 -np 4 -t 8 --n-gpu-layers -1": {"max_model_len": None, "max_num_seqs": 4, "num_threads": 8},
    "--jinja -fa on -m a.gguf -ctk q8_0 -ctv q8_0": {"model": "a.gguf", "kv_cache_dtype": "int8"},
    "--metrics -fa a.gguf -a mine -b 512 -ub 512": {"served_model_name": ("mine",), "max_num_batched_tokens": 512},
    "-m a.gguf --temp 0.7 --top-p=0.9 -n 256": {
        "override_generation_config": {"temperature": 0.7, "top_p": 0.9, "max_new_tokens": 256}
    },
    "-m a.gguf --cache-ram 2048 --mlock --no-mmap --threads 4": {"model": "a.gguf", "num_threads": 4},
    "a.gguf --verbose": {"log_level": "debug"},
    "-m a.gguf --embedding --pooling mean": {"pooling": "mean"},
    "-n 1 -tp 1 -O3 a": {"model": "a"},  # vLLM's short names keep their meaning
}


@pytest.mark.parametrize(("line", "expected"), TAKEN.items(), ids=TAKEN)
def test_flags_of_llama_server_that_mean_the_same(line: str, expected: dict[str, object]) -> None:
    settings = parse_command_line(line.split()).settings
    assert {name: getattr(settings, name) for name in expected} == expected


REFUSED = {
    "-m a.gguf --mmproj b.gguf": "--mmproj (llama-server's) is not there: only text is computed;",
    "-m a.gguf --grammar-file g": "--grammar-file (llama-server's) is a field of requests: response_format",
    "-m a.gguf -ctk q4_0": "-ctk q4_0: the KV cache is the model's type (f16, bf16) or int8 (q8_0)",
    "-m a.gguf -nglx 3": "unknown flag -nglx;",
    "-m a.gguf -p=80": "unknown flag -p;",
    "-m a.gguf --max-num-se 3": "unknown flag --max-num-se;",
}


@pytest.mark.parametrize(("line", "said"), REFUSED.items(), ids=REFUSED)
def test_flags_without_an_equal_are_one_line(line: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_command_line(line.split())
    (only,) = caught.value.lines
    assert only.startswith(said)
    problems = check_command_line(line.split())[1]
    assert said in "\n".join(problems)
    assert not any("ambiguous" in problem for problem in problems)


def test_what_differs_is_told_and_values_are_left_alone() -> None:
    given = parse_command_line(["a.gguf", "-c", "9", "--served-model-name", "m"])
    assert given.notes == ("-c: of each request, not shared among slots",)
    assert parse_command_line(["--", "a.gguf"]).settings.model == "a.gguf"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("run llama3.2", "`quire serve MODEL` serves a model, and then `quire chat` talks to it"),
        ("pull llama3.2", "fetches a model of the Hugging Face Hub"),
        ("list", "GET /v1/models"),
        ("ls", "GET /v1/models"),
        ("ps", "GET /api/ps"),
        ("show llama3.2", "POST /api/show"),
        ("stop llama3.2", "Ctrl-C"),
        ("rm llama3.2", "delete them"),
        ("cp a b", "--served-model-name"),
        ("create mine -f Modelfile", "--chat-template"),
        ("-m a.gguf -c 4096", "`quire serve -m a.gguf -c 4096` serves a model"),
        ("a.gguf", "`quire serve a.gguf` serves a model"),
        ("ollama serve", "quire config from ollama"),
        ("serv", "did you mean `quire serve`?"),
    ],
)
def test_commands_of_others_lead_to_ours(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(line)) == 2
    (only,) = capsys.readouterr().err.splitlines()
    assert said in only


def test_variables_of_ollama_set_nothing_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "0.0.0.0:11434")
    monkeypatch.setenv("OLLAMA_UNHEARD_OF", "1")
    given = parse_command_line([])
    assert given.settings.host == "127.0.0.1"
    assert given.warnings == (
        "variables of Ollama set nothing here; for flags that do the same:"
        ' quire config from ollama OLLAMA_HOST="$OLLAMA_HOST"',
    )
