"""`quire exercises`: exercises by a live server, or with `--mine FILE` a student's own scheduler or block pool.

Promises: exit code 0 when there is no fault, 1 when there is one, 2 for flags and files that cannot work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from quire_bench.peer_rate import PeerRate, peer_rate
from quire_bench.servers import BenchError, Peer
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.demo import demo_model_path
from quire_lab.exercises.__main__ import main as by_a_live_server
from quire_lab.mine.judge import Fault, judge, student_scheduler
from quire_lab.mine.process import CALL_SECONDS, StudentError, StudentProcess
from quire_lab.mine.referee import CAUSES, Broken
from quire_lab.mine.schedulers import OurScheduler, StaticScheduler
from quire_lab.mine.serving import MACHINE, Bench, ModelProcess, Served, serving_load

DONE, FAULTY, BAD_USAGE = 0, 1, 2
_VOCABULARY = 256  # token ids of the prompts: every model has them


def run(argv: Sequence[str]) -> int:
    """Judge, serve and print; the process's exit code. Without `--mine` the exercises of a live server."""
    if not any(word == "--mine" or word.startswith("--mine=") for word in argv) and not {"-h", "--help"} & set(argv):
        return by_a_live_server(argv)
    given = build_parser().parse_args(argv)
    console = Console(width=max(100, Console().width), highlight=False)
    if not given.mine.is_file():
        print(f"quire exercises: --mine {given.mine}: there is no such file", file=sys.stderr)
        return BAD_USAGE
    classes, faults = judge(given.mine, call_seconds=given.call_seconds)
    print_faults(given.mine, classes, faults, console)
    if faults or given.no_model or not {"BlockPool", "Scheduler"} & set(classes):
        return FAULTY if faults else DONE
    try:
        return _serve(given, console)
    except (ConfigError, ModelLoadError, BenchError) as error:
        print(f"quire exercises: {error}", file=sys.stderr)
        return BAD_USAGE


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="quire exercises",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Exercises on continuous batching and paged memory. Without --mine a live server does them:\n"
        "`quire exercises --url URL [S1.3 S2.2 ...]`. With it your own BlockPool, PageTable or Scheduler\n"
        "is held against the invariants that ours is held against, and then serves a real model beside ours and\n"
        "beside static batching.",
        epilog="The file is run, in a process of its own with limits of time and memory: it should be yours.\n"
        "docs/learn.md says what the two classes do.",
    )
    parser.add_argument(
        "--mine", type=Path, metavar="FILE", help="a Python file with a class BlockPool, PageTable or Scheduler"
    )
    parser.add_argument(
        "--model",
        type=Path,
        default=demo_model_path(),
        metavar="DIR",
        help="the model that is served [the embedded one]",
    )
    parser.add_argument(
        "--against",
        type=Peer.parse,
        metavar="URL[,NAME]",
        help="a running server, such as vLLM, that serves the same requests; its rate is printed beside yours",
    )
    parser.add_argument("--no-model", action="store_true", help="check the invariants alone")
    parser.add_argument(
        "--call-seconds", type=float, default=CALL_SECONDS, metavar="S", help=f"limit of one call [{CALL_SECONDS:g}]"
    )
    return parser


def _serve(given: argparse.Namespace, console: Console) -> int:
    load = serving_load()
    with (
        ModelProcess(given.model, MACHINE) as model,
        StudentProcess(given.mine, call_seconds=given.call_seconds) as mine,
    ):
        bench = Bench(model, MACHINE, load, _VOCABULARY)
        beside = peer_rate(given.against, bench.jobs, streams=MACHINE.max_num_seqs) if given.against else None
        alone = bench.alone()
        try:
            yours = bench.serve("yours", student_scheduler(mine, MACHINE))
        except (Broken, StudentError) as error:
            fault = getattr(error, "fault", "raises"), getattr(error, "invariant", "")
            found = Fault(of="file", invariant=fault[1], name=fault[0], said=f"{error} (with the model)")
            print_faults(given.mine, [], [found], console)
            return FAULTY
        runs = [yours, bench.serve("ours", OurScheduler(MACHINE)), bench.serve("static", StaticScheduler(MACHINE))]
    print_runs(runs, alone, console, beside)
    wrong = [name for name, tokens in alone.items() if yours.tokens.get(name) != tokens]
    if wrong:
        said = f"{len(wrong)} requests got other tokens than alone, the first of them {wrong[0]}"
        print_faults(given.mine, [], [Fault(of="file", invariant="I12", name="tokens", said=said)], console)
    return FAULTY if wrong else DONE


