"""The choice of tokens: the CPU sampler's tokens and generator, whatever else is in the call, in so many launches."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import triton
import triton.language as tl

from quire_engine.execution.distribution import uniform
from quire_kernels.triton import candidates, choose
from quire_kernels.triton.candidates import uniform_of
from support.guarded import DEVICE, between_guards, guarded
from support.planted import noticed, planted
from support.triton_choices import Wish, choice_rows, random_wishes, sampled, signed


def _logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Rows of many ties, of a few likely tokens, and of nearly equal ones, by turns."""
    values = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    values[0::3] = (2 * values[0::3]).round() / 2
    values[1::3] *= 4
    values[2::3] *= 0.1
    return between_guards(values)


def _check(module, logits: torch.Tensor, wishes: list[Wish], chunk: int) -> None:
    with guarded():
        ids, finite, possible = module.choose(logits, choice_rows(wishes), chunk=chunk)
    assert finite.all()
    assert possible.all()
    for row, (token, expected) in enumerate(zip(ids.tolist(), sampled(logits, wishes), strict=True)):
        assert token == expected.token_id, f"row {row}, {wishes[row]}"


def _check_telling_rows(module) -> None:
    """Rows where one token too many, too few or of another place is very likely drawn as another."""
    logits = between_guards(torch.zeros(7, 600))
    flat = torch.linspace(0.0, 0.01, 600)[torch.randperm(600, generator=torch.Generator().manual_seed(0))]
    logits[2:4] = flat
    logits[5] = flat + 200  # what the row before would read beyond its end
    logits[6, :512] = -5.0
    wishes = [
        Wish(top_k=3),
        Wish(top_p=0.01),
        Wish(top_k=2),
        Wish(top_p=0.02),
        Wish(temperature=0.0),
        Wish(top_k=30, top_p=0.1),
        Wish(),
    ]
    _check(module, logits, [replace(wish, seed=i) for i, wish in enumerate(wishes)], 512)


def test_rows_that_tell_most():
    _check_telling_rows(choose)


@pytest.mark.parametrize(("num_rows", "vocab_size", "chunk"), [(12, 333, 512), (4, 1700, 1024)])
def test_tokens_are_the_cpu_samplers(num_rows, vocab_size, chunk):
    _check(choose, _logits(num_rows, vocab_size, 1), random_wishes(num_rows, vocab_size, 1), chunk)


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_the_cpu_samplers_on_many_rows(seed):
    vocab_size = (50, 700, 5000)[seed % 3]
    _check(choose, _logits(30, vocab_size, seed), random_wishes(30, vocab_size, seed), (512, 4096)[seed % 2])


@triton.jit
def _uniform_kernel(seeds, choices, positions, out):
    i = tl.program_id(0)
    tl.store(out + i, uniform_of(tl.load(seeds + i), tl.load(choices + i), tl.load(positions + i)))


def test_the_generator_is_the_engines():
    cases = [(0, 0, 0), (2**64 - 1, 2**33 + 5, 2**40 + 7), (-3, 1, 2**31), (2**63, 2**32 - 1, 2**32)]
    cases += [(w.seed, w.choice, w.position) for w in random_wishes(20, 100, 3)]
    columns = [
        torch.tensor([signed(number) for number in column], device=DEVICE) for column in zip(*cases, strict=True)
    ]
    out = torch.empty(len(cases), dtype=torch.float64, device=DEVICE)
    _uniform_kernel[(len(cases),)](*columns, out)
    assert out.tolist() == [uniform(*case) for case in cases]


def test_a_token_depends_on_its_row_alone():
    """On no other row, no chunk, nor on which limits the others ask for. The CPU's sampler is not asked."""
    vocab_size, chosen = 600, [0, 2]
    logits, wishes = _logits(3, vocab_size, 5), random_wishes(3, vocab_size, 5)
    together = choose.choose(logits, choice_rows(wishes), chunk=512)[0]
    assert torch.equal(choose.choose(logits, choice_rows(wishes), chunk=1024)[0], together)
    for row in chosen:
        alone = choice_rows([wishes[row]], [row])
        assert torch.equal(choose.choose(logits, alone, chunk=512)[0], together[row : row + 1]), wishes[row]


