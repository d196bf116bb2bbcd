"""Settings: one model read from flags, environment and file, refused with the fix named."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import yaml

from quire_engine.contract.config import EngineConfig, KVTransferConfig
from quire_server.flags import build_parser, option_group, option_unit, parse_command_line, parse_flags
from quire_server.settings import EXPERIMENTS, GROUPS, REMOVED, Settings, SettingsError, flag_name, plain_fields
from quire_server.settings.node_fields import NodeFields


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith(("QUIRE_", "VLLM_")):
            monkeypatch.delenv(name)


def refusal(*argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_flags(argv)
    assert "Traceback" not in str(caught.value)
    assert all(len(line) < 400 for line in caught.value.lines)
    return str(caught.value)


def test_nothing_given_is_the_demo_model_on_localhost():
    settings = parse_flags([])
    assert settings == Settings()
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 8000, "quire-demo")
    assert settings.model_names == ("quire-demo",)


def test_model_is_positional_or_a_flag_but_not_both(tmp_path: Path):
    folder = tmp_path / "Tiny-1.0"
    assert parse_flags([str(folder)]).model == parse_flags(["--model", str(folder)]).model == str(folder)
    assert parse_flags([str(folder)]).model_names == ("Tiny-1.0",)
    assert parse_flags(["facebook/opt-125m"]).model_names == ("opt-125m",)
    assert parse_flags([str(folder), "--served-model-name", "mine"]).model_names == ("mine",)
    assert "twice" in refusal("a", "--model", "b")


def test_underscores_and_negations():
    settings = parse_flags(["--max_num_seqs=7", "--no_enable-prefix_caching", "--disable-access-log"])
    assert (settings.max_num_seqs, settings.enable_prefix_caching, settings.disable_access_log) == (7, False, True)


def test_a_value_keeps_its_underscores():
    assert parse_flags(["--served-model-name", "a_b", "--tokenizer=x_y"]).served_model_name == ("a_b",)
    assert parse_flags(["--tokenizer=x_y"]).tokenizer == "x_y"


def test_lists_repeat_and_take_several_values():
    settings = parse_flags(["--api-key", "a", "b", "--api-key=c", "--served-model-name", "m", "n"])
    assert settings.api_key == ("a", "b", "c")
    assert settings.model_names == ("m", "n")


@pytest.mark.parametrize(
    ("text", "tokens"), [("4096", 4096), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("auto", None)]
)
def test_token_counts(text: str, tokens: int | None):
    assert parse_flags(["--max-model-len", text]).max_model_len == tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1024", 1024),
        ("2GiB", 2 * 2**30),
        ("2G", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("2GB", 2 * 10**9),
        ("1.5 MiB", 3 * 2**19),
    ],
)
def test_sizes(text: str, size: int):
    assert parse_flags(["--kv-memory", text]).kv_memory == size


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-model-len", "long"], "4096, 4k (4000) or 4K (4096)"),
        (["--kv-memory", "2 pounds"], "512MiB, 2GiB"),
        (["--port", "70000"], "--port"),
        (["--gpu-memory-utilization", "0"], "--gpu-memory-utilization"),
        (["--gpu-memory-utilization", "1.1"], "less than or equal to 1"),
        (["--drain-timeout", "nan"], "--drain-timeout"),
        (["--set", "block_size=8"], "16, 32, 64, 128 or 256"),
        (["--device", "tpu"], "choose from"),
        (["--served-model-name", "a b"], "--served-model-name"),
        (["--default-chat-template-kwargs", "{"], "JSON object"),
        (["--chat-template", "/nowhere/x.jinja"], "--chat-template"),
        (["--api-key", ""], "empty"),
        (["--itl-target", "-1"], "--itl-target: must be at least 0"),
        (["--prefill-chunk", "0"], "--prefill-chunk: must be at least 1"),
        (["--itl-target", "nan"], "--itl-target: must be at least 0"),
        (["--itl-target", "inf"], "--itl-target: must be at least 0"),
        (["one", "two"], "unexpected argument 'two'"),
    ],
)
def test_impossible_values_name_the_setting_and_the_fix(argv: list[str], words: str):
    assert words in refusal(*argv)


def test_the_step_must_hold_every_sequence_and_the_oldest_prompt():
    message = refusal("--max-num-seqs", "500", "--max-num-batched-tokens", "512")
    assert "--max-num-batched-tokens 516" in message
    assert "--max-num-seqs 496" in message
    assert parse_flags(["--max-num-seqs", "496"]).max_num_seqs == 496
    assert parse_flags(["--max-num-seqs", "500", "--max-num-batched-tokens", "516"]).max_num_seqs == 500


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--max-num-seq", "--max-num-seqs"),
        ("--max_modle_len=3", "--max-model-len"),
        ("--context-length", "--max-model-len"),
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        ("--tensor-paralel-size", "--tensor-parallel-size"),
        ("--no-enable-prefix-cache", "--enable-prefix-caching"),
    ],
)
def test_did_you_mean(flag: str, meant: str):
    assert refusal(flag).endswith(f"did you mean {meant}?")


def test_no_abbreviations_and_no_suggestion_out_of_thin_air():
    assert "did you mean" not in refusal("--frobnicate", "2")
    assert "unknown flag --max" in refusal("--max", "2")


def test_every_problem_is_listed_once():
    lines = refusal("--port", "x", "--max-num-seqs", "0").splitlines()
    assert [line.split(":")[0] for line in sorted(lines)] == ["--max-num-seqs", "--port"]


def test_flag_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "quire.yaml"
    file.write_text("port: 1\nmax-num-seqs: 2\nset: {block_size: 32}\napi-key: [f]\n")
    monkeypatch.setenv("QUIRE_PORT", "10")
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "20")
    settings = parse_flags(["--config", str(file), "--port", "100"])
    assert (settings.port, settings.max_num_seqs, settings.block_size, settings.api_key) == (100, 20, 32, ("f",))
    monkeypatch.setenv("QUIRE_CONFIG", str(file))
    assert parse_flags([]).block_size == 32


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-num-seq: 3", "did you mean max_num_seqs?"),
        ("- a", "port: 8000"),
        ("a: [", "not YAML"),
        ("config: other.yaml", "remove `config`"),
        ("port: many", "port in the configuration file"),
        ("model: !!python/object/apply:os.getcwd []", "not YAML"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, words: str):
    file = tmp_path / "quire.yaml"
    file.write_text(text)
    assert words in refusal("--config", str(file))


def test_a_missing_file_is_refused():
    assert "cannot be read" in refusal("--config", "/nowhere/quire.yaml")


def test_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUIRE_API_KEY", "a, b")
    monkeypatch.setenv("QUIRE_ALLOWED_ORIGINS", '["https://a.example"]')
    monkeypatch.setenv("QUIRE_SET", "enable_prefix_caching=false")
    monkeypatch.setenv("QUIRE_DEFAULT_CHAT_TEMPLATE_KWARGS", '{"enable_thinking": false}')
    monkeypatch.setenv("QUIRE_KV_MEMORY", "1GiB")
    monkeypatch.setenv("QUIRE_UDS", "")
    settings = parse_flags([])
    assert settings.api_key == ("a", "b")
    assert settings.allowed_origins == ("https://a.example",)
    assert settings.enable_prefix_caching is False
    assert settings.default_chat_template_kwargs == {"enable_thinking": False}
    assert settings.kv_memory == 2**30
    assert settings.uds is None


def test_environment_problems_name_the_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QUIRE_PORT", "many")
    assert refusal().startswith("QUIRE_PORT:")
    monkeypatch.setenv("QUIRE_PROT", "1")
    assert "did you mean QUIRE_PORT?" in refusal()


def test_kubernetes_service_links(monkeypatch: pytest.MonkeyPatch):
    assert parse_command_line([]).warnings == ()
    for service in ("QUIRE", "QUIRE_NODES"):
        for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR"):
            monkeypatch.setenv(f"{service}_{name}", "10.0.0.1")
        monkeypatch.setenv(f"{service}_PORT", "tcp://10.0.0.1:8000")
    given = parse_command_line([])
    assert given.settings == Settings()
    assert given.settings.port == Settings.model_fields["port"].default
    (line,) = given.warnings
    assert line.startswith("QUIRE_NODES_PORT and 11 more in the environment: ")
    assert "enableServiceLinks" in line


@pytest.mark.parametrize("name", ["QUIRE_PROT", "QUIRE_NODES_PORT", "QUIRE_SERVICE_PORTS", "QUIRE_SERVICE"])
def test_variables_that_no_service_link_has_end_the_start(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "8000")
    assert refusal().startswith(f"unknown environment variable {name}")


def test_a_key_is_never_printed():
    assert "sesame" not in refusal("--api-key", "sesame", "", "--port", "x")
    assert "sesame" not in repr(Settings(api_key=("sesame",)))


def test_settings_are_frozen_and_closed():
    with pytest.raises(ValueError):
        Settings().port = 1
    with pytest.raises(ValueError):
        Settings(prot=1)


def test_help_shows_every_setting_grouped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as caught:
        parse_flags(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    position = -1
    for group in GROUPS:
        assert text.index(f"\n{group}:\n") > position
        position = text.index(f"\n{group}:\n")
    for name, field in Settings.model_fields.items():
        is_plain = name not in EXPERIMENTS and name not in NodeFields.model_fields
        assert (f" {flag_name(name)} " in text.replace("[no-]", "").replace("\n", " \n")) is is_plain, name
        assert option_group(field) in GROUPS
        assert option_unit(field) in {"", "s", "tokens", "bytes"}
        assert field.description


def test_every_flag_can_be_given_its_own_default(tmp_path: Path):
    """The parser, the environment and the file all reach every field."""
    parser = build_parser("quire serve")
    assert set(plain_fields(Settings)) <= {action.dest for action in parser._actions}


def flat(config: EngineConfig) -> dict[str, object]:
    """The fields of a configuration and of its limits."""
    values = dataclasses.asdict(config)
    return {**values.pop("limits"), **values}


def test_engine_config_takes_every_engine_setting():
    changed = {
        "model": "/m",
        "tokenizer": "/t",
        "generation_config": "/g",
        "device": "cpu",
        "dtype": "float32",
        "model_impl": "transformers",
        "kernels": "cpu",
        "cpu_variant": "avx2",
        "attention": "triton",
        "quantization": "int4",
        "tensor_parallel_size": 2,
        "ignore_config_keys": ("alpha", "beta"),
        "kv_cache_dtype": "int8",
        "deterministic": True,
        "trust_gpu_paths": True,
        "max_model_len": 99,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 300,
        "prefill_chunk": 33,
        "itl_target": 0.25,
        "max_num_partial_prefills": 4,
        "block_size": 32,
        "kv_memory": 1000,
        "gpu_memory_utilization": 0.5,
        "swap_space": 2048,
        "enable_prefix_caching": False,
        "scheduling_policy": "priority",
        "preemption_victim": "youngest",
        "class_share": {"interactive": 0.5, "batch": 0.25},
        "num_threads": 2,
        "async_scheduling": "on",
        "speculation": "suffix",
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
        "max_cpu_loras": 4,
        "check_invariants": True,
        "learn": True,
        "role": "prefill",
    }
    folders = {"packed_cache": "/var/packed:1GiB", "kv_offload_dir": "/var/kv:2GiB"}
    got = flat(Settings(**changed, **folders, enable_fault_injection="oom@3").engine_config())
    default = flat(EngineConfig(model=""))
    assert got.pop("faults") == ({"point": "oom", "nth": 3, "seed": None},)
    assert not got.pop("swap_on_cpu")  # for tests alone
    assert got.pop("admission") == "expected"  # simulations alone compare it
    assert got.pop("left_out_paths") is None  # the engine asks its GPU
    assert got.pop("row_seconds") == ()  # the supervisor passes on what an earlier engine measured
    packed = [got.pop(name) for name in ("packed_cache", "packed_cache_dir", "packed_cache_size")]
    assert packed == [True, "/var/packed", 1 << 30]  # one setting
    assert (got.pop("kv_offload_dir"), got.pop("kv_offload_size")) == ("/var/kv", 2 << 30)  # one setting too
    assert got.pop("kv_transfer") is None  # from several settings, as the next test says
    assert (got.pop("replicas"), got.pop("tells_prefixes"), got.pop("alive_seconds")) == (1, False, 0)  # divided_config
    assert not got.pop("tells_blocks")  # where the programs start
    for name in REMOVED.keys() & got.keys():
        assert got.pop(name) == default[name], name
    assert all(got[name] != default[name] for name in got), "a field of EngineConfig is not set from Settings"
    assert got == changed


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("off", (False, "", 64 << 30)),
        (False, (False, "", 64 << 30)),  # as YAML reads off
        ("/packed", (True, "/packed", 64 << 30)),
        ("/packed:2GiB", (True, "/packed", 2 << 30)),
        ("a:b:512MiB", (True, "a:b", 512 << 20)),
    ],
)
def test_the_folder_of_packed_weights_may_have_a_size(given: object, expected: tuple[bool, str, int]):
    config = Settings(packed_cache=given).engine_config()
    assert (config.packed_cache, config.packed_cache_dir, config.packed_cache_size) == expected


@pytest.mark.parametrize("given", ["", "/packed:many", True, "true", "on", "1", 7])
def test_a_wrong_folder_of_packed_weights_is_told(given: object):
    with pytest.raises(ValueError, match="expected"):
        Settings(packed_cache=given)


def test_engine_defaults_agree():
    ours = dataclasses.asdict(Settings().engine_config())
    theirs = dataclasses.asdict(EngineConfig(model=ours["model"]))
    assert ours == theirs


def test_the_transfer_of_blocks_has_the_secrets_of_the_cluster():
    given = {"kv_listen": "127.0.0.1:1", "kv_address": "h:2", "engine_tls_key": "/k", "engine_tls_ca": "/a"}
    transfer = Settings(**given).engine_config().kv_transfer
    assert transfer == KVTransferConfig(listen="127.0.0.1:1", reached_at="h:2", key="/k", ca="/a")
    nixl = Settings(**given, kv_transport="nixl", kv_trust_network=True).engine_config().kv_transfer
    assert nixl == dataclasses.replace(transfer, transport="nixl", trusts_network=True)
    with pytest.raises(ValueError, match="--role decode passes KV blocks on; set --kv-listen HOST:PORT too"):
        Settings(listen="127.0.0.1:1", role="decode")


def test_default_yaml_is_the_defaults():
    file = Path(__file__).parents[4] / "configs" / "default.yaml"
    written = yaml.safe_load(file.read_text())
    names = [key.replace("-", "_") for key in written]
    assert names == [name for name in plain_fields(Settings) if name not in {"config", "dry_run"}]
    assert parse_flags(["--config", str(file)]).model_dump(exclude={"config"}) == Settings().model_dump(
        exclude={"config"}
    )
