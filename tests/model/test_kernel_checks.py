"""The check of a kernel set at start: what fails is replaced and told, or the start fails; and the choice of tokens."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from quire_engine.contract.errors import ConfigError
from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.execution.kernel_checks import choice_checks, model_sizes, repaired, start_checks
from quire_engine.execution.logit_rules import SampleRow
from quire_engine.execution.models.config import load_model_config
from quire_engine.memory_plan import plan_text
from quire_kernels.reference import REFERENCE
from quire_kernels.verify.attention import like_reference
from quire_kernels.verify.findings import Subject
from quire_kernels.verify.watch import run_checks
from quire_server.metrics.metrics import Metrics
from support.checkpoints import shared_checkpoint
from support.exposition import PLAN, Scrape
from support.plans import changed
from support.sampling import sample

CPU = torch.device("cpu")
SIZES = model_sizes(load_model_config(shared_checkpoint()), 16)


def choose(logits, rows, *, seed_shift=0, ignores_p=False, shift=0):
    """The op as the engine's sampler does it."""
    asked = zip(*(x.tolist() for x in (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed)), strict=True)
    wanted = [
        SampleRow(
            sampling=SamplingParams(
                temperature=round(temperature, 6),
                top_k=top_k,
                top_p=1.0 if ignores_p else top_p,
                min_p=round(min_p, 6),
                seed=seed + seed_shift,
            ),
            stop=StopParams(max_new_tokens=1),
            choice=choice,
            prompt_token_ids=(),
            output_token_ids=(),
            position=position,
            logits_row=row,
        )
        for (temperature, top_k, top_p, min_p, seed), choice, position, row in zip(
            asked, rows.choice.tolist(), rows.position.tolist(), rows.logits_rows.tolist(), strict=True
        )
    ]
    found = sample(logits, wanted)
    ids = torch.tensor([max(one.token_id, 0) + shift for one in found])
    finite = torch.isfinite(logits).all(dim=1)
    return ids, finite[rows.logits_rows], torch.ones(len(found), dtype=torch.bool)


def subject(kernels) -> Subject:
    return Subject(kernels=kernels, device=CPU, dtype=torch.bfloat16, alone=True)


def checked(subject):
    """The set after a start's checks, and the ops that failed."""
    checks = run_checks(start_checks(subject, SIZES), device=CPU)
    failed = {each.op: f"{each.case}: {each.problem}" for each in checks if not each.ok}
    fits = "new_kv" not in failed and like_reference(subject, SIZES.heads)
    return repaired(subject.kernels, failed, reference_pool=fits), tuple(failed)


def choice_failures(**options):
    kernels = replace(REFERENCE, choose=lambda logits, rows: choose(logits, rows, **options))
    checks = choice_checks(subject(kernels), 500, (1, 3, 16, 64))
    return [each for each in run_checks(checks, device=CPU) if not each.ok]


def test_a_right_choice_passes_and_a_wrong_one_is_found():
    assert not list(choice_checks(subject(REFERENCE), 500, (1,)))  # a set need not have the op
    assert not choice_failures()
    assert len(choice_failures(seed_shift=1)) >= 2
    assert choice_failures(ignores_p=True)
    assert "got token" in choice_failures(shift=1)[0].problem
    assert "not all tokens of the vocabulary" in choice_failures(shift=600)[0].problem


def test_flags_of_rows_that_are_not_finite_are_checked():
    kernels = replace(REFERENCE, choose=lambda logits, rows: choose(logits.nan_to_num(), rows))
    found = list(run_checks(choice_checks(subject(kernels), 500, (5,)), device=CPU))
    assert "which rows are finite" in found[0].problem


def wrong_attention(q, *rest):
    return REFERENCE.attention(q, *rest) * 1.2


def test_a_set_that_is_right_serves_as_it_is(caplog):
    with caplog.at_level(logging.WARNING):
        assert checked(subject(REFERENCE)) == (REFERENCE, ())
    assert not caplog.records


def test_an_op_that_fails_is_replaced_and_told(caplog):
    fast = replace(REFERENCE, name="fast", attention=wrong_attention, choose=lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        kernels, replaced = checked(subject(fast))
    assert set(replaced) == {"attention", "choose"}
    assert kernels == replace(REFERENCE, name="fast")
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("the attention op of the fast kernels failed on this machine and is replaced by a slower")
    assert "numbers are wrong" in told[0]
    assert "raised ZeroDivisionError" in told[1]
    plan = changed(PLAN, machine={"replaced_ops": replaced, "left_out_paths": ("graphs",)})
    assert "kernels without attention, choose (failed their check) without graphs (not shown here)," in plan_text(plan)
    assert "without" not in plan_text(PLAN)
    metrics = Metrics("tiny")
    metrics.observe_plan(plan)
    assert Scrape(metrics)("quire_kernels_replaced", op="attention") == 1
    assert Scrape(metrics)("quire_gpu_path_left_out", path="graphs") == 1
    metrics.observe_plan(PLAN)  # the next engine's kernels are all right
    assert "quire_kernels_replaced{" not in metrics.render().decode()
    assert "quire_gpu_path_left_out{" not in metrics.render().decode()


def other_pool(*sizes):
    return REFERENCE.new_kv(*sizes).transpose(4, 5).contiguous()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention": wrong_attention, "new_kv": other_pool}, "reference attention cannot read this KV pool"),
        ({"new_kv": lambda *_: 1 / 0}, "raised ZeroDivisionError: division by zero), rope_write ("),
        ({"logits": lambda *_: 1 / 0, "packed_bits": 8.0}, "reference products cannot read these weights"),
    ],
)
def test_what_cannot_be_replaced_ends_the_start(changes, said):
    with pytest.raises(ConfigError) as refusal:
        checked(subject(replace(REFERENCE, name="fast", **changes)))
    assert said in str(refusal.value)
    assert str(refusal.value).startswith("kernels=fast: these ops failed on this machine: ")
    assert "set kernels to reference" in str(refusal.value)
