"""Drafts change no answer: the tokens, log-probabilities and ends of engines with drafters of every kind."""

from __future__ import annotations

import json
import logging
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from llguidance import LLMatcher

from quire_engine.build import BuiltEngine, build, resolve
from quire_engine.contract.config import EngineConfig, Fault
from quire_engine.contract.drafts import Draft, Drafter, Wish
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams, ThinkingParams
from quire_engine.demo import demo_model_path
from quire_engine.execution.drafting.model import ModelDrafter
from quire_engine.execution.drafting.outputs import OutputsDrafter
from quire_engine.execution.drafting.suffix import SuffixDrafter
from quire_engine.memory_plan import plan_text
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.speculation import RowCosts, Speculation
from support.checkpoints import make_checkpoint, shared_checkpoint
from support.covering import few
from support.limits import engine_config
from support.offline import Generated, generate

Results = dict[tuple[str, int], Generated]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "more": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "more"],
    "additionalProperties": False,
}
THINKING = ThinkingParams(max_tokens=9, start_ids=(30, 31), end_ids=(32, 33), is_open=True)
RULES: tuple[dict[str, object], ...] = (
    {},
    {"presence_penalty": 0.5, "frequency_penalty": 0.25},
    {"grammar": LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))},
    {"banned_sequences": ((40, 41), (42,)), "min_tokens": 9},
    {"thinking": THINKING},
    {"logit_bias": ((40, 1.5),)},
    {"repetition_penalty": 1.2},
    {"grammar": LLMatcher.grammar_from_regex("(ab|abc)+d?[0-9]{3}(xyz){4,8}")},
)


class Script:
    """Always right, wrong, random, or outside the vocabulary, by what the requests get without drafts."""

    is_costly = False

    def __init__(self, kind: str, known: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self._kind, self._known, self._dice = kind, known, random.Random(1)

    def draft(self, wishes: Sequence[Wish]) -> list[Draft]:
        return [self._guess(wish.token_ids, wish.most) for wish in wishes]

    def _guess(self, token_ids: Sequence[int], most: int) -> Draft:
        if self._kind == "random":
            return Draft(tuple(self._dice.randrange(380) for _ in range(most)), 32)
        if self._kind == "outside":
            return Draft((1 << 40,) * most if self._dice.random() < 0.5 else (-7, 5), 32)
        for whole in self._known.values():
            if whole[: len(token_ids)] == tuple(token_ids):
                right = whole[len(token_ids) : len(token_ids) + most]
                return Draft(right if self._kind == "right" else tuple(token + 1 for token in right), 32)
        return Draft()

    def note_end(self, token_ids: Sequence[int], scope: str) -> None:
        pass

    def forget(self, sequence_id: int) -> None:
        pass


def engine_asked(blocks: int, **changes: object) -> EngineConfig:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, prefill_chunk=48, admission="prompt")
    asked = EngineConfig(
        model=str(demo_model_path()),
        device="cpu",
        num_threads=1,
        packed_cache=False,
        max_model_len=512,
        limits=limits,
        **changes,  # type: ignore[arg-type]
    )
    return replace(asked, kv_memory=blocks * resolve(asked).bytes_per_block)


def engine(drafter: Drafter | None, blocks: int = 400, **changes: object) -> BuiltEngine:
    built = build(engine_asked(blocks, **changes))
    return (
        replace(built, scheduler=Scheduler(built.plan.scheduler, speculate=partial(Speculation, drafter)))
        if drafter
        else built
    )


def requests(count: int = 8) -> list[GenerationRequest]:
    """Greedy and drawn, with log-probabilities, stop ids, several choices; half of the prompts repeat themselves."""
    dice = random.Random(3)
    found = []
    for number in range(count):
        part = [dice.randrange(20, 380) for _ in range(12)]
        found.append(
            GenerationRequest(
                request_id=f"r{number}",
                prompt_token_ids=tuple(part * (1 + number % 4)),
                sampling=SamplingParams(
                    temperature=(0.0, 0.3, 1.0)[number % 3],
                    top_p=0.9 if number % 2 else 1.0,
                    seed=number,
                    num_logprobs=2 if number % 2 else None,
                    **RULES[number % len(RULES)],  # type: ignore[arg-type]
                ),
                stop=StopParams(max_new_tokens=60, stop_token_ids=(0, 2) if number % 8 == 0 else ()),
                n=2 if number == 3 else 1,
            )
        )
    return found


def known(results: Results) -> dict[tuple[int, ...], tuple[int, ...]]:
    prompts = {wanted.request_id: wanted.prompt_token_ids for wanted in requests()}
    wholes = [(*prompts[name], *each.token_ids) for (name, _), each in results.items()]
    return {whole: whole for whole in wholes}


@pytest.fixture(scope="module")
def without() -> Results:
    return generate(engine(None), requests())


# With 40 blocks requests are preempted, and else nothing is different; rows of 400 blocks stand beside one of 40.
SIZES_OF_POOLS = [pytest.param(400, marks=pytest.mark.matrix), 40]


