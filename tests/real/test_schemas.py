"""Valid texts walked through the grammars of schemas along the tokens of trained models, and invalid ones refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire_server.checkpoint.trained import TRAINED
from support.grammar_walks import Walker, Walks

SEEDS = 4


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", TRAINED)
def test_what_is_valid_can_be_written_and_nothing_else(unfolded_model: Callable[[str], Path], name: str):
    walks = Walks({name: Walker.of((unfolded_model(name) / "tokenizer.json").read_text("utf-8"))})
    for seed in range(SEEDS):
        walks.over_all_schemas(seed)
    print(walks.counts)
    assert walks.faults == [], walks.counts
