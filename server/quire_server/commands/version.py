"""`quire version`: prints the installed version.

Promises: one line on stdout.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire_server.showing.version import VERSION


def run(argv: Sequence[str]) -> int:
    """Print the version; arguments are ignored."""
    del argv
    print(f"quire {VERSION}")
    return 0
