"""What grammars cost a step: constrained and free streams, counted and timed."""

from __future__ import annotations

import pytest
from benchmarks import grammar_cost

from quire_engine.execution.constrained.constraints import Constraints


@pytest.mark.matrix  # the benchmark is run below
def test_the_table_has_a_row_for_each_number_of_streams_and_temperature(capsys):
    before = Constraints.allowed, Constraints.forced
    assert grammar_cost.main(["--streams", "2,3", "--rounds", "1", "--steps", "4", "--threads", "1"]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row[1:3]] for row in rows] == [
        ["2", "1"],
        ["2", "greedy"],
        ["3", "1"],
        ["3", "greedy"],
    ]
    for row in rows:
        free, constrained, masks, forced = (float(row[at].split()[0]) for at in (3, 4, 6, 7))
        assert 0 < masks + forced < constrained
        assert float(row[5].split()[0]) == pytest.approx(constrained / free, rel=0.05, abs=0.01)
    assert (Constraints.allowed, Constraints.forced) == before


def test_streams_that_pause_end_the_measurement(monkeypatch):
    """A target for steps with decodes lets some of the tokens that must come wait."""
    monkeypatch.setattr(grammar_cost, "ENTERING", 0)  # prompts of the first step have no token yet
    monkeypatch.setattr(grammar_cost, "PROMPT_TOKENS", 600)
    with pytest.raises(SystemExit, match="of 2 streams had a token in step 0"):
        grammar_cost.main(["--streams", "2", "--rounds", "1", "--steps", "4", "--threads", "1"])
