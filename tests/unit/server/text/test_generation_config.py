"""The model's own defaults, as its generation_config.json and the operator give them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_server.text.generation_config import GenerationDefaults, generation_config_file, generation_defaults

QWEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": [151645, 151643]}
NUMBERS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}


def folder(path: Path, content: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_the_checkpoints_file_is_read(tmp_path: Path) -> None:
    defaults = generation_defaults("auto", {}, folder(tmp_path, QWEN))
    assert (defaults.sampling, defaults.max_tokens, defaults.most_tokens) == (NUMBERS, None, None)
    assert (defaults.shown, defaults.source) == (NUMBERS, "generation_config.json")


def test_without_a_file_or_with_none_there_are_no_defaults(tmp_path: Path) -> None:
    assert generation_defaults("auto", {}, tmp_path) == GenerationDefaults()
    assert generation_defaults("none", {}, folder(tmp_path, QWEN)) == GenerationDefaults()


def test_null_is_absent_and_minus_one_turns_top_k_off(tmp_path: Path) -> None:
    values = {"temperature": None, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.05, "top_p": 1}
    defaults = generation_defaults("auto", {}, folder(tmp_path, values))
    assert defaults.sampling == {"top_k": 0, "min_p": 0.1, "repetition_penalty": 1.05, "top_p": 1}


def test_another_directory_and_the_operators_values(tmp_path: Path) -> None:
    other = folder(tmp_path / "other", QWEN)
    defaults = generation_defaults(str(other), {"temperature": 0.2, "min_p": 0.1}, tmp_path)
    assert defaults.sampling == NUMBERS | {"temperature": 0.2, "min_p": 0.1}
    assert defaults.source == f"{other}/generation_config.json and --override-generation-config"
    assert generation_config_file(str(other), tmp_path) == other / "generation_config.json"
    for asked in ("auto", "none"):
        assert generation_config_file(asked, tmp_path) == tmp_path / "generation_config.json"


def test_a_checkpoints_limit_is_a_default_and_an_operators_holds_for_all(tmp_path: Path) -> None:
    limited = folder(tmp_path, {"max_new_tokens": 100})
    of = lambda asked, override: generation_defaults(asked, override, limited)  # noqa: E731
    assert [(each.max_tokens, each.most_tokens) for each in (of("auto", {}), of(str(limited), {}))] == [
        (100, None),
        (100, 100),
    ]
    for asked in ("auto", "none", str(limited)):
        own = of(asked, {"max_new_tokens": 7})
        assert (own.max_tokens, own.most_tokens, own.shown) == (7, 7, {"max_tokens": 7})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"temperature": 3}, "temperature: should be less than or equal to 2; --generation-config none leaves"),
        ({"top_k": 2.5}, "top_k: "),
        ({"top_p": "0.9"}, "top_p: "),
        ({"max_new_tokens": 0}, "max_new_tokens: "),
        ([1], "the file: "),
        ("{", "not readable as JSON"),
    ],
)
def test_a_wrong_file_ends_the_start_with_its_key(content: object, text: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=text) as caught:
        generation_defaults("auto", {}, folder(tmp_path, content))
    assert str(caught.value).startswith(f"{tmp_path}/generation_config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "override", "text"),
    [
        ("auto", {"temprature": 1}, "temprature is not a sampling default; it takes temperature, top_p"),
        ("auto", {"temperature": -1}, "--override-generation-config: temperature: should be greater than"),
        ("nowhere", {}, r"--generation-config nowhere: there is no generation_config\.json"),
    ],
)
def test_an_operators_mistakes(asked: str, override: dict[str, object], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        generation_defaults(asked, override, tmp_path)
