"""Seconds that a row and a prompt's token take on this machine, learned from its own steps.

Promises: equal steps give equal prices; a single slow step changes none that is known. Must not know: blocks.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_ROW = 1 / 8  # of a step of one row, for each further row: assumed until two sizes of steps are known
_FEWEST = 8  # prompt tokens of a step from which their time can be told from that of its decodes
_NEWEST = 2  # steps of one size


class AppliedStep(NamedTuple):
    """The sizes and the times of a step whose results are applied."""

    prompt_tokens: int = 0
    num_decodes: int = 0
    num_rows: int = 0  # tokens that it computed, the guessed ones among them
    seconds: float = 0.0  # from its plan, or from the end of the step before it, to its results
    predicted: float = 0.0  # seconds; 0: not known, or not predicted


class StepPrices:
    """A step's fixed seconds, which its decodes share, and the seconds of a prompt token beside them.

    A step of n decodes takes a + b n seconds: the line through the shorter of the newest two steps of each power of two
    rows, since disturbances only lengthen a step. What a step with a prompt takes beyond its decodes is its prompt's.
    """

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[float, int]]] = {}  # (seconds, rows) by the bits of the rows
        self._prompts: deque[float] = deque(maxlen=_NEWEST)  # seconds of a prompt token
        self._line: tuple[float, float] | None = None  # (a, b) of the steps so far

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Learn from a step's size and its seconds."""
        if not prompt_tokens and num_decodes:
            newest = self._steps.setdefault(num_decodes.bit_length(), deque(maxlen=_NEWEST))
            newest.append((seconds, num_decodes))
            self._line = None
        elif prompt_tokens >= _FEWEST:
            own = 0.0
            if self._steps:
                fixed, row = self._decode_line()
                own = fixed + row * max(num_decodes, 1)
            self._prompts.append(max(seconds - own, 0.0) / prompt_tokens)

    def seconds_of(self, *, prompt_tokens: int, num_decodes: int) -> float | None:
        """Seconds that an undisturbed step of this size is expected to take; None: not known yet."""
        if not (self._prompts if prompt_tokens else self._steps):
            return None
        fixed, row = self._decode_line() if self._steps else (0.0, 0.0)
        of_prompt = prompt_tokens * min(self._prompts) if prompt_tokens else 0.0
        return fixed + row * max(num_decodes, 1) + of_prompt

    def gain_for_loss(self, num_rows: int) -> float | None:
        """Tokens that a row beside `num_rows` others must gain to be worth one token that is computed again.

        A token gained is worth the part of the step's fixed seconds that another row takes over; `inf` where that is
        less than what a computed token takes; None: not known yet.
        """
        if not self._steps or not self._prompts:
            return None
        gain, loss = self._decode_line()[0] / max(num_rows, 1), min(self._prompts)
        return loss / (gain - loss) if gain > loss else float("inf")

    def _decode_line(self) -> tuple[float, float]:
        if self._line is None:
            self._line = _line([min(newest) for newest in self._steps.values()])
        return self._line


def _line(steps: list[tuple[float, int]]) -> tuple[float, float]:
    """(a, b) of a + b rows by least squares, neither below 0."""
    seconds, rows = [each for each, _ in steps], [each for _, each in steps]
    mean_seconds, mean_rows = sum(seconds) / len(steps), sum(rows) / len(steps)
    spread = sum([(each - mean_rows) ** 2 for each in rows])
    if spread == 0:
        row = _ROW * mean_seconds / (1 + _ROW * mean_rows)
    else:
        row = sum([(x - mean_rows) * (y - mean_seconds) for x, y in zip(rows, seconds, strict=True)]) / spread
    row = min(max(row, 0.0), mean_seconds / mean_rows)
    return mean_seconds - row * mean_rows, row
