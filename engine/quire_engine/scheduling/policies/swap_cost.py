"""Whether what a victim has computed is cheaper to copy to the host and back, or to compute again.

Promises: told the same steps, the same answers. Must not know: groups, blocks' contents, clocks.
"""

from __future__ import annotations

_FEWEST = 32  # prompt tokens; the time of a step with fewer says more about its decodes
_WEIGHT = 0.3  # of the newest step in the mean


class SwapCost:
    """Recompute where tokens * seconds of a token < 2 * bytes / bandwidth, else swap.

    What a token costs is learned from steps with prompts in them, what a block costs was measured at the start. Until
    such a step was seen, copying is taken to be cheaper.
    """

    def __init__(self, seconds_per_block: float) -> None:
        self._seconds_per_block = seconds_per_block  # one way
        self._seconds_per_token = 0.0  # unknown

    def prefers_swap(self, *, num_blocks: int, num_tokens: int) -> bool:
        """Whether to copy so many blocks out and in rather than to compute so many tokens again."""
        return self._is_cheaper(2 * num_blocks, num_tokens)

    def prefers_restoring(self, *, num_blocks: int, num_tokens: int) -> bool:
        """Whether to copy blocks in that are on the host already."""
        return self._is_cheaper(num_blocks, num_tokens)

    def learn(self, *, prompt_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if prompt_tokens < _FEWEST:
            return
        rate = seconds / (prompt_tokens + num_decodes)
        known = self._seconds_per_token
        self._seconds_per_token = known + _WEIGHT * (rate - known) if known else rate

    def _is_cheaper(self, copies: int, num_tokens: int) -> bool:
        if self._seconds_per_token == 0:
            return True
        return copies * self._seconds_per_block <= num_tokens * self._seconds_per_token
