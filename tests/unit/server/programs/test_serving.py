"""SERVING.md: its chosen values are the defaults, and no plan in it finds better ones."""

from __future__ import annotations

import re

import pytest

from quire_lab.commands.planning.plan_section import BEGIN, END
from quire_server.flags import option_default
from quire_server.settings import Settings, spelled
from support.documents import section, text

ROW = re.compile(r"^\| `(--(?:set [a-z_]+|[a-z-]+))` \| \*\*([^*]+)\*\* \|", re.MULTILINE)
TUNED = [*ROW.findall(section("SERVING.md", "Measured values")), *ROW.findall(section("SERVING.md", "Reasoned values"))]
PLAN = text("SERVING.md").split(BEGIN)[1].split(END)[0]
EQUAL = 1.04  # rates that the search does not tell apart


def default(flag: str) -> str:
    (field,) = (field for name, field in Settings.model_fields.items() if spelled(name) == flag)
    return option_default(field) or "none"


def rates(flag: str) -> dict[str, float]:
    """Requests a second by each value of a setting that the plan tried, the best first."""
    rows = PLAN.split(f"\n| `{flag}` ")[1].split("\n| `")[0].split("\n\n")[0]
    return {
        value: float(rate) for value, rate in re.findall(r"\| (?:\*\*)?([\w.]+)(?:\*\*)? \|(?: \|)? ([\d.]+) \|", rows)
    }


@pytest.mark.parametrize(("flag", "chosen"), TUNED, ids=[flag for flag, _ in TUNED])
def test_a_chosen_value_is_the_default(flag: str, chosen: str) -> None:
    assert default(flag) == chosen


def test_there_are_values() -> None:
    assert len(TUNED) == len({flag for flag, _ in TUNED}) >= 15


@pytest.mark.parametrize("flag", [flag for flag, _ in ROW.findall(PLAN)])
def test_no_planned_value_is_better_than_the_default(flag: str) -> None:
    found = rates(flag)
    assert found[default(flag)] * EQUAL >= max(found.values())


def test_the_plan_tells_values_apart() -> None:
    found = rates("--itl-target")
    assert len(found) == 4
    assert min(found.values()) < 0.5 * found["0.1"]
