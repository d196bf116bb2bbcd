"""Exercises by a live server: quire exercises --url http://127.0.0.1:8000 [S1.3 S2.2 ...].

Promises: what the command of checks does; servers of its own, for what the given one cannot show, are gone at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from quire_lab.exercises import alone, commands, library, pool, reasons, stepping
from quire_lab.exercises.own import OwnServers
from quire_lab.facts.command import CheckCommand, Checks

_ABOUT = (
    "Exercises on continuous batching, by a live server: what was expected and what came. What"
    " needs a small pool, few slots or nobody else is shown by servers of the embedded model on this machine's CPU,"
    " which are started for that and stopped."
)


def checks(model: Path | None, own: OwnServers, plot: str | None) -> Checks:
    """Return the checks by the exercises that each checks, quick ones first."""
    return {
        ("S2.1",): lambda _: library.without_a_model(),
        ("S3.2",): lambda live: commands.memory_plan(live, model),
        ("S1.2",): pool.place_of_a_token,
        ("S1.1",): pool.audited_under_load,
        ("S3.1",): lambda live: stepping.jobs(live, own),
        ("S1.4",): lambda live: [*pool.shared_prefix(live), *commands.sharing_plan()],
        ("S1.3",): lambda live: stepping.at_once(live, own),
        ("S2.2", "S2.3"): lambda _: stepping.staggered(own, plot),
        ("S2.4",): lambda live: alone.same_tokens(live, own),
        ("S4.2",): lambda live: reasons.every_decision(live, own),
        ("S4.6",): lambda _: commands.plan_written_twice(),
        ("S3.3",): lambda _: library.script_for_vllm(own),
        ("S4.1",): commands.sweep,
        ("S4.4",): lambda live: commands.against_itself(live, own),
        ("S4.5",): commands.verdict,
    }


def main(argv: Sequence[str]) -> int:
    """Check and print; the process's exit code."""
    with OwnServers() as own:
        known = sorted(name for names in checks(None, own, None) for name in names)
        command = CheckCommand("quire exercises", about=_ABOUT, one="exercise", known=known)
        command.parser.add_argument(
            "--plot",
            nargs="?",
            const="-",
            metavar="FILE",
            help="used blocks of S2.3 over its steps here, as SVG in FILE",
        )
        asked = command.parse(argv)
        return command.carry_out(asked, checks(asked.model, own, asked.plot))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
