"""The command lines of nodes and fronts: each takes its own flags, refuses the other's, and shares a file with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire_server.flags import ENGINE, SERVE, build_parser, parse_flags
from quire_server.settings import SettingsError, flag_name
from quire_server.settings.node_fields import NodeFields

LISTEN = ("--listen", "127.0.0.1:9000")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("QUIRE_", "VLLM_")):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("prog", "argv", "line"),
    [
        (ENGINE, (), "--listen is missing: HOST:PORT on which this node serves fronts"),
        (ENGINE, (*LISTEN, "--port", "1"), "--port is a front's, which `quire serve --engines` starts"),
        (ENGINE, (*LISTEN, "--api-key", "k"), "--api-key is a front's, which `quire serve --engines` starts"),
        (ENGINE, (*LISTEN, "--replicas", "2"), "--replicas is a front's, which `quire serve --engines` starts"),
        (ENGINE, (*LISTEN, "--engines", "a:1"), "--engines is a front's, which `quire serve --engines` starts"),
        (SERVE, ("--engines", "a:1", "--kv-memory", "1GiB"), "--kv-memory is the nodes': give it to `quire engine`"),
        (SERVE, ("--engines", "a:1", "--max-num-seqs", "8"), "--max-num-seqs is the nodes': give it to `quire engine`"),
        (
            SERVE,
            ("--engines", "a:1", "--kv-events-config.endpoint", "tcp://*:1"),
            "--kv-events-config is the nodes': give it to `quire engine`",
        ),
        (SERVE, ("--engine-tls-ca", "k"), "--engine-tls-ca is of links to nodes, which --engines names"),
        (
            SERVE,
            ("--metrics-listen", "127.0.0.1:1"),
            "--metrics-listen is of `quire engine`; this server has /metrics on --host and --port",
        ),
        (SERVE, LISTEN, "--listen is of `quire engine`; this server listens on --host and --port"),
    ],
)
def test_a_flag_of_the_other_program_is_refused(prog: str, argv: tuple[str, ...], line: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_flags(argv, prog)
    assert caught.value.lines == (line,)


def test_a_file_may_have_the_settings_of_both(tmp_path: Path) -> None:
    file = tmp_path / "quire.yaml"
    file.write_text("listen: 127.0.0.1:9000\nengines: [127.0.0.1:9000]\nport: 8001\nkv-memory: 1GiB\n")
    node, front = (parse_flags(("--config", str(file)), prog) for prog in (ENGINE, SERVE))
    assert (node.listen, node.kv_memory) == ("127.0.0.1:9000", 1 << 30)
    assert (front.engines, front.port) == (("127.0.0.1:9000",), 8001)


def test_what_the_front_needs_of_the_model_it_takes() -> None:
    front = parse_flags(("--engines", "a:1", "--tokenizer", "t", "--slo-ttft", "2", "--enable-lora"), SERVE)
    assert (front.tokenizer, front.slo_ttft, front.enable_lora) == ("t", 2.0, True)
    node = parse_flags((*LISTEN, "--quantization", "int8", "--drain-timeout", "5", "--set", "cpu_variant=avx2"), ENGINE)
    assert (node.quantization, node.drain_timeout, node.cpu_variant) == ("int8", 5.0, "avx2")


def test_the_help_of_a_node_shows_its_flags_alone() -> None:
    shown = build_parser(ENGINE).format_help()
    for flag in ("--listen", "--kv-memory", "--engine-tls-ca", "--max-num-seqs"):
        assert f"\n  {flag} " in shown
    for flag in ("--port", "--api-key", "--replicas", "--engines"):
        assert f"\n  {flag} " not in shown
    assert "usage: quire engine [MODEL] [flags]" in shown


@pytest.mark.parametrize("name", NodeFields.model_fields)
def test_a_node_s_own_settings_are_no_flags_of_a_server(name: str) -> None:
    assert f"\n  {flag_name(name)} " in build_parser(ENGINE).format_help().replace("[no-]", "")
    assert flag_name(name) not in build_parser(SERVE).format_help().replace("[no-]", "")
