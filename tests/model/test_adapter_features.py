"""What else a request may ask for, of an adapter, offline: as of the merged checkpoint, and in any company as alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire import LLM, BeamSearchParams, LoRARequest, SamplingParams
from quire.sampling_params import StructuredOutputsParams
from support.adapters import merged, write_adapter
from support.checkpoints import shared_checkpoint
from support.served_answers import engines_in_threads

SETTINGS: dict[str, Any] = {"kv_memory": 8 << 20, "num_threads": 1, "max_model_len": 192, "seed": 3}
PROMPTS = ["Once upon a time", "The capital of France is"]
SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "rain"]}, "hours": {"type": "integer", "minimum": 0, "maximum": 24}},
    "required": ["sky", "hours"],
    "additionalProperties": False,
}


class Served(NamedTuple):
    """The model with its adapters, which take turns, and the first of them merged into it."""

    llm: LLM
    adapters: list[LoRARequest]
    merged: LLM


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder, model = tmp_path_factory.mktemp("adapters"), shared_checkpoint("llama")
    paths = [write_adapter(folder / f"a{i}", model, seed=i) for i in range(2)]
    with (
        engines_in_threads(),
        LLM(model, enable_lora=True, **SETTINGS) as llm,
        LLM(merged(folder / "merged", model, paths[0]), **SETTINGS) as one,
    ):
        yield Served(llm, [LoRARequest(path.name, i + 1, str(path)) for i, path in enumerate(paths)], one)


def generated(llm: LLM, params: SamplingParams, lora: Any = None) -> list[list[tuple[list[int], Any]]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, lora_request=lora)
    return [[(choice.token_ids, choice.logprobs) for choice in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=30, logprobs=3),
        SamplingParams(temperature=0.8, seed=5, n=3, max_tokens=20, logprobs=1),
    ],
    ids=["log-probabilities", "three choices"],
)
def test_choices_and_their_log_probabilities(served: Served, params: SamplingParams) -> None:
    first, second = served.adapters
    found = generated(served.llm, params, first)
    for ours, theirs in zip(found, generated(served.merged, params), strict=True):
        assert len(ours) == params.n
        for (tokens, scores), (wanted, wanted_scores) in zip(ours, theirs, strict=True):
            assert tokens == wanted
            for here, there in zip(scores, wanted_scores, strict=True):
                assert {token: entry.rank for token, entry in here.items()} == {
                    token: entry.rank for token, entry in there.items()
                }
                for token, entry in here.items():
                    assert entry.logprob == pytest.approx(there[token].logprob, abs=1e-3)
    other, plain = generated(served.llm, params, second), generated(served.llm, params)
    assert len({str(each) for each in (found, other, plain)}) == 3
    # A list with an adapter, or none, for each prompt.
    assert generated(served.llm, params, [first, second]) == [found[0], other[1]]
    assert generated(served.llm, params, [None, first]) == [plain[0], found[1]]


@pytest.mark.parametrize("length_penalty", [pytest.param(1.0, marks=pytest.mark.matrix), 0.5])
def test_beam_search(served: Served, length_penalty: float) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=16, length_penalty=length_penalty)
    first, second = served.adapters
    found = served.llm.beam_search(PROMPTS, params, lora_request=first)
    for ours, theirs in zip(found, served.merged.beam_search(PROMPTS, params), strict=True):
        assert [each.tokens for each in ours.sequences] == [each.tokens for each in theirs.sequences]
        for here, there in zip(ours.sequences, theirs.sequences, strict=True):
            assert here.score == pytest.approx(there.score, abs=1e-3)
    mixed = served.llm.beam_search(PROMPTS, params, lora_request=[second, first])
    assert [each.tokens for each in mixed[1].sequences] == [each.tokens for each in found[1].sequences]
    assert [each.tokens for each in mixed[0].sequences] != [each.tokens for each in found[0].sequences]


def test_structured_outputs(served: Served) -> None:
    def asked(**rules: Any) -> list[list[str]]:
        params = SamplingParams(
            temperature=1.0, seed=2, n=2, max_tokens=80, structured_outputs=StructuredOutputsParams(**rules)
        )
        outputs = served.llm.generate(PROMPTS, params, use_tqdm=False, lora_request=served.adapters)
        alone = [
            served.llm.generate(prompt, params, use_tqdm=False, lora_request=adapter)[0]
            for prompt, adapter in zip(PROMPTS, served.adapters, strict=True)
        ]
        texts = [[choice.text for choice in output.outputs] for output in outputs]
        assert texts == [[choice.text for choice in output.outputs] for output in alone]
        return texts

    for text in chain.from_iterable(asked(json=SCHEMA)):
        answer = json.loads(text)
        assert answer["sky"] in ("clear", "rain")
        assert 0 <= answer["hours"] <= 24
    assert {text for choices in asked(choice=["yes", "no"]) for text in choices} <= {"yes", "no"}
    assert all(re.fullmatch("[a-f]{3,9}", text) for choices in asked(regex="[a-f]{3,9}") for text in choices)


def test_chat(served: Served) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    (ours,) = served.llm.chat(messages, params, use_tqdm=False, lora_request=served.adapters[0])
    (theirs,) = served.merged.chat(messages, params, use_tqdm=False)
    assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


def test_what_cannot_be_is_said(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 prompts and 1 lora_requests"):
        served.llm.generate(PROMPTS, use_tqdm=False, lora_request=served.adapters[:1])
    with pytest.raises(ValueError, match="no such directory"):
        served.llm.generate(PROMPTS, use_tqdm=False, lora_request=LoRARequest("none", 9, str(tmp_path / "none")))
    with pytest.raises(ValueError, match="enable_lora"):
        served.merged.generate(PROMPTS, use_tqdm=False, lora_request=served.adapters[0])
