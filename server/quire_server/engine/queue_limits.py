"""How much of what was accepted may be unfinished.

Must not know: what it is, or who counts it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Bounds on requests that run or wait to run."""

    max_sequences: int  # a request with n choices counts n
    max_prompt_tokens: int | None = None
