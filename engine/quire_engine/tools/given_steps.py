"""Computes steps that were planned elsewhere, with a real model: `python -m quire_engine.tools.given_steps`, in JSON.

Promises: exactly the given slices are computed, in the given blocks; a reply has the tokens that follow; nothing is
scheduled here. Must not know: sockets, HTTP.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from quire_engine.build import build
from quire_engine.contract.batch import Batch, ScheduledSequence
from quire_engine.contract.config import engine_config
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.types import SamplingParams, StopParams
from quire_engine.tools.json_child import converse

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True, kw_only=True)
class _Computed:
    """A request's tokens so far."""

    number: int
    prompt: tuple[int, ...]
    stop: StopParams
    output: list[int] = field(default_factory=list)
    computed: int = 0
    run: int = 0


def answers(questions: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """First an `EngineConfig`, replied with the number of blocks; then steps, each replied with its tokens.

    A step: `add`, requests with `prompt` and `max_new_tokens` by id; `preempted`, ids; `slices`, lists of id, number of
    tokens and blocks. The reply: `tokens`, the next one of each request whose last known token was computed; `seconds`.
    """
    built = build(engine_config(next(questions)))
    yield {"num_blocks": built.plan.scheduler.num_blocks, "block_size": built.plan.scheduler.limits.block_size}
    live: dict[str, _Computed] = {}
    for number, step in enumerate(questions, start=1):
        for name, asked in step.get("add", {}).items():
            live[name] = _Computed(
                number=1 + max((one.number for one in live.values()), default=0),
                prompt=tuple(asked["prompt"]),
                stop=StopParams(max_new_tokens=asked["max_new_tokens"]),
            )
        for name in step.get("preempted", ()):
            live[name].computed, live[name].run = 0, live[name].run + 1
        items = {name: _item(live[name], count, tuple(blocks)) for name, count, blocks in step["slices"]}
        batch = Batch(
            step_id=number,
            items=tuple(items.values()),
            num_tokens=sum(item.num_tokens for item in items.values()),
            num_decodes=sum(item.is_decode for item in items.values()),
        )
        began = time.perf_counter()
        built.executor.launch(batch)
        result = built.executor.collect()
        seconds = time.perf_counter() - began
        if result.errors:
            raise ConfigError(f"the model refuses a slice: {next(iter(result.errors.values()))}")
        tokens: dict[str, int] = {}
        for name, item in items.items():
            live[name].computed = item.end
            if item.wants_sample:
                tokens[name] = result.samples[item.sequence_id][0].token_id
                live[name].output.append(tokens[name])
        yield {"tokens": tokens, "seconds": seconds}
    built.close()


def _item(one: _Computed, count: int, blocks: tuple[int, ...]) -> ScheduledSequence:
    known = (*one.prompt, *one.output)
    end = one.computed + count
    if count < 1 or end > len(known):
        raise ConfigError(f"a slice has {count} tokens, and {len(known) - one.computed} are left")
    return ScheduledSequence(
        sequence_id=one.number,
        choice=0,
        run=one.run,
        prompt_token_ids=one.prompt,
        output_token_ids=(),
        token_ids=known[one.computed : end],
        start=one.computed,
        block_ids=blocks,
        wants_sample=end == len(known),
        wants_prompt_logprobs=False,
        forks=(),
        sampling=_GREEDY,
        stop=one.stop,
    )


if __name__ == "__main__":
    sys.exit(converse(answers))
