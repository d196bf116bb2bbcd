"""How much of a long prompt one step computes.

Promises: never more than asked for.
Must not know: the step's budget beyond what it is given, other groups.
"""

from __future__ import annotations


class FixedChunk:
    """Sizes the slices of unfinished prompts, the elder's first claim excepted.

    At most `prefill_chunk` tokens of one sequence in one step, and half of the step where others may wait for long.

    A prompt that would take more than two such steps leaves them the other half, so that short ones behind a long one
    start soon; the last steps of a prompt are not worth sharing: all would end later and none sooner.
    """

    def __init__(self, prefill_chunk: int) -> None:
        self._cap = prefill_chunk

    def size(self, *, pending: int, planned: int, budget: int, others: bool) -> int:
        """Tokens to add to the `planned` ones of this step, at most min(pending, budget); 0 is none.

        `others`: requests behind this one may use what it leaves; it is asked again, without, when they have had it.
        """
        if others and pending > 2 * budget:
            budget = (budget + 1) // 2
        return min(pending, self._cap - planned, budget)
