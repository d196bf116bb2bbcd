"""Command lines, files and variables written for vLLM: every flag is known, and none is dropped in silence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire_server.flags import build_parser, parse_command_line, parse_flags
from quire_server.settings import Settings, SettingsError, plain_fields
from quire_server.settings.vllm import FLAGS, flags_text, foreign
from support.covering import few

# The flags of `vllm serve` as its own help lists them, and older ones; those that are settings here included.
RECORDED = Path(__file__).with_name("vllm_flags.txt")
OF_VLLM = [line for line in RECORDED.read_text().splitlines() if not line.startswith("#")]
OLDER = [
    "disable-log-requests",
    "swap-space",
    "max-num-partial-prefills",
    "calculate-kv-scales",
]

FOREIGN = foreign(plain_fields(Settings))
PLAUSIBLE = {"block-size": "32", "max-num-scheduled-tokens": "700", "device-memory-utilization": "0.5"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("QUIRE_", "VLLM_")):
            monkeypatch.delenv(name)


def refusal(*argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_flags(argv)
    return str(caught.value)


def test_every_flag_is_known():
    known = {word for action in build_parser("quire serve")._actions for word in action.option_strings}
    assert {f"--{name}" for name in (*OF_VLLM, *OLDER)} - known == set()
    assert len(OF_VLLM) == 317


def test_the_table_says_each_thing_once_and_names_settings_that_there_are():
    names = [flag.name for flag in FLAGS] + [short for flag in FLAGS for short in flag.short]
    assert sorted(names) == sorted(set(names))
    assert len(FLAGS) > 180
    for flag in FLAGS:
        assert not flag.setting or flag.setting in Settings.model_fields, flag.name
        assert flag.text or flag.setting or flag.keys, f"{flag.name} has no reason"
        for key in flag.keys:
            assert key.name.startswith(f"{flag.name}."), key.name
            assert not key.setting or key.setting in Settings.model_fields, key.name
            assert key.text or key.setting, f"{key.name} has no reason"
        assert not (flag.refused and (flag.setting or flag.only)), flag.name


# Two flags of each kind: those of a setting, objects with keys, noted, refused, taken with some values only.
OF_KINDS = {
    (flag.takes, flag.refused, bool(flag.keys), bool(flag.setting), bool(flag.values), bool(flag.only), again): flag
    for again, flags in enumerate((FOREIGN, FOREIGN[::-1]))
    for flag in flags
}


@pytest.mark.parametrize("flag", few(FOREIGN, *OF_KINDS.values()), ids=lambda flag: flag.name)
def test_each_flag_is_taken_with_a_note_or_a_setting_or_refused_with_its_reason(flag):
    """By the real parser, in the spelling that a script has."""
    if flag.keys:
        assert f"--{flag.name}: a JSON object with the keys" in refusal(f"--{flag.name}", '{"a": 1}')
        assert parse_command_line([f"--{flag.name}", "{}"]).settings == Settings()
        return
    value = {"switch": [], "json": ['{"a": 1}']}.get(flag.takes, [PLAUSIBLE.get(flag.name, "7")])
    if flag.setting and flag.values:
        value = [] if flag.takes == "switch" else [next(iter(flag.values))]
    words = [f"--{flag.name}", *value]
    if flag.refused or (flag.only and not {"on", "7"} & set(flag.only)):
        message = refusal(*words)
        assert message.startswith(f"--{flag.name}")
        assert flag.text in message
        return
    given = parse_command_line(words)
    assert flag.setting in given.settings.model_fields_set or len(given.notes) == 1 or flag.values or flag.only
    if not flag.setting and not flag.only:
        assert given.notes[0].startswith(f"--{flag.name}")
        assert flag.text in given.notes[0]
        assert given.settings == Settings()


SCRIPT = """/models/Qwen3-0.6B --host 0.0.0.0 --port 9000 --api-key token-abc123 --served-model-name qwen qwen3
 -tp 1 --pipeline_parallel_size=1 --dtype half --max-model-len 8192 --gpu-memory-utilization 0.9 --max-num-seqs 256
 --max-num-batched-tokens 8192 --enable-chunked-prefill --enable-prefix-caching --trust-remote-code --enforce-eager -O3
 --disable-log-requests --uvicorn-log-level warning --swap-space 4 --load-format auto --tokenizer-mode auto --seed 0
 --no-enable-lora --shutdown-timeout 20 --kv-cache-dtype fp8_e4m3 --distributed-executor-backend mp
 --disable-custom-all-reduce --compilation-config.level 3 --async-scheduling --allowed-methods ["*"]
 --allowed-origins ["*"]"""


def test_a_script_for_vllm_starts_unchanged():
    given = parse_command_line(SCRIPT.split())
    settings = given.settings
    assert (settings.model, settings.host, settings.port, settings.api_key) == (
        *("/models/Qwen3-0.6B", "0.0.0.0", 9000),
        ("token-abc123",),
    )
    assert settings.model_names == ("qwen", "qwen3")
    assert (settings.dtype, settings.kv_cache_dtype, settings.max_num_seqs) == ("float16", "fp8", 256)
    assert (settings.drain_timeout, settings.log_level, settings.async_scheduling) == (20.0, "warning", "on")
    assert (settings.enable_log_requests, settings.allowed_origins, settings.seed) == (False, ("*",), 0)
    assert any(
        note.startswith("--trust-remote-code changes nothing here: nothing remote is run") for note in given.notes
    )


EAGLE = "--speculation: heads such as EAGLE are not supported; expected off, auto, suffix, outputs or model:DIR"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tensor-parallel-size 0", "--tensor-parallel-size: "),
        ("-tp 65", "--tensor-parallel-size: "),
        ("-pp 2", "--pipeline-parallel-size 2: only 1 is taken: ranks of one machine compute a model"),
        ("-dp=4", "--data-parallel-size 4: only 1"),
        ("--enable-prompt-adapter", "--enable-prompt-adapter: refused: adapters"),
        ("--no-enable-chunked-prefill", "--no-enable-chunked-prefill: refused: prompts are always"),
        ("--enable-chunked-prefill=False", "--no-enable-chunked-prefill: refused"),
        ("--speculative-config.method draft_model", "--speculation: expected off, auto, suffix, outputs or model:DIR"),
        ('--speculative-config={"model":"a/b","method":"eagle"}', EAGLE),
        ("--speculative-config.method eagle3 --speculative-config.model a/b", EAGLE),
        ("--spec-model a/b --spec-method eagle3", EAGLE),
        ("--speculation eagle:/heads/a", EAGLE),
        ("--speculative-config.draft_tensor_parallel_size 2", "draft_tensor_parallel_size 2: only 1 is taken"),
        ("--speculative-config.draft_depth 2", "a JSON object with the keys method, model, "),
        ("--hf-overrides.rope_scaling.factor 2", "--hf-overrides {"),
        ("--distributed-executor-backend ray", "only mp or uni"),
        ("--load-format tensorizer", "safetensors"),
        ("--attention-backend FLASHINFER", "--set attention"),
        ("--hf-token hf_secret", "HF_TOKEN"),
        ("--disable-access-log-for-endpoints /health,/v1/models", "only these have no line"),
        ("--speculative-config.method", "expected a value"),
    ],
)
def test_what_would_change_something_is_refused_in_one_line(words: str, message: str):
    line = refusal(*words.split())
    assert message in line
    assert "\n" not in line
    assert len(line) < 400  # the longest names every key of a flag
    assert "hf_secret" not in line


def test_all_refusals_come_at_once():
    assert len(refusal("--enable-prompt-adapter", "-pp", "2", "--middleware", "a.b").splitlines()) == 3


@pytest.mark.parametrize(
    ("words", "on"),
    [
        ("--enable-prefix-caching=false", False),
        ("--enable_prefix_caching True", True),
        ("--enable-prefix-caching", True),
        ("--no-enable-prefix-caching", False),
    ],
)
def test_switches_in_all_their_spellings(words: str, on: bool):
    assert parse_flags(words.split()).enable_prefix_caching is on


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--async-scheduling", "on"),
        ("--no-async-scheduling", "off"),
        ("--async-scheduling --port 1", "on"),
        ("--async-scheduling auto", "auto"),
        ("--async-scheduling=off", "off"),
        ("--async-scheduling a/model", "on"),
    ],
)
def test_async_scheduling_is_a_switch_too(words: str, value: str):
    assert parse_flags(words.split()).async_scheduling == value


def test_dotted_json():
    words = "--default-chat-template-kwargs.enable_thinking false --default-chat-template-kwargs.a.b=text"
    words += " --default_chat_template_kwargs.list+ 1 --default-chat-template-kwargs.list+=2,x"
    expected = {"enable_thinking": False, "a": {"b": "text"}, "list": [1, 2, "x"]}
    assert parse_flags(words.split()).default_chat_template_kwargs == expected
    assert "keep one" in refusal("--default-chat-template-kwargs", "{}", "--default-chat-template-kwargs.a", "1")
    assert "no object" in refusal("--default-chat-template-kwargs.a=1", "--default-chat-template-kwargs.a.b=1")


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (
            "--structured-outputs-config.backend xgrammar",
            "--structured-outputs-config.backend changes nothing",
        ),
        ("--structured-outputs-config.disable_fallback true", "--structured-outputs-config.disable_fallback changes"),
        ("--reasoning-config.reasoning_start_str <think>", "--reasoning-config.reasoning_start_str changes nothing"),
        ('--reasoning-config {"reasoning_start_str":"<think>","reasoning_end_str":"</think>"}', "--reasoning-config."),
    ],
)
def test_the_keys_of_an_object_are_flags(words: str, note: str):
    given = parse_command_line(words.split())
    assert given.settings == Settings()
    assert all(line.startswith(note) for line in given.notes)
    assert given.notes


def test_the_keys_of_an_object_are_settings_or_refused(tmp_path: Path):
    for name in ("structured-outputs-config", "reasoning-config"):
        assert parse_flags([f"--{name}.reasoning_parser", "qwen3"]).reasoning_parser == "qwen3"
    given = parse_flags(["--logging-config.log_level", "DEBUG", "--logging-config.formatter", "json"])
    assert (given.log_level, given.log_format) == ("debug", "json")
    assert parse_flags(["--log-level", "CRITICAL"]).log_level == "error"
    message = refusal("--structured-outputs-config.disable_any_whitespace", "true", "-pp", "2")
    assert "--structured-outputs-config.disable_any_whitespace: refused: a schema" in message
    assert len(message.splitlines()) == 2
    assert "the keys reasoning_parser, " in refusal("--reasoning-config", "qwen3")
    file = tmp_path / "vllm.yaml"
    file.write_text("structured-outputs-config:\n  backend: guidance\n  reasoning_parser: qwen3\n")
    assert parse_flags(["--config", str(file)]).reasoning_parser == "qwen3"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ("--max-num-active-seqs 96", 96),
        ("--max-num-active-seqs 96 --max-num-seqs 128", 96),
        ("--max-num-seqs 64 --max-num-active-seqs 96", 64),
    ],
)
def test_of_two_counts_the_smaller_holds(words: str, value: int):
    assert parse_flags(words.split()).max_num_seqs == value


def test_of_two_counts_of_tokens_the_smaller_holds():
    both = "--max-num-batched-tokens 8K --max-num-scheduled-tokens 8k"
    assert parse_flags(both.split()).max_num_batched_tokens == 8000
    assert "--max-num-batched-tokens: expected a number" in refusal(*both.replace("8k", "many").split())


@pytest.mark.parametrize(("given", "most"), [("0", 0), ("50", 50), ("256", 256), ("-1", 256)])
def test_the_limit_of_log_probabilities(given: str, most: int):
    assert parse_flags(["--max-logprobs", given]).max_logprobs == most
    assert "256" in refusal("--max-logprobs", "257")


def test_our_own_flag_wins_over_its_other_name():
    assert parse_flags(["--log-level", "error", "--uvicorn-log-level", "info"]).log_level == "error"
    assert parse_flags(["--long-prefill-token-threshold", "0"]).prefill_chunk == Settings().prefill_chunk
    assert parse_flags(["--long-prefill-token-threshold", "64"]).prefill_chunk == 64
    assert parse_flags(["--max-model-len", "-1"]).max_model_len is None


def test_a_file_written_for_vllm(tmp_path: Path):
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: /m\nport: 12\ntensor-parallel-size: 2\ntrust-remote-code: true\nuvicorn-log-level: debug\n"
        "hf-overrides: {}\nmax-model-len: -1\nshutdown_timeout: 3\n"
    )
    given = parse_command_line(["--config", str(file)])
    assert (given.settings.port, given.settings.log_level, given.settings.drain_timeout) == (12, "debug", 3.0)
    assert given.settings.tensor_parallel_size == 2
    assert any(note.startswith("--trust-remote-code") for note in given.notes)
    file.write_text("enable-prompt-adapter: true\npipeline_parallel_size: 2\n")
    message = refusal("--config", str(file))
    assert "enable-prompt-adapter: refused" in message
    assert "pipeline-parallel-size 2: only 1" in message


def test_the_help_has_every_flag_with_what_happens():
    text = flags_text(plain_fields(Settings), 120)
    for flag in foreign(plain_fields(Settings)):
        assert f"--{flag.name}" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "--shutdown-timeout                    is --drain-timeout" in text


def test_help_vllm_is_printed(capsys: pytest.CaptureFixture[str]):
    for words in (["--help", "vllm"], ["--help=vllm"], ["-h", "vllm"]):
        with pytest.raises(SystemExit) as caught:
            parse_flags(words)
        assert caught.value.code == 0
        assert "--pipeline-parallel-size" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse_flags(["--help"])
    assert "--pipeline-parallel-size" not in capsys.readouterr().out


def test_variables_of_vllm_are_named(monkeypatch: pytest.MonkeyPatch):
    assert parse_command_line([]).warnings == ()
    for name in ("VLLM_LOGGING_LEVEL", "VLLM_FOO", "VLLM_NO_USAGE_STATS", "VLLM_SERVICE_HOST"):
        monkeypatch.setenv(name, "1")
    assert parse_command_line([]).warnings == (
        "VLLM_LOGGING_LEVEL sets nothing here; use --log-level",
        "variables of vLLM that set nothing here: VLLM_FOO",
    )


@pytest.mark.parametrize(
    ("words", "speculation"),
    [
        (["--speculative-config", '{"model": "a/b", "num_speculative_tokens": 3}'], "model:a/b"),
        (["--speculative-config", '{"method": "draft_model", "model": "a/b"}'], "model:a/b"),
        (["--speculative-config", '{"model": "a/b", "draft_tensor_parallel_size": 1}'], "model:a/b"),
        (["--speculative-config", '{"model": "a/b", "method": "draft_model"}'], "model:a/b"),
        (["--speculative-config", '{"model": "a/b", "method": "ngram"}'], "suffix"),
        (["--speculative-config", '{"model": "[ngram]", "num_speculative_tokens": 5}'], "suffix"),
        (["--spec-method", "draft_model", "--spec-model", "a/b"], "model:a/b"),
        (["--speculative-model", "a/b"], "model:a/b"),
        (["--speculation", "off", "--speculative-model", "a/b"], "off"),
    ],
)
def test_a_draft_model_is_taken_from_the_words_of_vllm(words: list[str], speculation: str):
    assert parse_command_line(words).settings.speculation == speculation
