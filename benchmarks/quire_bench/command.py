"""`quire bench`: puts load on servers and says how fast they are.

Promises: exit code 0 when every server answered at every load, 1 when one did not or could not be measured, 2 for flags
that cannot work.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from quire_bench.arguments import build_parser, parse_arguments
from quire_bench.benchmark import run_benchmark
from quire_bench.report import print_report
from quire_bench.results import Results
from quire_bench.servers import BenchError
from quire_server.http.event_loop import loop_factory
from quire_server.settings import SettingsError

__all__ = ["build_parser", "run"]  # the interface of a command

DONE, FAILED, BAD_USAGE = 0, 1, 2


def run(argv: Sequence[str]) -> int:
    """Measure; the process's exit code."""
    try:
        asked = parse_arguments(argv)
    except BenchError as error:
        _complain(error)
        return BAD_USAGE
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        try:
            results = runner.run(run_benchmark(asked, argv, lambda line: print(line, file=sys.stderr, flush=True)))
        except (BenchError, SettingsError) as error:
            _complain(error)
            return FAILED
        except KeyboardInterrupt:
            return FAILED
    if asked.json is not None:
        asked.json.write_bytes(results.encode())
    print_report(results)
    if asked.plot is not None:
        from quire_bench.plot import draw  # noqa: PLC0415 - needs matplotlib, which is optional

        draw(results, asked.plot)
    return DONE if _all_answered(results) else FAILED


def _all_answered(results: Results) -> bool:
    return all(run.ok for result in results.points for one in result.servers for run in one.rounds)


def _complain(error: Exception) -> None:
    for line in str(error).splitlines():
        print(f"quire bench: {line}", file=sys.stderr)