def test_choices_of_a_request_share_a_row_of_logits():
    logits = _logits(2, 300)
    wishes = [Wish(seed=9, choice=i, temperature=2.0) for i in range(6)]
    rows = [1, 1, 0, 1, 1, 0]
    ids = choose.choose(logits, choice_rows(wishes, rows), chunk=512)[0].tolist()
    assert ids == [token.token_id for token in sampled(logits, wishes, rows)]
    assert len(set(ids)) > 3


def test_of_equal_logits_the_first_is_the_greatest():
    logits = torch.zeros(3, 1030, device=DEVICE)
    logits[1, [700, 1029, 600]] = 2.0
    logits[2, 1029] = 1e-30
    ids, finite, possible = choose.choose(logits, choice_rows([Wish(temperature=0.0)] * 3), chunk=512)
    assert ids.tolist() == [0, 600, 1029]
    assert finite.all()
    assert possible.all()


def test_masks_leave_the_rest_and_rows_that_cannot_be_chosen_from_are_told():
    infinity = float("inf")
    logits = _logits(7, 500)
    logits[0, 100:] = -infinity  # masked by rules
    logits[1, 1:] = -infinity
    logits[2] = -infinity
    logits[3, 499] = float("nan")
    logits[4, 5] = infinity
    logits[5] = float("nan")
    for temperature in (0.0, 1.0):
        wishes = [Wish(temperature=temperature, top_k=150, top_p=0.9, min_p=0.01, seed=i) for i in range(7)]
        ids, finite, possible = choose.choose(logits, choice_rows(wishes), chunk=512)
        assert finite.tolist() == [False] * 6 + [True]
        assert possible.tolist()[:3] == [True, True, False]
        assert possible[6]
        assert ((ids >= 0) & (ids < 500)).all(), "an id can be looked up whatever the row"
        assert ids[0] < 100
        assert ids[1] == 0
        kept = logits[0:1, :100].contiguous()
        assert ids[0] == sampled(kept, wishes[:1])[0].token_id, "masked tokens are as if they were not there"


@pytest.mark.parametrize(
    ("draws", "limits_k", "limits_p", "count"), [(0, 1, 1, 2), (1, 0, 0, 4), (1, 1, 0, 13), (1, 1, 1, 21)]
)
def test_launches_are_as_many_as_said_and_nothing_waits(draws, limits_k, limits_p, count):
    """Whatever the rows hold: the kernels are not run."""
    launched = []
    rows = choice_rows([Wish(temperature=float(draws), top_k=limits_k, top_p=0.5 if limits_p else 1.0)] * 3)
    with (
        patch.object(type(choose.peak_kernel), "run", lambda kernel, *args, **kwargs: launched.append(kernel)),
        patch.object(torch.Tensor, "item", side_effect=AssertionError("waits")),
        patch.object(torch.Tensor, "tolist", side_effect=AssertionError("waits")),
        patch.object(torch.Tensor, "__bool__", side_effect=AssertionError("waits")),
    ):
        choose.choose(torch.zeros(3, 5000, device=DEVICE), rows)
    assert len(launched) == count


def test_what_it_cannot_serve_is_refused():
    rows = choice_rows([Wish()])
    for logits in (torch.zeros(1, 5).half(), torch.zeros(2, 4).t(), torch.zeros(1, 0), torch.zeros(1, 2**18 + 1)):
        with pytest.raises(ValueError, match="logits must be"):
            choose.choose(logits, rows)
    with pytest.raises(ValueError, match="chunk"):
        choose.choose(torch.zeros(1, 5), rows, chunk=256)
    assert len(choose.choose(torch.zeros(1, 5), choice_rows([]))[0]) == 0


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (candidates, "(keys == key) & (ids <= last)", "(keys == key)"),
        (candidates, "wanted -= tl.sum(tl.where(bins > chosen", "wanted -= tl.sum(tl.where(bins >= chosen"),
        (candidates, "tl.cumsum(measures, 0) + before", "tl.cumsum(measures, 0)"),
        (choose, "+ ids, mask=inside", "+ ids, mask=ids < num_tokens + 3"),
        (choose, "WHAT=what, TOP_K=top_k, TOP_P=top_p, **sizes", "WHAT=what, TOP_K=top_k, TOP_P=False, **sizes"),
    ],
    ids=["ties kept", "too few", "chunks forgotten", "past the row", "top-p forgotten in a launch"],
)
def test_planted_bugs_are_found(module, old, new, tmp_path):
    copy = planted(module, old, new, tmp_path, within=choose if module is candidates else None)
    with pytest.raises(noticed()):
        _check_telling_rows(copy)
