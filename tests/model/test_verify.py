"""What `quire verify` asks of the engine: the recorded answers, the choice of sets, the report on a broken one."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from quire_engine.build import build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.demo import demo_model_path
from quire_engine.engine import Engine
from quire_engine.execution.device import own_dtype
from quire_engine.execution.kernel_checks import model_sizes
from quire_engine.execution.models.config import load_model_config
from quire_engine.tools.verify import __main__ as tool
from quire_engine.tools.verify import greedy_run, sets
from quire_engine.tools.verify.greedy_run import LEAST_LEAD, GreedyResult, generate, recorded_answers, run_greedy
from quire_kernels.kernel_set import KVFormat
from quire_kernels.reference import REFERENCE
from quire_kernels.select import select
from support.checkpoints import shared_checkpoint
from support.model_steps import Model

CPU = torch.device("cpu")
PATH = demo_model_path()
TOKENIZER = Tokenizer.from_file(str(PATH / "tokenizer.json"))
QUESTION = {
    "device": "cpu",
    "kernels": "reference",
    "deterministic": False,
    "model": None,
    "num_threads": 1,
    "patience": 60,
}


def test_the_recorded_answers_are_the_tokenizers_ids_and_worth_the_time():
    answers = recorded_answers()
    assert len(answers) >= 10
    assert max(len(answer.prompt_token_ids) for answer in answers) > 512  # decode attention in several parts
    for answer in answers:
        assert TOKENIZER.encode(answer.text).ids == list(answer.prompt_token_ids)
        assert TOKENIZER.decode(list(answer.token_ids)) == answer.answer


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("cpu", "bfloat16"),
        pytest.param("reference", "bfloat16", marks=pytest.mark.matrix),
        pytest.param("reference", "float32", marks=pytest.mark.matrix),
    ],
)
def test_every_set_and_type_gives_the_recorded_answers(kernels, dtype):
    found = run_greedy(CPU, kernels, dtype, 1)
    assert (found.ok, found.kernels, found.problem) == (True, kernels, "")
    assert found.num_equal == found.num_tokens == 2 * sum(len(answer.token_ids) for answer in recorded_answers())


def test_the_greatest_logit_leads_at_every_recorded_token():
    kernels = select(CPU, torch.bfloat16, "cpu", kv=KVFormat(head_dim=32, block_size=16), threads=1)
    model = Model(PATH, dtype=torch.bfloat16, kernels=kernels, max_model_len=1024)
    for answer in recorded_answers():
        ids = [*answer.prompt_token_ids, *answer.token_ids]
        logits = model.logits(ids)[len(answer.prompt_token_ids) - 1 : -1]
        assert logits.argmax(dim=1).tolist() == list(answer.token_ids)
        greatest = logits.topk(2, dim=1).values
        assert float((greatest[:, 0] - greatest[:, 1]).min()) > LEAST_LEAD


def test_an_answer_that_differs_is_told(monkeypatch):
    """By an answer that was recorded wrongly, which is the same as one that is computed wrongly."""
    first, *others = recorded_answers()
    wrong = replace(first, token_ids=(*first.token_ids[:3], 7, *first.token_ids[4:]))
    monkeypatch.setattr(greedy_run, "recorded_answers", lambda: [wrong, *others])
    found = run_greedy(CPU, "cpu", "auto", 1)
    assert not found.ok
    assert found.problem.endswith(f"alone: another token after 3 of {len(first.token_ids)}")
    assert found.num_tokens - found.num_equal == 2 * (len(first.token_ids) - 3)


def test_generating_stops_at_the_recorded_length():
    built = build(EngineConfig(model=str(PATH), device="cpu", kernels="cpu", kv_memory=4 << 20))
    short = replace(recorded_answers()[0], token_ids=(1, 2))
    assert [len(each) for each in generate(Engine(built.scheduler, built.executor), [short, short])] == [2, 2]


def chosen(choice, monkeypatch) -> dict[tuple[str, str, str, str], set[str]]:
    """Each set that would be checked, with the ops that are."""
    sizes = model_sizes(load_model_config(PATH), 16)
    return {
        (
            each.subject.kernels.name,
            str(each.subject.dtype).removeprefix("torch."),
            each.subject.quantization or "",
            each.subject.kv_type,
        ): {check.op for check in each.checks}
        for each in sets.checked_sets(CPU, torch.bfloat16, choice, sizes, 1, deterministic=False)
    }


def test_every_format_that_a_set_has_is_checked(monkeypatch):
    pools, products = (
        {"new_kv", "kv_part", "rope_write", "attention"},
        {"embed", "pack_linear", "norm_linear", "norm_gate_up"},
    )
    products |= {"linear_add", "logits", "norm_add", "mul_sigmoid", "pack_stored"}
    # Of a model without them in the first set and the quantised ones alone.
    experts = {"mix_experts", "given_experts", "gate_rows", "route"}
    found = chosen("auto", monkeypatch)
    assert found[("cpu", "bfloat16", "", "auto")] == pools | products | experts | {"greedy", "bind_layers"}
    for quantization in ("int8", "int4"):
        own = products - {"pack_stored"}  # which stays as it is stored
        assert found[("cpu", "bfloat16", quantization, "auto")] == own | experts | {"greedy", "bind_layers"}
    assert found[("cpu", "bfloat16", "", "int8")] == pools
    for kind in ("float16", "float32"):
        assert found[("reference", kind, "", "auto")] == pools | products
    assert set(chosen("reference", monkeypatch)) == {
        ("reference", kind, "", "auto") for kind in ("bfloat16", "float16", "float32")
    }


def test_a_set_that_cannot_serve_the_model_is_refused():
    sizes = model_sizes(load_model_config(PATH), 16)
    with pytest.raises(ConfigError, match=r"kernels=cpu: .*not in float32"):
        next(sets.checked_sets(CPU, torch.float32, "cpu", sizes, 1, deterministic=False))


@pytest.fixture
def few_checks(monkeypatch):
    """Only the first set, briefly."""

    def broken(**changes):
        def some(device, dtype, choice, sizes, threads, *, deterministic):
            subject = sets.Subject(kernels=replace(REFERENCE, **changes), device=CPU, dtype=dtype, alone=True)
            yield sets.CheckedSet(subject=subject, checks=sets.short_checks(subject, sizes))

        monkeypatch.setattr(tool, "checked_sets", some)
        return tool.report({**QUESTION, "kernels": "cpu"})  # which answers faster than the reference kernels

    return broken


def test_the_sizes_are_those_of_the_model_that_is_named(monkeypatch):
    asked = []
    monkeypatch.setattr(tool, "checked_sets", lambda *told, **_: asked.append(told) or iter(()))
    monkeypatch.setattr(
        tool, "run_greedy", lambda *_, **__: GreedyResult(ok=True, kernels="", num_tokens=0, num_equal=0)
    )
    path = shared_checkpoint()
    report = tool.report({**QUESTION, "model": str(path)})
    ((device, dtype, choice, sizes, threads),) = asked
    assert (device, dtype, choice, threads) == (CPU, getattr(torch, load_model_config(path).dtype), "reference", 1)
    assert sizes == model_sizes(load_model_config(path), 16)
    assert report["model"] == str(path)
    assert report["ok"], report


def test_a_float16_model_is_checked_as_it_is_served(monkeypatch):
    asked = []
    monkeypatch.setattr(tool, "checked_sets", lambda *told, **_: asked.append(told[1]) or iter(()))
    monkeypatch.setattr(
        tool, "run_greedy", lambda *_, **__: GreedyResult(ok=True, kernels="", num_tokens=0, num_equal=0)
    )
    tool.report({**QUESTION, "kernels": "auto", "model": str(shared_checkpoint(dtype="float16"))})
    assert asked == [torch.bfloat16]
    cuda = torch.device("cuda")
    assert [own_dtype("float16", CPU, kernels) for kernels in ("auto", "cpu")] == ["bfloat16"] * 2
    assert own_dtype("float16", CPU, "reference") == own_dtype("float16", cuda, "auto") == "float16"
    assert own_dtype("float32", CPU, "auto") == "float32"


def test_a_report_on_a_broken_op(few_checks):
    report = few_checks(embed=lambda table, ids: table[ids] * torch.nan)
    assert not report["ok"]
    assert {row["op"] for row in report["checks"] if not row["ok"]} == {"embed"}
    assert {row["op"] for row in report["checks"] if row["ok"]} >= {"attention", "logits"}
    assert report["machine"]["versions"]["torch"] == torch.__version__
    assert report["greedy"]["ok"]  # by the set that was chosen, which is right


def test_after_a_hang_nothing_more_is_tried(few_checks, monkeypatch):
    release = threading.Event()
    monkeypatch.setitem(QUESTION, "patience", 0.5)
    report = few_checks(embed=lambda *_: release.wait(60))
    release.set()
    assert not report["ok"]
    assert report["greedy"] is None
    assert [(row["op"], row["fatal"]) for row in report["checks"]] == [("embed", True)]
