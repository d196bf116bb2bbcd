"""Answers each question `{"device", "kernels", "deterministic", "model", "num_threads", "patience"}` with a report.

Promises: a wrong result, an exception and a hang of an op are findings of the report; only a crash ends without a
report, and the terminal then shows which op was being checked.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from quire_engine.contract.errors import ConfigError
from quire_engine.demo import demo_model_path
from quire_engine.execution.device import own_dtype, resolve_device
from quire_engine.execution.kernel_checks import model_sizes
from quire_engine.execution.models.config import load_model_config
from quire_engine.machine import usable_cores
from quire_engine.tools.json_child import converse
from quire_engine.tools.verify.greedy_run import GreedyResult, run_greedy
from quire_engine.tools.verify.machine_facts import machine_facts
from quire_engine.tools.verify.sets import CheckedSet, checked_sets
from quire_kernels.verify.watch import run_checks

_BLOCK_SIZE = 16


def answers(questions: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One report for each question. Raises ConfigError, ModelLoadError."""
    for asked in questions:
        yield report(asked)


def report(asked: dict[str, Any]) -> dict[str, Any]:
    """Run all checks of one question."""
    started = time.perf_counter()
    device = resolve_device(asked["device"])
    model = load_model_config(Path(asked["model"]) if asked["model"] else demo_model_path())
    threads, patience = asked["num_threads"] or usable_cores(), asked["patience"]
    dtype = getattr(torch, own_dtype(model.dtype, device, asked["kernels"]))
    torch.set_num_threads(1)  # results are small: threads would spend more time on synchronization than on work
    found: list[dict[str, Any]] = []
    stopped = False
    sizes, deterministic = model_sizes(model, _BLOCK_SIZE), asked["deterministic"]
    for each in checked_sets(device, dtype, asked["kernels"], sizes, threads, deterministic=deterministic):
        rows = _findings(each, patience)
        found += rows
        stopped = any(row["fatal"] for row in rows)
        if stopped:
            break
    greedy = None if stopped else _greedy(device, asked, threads)
    _show("")
    return {
        "ok": all(row["ok"] for row in found) and greedy is not None and greedy.ok,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 1),
        "device": device.type,
        "deterministic": deterministic,
        "model": asked["model"] or "quire-demo",
        "machine": machine_facts(),
        "checks": found,
        "greedy": None if greedy is None else asdict(greedy),
    }


def _findings(each: CheckedSet, patience: float) -> list[dict[str, Any]]:
    subject = each.subject
    named = {
        "kernels": subject.kernels.name,
        "dtype": str(subject.dtype).removeprefix("torch."),
        "weights": subject.quantization or "auto",
        "kv": subject.kv_type,
    }
    rows, shown = [], ""
    for finding in run_checks(each.checks, device=subject.device, patience=patience):
        if finding.op != shown:
            shown = finding.op
            _show(f"{' '.join(named.values())}: {shown}")
        rows.append({**named, **asdict(finding)})
    return rows


def _greedy(device: torch.device, asked: dict[str, Any], threads: int) -> GreedyResult:
    _show("the embedded model")
    try:
        return run_greedy(device, asked["kernels"], "auto", threads, deterministic=asked["deterministic"])
    except (ConfigError, RuntimeError) as error:
        text = " ".join(str(error).split())
        return GreedyResult(ok=False, kernels="", num_tokens=0, num_equal=0, problem=f"did not run: {text[:300]}")


def _show(text: str) -> None:
    """Print the current check to a terminal, in one line that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    faulthandler.enable()  # a crash prints the traceback of the op
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    sys.exit(converse(answers))
