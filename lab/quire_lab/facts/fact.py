"""One fact, and whether the server agrees.

Promises: what was expected and what came, in words a person can compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from quire_bench.servers import BenchError

_TRIES = 3


class NotShown(BenchError):
    """Raised where a server or its machine cannot show a fact; one line with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """`name` begins with the fact's number, such as "F1 useful token slots"."""

    name: str
    expected: str
    got: str
    ok: bool
    shown: bool = True  # False: this server cannot show it, which speaks neither for it nor against

    @property
    def verdict(self) -> str:
        return "not shown here" if not self.shown else "ok" if self.ok else "NOT SO"


def equal(name: str, expected: float, got: float) -> Fact:
    """Two counts that must be the same."""
    return Fact(name=name, expected=_text(expected), got=_text(got), ok=expected == got)


def near(name: str, expected: float, got: float, *, within: float, unit: str = "") -> Fact:
    """`got` within a share of `expected`."""
    return Fact(
        name=name,
        expected=f"{expected:.4g}{unit} ± {within:.0%}",
        got=f"{got:.4g}{unit}",
        ok=abs(got - expected) <= within * abs(expected),
    )


def at_most(name: str, bound: float, got: float, unit: str = "") -> Fact:
    """`got` not above a bound."""
    return Fact(name=name, expected=f"at most {bound:.4g}{unit}", got=f"{got:.4g}{unit}", ok=got <= bound)


def not_shown(name: str, reason: str) -> Fact:
    """A fact that this server cannot show."""
    return Fact(name=name, expected="", got=reason, ok=True, shown=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One try at facts, some of which need circumstances that a busy machine may not bring about."""

    certain: tuple[Fact, ...] = ()  # whatever the circumstances
    others: tuple[Fact, ...] = ()  # a failure counts only under the right circumstances
    missing: str = ""  # of the circumstances; empty: all were there


def tried(check: Callable[[], Try]) -> list[Fact]:
    """The facts of the first try that nothing speaks against or that had its circumstances, of three at most.

    Where the circumstances were missing each time, what does not hold is not shown.
    """
    for _ in range(_TRIES):
        found = check()
        if not found.missing or all(fact.ok for fact in (*found.certain, *found.others)):
            return [*found.certain, *found.others]
        if not all(fact.ok for fact in found.certain):
            break
    unclear = [fact if fact.ok else not_shown(fact.name, f"{fact.got}, but {found.missing}") for fact in found.others]
    return [*found.certain, *unclear]


def renamed(name: str, facts: Iterable[Fact]) -> list[Fact]:
    """Put facts under another number: "F1 useful token slots" as "S1.3 useful token slots"."""
    return [replace(fact, name=f"{name} {fact.name.partition(' ')[2]}") for fact in facts]


def _text(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"
