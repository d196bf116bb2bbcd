"""Runs checks one after the other and reports each, whatever becomes of it.

Promises: a wrong result, an exception and a check that never returns each end as a `Finding`; after a hang, or when the
device does not answer any more, the last one is `fatal` and nothing more is run. Must not know: the engine.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator

import torch

from quire_kernels.verify.findings import Check, Finding

PATIENCE = 60.0  # seconds for one check: what compiles at its first call takes some


def run_checks(checks: Iterable[Check], *, device: torch.device, patience: float = PATIENCE) -> Iterator[Finding]:
    """The findings, each when it is there. The checks run in a thread of their own, since a hang cannot be ended."""
    told: queue.Queue[Check | Finding | BaseException | None] = queue.Queue()
    stop = threading.Event()

    def work() -> None:
        try:
            with torch.inference_mode():  # it is a thread's own
                for check in checks:
                    if stop.is_set():
                        return
                    told.put(check)
                    finding = _run(check, device)
                    told.put(finding)
                    if finding.fatal:
                        break
            told.put(None)
        except BaseException as error:
            told.put(error)

    threading.Thread(target=work, name="verify", daemon=True).start()
    running: Check | None = None
    try:
        while True:
            try:
                news = told.get(timeout=patience)
            except queue.Empty:
                op, case = (running.op, running.case) if running else ("", "")
                problem = f"did not come back within {patience:g} seconds"
                yield Finding(op=op, case=case, ok=False, problem=problem, fatal=True)
                return
            if news is None:
                return
            if isinstance(news, BaseException):
                raise news
            if isinstance(news, Check):
                running = news
            else:
                yield news
    finally:
        stop.set()


def _run(check: Check, device: torch.device) -> Finding:
    try:
        outcome = check.run()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        lost = _lost(device)
        problem = f"raised {text[:300]}" + ("; the device does not answer any more" if lost else "")
        return Finding(op=check.op, case=check.case, ok=False, problem=problem, fatal=lost)
    return Finding(
        op=check.op,
        case=check.case,
        ok=not outcome.problem,
        share=outcome.share,
        alone=outcome.alone,
        problem=outcome.problem,
    )


def _lost(device: torch.device) -> bool:
    """After an access out of bounds every later call on a GPU fails too."""
    try:
        return bool(torch.ones(2, device=device).sum().item() != 2)
    except RuntimeError:
        return True
