"""Walks the table of workers in docs/operations.md: each process, thread and task is killed, stopped, raises, is slow
and meets a full disk, as far as each can: `make worker-walk`, `make worker-walk ARGS="grammars kv"`.

Exit code 1 where something else came of it than the table says.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

from e2e.served import Served
from support.workers import workers
from walk.live import KINDS, without_row
from walk.scene import SMALL, START_SECONDS, golden_of, scene
from walk.trials import FAULTS, RECORD, Part, Trial


def walk(name: str, part: Part, golden: list[list[int]]) -> int:
    """Try all faults of a part; returns how many went wrong."""
    broken = 0
    for fault in FAULTS:
        trial = part[fault]
        if isinstance(trial, str):
            print(f"{'cannot':<8} {name}: {fault}: {trial}", flush=True)
            continue
        started = time.monotonic()
        said = "ok"
        try:
            with scene(golden, *trial.flags, plants=trial.plants, files=trial.files, key=trial.key) as found:
                asyncio.run(trial.act(found))
                assert not trial.plants or found.fired(), "the planted fault did not happen"
        except Exception as error:
            said, broken = f"BROKEN: {type(error).__name__}: {error}", broken + 1
        print(f"{said[:6]:<8} {name}: {fault}: {said}, {time.monotonic() - started:.1f} s", flush=True)
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(prog="walk", description=__doc__)
    parser.add_argument("part", nargs="*", help="parts whose names begin so; default: all")
    wanted = parser.parse_args().part
    parts = [each for each in workers() if not wanted or any(each.name.startswith(name) for name in wanted)]
    with Served(*SMALL, start_seconds=START_SECONDS) as server:
        golden = asyncio.run(golden_of(server))
    without = [] if wanted else [f"{kind}: {each}" for kind in KINDS for each in without_row(kind)]
    print("\n".join(f"BROKEN   no row: {each}" for each in without), flush=True)
    broken = len(without) + sum(
        walk(f"{each.kind} {each.name}", RECORD[each.kind, each.name], golden) for each in parts
    )
    tried = sum(isinstance(trial, Trial) for each in parts for trial in RECORD[each.kind, each.name].values())
    print(f"{len(parts)} parts, {tried} faults, {broken} with another end than the table says")
    return 1 if broken or not parts else 0


if __name__ == "__main__":
    sys.exit(main())
