"""The account of one tenant, and under fair queueing of each size class of its requests.

Service is the sum of its tokens, each at its cost. The virtual counter is service over weight, and never falls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PROMPT_COST = 1
OUTPUT_COST = 2
SMALL = 256  # tokens of a prompt that are to be computed; each size class ends at eight times the one before it


def size_class(num_tokens: int) -> int:
    """The size class of a request with so many prompt tokens to compute: 0 up to 256, 1 up to 2,048, and so on.

    >>> [size_class(num_tokens) for num_tokens in (1, 256, 257, 2048, 2049, 16384)]
    [0, 0, 1, 1, 2, 2]
    """
    size, largest = 0, SMALL
    while num_tokens > largest:
        size, largest = size + 1, largest * 8
    return size


@dataclass(slots=True, eq=False, kw_only=True)
class Account:
    """The tokens and the virtual counter of one tenant, or of one size class of its requests.

    A size class charges its tenant for all that it is charged.
    """

    tenant: str
    of: Account | None = None  # the tenant's account; None: this is one
    weight: float = 1.0
    max_running: int = 0
    elsewhere: float | None = None  # service by other replicas that is charged here; None: no request has told
    virtual: float = 0.0  # service over weight, raised after idleness
    begun_tokens: int = 0  # prompt tokens of entered requests that are not computed yet
    prompt_tokens: int = 0
    output_tokens: int = 0
    sizes: dict[int, Account] = field(default_factory=dict)  # a tenant's size classes
    last_to_enter: Account | None = None  # the size class of the last request that entered

    @property
    def payer(self) -> Account:
        """The tenant's account."""
        return self.of or self

    @property
    def service(self) -> int:
        """The service so far, each token at its cost."""
        return PROMPT_COST * self.prompt_tokens + OUTPUT_COST * self.output_tokens

    @property
    def promised(self) -> float:
        """The virtual counter with all begun prompts charged: else one tenant's requests would all enter at once."""
        return self.virtual + PROMPT_COST * self.begun_tokens / self.weight

    def of_size(self, size: int) -> Account:
        """The account of one size class of the tenant."""
        account = self.sizes.get(size)
        if account is None:
            account = self.sizes[size] = Account(tenant=self.tenant, of=self)
        return account

    def begin(self, num_tokens: int) -> None:
        """A prompt enters with `num_tokens` tokens to compute."""
        self.begun_tokens += num_tokens
        if self.of is not None:
            self.of.begin(num_tokens)

    def forget(self, num_tokens: int) -> None:
        """Remove tokens of begun prompts that will never be computed."""
        self.begin(-num_tokens)

    def charge_prompt(self, num_tokens: int) -> None:
        """Charge computed tokens of begun prompts."""
        self.begun_tokens -= num_tokens
        self.prompt_tokens += num_tokens
        self.virtual += PROMPT_COST * num_tokens / self.weight
        if self.of is not None:
            self.of.charge_prompt(num_tokens)

    def charge_output(self, num_tokens: int) -> None:
        """Charge sampled output tokens."""
        account: Account | None = self
        while account is not None:  # without a call, since this is done for each token
            account.output_tokens += num_tokens
            account.virtual += OUTPUT_COST * num_tokens / account.weight
            account = account.of

    def charge_outputs(self, times: int) -> None:
        """`charge_output(1)`, so many times: the counter is a sum of the same numbers, in the same order."""
        account: Account | None = self
        while account is not None:
            account.output_tokens += times
            virtual, cost = account.virtual, OUTPUT_COST / account.weight
            for _ in range(times):
                virtual += cost
            account.virtual = virtual
            account = account.of

    def update(self, *, weight: float, max_running: int, elsewhere: float) -> None:
        """Take weight and quota from the tenant's newest request, and charge what other replicas gave since the last.

        Their service before the first such request is not charged, as idle time gives no credit.
        """
        self.weight, self.max_running = weight, max_running
        if self.elsewhere is not None and elsewhere > self.elsewhere:
            self.virtual += (elsewhere - self.elsewhere) / weight
        self.elsewhere = max(self.elsewhere or 0.0, elsewhere)  # fronts may know different sums: none is charged twice

    def lift(self, least: float) -> None:
        """The account's requests wait again: idle time gives no credit."""
        self.virtual = max(self.virtual, least)

    def goes_before(self, other: Account) -> bool:
        """Whether its next request enters before the other's: tenants compete first, then sizes of one tenant."""
        if self.payer is not other.payer:
            return self.payer.promised <= other.payer.promised
        return self is not other and self.promised <= other.promised
