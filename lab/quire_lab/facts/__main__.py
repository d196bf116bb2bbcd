"""Facts against a live server: python -m quire_lab.facts --url http://127.0.0.1:8000 [F1 F12 ...].

Promises: what the command of checks does, for facts on batching and paged memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from quire_lab.facts import batching, memory, sharing, steps, timing
from quire_lab.facts.command import CheckCommand, Checks, run_checks
from quire_lab.facts.fact import Fact
from quire_lab.facts.live import Live


def checks(model: Path | None) -> Checks:
    """Return the checks by the numbers of the facts that each checks, quick ones first."""
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
    """The facts with these numbers, or all."""
    return run_checks(live, checks(model), wanted)


def main(argv: Sequence[str]) -> int:
    """Check and print; the process's exit code."""
    known = [number for numbers in checks(None) for number in numbers]
    about = "Facts on batching and paged memory against a live server: what was expected and what came."
    command = CheckCommand("python -m quire_lab.facts", about=about, one="fact", known=known)
    asked = command.parse(argv)
    return command.carry_out(asked, checks(asked.model))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
