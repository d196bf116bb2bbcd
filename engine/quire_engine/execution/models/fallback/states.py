"""Recurrent layers in mixed steps: one state for each sequence, and one row at a time.

A recurrent module sees the rows of one sequence, each alone and in order. So its result depends neither on the other
sequences of a step nor on how a prompt was cut, which the chunked forms of these modules would not give.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

COPIES = 2  # of a sequence's state, at most
_CACHES = ("cache_params", "past_key_values", "past_key_value", "cache")


def cache_parameter(module: nn.Module) -> str | None:
    """The name by which a module's forward takes a cache; None: it takes none."""
    names = inspect.signature(type(module).forward).parameters
    return next((name for name in _CACHES if name in names), None)


class SequenceState(DynamicCache):
    """The states of one sequence in all layers. Keys and values pass through: the paged pool has them."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.position = 0  # tokens that it has taken in

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in _tensors(vars(layer)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


class States:
    """The states of the sequences that run, by their ids; the modules of a model that use them are wrapped."""

    def __init__(self, model: Any, mixers: Sequence[str], most: int) -> None:
        """`most`: sequences that run at once."""
        self._config, self._most = model.config, most
        self._of: OrderedDict[int, SequenceState] = OrderedDict()  # the least recently computed first
        self._before: dict[int, SequenceState] = {}  # the same before the present step
        self._rows: list[tuple[SequenceState, int]] = []  # of the present step
        for name in mixers:
            self._wrap(model.get_submodule(name))

    def __len__(self) -> int:
        return len(self._of)

    def begin(self, ids: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """A step computes `counts` rows of each sequence from position `starts` on.

        A step that fails may be computed again, whole or in parts: the states before it are kept until the next one.
        Raises ValueError for a sequence whose state is not there: it must begin anew.
        """
        now = [self._at(sequence, start) for sequence, start in zip(ids, starts, strict=True)]
        for sequence, state in zip(ids, now, strict=True):
            if state.position:
                self._before[sequence] = copy.deepcopy(state)
            state.position = -1  # until the step is computed
            self._of[sequence] = state
            self._of.move_to_end(sequence)
        self._rows = list(zip(now, counts, strict=True))

    def _at(self, sequence: int, position: int) -> SequenceState:
        """The state behind the sequence's first `position` tokens."""
        if position == 0:
            return SequenceState(self._config)
        held = [each for each in (self._of.get(sequence), self._before.get(sequence)) if each is not None]
        for state in held:
            if state.position == position:
                return state
        raise ValueError(
            f"position {position} needs the recurrent state before it; there are states of"
            f" {', '.join(str(state.position) for state in held) or 'no'} tokens"
        )

    def end(self, ids: Sequence[int], ends: Sequence[int], forks: Sequence[Sequence[int]]) -> None:
        """The step is computed: the states are those of position `ends`, also of the sequences forked from them."""
        for sequence, end, children in zip(ids, ends, forks, strict=True):
            self._of[sequence].position = end
            for child in children:
                self._of[child] = copy.deepcopy(self._of[sequence])
        while len(self._of) > 2 * self._most:  # what was never given back: a backstop
            self._before.pop(self._of.popitem(last=False)[0], None)

    def forget(self, ids: Sequence[int]) -> None:
        """Forget the states of sequences that ended or were preempted."""
        for sequence in ids:
            self._of.pop(sequence, None)
            self._before.pop(sequence, None)

    def _wrap(self, module: nn.Module) -> None:
        original, cache = module.forward, cache_parameter(module)
        names = list(inspect.signature(original).parameters)
        states = self

        def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            hidden = given.pop(names[0])  # [1, T, H]; rows behind those of the step are padding
            given[cache or ""] = None
            out = torch.zeros_like(hidden)
            rest: tuple[Any, ...] | None = None
            at = 0
            for state, count in states._rows:
                given[cache or ""] = state
                for row in range(at, at + count):
                    found = original(**{names[0]: hidden[:, row : row + 1], **given})
                    if isinstance(found, tuple):
                        found, rest = found[0], found[1:]
                    out[:, row : row + 1] = found
                at += count
            return out if rest is None else (out, *rest)

        module.forward = MethodType(forward, module)
