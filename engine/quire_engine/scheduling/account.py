"""What one tenant has been given.

Service is what was given, each token at its cost; the virtual counter is that over the weight, and never falls.
"""

from __future__ import annotations

from dataclasses import dataclass

PROMPT_COST = 1
OUTPUT_COST = 2


@dataclass(slots=True, eq=False, kw_only=True)
class Account:
    """One tenant's."""

    tenant: str
    weight: float = 1.0
    max_running: int = 0
    virtual: float = 0.0  # service over weight, lifted after idleness
    begun_tokens: int = 0  # of prompts that have entered, not computed yet
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def service(self) -> int:
        """What it has got, each token at its cost."""
        return PROMPT_COST * self.prompt_tokens + OUTPUT_COST * self.output_tokens

    @property
    def promised(self) -> float:
        """The virtual counter with all that has been begun: who enters next goes by this, or all of one would."""
        return self.virtual + PROMPT_COST * self.begun_tokens / self.weight

    def begin(self, num_tokens: int) -> None:
        """A prompt enters, with so many tokens to compute."""
        self.begun_tokens += num_tokens

    def forget(self, num_tokens: int) -> None:
        """So many of those will never be computed."""
        self.begun_tokens -= num_tokens

    def charge_prompt(self, num_tokens: int) -> None:
        """So many tokens of a prompt that it has begun are computed."""
        self.begun_tokens -= num_tokens
        self.prompt_tokens += num_tokens
        self.virtual += PROMPT_COST * num_tokens / self.weight

    def charge_output(self, num_tokens: int) -> None:
        """It got so many tokens."""
        self.output_tokens += num_tokens
        self.virtual += OUTPUT_COST * num_tokens / self.weight

    def update(self, *, weight: float, max_running: int) -> None:
        """The newest request says what the tenant is worth, and how many of its sequences may run."""
        self.weight, self.max_running = weight, max_running

    def lift(self, least: float) -> None:
        """It waits again: the time in which it asked for nothing is no credit."""
        self.virtual = max(self.virtual, least)
