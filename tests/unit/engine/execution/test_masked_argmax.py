"""Maxima within masks: found without logits they are what the sampler chooses, errors and forced tokens included."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_engine.contract.batch import Batch, Fork, ScheduledSequence, StepResult
from quire_engine.contract.types import NO_CANDIDATE, NON_FINITE, SamplingParams, StopParams, ThinkingParams
from quire_engine.execution.constrained.constraints import Constraints
from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.executor import Executor
from quire_engine.execution.logit_rules import SampleRow, asks_for_masked_argmax
from quire_engine.execution.runner import Runner
from quire_kernels.cpu.ops import cpu_kernel_set
from quire_kernels.kernel_set import Norm
from support.checkpoints import VOCAB_SIZE, write_tokenizer

WIDTH = 32
PADDED = VOCAB_SIZE + 40  # columns of the logits: the tokenizer knows nothing of the last ones
EOS = 2
KERNELS = cpu_kernel_set(1, None)
NORM = torch.ones(WIDTH, dtype=torch.bfloat16)
GRAMMARS = {
    "none": "",
    "any text": r"start: /(.|\n)*/",
    "letters": "start: /[a-z]*/",
    "words": 'start: ("the" | "quick" | " ")*',
    "one word": 'start: "the quick brown fox"',
    "json": 'start: %json {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
    "ends by a token that it names": f'start: /[a-z]*/ <[{EOS}]> "x"',
    "not a grammar": "start: nothing",
}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory) -> Grammars:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    (path / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS}, 0]}}')
    return Grammars(path, PADDED)


class Head:
    """The hidden states are given; logits are in quarters, of many equal values."""

    def __init__(self, hidden: torch.Tensor, *, fused: bool) -> None:
        generator = torch.Generator().manual_seed(5)
        weight = torch.randint(-1, 2, (PADDED // 3 + 1, WIDTH), generator=generator).to(torch.bfloat16)
        self.head = KERNELS.pack_linear(weight.repeat(3, 1)[:PADDED], None)
        self.hidden, self.fused, self.num_fused = hidden, fused, 0
        self.config = SimpleNamespace(vocab_size=PADDED)

    def forward(self, step, kv):
        return self.hidden[: len(step.sample_rows)]

    def logits(self, hidden):
        return KERNELS.logits(hidden, Norm(NORM, 1e-6), self.head)

    def greedy(self, hidden, allowed):
        if not self.fused:
            return None
        self.num_fused += 1
        return KERNELS.greedy(hidden, Norm(NORM, 1e-6), self.head, allowed)


class Blocks:
    tensor = torch.zeros(1)


def item(sequence_id: int, sampling: SamplingParams, output: tuple[int, ...], stop: tuple[int, ...], forks=()):
    tokens = (5, 6, 7, *output)
    return ScheduledSequence(
        sequence_id=sequence_id,
        choice=0,
        prompt_token_ids=(5, 6, 7),
        output_token_ids=output,
        token_ids=tokens[-1:],
        start=len(tokens) - 1,
        block_ids=tuple(range(8)),
        wants_sample=True,
        wants_prompt_logprobs=False,
        forks=forks,
        sampling=sampling,
        stop=StopParams(max_new_tokens=20, stop_token_ids=stop),
    )


def computed(head: Head, grammars: Grammars, *items: ScheduledSequence) -> StepResult:
    runner = Runner(head, Blocks.tensor, 16, torch.device("cpu"), grammars=grammars)
    return Executor(runner, Blocks()).execute(Batch(step_id=1, items=items, num_tokens=len(items)))


_ASKED = st.builds(
    lambda grammar, least, thinking: SamplingParams(
        temperature=0.0, grammar=GRAMMARS[grammar], min_tokens=least if GRAMMARS[grammar] else 0, thinking=thinking
    ),
    st.sampled_from(sorted(GRAMMARS)),
    st.sampled_from([0, 0, 3]),
    st.sampled_from([None, None, ThinkingParams(end_ids=(1,), is_open=True, max_tokens=1)]),
)
_ROWS = st.lists(
    st.tuples(
        _ASKED,
        st.sampled_from(["", "the", "the quick", "{", '{"a":', '{"a":1}', "zz"]),
        st.sampled_from([(EOS,), (EOS, 0), (7,), ()]),
        st.sampled_from(["", "", "", "nan", "inf"]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=50, deadline=None)
@given(rows=_ROWS, seed=st.integers(0, 1 << 20))
def test_without_logits_they_are_what_the_sampler_chooses(grammars, rows, seed):
    grammars.warm_up()
    hidden = torch.randn(len(rows), WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    items = []
    for i, (sampling, said, stop, broken) in enumerate(rows):
        if broken:
            hidden[i, 3] = float(broken)
        items.append(item(i, sampling, tuple(grammars._vocabulary.tokenize_str(said)), stop))
    fast, slow = Head(hidden, fused=True), Head(hidden, fused=False)
    assert computed(fast, grammars, *items) == computed(slow, grammars, *items)
    assert (fast.num_fused, slow.num_fused) == (1, 0)


def test_every_kind_of_end_is_met(grammars):
    hidden = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    hidden[1] = torch.nan
    asked = SamplingParams(temperature=0.0, grammar='start: "the"')
    the = tuple(grammars.matcher(asked.grammar) and grammars._vocabulary.tokenize_str("the"))
    items = (item(0, asked, (), (EOS,)), item(1, asked, (), (EOS,)), item(2, asked, the, ()))
    bad = item(3, replace(asked, grammar="start: nothing"), (), (EOS,))
    found = computed(Head(hidden, fused=True), grammars, *items, bad).samples
    assert [token.token_id for token in found[0]][-1] == EOS
    assert [found[i][0].error for i in (1, 2)] == [NON_FINITE, NO_CANDIDATE]
    assert "unknown name" in str(found[3][0].error)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.5},
        {"num_logprobs": 0},
        {"logit_bias": ((1, 1.0),)},
        {"banned_token_ids": (4,)},
        {"banned_sequences": ((4, 5),)},
        {"allowed_token_ids": (4,)},
        {"presence_penalty": 0.1},
        {"grammar": "", "thinking": ThinkingParams(end_ids=(1,), max_tokens=1), "min_tokens": 2},
    ],
)
def test_who_asks_for_more_needs_logits(grammars, more):
    sampling = SamplingParams(temperature=0.0, grammar=GRAMMARS["letters"])
    assert asks_for_masked_argmax(sampling)
    head = Head(torch.ones(1, WIDTH, dtype=torch.bfloat16), fused=True)
    computed(head, grammars, item(0, replace(sampling, **more), (), (EOS,)))
    assert head.num_fused == 0


@pytest.mark.parametrize("bias", [-1, 1])
def test_the_mark_that_opens_thoughts_needs_logits_once(grammars, bias):
    """And the maximum without the mask decides, where the kernels would find the one within it."""
    sampling = SamplingParams(temperature=0.0, grammar='start: (<[1]> "the ")? "quick"', thinking_opener=1)
    head = Head(torch.ones(1, WIDTH, dtype=torch.bfloat16), fused=True)
    weight = torch.zeros(PADDED, WIDTH, dtype=torch.bfloat16)
    weight[1], weight[40] = bias, 0.5
    head.head = KERNELS.pack_linear(weight, None)
    (token, *_) = computed(head, grammars, item(0, sampling, (), (EOS,))).samples[0]
    assert head.num_fused == 0
    assert (token.token_id == 1) == (bias > 0)
    computed(head, grammars, item(0, sampling, (token.token_id,), (EOS,)))
    assert head.num_fused == 1


def test_forks_follow_grammars_of_their_own(grammars):
    sampling = SamplingParams(temperature=0.0, grammar=GRAMMARS["one word"])
    head = Head(torch.ones(1, WIDTH, dtype=torch.bfloat16), fused=True)
    found = computed(head, grammars, item(0, sampling, (), (EOS,), forks=(Fork(sequence_id=9, choice=1),)))
    assert head.num_fused == 0
    assert found.samples[0] == found.samples[9]


def test_a_step_that_is_computed_again_gets_the_mask_it_had(grammars):
    """A token was chosen, but a mate of the batch failed: the very same rows come once more."""
    asked, constraints = item(1, SamplingParams(grammar='start: "the" | "a"'), (), (EOS,)), Constraints(grammars)
    row = SampleRow(
        sampling=asked.sampling,
        stop=asked.stop,
        choice=0,
        prompt_token_ids=asked.prompt_token_ids,
        output_token_ids=(),
        position=asked.end,
        logits_row=0,
    )
    before = constraints.allowed([row], PADDED).masks[0].copy()
    ids = np.flatnonzero(np.unpackbits(before.view(np.uint8), bitorder="little")).tolist()
    constraints.forced(row, ids[-1])
    assert (constraints.allowed([row], PADDED).masks[0] == before).all()


def test_thinking_that_has_not_spent_its_budget_is_free(grammars):
    hidden = torch.ones(2, WIDTH, dtype=torch.bfloat16)
    thinking = SamplingParams(temperature=0.0, thinking=ThinkingParams(end_ids=(1,), is_open=True, max_tokens=3))
    head = Head(hidden, fused=True)
    free = item(0, SamplingParams(temperature=0.0), (), (EOS,))
    found = computed(head, grammars, free, item(1, thinking, (), (EOS,))).samples
    assert found[0] == found[1]
    assert head.num_fused == 1


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(set(GRAMMARS) - {"none", "not a grammar"})), seed=st.integers(0, 1 << 20))
def test_a_grammar_that_is_complete_allows_every_end(grammars, name, seed):
    """What spares the question whether an output may end: where no end has a bit it may not."""
    dice, constraints, output = np.random.default_rng(seed), Constraints(grammars), ()
    matcher = grammars.matcher(GRAMMARS[name])
    for _ in range(12):
        asked = item(1, SamplingParams(grammar=GRAMMARS[name]), output, (EOS, 0))
        mask = np.zeros(-(-PADDED // 32), dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_accepting():
            ends = np.unpackbits(mask.view(np.uint8), bitorder="little")[list(grammars.end_ids)]
            assert ends.any()
        row = SampleRow(
            sampling=asked.sampling,
            stop=asked.stop,
            choice=0,
            prompt_token_ids=asked.prompt_token_ids,
            output_token_ids=output,
            position=asked.end,
            logits_row=0,
        )
        found = constraints.allowed([row], PADDED).masks[0]
        ids = np.flatnonzero(np.unpackbits(found.view(np.uint8), bitorder="little"))
        token = int(dice.choice(ids))
        if token in (EOS, 0) or not matcher.consume_token(token):
            return
        output = (*output, token)
