"""Trained models in float32: the tokens and log-probabilities of transformers, to rounding."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from quire_server.checkpoint.trained import TRAINED
from real.conftest import RealModel
from real.recorded import PROSE, recorded
from support.model_steps import Model

ROUNDED = 2e-3


@pytest.fixture(scope="module", params=TRAINED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_text_has_the_tokens_of_transformers(name: str, unfolded_model: RealModel) -> None:
    tokenizer = Tokenizer.from_file(str(unfolded_model(name) / "tokenizer.json"))
    assert tokenizer.encode(PROSE).ids == recorded(name).token_ids


def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(name: str, unfolded_model: RealModel) -> None:
    wanted = recorded(name)
    model = Model(unfolded_model(name), max_model_len=1024)
    with torch.inference_mode():
        scores = model.logits(wanted.token_ids).log_softmax(-1)[:-1]
        found = scores.gather(-1, torch.tensor(wanted.token_ids[1:])[:, None])[:, 0]
        assert (found - torch.tensor(wanted.logprobs)).abs().max() < ROUNDED
        for each in wanted.greedy:  # the most likely token of each place, after the recorded ones
            chosen = model.logits(each.prompt + each.tokens[:-1]).argmax(-1)[len(each.prompt) - 1 :]
            assert chosen.tolist() == each.tokens
