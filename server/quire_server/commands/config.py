"""`quire config`: checks the settings of a server without starting it, and translates command lines of other servers.

Promises: every problem that can be told without a model or a socket, a line each, by the name of its setting; nothing
is started, downloaded or written. The exit code is 0 where nothing is wrong, else 2.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from quire_engine.contract.errors import QuireError
from quire_engine.links.link_security import link_security
from quire_server.checkpoint.locate import check_location
from quire_server.engine.nodes.addresses import parse_sources
from quire_server.flags import ENGINE, SERVE, check_command_line
from quire_server.http.tls import tls_context
from quire_server.logs.output import check_collector
from quire_server.programs.warming import read_prefixes
from quire_server.settings import DEMO_MODEL, Settings, SettingsError, several_models
from quire_server.settings.migration import SERVERS, translate_words
from quire_server.showing.terminal import BAD_USAGE, DONE, Parser, complain

_NAME = "config check"
_OWN = ("--node", "-h", "--help")  # all other words are the server's


def run(argv: Sequence[str]) -> int:
    """Check a server's settings, or with --node a node's; the process's exit code."""
    if argv[:1] == ["from"]:
        return _translate(argv[1:])
    own = [word for at, word in enumerate(argv) if at == 0 or word in _OWN]
    asked = build_parser().parse_args(own)
    rest = [word for word in argv[1:] if word not in _OWN]
    given, problems = check_command_line(rest, ENGINE if asked.node else SERVE)
    notes: list[str] = []
    if given is not None:
        problems = [*_problems(given.settings, notes)]
        for line in given.warnings:
            print(f"quire {_NAME}: warning: {line}", file=sys.stderr)
        notes = [*given.notes, *notes]
    for line in notes:
        print(f"note: {line}")
    if problems:
        return complain(_NAME, "\n".join(problems), BAD_USAGE)
    print("no problem was found; `quire serve --dry-run` with the same settings holds them against model and memory")
    return DONE


def build_parser() -> ArgumentParser:
    """The command's own flags."""
    parser = Parser(
        prog="quire config",
        description="Read the settings of a server as `quire serve` would, from flags, environment and --config file,"
        " and say every problem without starting it; all further flags are those of `quire serve`. Or print the command"
        f" line of `quire serve` that does what another server's did: quire config from {'|'.join(SERVERS)} FLAGS.",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=("check", "from"))
    parser.add_argument("--node", action="store_true", help="check a node's settings, of quire engine")
    return parser


def _translate(argv: Sequence[str]) -> int:
    """Print the command line that does what one of another server did, and what is to be said of its words."""
    name, *words = argv or [""]
    if name not in SERVERS:
        return complain("config from", f"expected one of {', '.join(SERVERS)}, and its flags", BAD_USAGE)
    server = SERVERS[name]
    found = translate_words(server, words[1:] if words[:1] == ["--"] else words)
    print(found.command)
    for line in found.notes:
        print(f"# {line}")
    problems = [*found.problems, *check_command_line(found.words)[1]]
    return complain("config from", "\n".join(problems), BAD_USAGE) if problems else DONE


def _problems(settings: Settings, notes: list[str]) -> Iterator[str]:
    """The problems that only a start would tell; `notes` get the names that could not be looked at."""

    def links() -> None:
        link_security(settings.engine_tls_cert, settings.engine_tls_key, settings.engine_tls_ca)
        if settings.engines:
            parse_sources(settings.engines)

    def model(settings: Settings) -> None:
        named = [("--model", settings.model)] if settings.model != DEMO_MODEL and not settings.engines else []
        named += [("--tokenizer", settings.tokenizer)] if settings.tokenizer is not None else []
        for setting, name in named:
            note = check_location(name, settings.model_impl, setting)
            notes.extend([note] if note else [])

    try:
        models = [entry.settings for entry in several_models(settings)] or [settings]
    except SettingsError as error:
        models = []
        yield from error.lines
    checks: tuple[Callable[[], object], ...] = (
        lambda: tls_context(settings),
        lambda: check_collector("traces", settings.otlp_traces_endpoint),
        lambda: check_collector("metrics", settings.otlp_metrics_endpoint),
        lambda: settings.warm_prefix is None or read_prefixes(settings.warm_prefix),
        links,
        *(partial(model, each) for each in models),
    )
    for check in checks:
        try:
            check()
        except QuireError as error:
            yield str(error)
        except OSError as error:
            yield f"{error.filename or 'a file'}: {error.strerror}"
