"""The mark that opens thoughts before a constrained answer comes only where it is chosen without the mask."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.execution.constrained.constraints import Constraints
from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.logit_rules import SampleRow
from support.checkpoints import VOCAB_SIZE, write_tokenizer
from support.sampling import sample

MARK, EOS = 1, 2
GRAMMAR = f'start: (<[{MARK}]> /[a-z ]*/ <[{EOS}]>)? ("q" | "z")'
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory) -> Grammars:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    found = Grammars(path, VOCAB_SIZE)
    found.warm_up()
    return found


@pytest.fixture(scope="module")
def letters(grammars) -> tuple[int, ...]:
    return tuple(grammars._vocabulary.tokenize_str("qz"))


def row(logits_row: int = 0, output: tuple[int, ...] = (), *, opener: int | None = MARK, **sampling) -> SampleRow:
    return SampleRow(
        sampling=SamplingParams(**{"grammar": GRAMMAR, "thinking_opener": opener, **sampling}),
        stop=StopParams(max_new_tokens=20, stop_token_ids=(EOS,)),
        choice=0,
        prompt_token_ids=(5, 6, 7),
        output_token_ids=output,
        position=3 + len(output),
        logits_row=logits_row,
    )


def logits_of(masses: dict[int, float]) -> torch.Tensor:
    """A row of which these tokens have these shares, the others together what is left."""
    left = (1 - sum(masses.values())) / (VOCAB_SIZE - len(masses))
    return torch.tensor([masses.get(i, left) for i in range(VOCAB_SIZE)]).log()


def allowed(grammars: Grammars, one: SampleRow) -> set[int]:
    (mask,) = Constraints(grammars).allowed([one], VOCAB_SIZE).masks.values()
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_the_mask_has_it_only_where_thinking_is_asked_for(grammars, letters):
    assert allowed(grammars, row(opener=None)) == {MARK, *letters}
    assert allowed(grammars, row()) == set(letters)
    assert allowed(grammars, row(output=(MARK,))) > set(letters)  # opened: thoughts go on as they like


def test_an_opener_does_not_keep_a_forbidden_end_away(grammars, letters):
    """Before `min_tokens` an end may come where nothing else can; the mark is nothing else."""
    ended = row(grammar=f'start: (<[{MARK}]> "q")?', min_tokens=5)
    assert allowed(grammars, ended) == {EOS}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mass", [0.0001, 0.3, 0.9])
def test_greedy_it_is_the_maximum_or_does_not_come(grammars, letters, mass, device):
    other = 300
    logits = logits_of({MARK: mass, other: 0.08, letters[1]: 0.00005}).unsqueeze(0).to(device)
    (found,) = sample(logits, [row(temperature=0.0)], grammars=grammars)
    assert found.token_id == (MARK if mass > 0.08 else letters[1] if mass > 0.0001 else letters[0])


def test_other_rules_hold_for_both_choices(grammars, letters):
    logits = logits_of({MARK: 0.9, letters[0]: 0.02}).unsqueeze(0)
    (found,) = sample(logits, [row(temperature=0.0, banned_token_ids=(MARK,))], grammars=grammars)
    assert found.token_id == letters[0]
    rare = logits_of({MARK: 0.0001, letters[0]: 0.02}).unsqueeze(0)
    (found,) = sample(rare, [row(temperature=0.0, logit_bias=((MARK, 50.0),))], grammars=grammars)
    assert found.token_id == MARK


@pytest.mark.parametrize("device", DEVICES)
def test_drawn_it_comes_as_often_as_without_the_grammar_and_the_others_keep_their_shares(grammars, letters, device):
    masses = {MARK: 0.25, letters[0]: 0.06, letters[1]: 0.02}
    num_rows = 2000
    logits = logits_of(masses).expand(num_rows, -1).to(device)
    rows = [row(i, temperature=1.0, seed=i) for i in range(num_rows)]
    found = [token.token_id for token in sample(logits, rows, grammars=grammars)]
    free = sample(logits, [each.without_mask() for each in rows])
    assert [token == MARK for token in found] == [token.token_id == MARK for token in free], "by the same draw"
    counts = Counter(found)
    assert set(counts) == {MARK, *letters}
    assert counts[MARK] / num_rows == pytest.approx(0.25, abs=0.03)
    # Not what a draw leaves of which the mark has had its part: the first letter is three times as likely.
    assert counts[letters[0]] / (num_rows - counts[MARK]) == pytest.approx(0.75, abs=0.03)


def test_a_row_is_the_same_alone_and_among_others(grammars, letters):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(24, VOCAB_SIZE, generator=generator) * 2
    logits[:, MARK] += 6
    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 40},
        {"temperature": 1.2, "num_logprobs": 2},
        {"opener": None},
    )
    rows = [row(i, seed=i, **kinds[i % 4]) for i in range(24)]
    together = sample(logits, rows, grammars=grammars)
    sliced = sample(logits, rows, slice_bytes=5 * 4 * VOCAB_SIZE, grammars=grammars)
    for i, each in enumerate(rows):
        alone = sample(logits[i : i + 1].clone(), [each._replace(logits_row=0)], grammars=grammars)
        assert alone == [together[i]] == [sliced[i]]
    assert {token.token_id == MARK for token in together} == {True, False}


def test_an_id_outside_the_vocabulary_is_the_error_of_its_row(grammars):
    logits = logits_of({MARK: 0.9}).expand(2, -1)
    bad, good = sample(logits, [row(opener=VOCAB_SIZE), row(1, temperature=0.0)], grammars=grammars)
    assert "thinking_opener" in str(bad.error)
    assert good.token_id == MARK
