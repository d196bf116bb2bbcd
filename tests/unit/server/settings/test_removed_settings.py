"""Settings that are gone: each is refused with what became of it, wherever it is still set."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from quire import LLM
from quire_lab.commands.plan import run as plan
from quire_server.engine.replicas import FAILOVER_SECONDS
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.flags import build_parser, parse_flags
from quire_server.settings import ENV_PREFIX, REMOVED, Settings, SettingsError, flag_name, plain_fields
from quire_server.settings.limits import REMOVED_SWITCHES, WITHOUT_EFFECT
from quire_server.settings.vllm import flags_text

ROOT = Path(__file__).parents[4]
SOURCES = {".py", ".cpp", ".h", ".js", ".html", ".yaml", ".yml", ".json", ".sh"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("QUIRE_", "VLLM_")):
            monkeypatch.delenv(name)


def refused(*argv: str) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        parse_flags(argv)
    return caught.value.lines


def test_what_is_gone_is_no_setting() -> None:
    assert (REMOVED.keys() | WITHOUT_EFFECT.keys()) & Settings.model_fields.keys() == set()
    assert REMOVED.keys() >= REMOVED_SWITCHES


def told(prefix: str, names: Iterable[str], spell: Callable[[str], str]) -> list[str]:
    every = {**REMOVED, **WITHOUT_EFFECT}
    return sorted(f"{prefix}{spell(name)} is no setting any more, leave it out: {every[name]}" for name in names)


def test_as_flags() -> None:
    lines = told("", REMOVED, flag_name)
    assert sorted(refused(*(word for name in REMOVED for word in (flag_name(name), "1")))) == lines
    assert sorted(refused(*(f"--{name}=1" for name in REMOVED))) == lines
    assert sorted(refused(*map(flag_name, REMOVED))) == lines


def test_as_switches() -> None:
    lines = told("", REMOVED_SWITCHES, flag_name)
    for spelling in ("--{}", "--no-{}", "--{}=false"):
        assert sorted(refused(*(spelling.format(flag_name(name)[2:]) for name in REMOVED_SWITCHES))) == lines
    assert sorted(refused(*(f"--{name}=true" for name in REMOVED_SWITCHES))) == lines


def test_as_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*REMOVED, *WITHOUT_EFFECT]
    for name in names:
        monkeypatch.setenv(ENV_PREFIX + name.upper(), "7")
    assert sorted(refused()) == told(ENV_PREFIX, names, str.upper)


@pytest.mark.parametrize("value", ["7", "64MiB", "true", "false"])
def test_as_keys_of_the_file(value: str, tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    for between in "_-":
        file.write_text("port: 8000\n" + "".join(f"{name.replace('_', between)}: {value}\n" for name in REMOVED))
        lines = told(f"--config {file}: ", REMOVED, lambda name: name.replace("_", "-"))
        assert sorted(refused("--config", str(file))) == lines


def test_each_has_its_line(tmp_path: Path) -> None:
    lines = refused("--min-chunk", "8", "--pipeline-parallel-size", "2", "--step-log", "0")
    assert sorted(line.split(" ")[0] for line in lines) == ["--min-chunk", "--pipeline-parallel-size", "--step-log"]
    file = tmp_path / "quire.yaml"
    file.write_text("min-chunk: 8\nstep-log: 0\n")
    assert len(refused("--config", str(file))) == 2


def test_as_an_argument_of_a_script() -> None:
    with pytest.raises(TypeError, match=r"LLM\(\): min_chunk is no setting any more") as caught:
        LLM("quire-demo", min_chunk=8)
    assert "\n" not in str(caught.value)


def test_a_plan_does_not_try_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "load.jsonl"
    trace.write_text('{"at": 0, "input_tokens": 10, "output_tokens": 10}\n')
    argv = ["--slo", "ttft_p95=2s", "--trace", str(trace), "--cost", "step=0.01", "--try", "min-chunk=8,16"]
    assert plan(argv) == 2
    assert "--try min-chunk is no setting any more" in capsys.readouterr().err


def test_the_lines_name_what_there_is() -> None:
    for text in REMOVED.values():
        assert set(re.findall(r"--[a-z-]+", text)) <= {flag_name(name) for name in plain_fields(Settings)}
    policy = RestartPolicy()
    assert f"last {policy.window_seconds:g} s" in REMOVED["engine_restart_window"]
    assert f"for {policy.start_seconds:g} s" in REMOVED["engine_start_timeout"]
    assert f"wait {FAILOVER_SECONDS:g} s" in REMOVED["failover_wait"]


def test_no_help_shows_it() -> None:
    shown = build_parser("quire serve").format_help() + flags_text(plain_fields(Settings), 120)
    for name in REMOVED:
        assert flag_name(name) not in shown, name


def test_no_message_names_it() -> None:
    """Nothing that is printed, answered or configured sends anybody to a flag that is gone."""
    gone = re.compile("|".join(f"{flag_name(name)}\\b" for name in REMOVED))
    folders = ("server", "engine", "kernels", "configs", "benchmarks/quire_bench", "lab")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    assert len(files) > 300
    documents = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if path.name != "CHANGELOG.md"]
    for path in (*files, *documents, ROOT / "Dockerfile", ROOT / "Makefile"):
        assert not gone.search(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize(("budget", "chunk", "claim"), [(512, 512, 16), (8192, 2048, 256), (256, 8, 8), (96, 64, 16)])
def test_the_oldest_request_s_claim_grows_with_the_step(budget: int, chunk: int, claim: int) -> None:
    limits = Settings(max_num_batched_tokens=budget, prefill_chunk=chunk).limits
    assert limits.min_chunk == claim


@pytest.mark.parametrize("num_seqs", [64, 496, 500, 1008, 2000, 2032, 8000])
def test_the_claim_leaves_room_for_every_decode(num_seqs: int) -> None:
    """A step that holds all decodes and 16 tokens is enough, whatever its size: so a refusal's advice works."""
    Settings(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs + 16).limits.check()
