"""Calls that must come, by a trained model with ten usual tools: each parses and satisfies its schema."""

from __future__ import annotations

import asyncio

import pytest

from e2e.served import Served
from real.tools_trial import prompts, trial

MOST_CUT = 0.05  # of all calls: a text that goes on to its longest may be cut by max_tokens


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_forced_call_satisfies_its_schema(smollm2: Served, temperature: float):
    counts = asyncio.run(trial(smollm2.url, "smollm2", temperature))
    print(counts)
    assert counts["whole"] + counts["cut"] == len(prompts()), counts
    assert counts["cut"] <= MOST_CUT * len(prompts()), counts
