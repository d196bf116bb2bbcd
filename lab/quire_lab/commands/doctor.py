"""`quire doctor`: reads a running server's metrics for a while and names the cause of bad latencies.

Promises: exit code 0 when all objectives are met and no request was refused, 1 when not, 2 when the server cannot be
read or the flags cannot work.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from urllib.error import URLError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.table import Table

from quire_engine.contract.errors import ConfigError
from quire_engine.cost_model import read_cost
from quire_lab.commands.diagnosis.causes import Diagnosis, diagnose
from quire_lab.commands.diagnosis.scrapes import Scrape, Window, read_scrape
from quire_lab.simulation.slo import parse_slo
from quire_server.commands.health import listening
from quire_server.settings.keys import sent_key
from quire_server.settings.sources import admin_key_of_environment
from quire_server.showing.terminal import (
    BAD_USAGE,
    DONE,
    FAILED,
    Parser,
    above_0,
    complain,
    duration,
    wide_console,
)

DEFAULT_SLO = "ttft_p95=2s,itl_p95=200ms"
_EVERY = 1.0  # seconds between scrapes: gauges change faster than counters matter
_TIMEOUT = 10.0
_MOST_BYTES = 16 << 20
_STEPS = 256  # the most in one answer


def run(argv: Sequence[str]) -> int:
    """Scrape, diagnose and print; returns the exit code."""
    given = build_parser().parse_args(argv)
    try:
        slo = parse_slo(given.slo)
        cost = read_cost(given.cost)[0] if given.cost else None
        admin_key = sent_key(given.admin_api_key or admin_key_of_environment(), "--admin-api-key")
        api_key = sent_key(given.api_key or "", "--api-key")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        url = (given.url or _found()).rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url is {url!r}, must begin with http:// or https://")
        print(f"reading {url}/metrics for {given.seconds:g} s", file=sys.stderr)
        scrapes = watch(lambda: fetch(f"{url}/metrics", headers), seconds=given.seconds)
    except ConfigError as error:
        return complain("doctor", str(error), BAD_USAGE)
    told = [Scrape(at=scrapes[0].at, samples={}), *scrapes] if given.since_start else scrapes
    window = Window(told, cost=cost, takers=takers(url, admin_key))
    found = diagnose(window, slo)
    print_diagnosis(found, window, wide_console())
    return DONE if found.ok and not found.causes else FAILED


def build_parser() -> argparse.ArgumentParser:
    """The command\'s own flags."""
    parser = Parser(
        prog="quire doctor",
        description="Read a running server's metrics for a while, hold them against objectives, and name the cause"
        " where one is missed: with the numbers that show it, and what to change.",
        allow_abbrev=False,
    )
    parser.add_argument("--url", help="of the server [the one that runs here]")
    parser.add_argument("--slo", default=DEFAULT_SLO, metavar="LIST", help=f"objectives [{DEFAULT_SLO}]")
    parser.add_argument(
        "--seconds", type=above_0("seconds", most=3600), default=10.0, metavar="S", help="time to look [10]"
    )
    parser.add_argument("--since-start", action="store_true", help="all since the server's start, not this time alone")
    parser.add_argument(
        "--cost", metavar="FILE", help="its calibration: a quantised model's steps are held against it [not]"
    )
    parser.add_argument("--api-key", metavar="KEY", help="if the server needs one")
    parser.add_argument(
        "--admin-api-key",
        default="",
        metavar="KEY",
        help="to name the requests that took others' blocks, where it needs one; or QUIRE_ADMIN_API_KEY",
    )
    return parser


def _found() -> str:
    addresses = sorted(listening())
    if len(addresses) != 1:
        found = f"several servers listen here: {', '.join(addresses)}" if addresses else "no server listens here"
        raise ConfigError(f"{found}; name one with --url")
    return addresses[0]


def fetch(url: str, headers: dict[str, str]) -> str:
    """One scrape of the metrics. Raises ConfigError."""
    try:
        with urlopen(Request(url, headers=headers), timeout=_TIMEOUT) as reply:
            text: bytes = reply.read(_MOST_BYTES)
    except (URLError, OSError, ValueError) as error:
        raise ConfigError(f"{url} cannot be read: {error}") from None
    return text.decode(errors="replace")


def takers(url: str, admin_key: str) -> dict[str, int]:
    """How often the last steps preempted a request for each of these; empty where the server does not tell."""
    headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    try:
        steps = json.loads(fetch(f"{url}/debug/steps?limit={_STEPS}", headers))["steps"]
        return Counter(one["by"] for step in steps for one in step["decisions"] if one.get("by"))
    except (ConfigError, ValueError, KeyError, TypeError):
        return {}


def watch(
    read: Callable[[], str],
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Scrape]:
    """Scrapes over a while, including the first and the last. Raises ConfigError if the server is not Quire."""
    started = clock()
    scrapes = [read_scrape(read(), started)]
    if "quire_requests_running" not in scrapes[0].samples:
        raise ConfigError("the server there is not Quire: it has no metric quire_requests_running")
    while (left := started + seconds - clock()) > 0 or len(scrapes) == 1:
        sleep(min(_EVERY, max(left, 0.0)))
        scrapes.append(read_scrape(read(), clock()))
    return scrapes


def print_diagnosis(found: Diagnosis, window: Window, console: Console) -> None:
    """Print the objectives, then the causes."""
    table = Table(title=f"{found.observed:,.0f} requests in {window.seconds:.0f} s", title_justify="left")
    table.add_column("objective")
    for column in ("at most", "measured", ""):
        table.add_column(column, justify="right")
    for one in found.measured:
        verdict = "no data" if one.seconds is None else "ok" if one.ok else "[red]MISSED[/red]"
        table.add_row(one.objective.name, duration(one.objective.seconds), duration(one.seconds), verdict)
    console.print(table)
    for number, cause in enumerate(found.causes, start=1):
        console.print(f"{number}. [bold]{cause.name}[/bold]", highlight=False)
        console.print(f"   {cause.numbers}", highlight=False, markup=False)
        console.print(f"   remedy: {cause.remedy}", highlight=False, markup=False)
    if all(one.seconds is None for one in found.measured):
        console.print("too little traffic to say anything: look again under load, or with --since-start")
    elif found.ok and not found.causes:
        console.print("the server meets its objectives; if clients see worse, it is the network, a proxy or the client")
    elif not found.causes:
        console.print("none of the known causes shows in the metrics; `quire trace` tells single requests' stories")
