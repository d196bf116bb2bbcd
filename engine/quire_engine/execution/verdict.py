"""The outcome of the checks of a GPU's kernels and optional paths on one device: what has failed, and what was shown.

Promises: the JSON form is read back as it was written, or refused with a ValueError. Must not know: torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# A next try may succeed where others took the memory, or where somebody ended the process.
_PASSING = ("OutOfMemoryError", "SIGKILL", "SIGTERM", "SIGINT")


@dataclass(slots=True, kw_only=True)
class Verdict:
    """Problems in one line each, by op and by optional path; filled while checks run."""

    ops: dict[str, str] = field(default_factory=dict)  # those that failed
    ops_checked: bool = False  # all of them have been
    reference_pool: bool = False  # the plain pool has the reference's layout
    possible: tuple[str, ...] = ()  # the optional paths that could be taken here
    paths: dict[str, str] = field(default_factory=dict)  # by optional path: its problem; empty: it was shown

    @property
    def lasting(self) -> Verdict:
        """The part that a later start need not check again."""
        ops, paths = ({name: text for name, text in found.items() if _lasts(text)} for found in (self.ops, self.paths))
        checked = self.ops_checked and len(ops) == len(self.ops)
        return Verdict(
            ops=ops, ops_checked=checked, reference_pool=self.reference_pool, possible=self.possible, paths=paths
        )

    @property
    def is_complete(self) -> bool:
        return self.ops_checked and all(name in self.paths for name in self.possible)


def verdict_of(plain: Mapping[str, Any]) -> Verdict:
    """Read the JSON form of `dataclasses.asdict`. Raises ValueError."""
    try:
        found = Verdict(**{**plain, "possible": tuple(plain["possible"])})
        texts = [*found.ops.items(), *found.paths.items(), *((name, "") for name in found.possible)]
        if all(isinstance(text, str) for pair in texts for text in pair):
            return found
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no verdict: {error}") from None
    raise ValueError("no verdict: a problem is no text")


def _lasts(problem: str) -> bool:
    return not any(word in problem for word in _PASSING)
