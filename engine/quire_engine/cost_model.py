"""The cost model of a step: seconds from the sizes in its batch.

Promises: equal batches take equal seconds; the time of a step without prompts is linear, that of a step with prompts
comes from a table of measured sizes, which never falls. Must not know: the scheduler, clocks.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from quire_engine.contract.batch import Batch
from quire_engine.contract.errors import ConfigError

_STEEPER, _NOTABLE = 2.0, 0.05
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


class StepSizes(NamedTuple):
    """The sizes that a step's time depends on."""

    num_tokens: int
    num_decodes: int
    context: int  # tokens attended by slices of one token
    before: int  # sum over longer slices: tokens of the slice x tokens before it

    @property
    def has_prompts(self) -> bool:
        return self.num_tokens != self.num_decodes


def step_sizes(batch: Batch) -> StepSizes:
    """The sizes of a planned step. A guessed token behind a decode is a row as a decode is."""
    if batch.num_tokens == batch.num_decodes:
        context = batch.rows_context + sum([item.start + 1 for item in batch.others])
        return StepSizes(batch.num_tokens, batch.num_decodes, context, 0)
    context, before = batch.rows_context, 0
    for item in batch.others:
        num_tokens = len(item.token_ids)
        if num_tokens == 1 + item.num_drafts:
            context += sum(range(item.start + 1, item.end + 1))
        else:
            before += num_tokens * item.start
    return StepSizes(batch.num_tokens, batch.num_tokens - batch.num_prefills, context, before)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of a step.

    Without prompts: step + row * decodes + context * (tokens that they attend to). With prompts the table gives the
    time for all tokens of the step, linear between its sizes and beyond its last: a matrix product that already reads
    all weights computes decodes almost for free (table 2 of Sarathi-Serve). In both cases the time of attention is
    added: for decodes as above, for prompts chunk_context * (tokens of a chunk) * (tokens before it).
    """

    step: float = 0.0  # seconds of any step
    row: float = 0.0  # seconds of one more decode
    context: float = 0.0  # seconds of one more token that a decode attends to
    prompt: tuple[tuple[int, float], ...] = ()  # (tokens in a step with prompts, seconds), rising; empty: as decodes
    chunk_context: float = 0.0  # seconds per prompt token and token before its chunk
    request: float = 0.0  # seconds of a request outside of steps, before its first: parsing, frames
    origin: Mapping[str, Any] = field(default_factory=dict)  # the origin of the measurement, only for display

    def decode_seconds(self, num_decodes: int, num_context: int) -> float:
        """A step of `num_decodes` decodes, which attend to `num_context` tokens together."""
        return self.step + self.row * num_decodes + self.context * num_context

    def prompt_seconds(self, num_tokens: int) -> float:
        """A step with prompts, of `num_tokens` tokens in all, without attention to earlier tokens."""
        table = self.prompt
        if not table:
            return self.step + self.row * num_tokens
        at = bisect_left(table, (num_tokens, 0.0))
        if at == 0:
            return table[0][1]
        if at == len(table):
            if at == 1:
                return table[0][1] * num_tokens / table[0][0]
            at -= 1
        (few, low), (many, high) = table[at - 1], table[at]
        return low + (high - low) * (num_tokens - few) / (many - few)

    def prompt_tokens_within(self, seconds: float, most: int) -> int:
        """The most tokens of a step with prompts that takes no longer, 0 to `most`; the inverse of `prompt_seconds`."""
        if self.prompt_seconds(most) <= seconds:
            return most
        table = self.prompt
        at = bisect_right(table, seconds, key=lambda entry: entry[1])
        if not table:
            tokens = (seconds - self.step) / self.row if self.row else 0.0  # the step alone takes longer
        elif at == 0:
            return 0
        elif len(table) == 1:
            tokens = seconds * table[0][0] / table[0][1]
        else:
            (few, low), (many, high) = table[min(at, len(table) - 1) - 1], table[min(at, len(table) - 1)]
            tokens = few + (seconds - low) * (many - few) / (high - low)
        found = min(max(int(tokens), 0), most)
        return found if not found or self.prompt_seconds(found) <= seconds else found - 1

    def seconds(self, batch: Batch) -> float:
        """A step as the scheduler planned it."""
        return self.seconds_of(step_sizes(batch))

    def seconds_of(self, sizes: StepSizes) -> float:
        """A step of these sizes."""
        if not sizes.has_prompts:
            return self.decode_seconds(sizes.num_decodes, sizes.context)
        of_prompts = self.prompt_seconds(sizes.num_tokens)
        return of_prompts + self.context * sizes.context + self.chunk_context * sizes.before

    def chunk_seconds(self, chunk: int, before: int, num_decodes: int, num_context: int) -> float:
        """A step of `decode_seconds` with a prompt's chunk behind `before` tokens; one of a token is like a decode."""
        if chunk == 1:
            return self.seconds_of(StepSizes(1 + num_decodes, num_decodes, num_context + before + 1, 0))
        return self.seconds_of(StepSizes(chunk + num_decodes, num_decodes, num_context, chunk * before))

    def of_ranks(self, ranks: int, exchanges: int, exchange_seconds: float) -> CostModel:
        """Return the costs of the same model on `ranks` processes, each with the processors and the memory of this one.

        A step reads and computes a rank's part, and waits for `exchanges` of columns, of so many seconds each.
        """
        if ranks == 1:
            return self
        more = exchanges * exchange_seconds
        parts = {name: getattr(self, name) / ranks for name in ("row", "context", "chunk_context")}
        table = tuple([(tokens, seconds / ranks + more) for tokens, seconds in self.prompt])
        return replace(self, step=self.step / ranks + more, prompt=table, **parts)

    def as_plain(self) -> dict[str, Any]:
        return asdict(self)