@pytest.mark.parametrize("kind", few(["suffix", "right", "wrong", "random", "outside"], "suffix", "wrong"))
@pytest.mark.parametrize("blocks", SIZES_OF_POOLS)
def test_drafts_change_nothing(kind: str, blocks: int, without: Results) -> None:
    drafter: Drafter = SuffixDrafter() if kind == "suffix" else Script(kind, known(without))
    built = engine(drafter, blocks)
    assert generate(built, requests()) == without
    speculation = built.scheduler._speculation
    assert speculation is not None
    assert speculation.total_draft_tokens > 0
    assert sum(speculation.total_accepted_by_position) == speculation.total_accepted_tokens
    assert speculation.total_accepted_by_position == sorted(speculation.total_accepted_by_position, reverse=True)
    assert sum(speculation.total_undrafted.values()) > 0
    assert (speculation.total_accepted_tokens > 0) == (kind in {"suffix", "right"}) or kind == "random"
    assert built.scheduler.stats().blocks_used == 0


def test_the_scheduler_begins_with_what_rows_were_measured_to_cost() -> None:
    """In seconds of this machine, before the first request; nothing of the pool is held by it."""
    speculation = engine(None, speculation="suffix").scheduler._speculation
    assert speculation is not None
    costs = speculation._costs
    assert 0 < costs._cost(1) <= costs._cost(64) < 1.0
    assert costs._table != RowCosts()._table
    asked = replace(engine_asked(400, speculation="suffix"), faults=(Fault(point="step.raise", nth=1),))
    built = build(asked)
    assert built.scheduler._speculation is not None
    assert not built.scheduler._speculation._costs._is_measured, "a fault that is planted is for a request"


@pytest.mark.parametrize("blocks", SIZES_OF_POOLS)
def test_earlier_outputs_change_nothing_and_are_found_again(blocks: int, without: Results) -> None:
    """Of the second round nearly all tokens were said in the first; in another scope none of them is known."""
    built = engine(OutputsDrafter(), blocks)
    speculation = built.scheduler._speculation
    assert speculation is not None
    accepted = []
    for scope in ("a\0", "a\0", "b\0"):
        before = speculation.total_accepted_tokens
        assert generate(built, [replace(wanted, cache_salt=scope) for wanted in requests()]) == without
        accepted.append(speculation.total_accepted_tokens - before)
    assert accepted[1] > 2 * accepted[0]
    assert accepted[1] > 2 * accepted[2]
    assert built.scheduler.stats().blocks_used == 0


def test_the_log_counts_no_draft_as_a_token_of_a_prompt(without: Results) -> None:
    """Tokens that a rule forces are computed as a prompt's are, unless they were guessed."""
    counted = []
    for drafter in (None, Script("right", known(without))):
        built = engine(drafter)
        generate(built, requests())
        answer = built.scheduler.answer("steps", {"limit": 4096})
        assert isinstance(answer, dict)
        counted.append(sum(step.prefill_tokens for step in answer["steps"]))
    assert counted[0] >= counted[1] >= sum(len(wanted.prompt_token_ids) for wanted in requests())


@pytest.mark.parametrize("number", few(range(len(RULES)), 0, 1, 2))
def test_right_drafts_take_fewer_steps(number: int, without: Results) -> None:
    alone = [wanted for wanted in requests() if wanted.request_id == f"r{number}"]
    steps = []
    for drafter in (None, Script("right", known(without))):
        seen: list[int] = []
        built = engine(drafter)
        assert generate(built, alone, on_batch=lambda batch, seen=seen: seen.append(batch.step_id))  # type: ignore[misc]
        steps.append(len(seen))
    assert steps[1] < steps[0] / 2


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory, without: Results) -> Path:
    """A model of random weights with the embedded model's tokens."""
    del without
    demo = demo_model_path()
    facts = json.loads((demo / "config.json").read_text())
    path = make_checkpoint(tmp_path_factory.mktemp("strange"), seed=3, vocab_size=facts["vocab_size"])
    shutil.copy(demo / "tokenizer.json", path / "tokenizer.json")
    return path


def guessing(path: Path, blocks: int = 400, **changes: object) -> tuple[BuiltEngine, Speculation]:
    """An engine with this draft model."""
    built = engine(None, blocks, speculation=f"model:{path}", **changes)
    return built, unhurried(built)


def unhurried(built: BuiltEngine) -> Speculation:
    """Its drafter's calls seem to take no time, and this machine's rows are as others': what pays follows from what is
    accepted.
    """
    speculation = built.scheduler._speculation
    assert speculation is not None
    speculation._clock, speculation._costs = lambda: 0.0, RowCosts()
    return speculation


@pytest.mark.parametrize("blocks", SIZES_OF_POOLS)
@pytest.mark.parametrize("quantization", few([None, "int8", "int4"], None))
def test_a_draft_model_changes_nothing_and_the_same_model_is_right(
    quantization: str | None, blocks: int, without: Results
) -> None:
    expected = without if quantization is None else generate(engine(None, quantization=quantization), requests())
    built, _ = guessing(demo_model_path(), blocks, quantization=quantization)
    assert generate(built, requests()) == expected
    stats = built.scheduler.stats()
    assert stats.total_draft_tokens > 100
    assert stats.total_accepted_tokens > stats.total_draft_tokens / 2, "what is drawn is often not the likeliest"
    assert stats.blocks_used == 0
    assert f"draft model      {demo_model_path()}, " in plan_text(built.plan)


