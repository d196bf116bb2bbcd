"""Runs rows, all or those named, and prints what happened: `PYTHONPATH=tests python -m hostile.rows [NAME ...]`."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

from e2e.served import Served
from hostile.row import Row


def rows() -> Iterator[Row]:
    """All that the modules beside this one name in their `ROWS`."""
    for path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
        yield from import_module(f"hostile.rows.{path.stem}").ROWS


def main(names: Sequence[str]) -> int:
    """The exit code: 1 where a promise was broken, 2 for a name that is not known."""
    known = {row.name: row for row in rows()}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no such row: {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a background job inherits it, and servers would from it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    broken = 0
    for row in [known[name] for name in names] or known.values():
        with (
            tempfile.TemporaryDirectory() as folder,
            Served(*row.flags, limits=row.limits, cwd=Path(folder) if row.has_folder else None) as server,
        ):
            try:
                happened = asyncio.run(row.act(server))
            except AssertionError as error:
                broken += 1
                happened = f"BROKEN: {error}"
        print(f"{row.name}: {row.what}: {happened}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
