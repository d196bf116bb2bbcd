"""Several models: what the file of `--models` and repeated `--model` give, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire_server.flags import parse_flags
from quire_server.settings import ModelEntry, SettingsError, several_models


def entries(*argv: str) -> tuple[ModelEntry, ...]:
    return several_models(parse_flags(argv))


def written(folder: Path, text: str) -> str:
    (folder / "models.yaml").write_text(text)
    return str(folder / "models.yaml")


def test_one_model_is_not_several():
    assert entries() == () == entries("--model", "/models/a")


def test_models_on_the_command_line_share_all_settings():
    made = entries("--model", "/models/a", "--model", "/models/b", "--max-num-seqs", "3")
    assert [each.settings.model_names for each in made] == [("a",), ("b",)]
    assert {each.settings.max_num_seqs for each in made} == {3}
    assert [(each.pinned, each.priority, each.idle_seconds, each.sleep_level) for each in made] == [
        (False, 0, None, 1)
    ] * 2


def test_each_entry_of_the_file_has_settings_of_its_own(tmp_path: Path):
    text = """
models:
  - {model: quire-demo, served-model-name: small, pinned: true, priority: 5}
  - {model: quire-demo, served_model_name: [other, alias], idle_seconds: 60, sleep_level: 2, kv_memory: 1GiB}
"""
    first, second = entries("--models", written(tmp_path, text), "--kv-memory", "2GiB", "--port", "9000")
    assert (first.settings.model_names, first.settings.kv_memory) == (("small",), 2 << 30)
    assert (first.pinned, first.priority, first.idle_seconds, first.sleep_level) == (True, 5, None, 1)
    assert (second.settings.model_names, second.settings.kv_memory) == (("other", "alias"), 1 << 30)
    assert (second.pinned, second.priority, second.idle_seconds, second.sleep_level) == (False, 0, 60.0, 2)
    assert first.settings.port == second.settings.port == 9000
    assert not first.settings.models


def test_adapters_and_ranks_are_a_model_s_own(tmp_path: Path):
    text = """
models:
  - {model: quire-demo, served_model_name: one, tensor_parallel_size: 2, lora_modules: [a=/a, {name: b, path: /b}]}
  - {model: quire-demo, served_model_name: two, max_loras: 3, lora_modules: [c=/c]}
"""
    first, second = entries("--models", written(tmp_path, text), "--enable-lora", "--max-loras", "2")
    assert [(each.name, each.path) for each in first.settings.lora_modules] == [("a", "/a"), ("b", "/b")]
    assert [each.name for each in second.settings.lora_modules] == ["c"]
    assert (first.settings.tensor_parallel_size, second.settings.tensor_parallel_size) == (2, 1)
    assert (first.settings.max_loras, second.settings.max_loras) == (2, 3)
    assert second.settings.enable_lora


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "expected a list `models:`"),
        ("models: [{model: a}]\nmore: 1", "expected a list `models:`"),
        ("models: []", "expected a list `models:`"),
        ("models: [{name: a}]", "entry 1 has no `model: PATH`"),
        ("models: [{model: /m/a, port: 1}]", "/m/a: port is not a model's setting"),
        ("models: [{model: /m/a, pined: true}]", "pined is not a model's setting; did you mean pinned?"),
        ("models: [{model: /m/a, replicas: 2}]", "replicas is not a model's: a model has one engine"),
        ("models: [{model: /m/a, lora_modules: [x=/x]}]", "/m/a: --lora-modules needs --enable-lora"),
        (
            "models: [{model: a, enable_lora: true, lora_modules: [x=/x]},"
            " {model: b, enable_lora: true, lora_modules: [x=/y]}]",
            "the name 'x' stands for several models",
        ),
        ("models: [{model: /m/a, idle_seconds: 0}]", "/m/a: idle_seconds: input should be greater than 0"),
        ("models: [{model: /m/a, kv_memory: much}]", "/m/a: kv_memory: expected a size"),
        ("models: [{model: /m/a}, {model: /n/a}]", "the name 'a' stands for several models"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, told: str):
    path = written(tmp_path, text)
    with pytest.raises(SettingsError) as raised:
        entries("--models", path)
    assert told in str(raised.value)
    assert str(raised.value).startswith("--models")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--model", "b", "--model", "c"), "--models and --model exclude each other"),
        (("--model", "b"), "--models and --model exclude each other"),
        (("--replicas", "2"), "--models and --replicas exclude each other: a model has one engine here"),
        (("--api-server-count", "2"), "exclude each other: one process accepts"),
        (("--served-model-name", "a"), "put `served_model_name` into the model's entry"),
        (("--enable-lora", "--lora-modules", "x=/x"), "put `lora_modules` into the model's entry"),
    ],
)
def test_what_several_models_exclude(tmp_path: Path, flags: tuple[str, ...], told: str):
    path = written(tmp_path, "models: [{model: quire-demo}]")
    with pytest.raises(SettingsError, match=told):
        entries("--models", path, *flags)


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"--models .*absent.yaml: cannot be read"):
        entries("--models", str(tmp_path / "absent.yaml"))
