"""Facts against a live server: python -m quire_bench.facts --url http://127.0.0.1:8000 [F1 F12 ...].

Promises: a table of what was expected and what came; exit code 0 when all agree, 1 when one does not or could not be
checked, 2 for arguments that cannot work. Must not know: any fact.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quire_bench.facts import batching, memory, sharing, steps, timing
from quire_bench.facts.fact import Fact
from quire_bench.facts.live import Live
from quire_bench.servers import BenchError

Check = Callable[[Live], list[Fact]]


def checks(model: Path | None) -> dict[tuple[str, ...], Check]:
    """By the numbers of the facts that each checks, quick ones first."""
    return {
        ("F9",): memory.reserved_and_live,
        ("F10",): lambda live: memory.bytes_of_a_block(live, model),
        ("F19",): memory.limits_are_checked,
        ("F1", "F2"): batching.static_batching,
        ("F8",): batching.blocks_of_a_length,
        ("F12",): batching.block_growth,
        ("F3", "F4"): steps.finish_steps,
        ("F6",): steps.chunks_of_a_prompt,
        ("F7",): steps.place_of_a_token,
        ("F11", "F13"): sharing.shared_prefix,
        ("F5",): timing.first_token_parts,
        ("F14",): sharing.saved_prefill,
        ("F17",): timing.full_cache_alerts,
        ("F18",): timing.littles_law,
    }


def run(live: Live, wanted: Sequence[str], model: Path | None) -> list[Fact]:
    """The facts with these numbers, or all; one that cannot be checked is one that does not hold."""
    facts: list[Fact] = []
    for numbers, check in checks(model).items():
        if wanted and not set(numbers) & set(wanted):
            continue
        try:
            live.until_idle()
            facts += check(live)
        except BenchError as error:
            facts.append(Fact(name="/".join(numbers), expected="an answer", got=str(error)[:160], ok=False))
    return facts


def main(argv: Sequence[str]) -> int:
    known = [number for numbers in checks(None) for number in numbers]
    parser = argparse.ArgumentParser(prog="python -m quire_bench.facts", description=__doc__.splitlines()[0])
    parser.add_argument("facts", nargs="*", metavar="FACT", help=f"which: {', '.join(known)}; default: all")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a server that does nothing else meanwhile")
    parser.add_argument("--api-key", default="", help="key that the server asks clients for")
    parser.add_argument("--admin-api-key", default="", help="key that it asks operators for; none on its own machine")
    parser.add_argument("--model", type=Path, help="the served checkpoint, to compare its config's sizes")
    asked = parser.parse_args(argv)
    if unknown := [fact for fact in asked.facts if fact not in known]:
        parser.error(f"there is no check of {', '.join(unknown)}; known are {', '.join(known)}")
    try:
        live = Live(asked.url, api_key=asked.api_key, admin_key=asked.admin_api_key)
    except BenchError as error:
        print(f"quire facts: {error}", file=sys.stderr)
        return 1
    facts = run(live, asked.facts, asked.model)
    table = Table("fact", "expected", "got", "")
    for fact in facts:
        table.add_row(fact.name, fact.expected, fact.got, "ok" if fact.ok else "NOT SO")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return 0 if all(fact.ok for fact in facts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
