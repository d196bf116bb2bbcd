"""A worker's checks: first the ops of the plain kernel set, then each optional path on top of those shown before it.

Promises: says each check before it begins. Must not know: processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch

from quire_engine.contract.errors import ConfigError
from quire_engine.execution.kernel_checks import start_checks
from quire_engine.execution.verdict import Verdict
from quire_engine.tools.prover.workers import Say
from quire_kernels.optional_paths import NAMES, PATHS, OptionalPath
from quire_kernels.reference import REFERENCE
from quire_kernels.verify.attention import like_reference
from quire_kernels.verify.checks import ModelSizes
from quire_kernels.verify.findings import Check, Subject
from quire_kernels.verify.layers import Capture
from quire_kernels.verify.paths import path_checks
from quire_kernels.verify.watch import explained, run_check


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How to make the kernels of one configuration, and what it could take.

    `make`: the set without these optional paths, and its configuration. `asked`: optional paths that are settings.
    """

    make: Callable[[Collection[str]], Subject]
    capture: Capture
    sizes: ModelSizes
    asked: tuple[str, ...] = ()

    def work(self, verdict: Verdict, say: Say) -> None:
        """Go on where the verdict ends. Returns early where the device no longer responds."""
        torch.set_num_threads(1)  # results are small, and threads would wait for each other longer than they compute
        with torch.inference_mode():
            try:
                plain = self.make(NAMES)
            except Exception as error:
                say({"broken": explained(error)})
                return
            if plain.kernels.name == REFERENCE.name:
                say({"ops_checked": True, "reference_pool": True, "possible": []})
                say({"done": True})
            elif self._ops(plain, verdict, say) and self._paths(plain, verdict, say):
                say({"done": True})

    def _ops(self, plain: Subject, verdict: Verdict, say: Say) -> bool:
        """Whether the device still responds."""
        if not verdict.ops_checked:
            for check in start_checks(plain, self.sizes):
                if check.op not in verdict.ops:
                    problem, lost = self._problem([check], "", plain, say)
                    if problem:
                        say({"op": [check.op, problem]})
                        verdict.ops[check.op] = problem
                    if lost:
                        return False
        fits = "new_kv" not in verdict.ops and like_reference(plain, self.sizes.heads)
        possible = {*self.asked, *plain.kernels.optional}
        say({"ops_checked": True, "reference_pool": fits, "possible": [name for name in NAMES if name in possible]})
        verdict.possible = tuple(possible)
        return True

    def _paths(self, plain: Subject, verdict: Verdict, say: Say) -> bool:
        """Whether the device still responds."""
        for path in PATHS:
            if path.name not in verdict.possible or path.name in verdict.paths:
                continue
            if path.needs and verdict.paths.get(path.needs) != "":
                problem, lost = f"it takes {path.needs}, which is left out", False
            else:
                problem, lost = self._shown(path, plain, verdict, say)
            say({"path": [path.name, problem]})
            verdict.paths[path.name] = problem
            if lost:
                return False
        return True

    def _shown(self, path: OptionalPath, plain: Subject, verdict: Verdict, say: Say) -> tuple[str, bool]:
        say({"running": [path.name, "", "making the kernels"]})
        taken = {path.name, *(name for name, problem in verdict.paths.items() if not problem)}
        try:
            subject = self.make([name for name in NAMES if name not in taken])
        except ConfigError:
            return "", False  # settings that cannot work are the start's to refuse, which makes the same set
        except Exception as error:
            return explained(error), False
        checks = path_checks(path.name, subject, self.sizes, self.capture)
        return self._problem(checks, path.name, plain, say)

    def _problem(self, checks: Iterable[Check], path: str, plain: Subject, say: Say) -> tuple[str, bool]:
        """The first problem of these checks, and whether the device no longer responds."""
        for check in checks:
            say({"running": [path, check.op, check.case]})
            finding = run_check(check, plain.device)
            if not finding.ok:
                of = f"{check.op}, " if path else ""
                return f"{of}{check.case}: {finding.problem}", finding.fatal
        return "", False
