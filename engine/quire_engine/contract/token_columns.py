"""A step's outputs of which most are one plain token each: these are kept as two columns until they are read.

Promises: `outputs` are those of any `StepOutput`, in the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from itertools import chain
from typing import Any

from quire_engine.contract.types import StepOutput, TokenOutput


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """A choice, as all of its plain outputs name it beside their token."""

    request_id: str
    choice: int
    num_cached_tokens: int

    def output(self, token_id: int) -> TokenOutput:
        return TokenOutput(
            request_id=self.request_id,
            choice=self.choice,
            token_ids=(token_id,),
            num_cached_tokens=self.num_cached_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The outputs of one step: `others`, and a token of each of the `streams`; an output may come behind some of them.

    `streams` is the same tuple in the next step where the streams are the same.
    """

    others: list[TokenOutput]
    streams: tuple[Stream, ...] = ()
    ids: bytes = b""  # of the streams' tokens, unsigned, four bytes each, the highest first
    behind: tuple[int, ...] = ()  # of each of the others: how many of the streams come before it

    def __len__(self) -> int:
        return len(self.others) + len(self.streams)

    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the streams."""
        return struct.unpack(f">{len(self.streams)}I", self.ids)

    def parts(self) -> Iterator[tuple[slice, list[TokenOutput]]]:
        """Yield in order: streams and the others that follow them, then the streams with nothing behind them."""
        first = 0
        for output, place in zip(self.others, self.behind, strict=True):
            yield slice(first, place), [output]
            first = place
        yield slice(first, len(self.streams)), []

    def every(self) -> list[TokenOutput]:
        """All outputs, in order."""
        if not self.streams:
            return self.others
        plain = [stream.output(token_id) for stream, token_id in zip(self.streams, self.token_ids(), strict=True)]
        return list(chain(*(chain(plain[some], others) for some, others in self.parts())))

    def behind_others(self, earlier: Outputs) -> Outputs:
        """Return these outputs behind earlier ones that are not sent yet."""
        if not len(earlier):
            return self
        before = earlier.every()
        behind = ((0,) * len(before) + self.behind) if self.streams else ()
        return Outputs(others=before + self.others, streams=self.streams, ids=self.ids, behind=behind)


class StepInColumns(StepOutput):
    """A `StepOutput` whose outputs are made when they are read."""

    __slots__ = ("_made", "columns")

    columns: Outputs
    _made: tuple[TokenOutput, ...] | None

    def __init__(self, columns: Outputs, **others: Any) -> None:
        """`others`: the fields of `StepOutput` but for its outputs."""
        put = object.__setattr__  # as the other fields, these are never changed
        put(self, "columns", columns)
        put(self, "_made", None)
        for name, value in (_DEFAULTS | others).items():
            put(self, name, value)

    @property
    def outputs(self) -> tuple[TokenOutput, ...]:
        if self._made is None:
            made = tuple(self.columns.every())
            object.__setattr__(self, "_made", made)
            return made
        return self._made


_DEFAULTS = {field.name: field.default for field in fields(StepOutput) if field.default is not MISSING}
OTHER_FIELDS = tuple([field.name for field in fields(StepOutput) if field.name != "outputs"])


def step_output(outputs: Outputs, **others: Any) -> StepOutput:
    """The `StepOutput` of one step, in columns where it has some; `others`: its other fields."""
    if not outputs.streams:
        return StepOutput(outputs=tuple(outputs.others), **others)
    return StepInColumns(outputs, **others)
