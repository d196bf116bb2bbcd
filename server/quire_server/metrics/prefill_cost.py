"""The measured cost of a prompt token on this machine.

Promises: the seconds that one more token adds to a step, without the fixed cost of a step. Must not know: requests.
"""

from __future__ import annotations

_KEPT = 0.98  # factor on older measurements per step: about the last fifty count
_MOSTLY = 4  # fewest prompt tokens per decode in a step that is measured


class PrefillCost:
    """The slope of a line through the last steps that computed prompts: seconds over tokens."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """Take in a step's sizes and the model's seconds; steps with mostly decodes are ignored."""
        if prompt_tokens == 0 or prompt_tokens < _MOSTLY * num_decodes:
            return
        tokens = prompt_tokens + num_decodes
        self._n = self._n * _KEPT + 1
        self._x = self._x * _KEPT + tokens
        self._y = self._y * _KEPT + seconds
        self._xx = self._xx * _KEPT + tokens * tokens
        self._xy = self._xy * _KEPT + tokens * seconds

    @property
    def seconds_per_token(self) -> float:
        """0 before the first prompt. If all steps have one size, their mean: an upper bound of the slope."""
        if self._n == 0:
            return 0.0
        mean = self._y / self._x
        spread = self._xx - self._x * self._x / self._n
        if spread < 0.01 * self._xx:
            return mean
        slope = (self._xy - self._x * self._y / self._n) / spread
        return slope if 0 < slope < mean else mean
