"""How many prompt tokens may share a step with running decodes.

Promises: a stream that runs waits about as long as the target for its next token, however long the prompts beside it.
Must not know: groups, blocks, clocks: it is told what steps took.
"""

from __future__ import annotations

import sys

FEWEST = 64  # prompt tokens; a smaller product leaves part of the machine unused
_WEIGHT = 0.3  # of the newest step in the mean


class ItlTarget:
    """Bounds the inter-token latency (ITL) of running decodes by the size of steps.

    As many tokens as would have taken `seconds` at the rate of the last steps with prompts in them; 0 is no bound.

    Chunks beside decodes are those of Sarathi-Serve (Agrawal et al., OSDI 2024); its token budget is found here by
    measuring. A step takes a + b n seconds for n tokens, so asking for target * n / (a + b n) tokens each time leads to
    the n that takes the target. Prompts go on by `fewest` tokens even where that takes longer.
    """

    def __init__(self, seconds: float, fewest: int = FEWEST) -> None:
        self._target = seconds
        self._fewest = fewest
        self._seconds_per_token = 0.0  # unknown

    def prompt_tokens(self, num_decodes: int) -> int:
        """Most prompt tokens of a step in which so many running sequences get their next token."""
        if num_decodes == 0 or self._target == 0 or self._seconds_per_token == 0:
            return sys.maxsize
        return max(int(self._target / self._seconds_per_token) - num_decodes, self._fewest)

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if prompt_tokens * 2 < self._fewest:
            return  # its time says more about the decodes
        rate = seconds / (prompt_tokens + num_decodes)
        known = self._seconds_per_token
        self._seconds_per_token = known + _WEIGHT * (rate - known) if known else rate
