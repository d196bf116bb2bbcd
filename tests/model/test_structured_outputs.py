"""What the embedded model writes at temperature 1 under real schemas is valid, or was cut by its length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams, StructuredOutputsParams
from support.json_schemas import KEPT, errors, schema

MOST_TOKENS = 400
LEAST_WHOLE = 0.4  # of all outputs; a model this small fills unbounded lists and texts for long
WANTED = 500  # whole outputs of the long run
MOST_ROUNDS = 20


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("quire-demo", max_num_seqs=32) as loaded:
        yield loaded


def judge(llm: LLM, names: list[str], seed: int) -> Counter[str]:
    conversations = [[{"role": "user", "content": f"Write a JSON object for {name}."}] for name in names]
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed,
            max_tokens=MOST_TOKENS,
            structured_outputs=StructuredOutputsParams(json=schema(name)),
        )
        for name in names
    ]
    outcomes: Counter[str] = Counter()
    for name, output in zip(names, llm.chat(conversations, params, use_tqdm=False), strict=True):
        (choice,) = output.outputs
        if choice.finish_reason == "length":
            outcomes["cut"] += 1
            continue
        assert choice.finish_reason == "stop"
        assert errors(name, choice.text) == [], choice.text
        outcomes["valid"] += 1
    return outcomes


@pytest.mark.matrix  # `make schema-test` has 500
def test_outputs_at_temperature_1_are_valid(llm: LLM):
    outcomes = judge(llm, KEPT[::5], seed=0)
    assert outcomes["valid"] >= LEAST_WHOLE * outcomes.total(), outcomes


@pytest.mark.matrix  # the mark's probability: test_thinking_opener.py, and in an engine test_simulated_engine.py
@pytest.mark.parametrize("switches", [{}, {"enable_thinking": False}])
def test_a_choice_is_answered_and_not_thought_about(llm: LLM, switches: dict[str, object]):
    """The mark that opens thoughts does not get the probability of all that the choices forbid."""
    bound = StructuredOutputsParams(choice=["yes", "no"])
    for seed, question in enumerate(("Is water wet?", "Is Paris in Spain?")):
        params = SamplingParams(max_tokens=5, n=16, seed=seed, structured_outputs=bound)
        (output,) = llm.chat(
            [{"role": "user", "content": question}], params, chat_template_kwargs=switches, use_tqdm=False
        )
        assert {choice.text for choice in output.outputs} <= {"yes", "no"}


@pytest.mark.schemas
@pytest.mark.timeout(3600)
def test_500_outputs_at_temperature_1_are_valid(llm: LLM):
    outcomes: Counter[str] = Counter()
    for seed in range(1, MOST_ROUNDS + 1):
        outcomes += judge(llm, KEPT, seed)
        print(outcomes, flush=True)
        if outcomes["valid"] >= WANTED:
            break
    assert outcomes["valid"] >= WANTED, outcomes
    assert outcomes["valid"] >= LEAST_WHOLE * outcomes.total(), outcomes