def print_faults(path: Path, classes: Sequence[str], faults: Sequence[Fault], console: Console) -> None:
    """One line for each fault, or that there is none."""
    for fault in faults:
        number = f"{fault.invariant} " if fault.invariant else ""
        console.print(f"{path.name}: {fault.of}: {number}{fault.name}: {fault.said}", markup=False)
    if not faults:
        console.print(f"{path.name}: {' and '.join(classes)}: every invariant holds", markup=False)


def print_runs(
    runs: Sequence[Served], alone: dict[str, list[int]], console: Console, beside: PeerRate | None = None
) -> None:
    """Print what the three were worth, beside a peer's rate, and where the seats went that nobody used."""
    print_worth(runs, alone, console)
    print_rates(runs[0], console, beside)
    print_empty_seats(runs, console)


def print_worth(runs: Sequence[Served], alone: dict[str, list[int]], console: Console) -> None:
    """Print counts, times and rates of each scheduler."""
    table = Table(
        title=f"{len(alone)} requests, the same model, {MACHINE.num_blocks} blocks, {MACHINE.max_num_seqs} seats"
    )
    table.add_column("")
    for one in runs:
        table.add_column(one.name, justify="right")
    rows = {
        "steps": [f"{one.counts.steps:,}" for one in runs],
        "output tokens a step": [f"{one.num_tokens / one.counts.steps:.2f}" for one in runs],
        "steps to the first token, mean": [f"{_mean(one.counts.first_steps):.1f}" for one in runs],
        "peak of used blocks": [str(one.counts.peak_blocks) for one in runs],
        "preemptions": [str(one.counts.preemptions) for one in runs],
        "tokens computed again": [f"{one.counts.recomputed_tokens:,}" for one in runs],
        "output tokens a second": [f"{one.tokens_per_second:,.0f}" for one in runs],
        "the model's time, s": [f"{one.model_seconds:.3f}" for one in runs],
        "a plan's time, ms": [f"{1e3 * one.plan_seconds / one.counts.steps:.3f}" for one in runs],
        "requests with the tokens that they get alone": [
            f"{sum(one.tokens.get(name) == tokens for name, tokens in alone.items())} of {len(alone)}" for one in runs
        ],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)


def print_rates(yours: Served, console: Console, beside: PeerRate | None) -> None:
    """Print the rate, and a peer's for the same requests: it serves them over HTTP, with as many streams as seats."""
    rate = f"Yours makes {yours.tokens_per_second:,.0f} output tokens a second"
    if beside is not None and beside.tokens_per_second:
        times = yours.tokens_per_second / beside.tokens_per_second
        rate += f", {beside.name} {beside.tokens_per_second:,.0f} from {beside.streams} streams: {times:.2f}x"
    console.print(f"{rate}.", markup=False, soft_wrap=True)


def print_empty_seats(runs: Sequence[Served], console: Console) -> None:
    """Print the seats that nobody used, by cause, and the steps that yours takes beyond ours."""
    gap = Table(title="Empty seats, by cause: a seat in a step that computed nothing for it")
    gap.add_column("")
    for one in runs:
        gap.add_column(one.name, justify="right")
    gap.add_column("yours - ours", justify="right")
    for cause in (*CAUSES, "all"):
        counted = [_empty(one, cause) for one in runs]
        gap.add_row(cause, *map(str, counted), f"{counted[0] - counted[1]:+d}")
    console.print(gap)
    lost = runs[0].counts.steps - runs[1].counts.steps
    console.print(
        f"Yours takes {abs(lost)} steps {'more' if lost > 0 else 'fewer'} than ours."
        if lost
        else "As many steps as ours."
    )


def _empty(one: Served, cause: str) -> int:
    empty = one.counts.empty_seats
    return sum(empty.values()) if cause == "all" else empty.get(cause, 0)


def _mean(values: Sequence[int]) -> float:
    return sum(values) / max(1, len(values))
