"""The account of one tenant.

Service is the sum of its tokens, each at its cost. The virtual counter is service over weight, and never falls.
"""

from __future__ import annotations

from dataclasses import dataclass

PROMPT_COST = 1
OUTPUT_COST = 2


@dataclass(slots=True, eq=False, kw_only=True)
class Account:
    """The tokens and the virtual counter of one tenant."""

    tenant: str
    weight: float = 1.0
    max_running: int = 0
    virtual: float = 0.0  # service over weight, raised after idleness
    begun_tokens: int = 0  # prompt tokens of entered requests that are not computed yet
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def service(self) -> int:
        """The service so far, each token at its cost."""
        return PROMPT_COST * self.prompt_tokens + OUTPUT_COST * self.output_tokens

    @property
    def promised(self) -> float:
        """The virtual counter with all begun prompts charged: else one tenant's requests would all enter at once."""
        return self.virtual + PROMPT_COST * self.begun_tokens / self.weight

    def begin(self, num_tokens: int) -> None:
        """A prompt enters with `num_tokens` tokens to compute."""
        self.begun_tokens += num_tokens

    def forget(self, num_tokens: int) -> None:
        """Remove tokens of begun prompts that will never be computed."""
        self.begun_tokens -= num_tokens

    def charge_prompt(self, num_tokens: int) -> None:
        """Charge computed tokens of begun prompts."""
        self.begun_tokens -= num_tokens
        self.prompt_tokens += num_tokens
        self.virtual += PROMPT_COST * num_tokens / self.weight

    def charge_output(self, num_tokens: int) -> None:
        """Charge sampled output tokens."""
        self.output_tokens += num_tokens
        self.virtual += OUTPUT_COST * num_tokens / self.weight

    def update(self, *, weight: float, max_running: int) -> None:
        """Take weight and quota from the tenant's newest request."""
        self.weight, self.max_running = weight, max_running

    def lift(self, least: float) -> None:
        """The tenant waits again: idle time gives no credit."""
        self.virtual = max(self.virtual, least)