def knees(table: Sequence[tuple[int, float]]) -> tuple[int, ...]:
    """The sizes of a rising table after which a further token costs much more than the tokens before it did.

    `table`: (tokens in a step, seconds). Up to a knee a step has room for almost nothing: a rise counts where it is
    steeper by `_STEEPER` than the one before it, and more than `_NOTABLE` of the step, so that scatter is none.
    """
    found = []
    for (few, low), (size, seconds), (many, high) in zip(table, table[1:], table[2:], strict=False):
        before, after = (seconds - low) / (size - few), (high - seconds) / (many - size)
        if high - seconds > _NOTABLE * seconds and after > _STEEPER * before:
            found.append(size)
    return tuple(found)


UNIT_STEPS = CostModel(step=1.0)  # every step takes one second, whatever is in it: arrivals are counted in steps


def cost_model(plain: Mapping[str, Any], where: str = "the cost model") -> CostModel:
    """The cost model from the JSON form of `as_plain`. Raises ConfigError."""
    try:
        table = tuple((int(tokens), float(seconds)) for tokens, seconds in plain.get("prompt", ()))
        numbers = {name: float(plain.get(name, 0.0)) for name in ("step", "row", "context", "chunk_context", "request")}
        model = CostModel(**numbers, prompt=table, origin=dict(plain.get("origin", {})))
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{where} is none: {error}; `quire calibrate` writes one") from None
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(table))
    if min(numbers.values()) < 0 or not rising or (table and table[0][0] < 1):
        raise ConfigError(f"{where} has a number below 0, or a table that falls; `quire calibrate` writes another")
    if model.prompt_seconds(1) <= 0 or model.decode_seconds(1, 1) <= 0:
        raise ConfigError(f"{where} says that steps take no time; `quire calibrate` writes another")
    return model


def read_cost(text: str) -> tuple[CostModel, dict[str, Any]]:
    """A file of `quire calibrate`, with its whole contents; or numbers such as `step=20ms,row=0.1ms,token=1ms`.

    `token`: seconds per prompt token beside `step`; `unit` means steps of one second. Raises ConfigError.
    """
    if text == "unit":
        return UNIT_STEPS, {}
    if "=" in text and not Path(text).exists():
        return _from_numbers(text), {}
    try:
        plain = json.loads(Path(text).read_bytes())
    except OSError as error:
        raise ConfigError(f"cost model {text} cannot be read: {error.strerror}; `quire calibrate` writes one") from None
    except ValueError:
        raise ConfigError(f"cost model {text} is not JSON; `quire calibrate` writes one") from None
    if not isinstance(plain, dict) or not isinstance(plain.get("cost"), dict):
        raise ConfigError(f"cost model {text} has no entry `cost`; `quire calibrate` writes one")
    return cost_model(plain["cost"], f"cost model {text}"), plain


def _from_numbers(text: str) -> CostModel:
    known = ("step", "row", "context", "token", "chunk_context", "request")
    numbers: dict[str, float] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name not in known:
            raise ConfigError(f"cost model: {name!r} is unknown; use {', '.join(known)}")
        numbers[name] = seconds(value, f"cost model: {name}")
    token = numbers.pop("token", numbers.get("row", 0.0))
    step = numbers.get("step", 0.0)
    return cost_model({**numbers, "prompt": [(1, step + token), (1025, step + 1025 * token)]})


def seconds(text: str, name: str) -> float:
    """`20ms`, `1.5s`, `3us` or a plain number of seconds. Raises ConfigError."""
    unit = next((unit for unit in ("us", "ms", "s") if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * _UNITS.get(unit, 1.0)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name} is {text!r}; write a time such as 20ms, 1.5s or 3us")
    return value
