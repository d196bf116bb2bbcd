"""Settings that are gone: each is refused with what became of it, wherever it is still set."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from quire import LLM
from quire_lab.commands.plan import run as plan
from quire_server.engine.replicas import FAILOVER_SECONDS
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.flags import build_parser, parse_flags
from quire_server.settings import ENV_PREFIX, REMOVED, Settings, SettingsError, flag_name, plain_fields
from quire_server.settings.limits import REMOVED_SWITCHES
from quire_server.settings.vllm import flags_text
from support.covering import few

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
    assert REMOVED.keys() & Settings.model_fields.keys() == set()
    assert REMOVED.keys() >= REMOVED_SWITCHES


@pytest.mark.parametrize("name", REMOVED)
def test_as_a_flag(name: str) -> None:
    (line,) = refused(flag_name(name), "1")
    assert line == f"{flag_name(name)} is no setting any more, leave it out: {REMOVED[name]}"
    assert refused(f"--{name}=1") == (line,)
    assert refused(flag_name(name)) == (line,)


@pytest.mark.parametrize("name", sorted(REMOVED_SWITCHES))
def test_as_a_switch(name: str) -> None:
    flag = flag_name(name)
    (line,) = refused(flag)
    assert line.startswith(f"{flag} is no setting any more")
    for spelling in (f"--no-{flag[2:]}", f"{flag}=false", f"--{name}=true"):
        assert refused(spelling) == (line,)


@pytest.mark.parametrize("name", REMOVED)
def test_as_a_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variable = ENV_PREFIX + name.upper()
    monkeypatch.setenv(variable, "7")
    (line,) = refused()
    assert line == f"{variable} is no setting any more, leave it out: {REMOVED[name]}"


@pytest.mark.parametrize("name", REMOVED)
@pytest.mark.parametrize("value", few(["7", "64MiB", "true", "false"], "7"))
def test_as_a_key_of_the_file(name: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    for key in (name, name.replace("_", "-")):
        file.write_text(f"port: 8000\n{key}: {value}\n")
        (line,) = refused("--config", str(file))
        kebab = name.replace("_", "-")
        assert line == f"--config {file}: {kebab} is no setting any more, leave it out: {REMOVED[name]}"


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
