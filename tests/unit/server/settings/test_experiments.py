"""Experiments: each is set by `set` in every source, checked as a setting, and named where it is given otherwise."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from quire_server.flags import ENGINE, build_parser, option_group, parse_flags, value_kind
from quire_server.settings import ENV_PREFIX, EXPERIMENTS, Settings, SettingsError, flag_name, several_models, spelled
from quire_server.settings.vllm import names_of_vllm
from support.covering import few


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("QUIRE_", "VLLM_")):
            monkeypatch.delenv(name)


def refusal(*argv: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parse_flags(argv)
    (line,) = caught.value.lines
    return line


def other(name: str) -> str:
    """A value that is not the default."""
    given = {
        "ignore_config_keys": "alpha,beta",
        "enable_fault_injection": "step.raise@5,oom@seed=7",
        "block_size": "32",
    }
    field = EXPERIMENTS[name]
    kind, default = value_kind(field.annotation), field.get_default(call_default_factory=True)
    if name in given:
        return given[name]
    if kind is bool:
        return "false" if default else "true"
    return next(value for value in get_args(kind) if value != default) if get_origin(kind) is Literal else "7"


OTHERS = {name: other(name) for name in EXPERIMENTS}


def set_in(settings: Settings) -> dict[str, object]:
    """The experiments that are not their defaults."""
    values = {name: getattr(settings, name) for name in EXPERIMENTS}
    defaults = {name: field.get_default(call_default_factory=True) for name, field in EXPERIMENTS.items()}
    return {name: value for name, value in values.items() if value != defaults[name]}


@pytest.mark.parametrize("name", few(EXPERIMENTS, *list(EXPERIMENTS)[::5]))
def test_every_source_sets_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = f"{name}={OTHERS[name]}"
    by_flag = parse_flags(["--set", pair])
    assert set_in(by_flag).keys() == {name}
    assert by_flag == parse_flags([f"--set={pair}"])
    file = tmp_path / "quire.yaml"
    for written in (f"set: [{json.dumps(pair)}]\n", f"set:\n  {name}: {json.dumps(OTHERS[name])}\n"):
        file.write_text(written)
        assert set_in(parse_flags(["--config", str(file)])) == set_in(by_flag)
    monkeypatch.setenv("QUIRE_SET", pair)
    assert parse_flags([]) == by_flag


def test_all_at_once_by_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_SET", ", ".join(f"{name}={value}" for name, value in OTHERS.items()))
    settings = parse_flags([])
    assert set_in(settings).keys() == EXPERIMENTS.keys()
    assert settings.enable_fault_injection == OTHERS["enable_fault_injection"]
    assert settings.ignore_config_keys == ("alpha", "beta")


def test_sources_win_name_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("set: {learn: true, block_size: 64, kernels: cpu, async_scheduling: off}\n")
    monkeypatch.setenv("QUIRE_SET", "block_size=32,kernels=triton")
    settings = parse_flags(["--config", str(file), "--set", "kernels=reference", "--set", "max-logprobs=3"])
    by_file = {"learn": True, "async_scheduling": "off"}  # which YAML reads as truths
    assert set_in(settings) == {"block_size": 32, "kernels": "reference", "max_logprobs": 3, **by_file}


@pytest.mark.parametrize("name", sorted(EXPERIMENTS.keys() - set(names_of_vllm())))
def test_as_a_setting_of_its_own_it_is_told_how_to_write_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_switch, pair = value_kind(EXPERIMENTS[name].annotation) is bool, f"{name}={OTHERS[name]}"
    words = [flag_name(name)] if is_switch else [flag_name(name), OTHERS[name]]
    assert refusal(*words) == f"{flag_name(name)} is an experiment now: write --set {pair}, in a file set: [{pair}]"
    file = tmp_path / "quire.yaml"
    file.write_text(f"{name}: {OTHERS[name] if is_switch else json.dumps(OTHERS[name])}\n")
    assert f"is an experiment now: write --set {pair}, in a file set: [{pair}]" in refusal("--config", str(file))
    monkeypatch.setenv(ENV_PREFIX + name.upper(), OTHERS[name])
    assert refusal() == f"{ENV_PREFIX}{name.upper()} is an experiment now: write QUIRE_SET={pair}"


@pytest.mark.parametrize("name", sorted(EXPERIMENTS.keys() & set(names_of_vllm())))
def test_a_flag_of_vllm_sets_it_still(name: str) -> None:
    is_switch = value_kind(EXPERIMENTS[name].annotation) is bool
    words = [f"--no-{flag_name(name)[2:]}"] if is_switch else [flag_name(name), OTHERS[name]]
    assert parse_flags(words) == parse_flags(["--set", f"{name}={OTHERS[name]}"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("kernel=cpu", "--set kernel: no experiment has this name; known: kernels, cpu_variant, "),
        ("port=80", "--set port: no experiment has this name; known: "),
        ("learn", "--set learn: expected NAME=VALUE, such as check_invariants=true"),
        ("kernels=fast", "--set kernels: input should be 'auto', 'reference', 'cpu' or 'triton' (got 'fast')"),
        ("block_size=3", "--set block_size: block sizes are 16, 32, 64, 128 or 256 tokens"),
        ("max_num_partial_prefills=0", "--set max_num_partial_prefills: must be at least 1"),
    ],
)
def test_what_cannot_be_set_is_refused_in_one_line(words: str, line: str) -> None:
    assert refusal("--set", words).startswith(line)


def test_other_sources_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("set: {kernel: cpu}\n")
    assert refusal("--config", str(file)).startswith(f"--config {file}: set: kernel: no experiment has this name")
    file.write_text("set: {kernels: fast}\n")
    assert refusal("--config", str(file)).startswith("set: kernels in the configuration file: input should be")
    monkeypatch.setenv("QUIRE_SET", "cpu-variant=kernels,learn=true")
    with pytest.raises(SettingsError) as both:
        parse_flags(["--config", str(file)])
    assert sorted(problem.partition(": input should be")[0] for problem in both.value.lines) == [
        "QUIRE_SET: cpu_variant",
        "set: kernels in the configuration file",
    ]
    monkeypatch.setenv("QUIRE_SET", "learn=true,kernels=fast")
    assert refusal().startswith("QUIRE_SET: kernels: input should be")
    monkeypatch.setenv("QUIRE_SET", "kernel=cpu")
    assert refusal().startswith("QUIRE_SET: kernel: no experiment has this name")


def test_a_node_refuses_those_of_a_front() -> None:
    assert parse_flags(["--listen", "127.0.0.1:1", "--set", "kernels=cpu"], ENGINE).kernels == "cpu"
    with pytest.raises(SettingsError, match=r"^--set route_policy is a front's"):
        parse_flags(["--listen", "127.0.0.1:1", "--set", "route_policy=round_robin"], ENGINE)
    with pytest.raises(SettingsError, match=r"^--set kernels is the nodes'"):
        parse_flags(["--engines", "a:1", "--set", "kernels=cpu"])


def test_of_several_models_each_has_its_own(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models:\n- {model: a, set: {kernels: reference}}\n- {model: b}\n")
    first, second = several_models(parse_flags(["--models", str(file), "--set", "kernels=cpu"]))
    assert (first.settings.kernels, second.settings.kernels) == ("reference", "cpu")
    for entry, line in (
        ("{model: a, kernels: cpu}", r"a: kernels is an experiment now: write set: \[kernels=cpu\]"),
        ("{model: a, set: {kernel: cpu}}", "a: set: kernel: no experiment has this name"),
        ("{model: a, set: {learn: true}}", "a: learn is not a model's"),
        ("{model: a, set: {enable_fault_injection: oom}}", "a: enable_fault_injection is not a model's: a fault names"),
    ):
        file.write_text(f"models:\n- {entry}\n")
        with pytest.raises(SettingsError, match=line):
            several_models(parse_flags(["--models", str(file)]))


def test_the_help_of_set_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_flags(["--set", "help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name, field in EXPERIMENTS.items():
        assert f"\n{name} " in shown
        assert option_group(field) == "Experiments"
        assert spelled(name) == f"--set {name}"
    assert "--set NAME=VALUE" in build_parser("quire serve").format_help()
