"""Compares the reports of two runs number by number.

Promises: numbers that both runs have, by their path in the report; equal ones are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One number before and after."""

    name: str
    before: float
    after: float

    @property
    def ratio(self) -> float | None:
        """After over before; None where before is 0."""
        return self.after / self.before if self.before else None


def compare(before: Mapping[str, object], after: Mapping[str, object]) -> list[Difference]:
    """The differences of two reports as plain values."""
    old = dict(_numbers(before))
    return [
        Difference(name=name, before=old[name], after=value)
        for name, value in _numbers(after)
        if name in old and old[name] != value
    ]


def _numbers(plain: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in plain.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", float(value)
