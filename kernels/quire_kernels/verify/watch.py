"""Runs checks one after the other in a thread and reports each, even if it hangs.

Promises: a wrong result, an exception and a hang each give a `Finding`; after a hang, or if the device no longer
responds, the finding is `fatal` and no further check runs. Must not know: the engine.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator

import torch

from quire_kernels.verify.findings import Check, Finding

PATIENCE = 60.0  # seconds for one check, including kernels that compile at their first call


def run_checks(checks: Iterable[Check], *, device: torch.device, patience: float = PATIENCE) -> Iterator[Finding]:
    """Yield each finding when it is ready. A daemon thread runs the checks, since a hang cannot be interrupted."""
    told: queue.Queue[Check | Finding | BaseException | None] = queue.Queue()
    stop = threading.Event()

    def work() -> None:
        try:
            with torch.inference_mode():  # the mode is per thread
                for check in checks:
                    if stop.is_set():
                        return
                    told.put(check)
                    finding = run_check(check, device)
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


def run_check(check: Check, device: torch.device) -> Finding:
    """Run one check in this thread. An exception is a finding, `fatal` if the device is lost."""
    try:
        outcome = check.run()
    except Exception as error:
        lost = _lost(device)
        problem = explained(error) + ("; the device does not answer any more" if lost else "")
        return Finding(op=check.op, case=check.case, ok=False, problem=problem, fatal=lost)
    return Finding(
        op=check.op,
        case=check.case,
        ok=not outcome.problem,
        share=outcome.share,
        alone=outcome.alone,
        problem=outcome.problem,
    )


def explained(error: Exception) -> str:
    """The error in one line of at most 320 characters."""
    return f"raised {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}"


def _lost(device: torch.device) -> bool:
    """Whether the device no longer responds: after an access out of bounds every later call on a GPU fails."""
    try:
        return bool(torch.ones(2, device=device).sum().item() != 2)
    except RuntimeError:
        return True
