"""`quire version`: prints the installed version.

Promises: one line on stdout.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version


def run(argv: Sequence[str]) -> int:
    """Print the version; arguments are ignored."""
    del argv
    print(f"quire {version('quire')}")
    return 0
