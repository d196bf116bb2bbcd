"""Compares the embedded model's greedy answers on a device with answers recorded on a CPU.

Promises: the answers come from the serving engine, for each prompt alone and for all prompts together. At every
recorded token the greatest logit leads by at least `LEAST_LEAD`, so rounding cannot change the token. Must not know:
text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire_engine.build import build
from quire_engine.contract.config import DType, EngineConfig, KernelChoice
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StepOutput, StopParams
from quire_engine.demo import demo_model_path, recorded_answers_path
from quire_engine.engine import Engine

LEAST_LEAD = 2.0
_POOL_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One recorded answer. `text` and `answer` are for human readers."""

    text: str
    answer: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyResult:
    """Result of the comparison."""

    ok: bool
    kernels: str
    num_tokens: int
    num_equal: int  # tokens before the first difference, summed over the answers
    problem: str = ""


def recorded_answers() -> list[Answer]:
    """Read the answers that ship with the model."""
    plain = json.loads(recorded_answers_path().read_text(encoding="utf-8"))
    return [
        Answer(
            text=each["text"],
            answer=each["answer"],
            prompt_token_ids=tuple(each["prompt_token_ids"]),
            token_ids=tuple(each["token_ids"]),
        )
        for each in plain
    ]


def run_greedy(
    device: torch.device, kernels: KernelChoice, dtype: DType, num_threads: int, *, deterministic: bool = False
) -> GreedyResult:
    """Load the embedded model and compare its answers. Raises ConfigError, ModelLoadError."""
    built = build(
        EngineConfig(
            model=str(demo_model_path()),
            device="cuda" if device.type == "cuda" else "cpu",
            dtype=dtype,
            kernels=kernels,
            deterministic=deterministic,
            kv_memory=_POOL_BYTES,
            limits=SchedulerLimits(max_num_seqs=16),
            num_threads=num_threads,
        )
    )
    engine, answers = Engine(built.scheduler, built.executor), recorded_answers()
    found = [tokens for answer in answers for tokens in generate(engine, [answer])]
    found += generate(engine, answers)
    wanted = [answer.token_ids for answer in (*answers, *answers)]
    num_equal, problem = 0, ""
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        equal = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
        num_equal += equal
        if ours != theirs and not problem:
            way = "alone" if number < len(answers) else "among others"
            problem = f"{answers[number % len(answers)].text!r} {way}: another token after {equal} of {len(theirs)}"
    return GreedyResult(
        ok=not problem,
        kernels=built.plan.machine.kernels,
        num_tokens=sum(len(tokens) for tokens in wanted),
        num_equal=num_equal,
        problem=problem,
    )


def generate(engine: Engine, answers: Sequence[Answer]) -> list[tuple[int, ...]]:
    """Generate as many tokens as were recorded for each prompt, with all prompts in one batch."""
    tokens: list[list[int]] = [[] for _ in answers]

    def note(step: StepOutput) -> None:
        for output in step.outputs:
            tokens[int(output.request_id)].extend(output.token_ids)

    engine.on_step = note
    for number, answer in enumerate(answers):
        engine.submit(
            GenerationRequest(
                request_id=str(number),
                prompt_token_ids=answer.prompt_token_ids,
                sampling=SamplingParams(temperature=0.0),
                stop=StopParams(max_new_tokens=len(answer.token_ids)),
            )
        )
    while engine.has_work:
        engine.step()
    return [tuple(each) for each in tokens]
