"""The facts' own arithmetic, which is not read off any server, and how they are told."""

from __future__ import annotations

import doctest

from quire_bench.facts import memory
from quire_bench.facts.fact import at_most, equal, near


def test_the_memory_of_keys_and_values() -> None:
    assert doctest.testmod(memory).failed == 0
    assert doctest.testmod(memory).attempted == 2


def test_a_fact_says_both_numbers_and_whether_they_agree() -> None:
    assert equal("F1", 480, 480).ok
    wrong = equal("F1 slots", 1024, 1023)
    assert (wrong.ok, wrong.expected, wrong.got) == (False, "1,024", "1,023")
    assert near("F14", 0.2, 0.17, within=0.2).ok
    assert not near("F14", 0.2, 0.15, within=0.2).ok
    assert near("F2", 0.53125, 0.53125, within=0.0).ok
    assert not near("F2", 0.53125, 0.5313, within=0.0).ok
    assert at_most("F18", 5, 5).ok
    assert not at_most("F18", 5, 5.1).ok