def test_greedy_tokens_are_always_those_of_the_same_model() -> None:
    wanted = [
        GenerationRequest(
            request_id=f"{number}",
            prompt_token_ids=tuple(range(20 + number, 20 + 9 * number)),
            sampling=SamplingParams(temperature=0.0, num_logprobs=1),
            stop=StopParams(max_new_tokens=60),
        )
        for number in range(3, 9)
    ]
    built, _ = guessing(demo_model_path())
    assert generate(built, wanted) == generate(engine(None), wanted)
    stats = built.scheduler.stats()
    assert stats.total_accepted_tokens == stats.total_draft_tokens > 100


@pytest.mark.parametrize("blocks", SIZES_OF_POOLS)
def test_a_draft_model_that_is_wrong_changes_nothing_and_is_asked_rarely(
    strange: Path, blocks: int, without: Results
) -> None:
    built, speculation = guessing(strange, blocks)
    assert generate(built, requests()) == without
    before = speculation.total_draft_tokens
    assert before > 0
    assert speculation.total_accepted_tokens < before / 10
    for _ in range(3):
        assert generate(built, requests()) == without
    assert speculation._hope < 0.35
    assert speculation.total_draft_tokens - before < 3 * before
    assert built.scheduler.stats().blocks_used == 0


FAMILIES: dict[str, tuple[str, str, dict[str, object]]] = {
    "windows": ("gemma3", "gemma3", {}),
    "windows of the model alone": ("ministral", "qwen3", {}),
    "int8 pools": ("qwen3", "qwen3", {"kv_cache_dtype": "int8"}),
    "by the reference": ("qwen3", "qwen3", {"dtype": "float32"}),
    "by transformers": ("llama", "llama", {"model_impl": "transformers"}),
}


@pytest.mark.parametrize("name", few(FAMILIES, *list(FAMILIES)[:2]))
def test_draft_models_of_every_kind_change_nothing(name: str) -> None:
    family, other, changes = FAMILIES[name]
    asked = engine_config(
        model=str(shared_checkpoint(family)),
        speculation=f"model:{shared_checkpoint(other)}",
        max_model_len=200,
        max_num_seqs=8,
        **{"device": "cpu", "num_threads": 1, "packed_cache": False, "dtype": "bfloat16", **changes},
    )
    wanted = [
        GenerationRequest(
            request_id=f"{number}",
            prompt_token_ids=tuple((7 * number + 13 * i) % 300 + 20 for i in range(10 + 15 * number)),
            sampling=SamplingParams(temperature=0.0 if number % 2 else 0.8, seed=number, num_logprobs=1),
            stop=StopParams(max_new_tokens=60),
        )
        for number in range(5)
    ]
    built = build(asked)
    speculation = unhurried(built)
    assert generate(built, wanted) == generate(build(replace(asked, speculation="off")), wanted)
    assert speculation.total_draft_tokens > 0
    assert (speculation.total_accepted_tokens > speculation.total_draft_tokens / 3) == (family == other)


def test_the_memory_of_a_draft_model_is_bounded_and_planned() -> None:
    """A quarter of the pool's bytes, or what all running sequences fill; the weights are counted before the pool."""
    speculation = f"model:{demo_model_path()}"
    for blocks, expected in ((40, 10), (400, 100), (4000, 8 * 32)):
        asked = resolve(engine_asked(blocks, speculation=speculation))
        pool = asked.pool(blocks * asked.bytes_per_block)
        plan = asked.plan(pool, asked.scheduler(pool))
        assert plan.speculation.draft_bytes == asked.weights.total + expected * asked.bytes_per_block
    assert asked.bytes_beside_pool == 2 * asked.weights.total


def test_a_fault_of_the_draft_model_is_harmless(
    without: Results, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built, speculation = guessing(demo_model_path())
    drafter, calls = speculation._drafter, 0
    assert isinstance(drafter, ModelDrafter)
    begin = drafter._runner.begin

    def fail_later(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise RuntimeError("planted")
        return begin(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter._runner, "begin", fail_later)
    with caplog.at_level(logging.WARNING):
        assert generate(built, requests()) == without
    assert calls > 20
    assert [record.getMessage() for record in caplog.records if "planted" in record.getMessage()] == [
        "the draft model failed, and requests where it does go on without guesses: planted"
    ]


def test_a_draft_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"speculation=model:.*: its tokenizer differs: .* use a model of its family"):
        engine(None, speculation=f"model:{shared_checkpoint()}")
    with pytest.raises(ConfigError, match=r"speculation=model:.*config.json: no such file"):
        engine(None, speculation=f"model:{tmp_path}")
    with pytest.raises(
        ConfigError, match="speculation=eagle:/x is unknown; set speculation to off, auto, suffix, outputs or model:DIR"
    ):
        engine(None, speculation="eagle:/x")
