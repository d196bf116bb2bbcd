"""What grammars cost a step of decodes: streams that write JSON by a schema beside free ones, in turns.

    python -m benchmarks.grammar_cost [--model DIR] [--streams 16,64] [--rounds 5] [--steps 150] [--threads N]

An engine in this process, the embedded model where no other is named, temperature 1 and greedy. Each round runs free
streams, then constrained ones; only steps in which every stream decodes are counted. Printed are the medians over all
rounds of a step's milliseconds; the median and the range of the rounds' ratios; and what a step spends on masks and on
tokens that must come, with their share of the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from llguidance import LLMatcher
from rich.console import Console
from rich.table import Table

from quire_engine.build import build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StepOutput, StopParams
from quire_engine.demo import demo_model_path
from quire_engine.engine import Engine
from quire_engine.execution.constrained.constraints import MAX_FORCED, Constraints

PROMPT_TOKENS = 32
ENTERING = 24  # steps in which prompts enter and the first tokens come
SCHEMA = {
    "type": "array",
    "minItems": 500,  # so that no stream ends while it is measured
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["person", "place", "thing"]},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
}


@dataclass
class Round:
    """Seconds of each step in which every stream decoded."""

    steps: list[float] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("masks", "forced"), 0.0))

    @property
    def step(self) -> float:
        return statistics.median(self.steps)

    def a_step(self, part: str) -> float:
        return self.parts[part] / len(self.steps)


@contextmanager
def _timed(spent: dict[str, float]) -> Iterator[None]:
    """Adds the seconds that the engine's thread is in the calls for masks and for forced tokens."""
    originals = Constraints.allowed, Constraints.forced

    def timed(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object) -> object:
            started = time.perf_counter()
            found = call(*args)
            spent[name] += time.perf_counter() - started
            return found

        return run

    Constraints.allowed = timed("masks", originals[0])  # type: ignore[method-assign, assignment]
    Constraints.forced = timed("forced", originals[1])  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Constraints.allowed, Constraints.forced = originals  # type: ignore[method-assign]


def one_round(engine: Engine, streams: int, steps: int, sampling: Sequence[SamplingParams]) -> Round:
    """A stream for each of the `sampling`; all are dropped at the end."""
    found, outputs = Round(), list[StepOutput]()
    engine.on_step = outputs.append
    for number, each in enumerate(sampling):
        engine.submit(
            GenerationRequest(
                request_id=f"{number}",
                prompt_token_ids=tuple(300 + (7 * number + at) % 512 for at in range(PROMPT_TOKENS)),
                sampling=each,
                stop=StopParams(max_new_tokens=(1 + MAX_FORCED) * (steps + ENTERING)),
            )
        )
    spent = found.parts
    with _timed(spent):
        for number in range(steps + ENTERING):
            if number == ENTERING:
                spent.update(dict.fromkeys(spent, 0.0))
            outputs.clear()
            started = time.perf_counter()
            engine.step()
            took = time.perf_counter() - started
            if number >= ENTERING:
                tokens = [len(one.token_ids) for step in outputs for one in step.outputs if one.token_ids]
                if len(tokens) < streams:
                    raise SystemExit(f"{len(tokens)} of {streams} streams had a token in step {number}")
                found.steps.append(took)
    for number in range(streams):
        engine.abort(f"{number}")
    while engine.has_work:
        engine.step()
    return found


def compare(engine: Engine, streams: int, rounds: int, steps: int, temperature: float) -> list[dict[str, Round]]:
    """Free and constrained streams in turns."""
    grammar = LLMatcher.grammar_from_lark(f"start: %json {json.dumps(SCHEMA)}")
    found = []
    for number in range(rounds + 1):
        together = {}
        for name, text in (("free", ""), ("JSON", grammar)):
            sampling = [SamplingParams(temperature=temperature, seed=at, grammar=text) for at in range(streams)]
            together[name] = one_round(engine, streams, steps, sampling)
        if number:  # the first has the compilation, and warms caches
            found.append(together)
    return found


def _row(streams: int, temperature: float, rounds: list[dict[str, Round]]) -> list[str]:
    def median(name: str, of: Callable[[Round], float]) -> float:
        return statistics.median(of(each[name]) for each in rounds)

    ratios = [each["JSON"].step / each["free"].step for each in rounds]
    row = [f"{streams}", "greedy" if temperature == 0 else f"{temperature:g}"]
    row += [f"{median(name, _step) * 1e3:.3f}" for name in ("free", "JSON")]
    row.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    for part in ("masks", "forced"):
        took = statistics.median([each["JSON"].a_step(part) for each in rounds])
        row.append(f"{took * 1e3:.3f} ({100 * took / median('JSON', _mean):.1f} %)")
    return row


def _step(of: Round) -> float:
    return of.step


def _mean(of: Round) -> float:
    return statistics.fmean(of.steps)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="a folder; the embedded model")
    parser.add_argument("--streams", default="16,64", help="how many at once, one or several (16,64)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="measured in each round")
    parser.add_argument("--threads", type=int, default=None, help="of the engine (one for each core)")
    asked = parser.parse_args(argv)
    table = Table(title=f"JSON by a schema beside free text, {asked.rounds} rounds in turns")
    for column in ("streams", "temperature", "free, ms a step", "JSON", "ratio", "masks, ms a step", "forced tokens"):
        table.add_column(column, justify="right")
    for streams in map(int, asked.streams.split(",")):
        # Tokens that must come are computed as a prompt's are: no stream is to wait for the target between two tokens.
        limits = SchedulerLimits(max_num_seqs=streams, max_num_batched_tokens=max(512, 16 * streams), itl_target=0.0)
        config = EngineConfig(
            model=str(asked.model), device="cpu", num_threads=asked.threads, limits=limits, kv_memory=1 << 29
        )
        built = build(config)
        engine = Engine(built.scheduler, built.executor, grammars=built.grammars)
        for temperature in (1.0, 0.0):
            rounds = compare(engine, streams, asked.rounds, asked.steps, temperature)
            table.add_row(*_row(streams, temperature, rounds))
        built.close()
    Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
