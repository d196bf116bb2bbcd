"""The checks of all optional paths on a device, as starts make them: `python -m gpu_first.paths DEVICE FILE`.

Promises: a path is checked with the settings that take it; exit code 1 where one fails; the file has what each came to.
Must not know: what is checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire_engine.contract.config import EngineConfig
from quire_engine.demo import demo_model_path
from quire_engine.execution.verdict import Verdict, verdict_of
from quire_engine.own_modules import module_command
from quire_kernels.optional_paths import NAMES

# Of the starts that take, together, every path but that of a library.
SETTINGS: tuple[Mapping[str, Any], ...] = (
    {},
    {"deterministic": True},
    {"quantization": "int8", "kv_cache_dtype": "fp8"},
)
PATIENCE = {"budget": 600.0}  # seconds of checks: a start leaves the rest to the next one, a job has its own limit


def verdicts(device: str) -> list[Verdict]:
    """What the process of a start's checks says, for each of the settings. Raises ValueError with its words."""
    on_gpu = device == "cuda"
    simulated = [sys.executable, "-m", "support.simulated_paths", "child", "{}"]
    questions = [
        {
            "config": asdict(EngineConfig(model=str(demo_model_path()), device="cuda", **settings)),
            "dtype": "bfloat16",
            "verdict": asdict(Verdict()),
            "patience": PATIENCE,
        }
        for settings in SETTINGS
    ]
    with tempfile.TemporaryDirectory() as home:
        done = subprocess.run(
            module_command("quire_engine.tools.prover") if on_gpu else simulated,
            input="".join(json.dumps(question) + "\n" for question in questions),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env=dict(os.environ) if on_gpu else {**os.environ, "HOME": home},
        )
    replies = [json.loads(line) for line in done.stdout.splitlines()]
    for reply in replies:
        if "possible" not in reply:
            raise ValueError(str(reply.get("broken") or reply.get("error")))
    if len(replies) != len(questions):
        raise ValueError(f"the process ended with {done.returncode} after {len(replies)} replies")
    return [verdict_of(reply) for reply in replies]


def shown(found: Sequence[Verdict]) -> dict[str, str]:
    """The problem of each path that was checked, empty if there is none, in the list's order."""
    problems = [(name, problem) for each in found for name, problem in each.paths.items()]
    worst = {name: max(problem for other, problem in problems if other == name) for name, _ in problems}
    return {name: worst[name] for name in NAMES if name in worst}


def main(argv: Sequence[str]) -> int:
    """0: all that were checked are right, 1: not so."""
    device, file = argv
    try:
        found = verdicts(device)
    except ValueError as error:
        print(error)
        return 1
    paths = shown(found)
    ops = {op: problem for each in found for op, problem in each.ops.items()}
    Path(file).write_text(json.dumps({"paths": paths, "ops": ops}) + "\n", encoding="utf-8")
    failed = {name: problem for name, problem in {**ops, **paths}.items() if problem}
    for name, problem in failed.items():
        print(f"{name}: {problem}")
    right = [name for name, problem in paths.items() if not problem]
    print(f"{len(right)} of {len(NAMES)} optional paths are right: {', '.join(right)}")
    return 1 if failed or not right else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
