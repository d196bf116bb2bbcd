"""The limits that the scheduler keeps: `SchedulerLimits` from the operator, and `SchedulerConfig` with the pool.

Owns their defaults, their checks and the arithmetic on them. Units are tokens, blocks, steps and seconds, never bytes.
Must not know: torch, flags.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from quire_engine.contract.errors import ConfigError
from quire_engine.contract.kv_groups import KVGroup, Window, kv_groups, most_blocks

PolicyName = Literal["fcfs", "priority", "wfq", "lpm", "dlpm"]
AdmissionName = Literal["expected", "prompt"]
VictimName = Literal["youngest", "longest-running", "lowest-class", "least-lost"]

_MAY_BE_0 = {"least": 0}  # the other numbers are 1 or more


def first_claim(max_num_batched_tokens: int, max_num_seqs: int, prefill_chunk: int) -> int:
    """A server's `min_chunk`: a thirty-second of a step's tokens, as far as decodes leave them, and 16 at least.

    Never more than a chunk.
    """
    share = min(max_num_batched_tokens // 32, max_num_batched_tokens - max_num_seqs)
    return min(max(16, share), prefill_chunk)


SHARE_WINDOW_STEPS = 128  # about as many steps make up the window in which shares of classes are kept
_SHARES_FORM = "expected interactive=SHARE,batch=SHARE, such as interactive=0.7,batch=0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastShares:
    """The least share of the useful tokens that each service class gets while it has more to compute."""

    interactive: float = 0.0
    batch: float = 0.1

    def __str__(self) -> str:
        return f"interactive={self.interactive:.12g},batch={self.batch:.12g}"

    @classmethod
    def parse(cls, value: object) -> Self:
        """The shares from a text such as interactive=0.7,batch=0.1, or a mapping; a class left out keeps its default.

        Raises ConfigError where it has another form. `problem` judges the numbers.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            pairs = [part.partition("=")[::2] for part in value.split(",")]
            given = {name.strip(): text.strip() for name, text in pairs}
            is_clear = len(given) == len(pairs)
        else:
            given, is_clear = (dict(value), True) if isinstance(value, Mapping) else ({}, False)
        if not is_clear or not given or not given.keys() <= {one.name for one in fields(cls)}:
            raise ConfigError(_SHARES_FORM)
        try:
            return cls(**{name: float(share) for name, share in given.items()})
        except (TypeError, ValueError):
            raise ConfigError(_SHARES_FORM) from None

    @property
    def problem(self) -> str | None:
        """The rule that the shares break, or None."""
        for one in fields(self):
            if not 0 <= getattr(self, one.name) <= 1:
                return f"the share {one.name}={getattr(self, one.name):g} must be 0 to 1"
        if self.batch > 0.5:
            return f"the share batch={self.batch:g} must be at most 0.5: interactive requests go first"
        if self.interactive + self.batch > 1 + 1e-9:
            return f"the shares add up to {self.interactive + self.batch:g}, must be at most 1 together"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """One field for each limit; those that are settings have the name of their flag. Defaults stand here alone."""

    block_size: int = 16  # tokens per KV block
    enable_prefix_caching: bool = True
    max_num_seqs: int = 64  # sequences computed in one step
    max_num_batched_tokens: int = 512  # tokens computed in one step
    prefill_chunk: int = 512  # most tokens of one sequence in one step
    itl_target: float = field(default=0.1, metadata=_MAY_BE_0)  # target seconds of a step with decodes; 0: none
    max_num_partial_prefills: int = 2  # groups that may be in the middle of their prompt at once
    min_chunk: int = 16  # the elder's first claim on the step's tokens
    max_bypasses: int = field(default=8, metadata=_MAY_BE_0)  # times a blocked queue head may be overtaken
    elder_age_steps: int = field(default=64, metadata=_MAY_BE_0)  # a group older than this plus its own work is overdue
    scheduling_policy: PolicyName = "wfq"
    step_log: int = field(default=4096, metadata=_MAY_BE_0)  # steps remembered with their reasons; 0: none
    preemption_victim: VictimName = "least-lost"
    admission: AdmissionName = "expected"  # the growth that counts when a group enters
    class_share: LeastShares = field(default_factory=LeastShares)
    max_loras: int = 1  # adapters of the sequences that run at once
    max_consecutive_chunks: int = field(default=2, metadata=_MAY_BE_0)  # of one prompt while others wait; 0: any

    @property
    def max_choices(self) -> int:
        """The most choices of one request: all run at once, and the elder's decodes are a part of its first claim."""
        return min(self.max_num_seqs, self.min_chunk)

    def check(self) -> None:
        """Raise ConfigError, naming the setting and a value that works."""
        for name in LIMIT_NAMES:
            wrong = out_of_range(name, getattr(self, name))
            if wrong is not None:
                raise ConfigError(f"{name} is {getattr(self, name)}, {wrong}")
        needed, left = self.max_num_seqs + self.min_chunk, self.max_num_batched_tokens - self.min_chunk
        if needed > self.max_num_batched_tokens:
            fewer = f", or max_num_seqs to {left} or less" if left > 0 else ""
            raise ConfigError(
                f"max_num_seqs ({self.max_num_seqs}) + {self.min_chunk} tokens of the oldest request must fit in"
                f" max_num_batched_tokens ({self.max_num_batched_tokens}): all of them advance in each step;"
                f" set max_num_batched_tokens to {needed} or more{fewer}"
            )
        if self.class_share.problem is not None:
            raise ConfigError(f"class_share is {self.class_share}: {self.class_share.problem}")
        if self.min_chunk > self.prefill_chunk:
            raise ConfigError(
                f"prefill_chunk ({self.prefill_chunk}) is smaller than min_chunk ({self.min_chunk}), the oldest"
                f" request's claim on each step; set prefill_chunk to {self.min_chunk} or more"
            )

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group of layers that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def footprint(self, *, num_prompt: int, max_new_tokens: int, n: int) -> int:
        """Blocks of one group that a request holds at most: its prompt's full blocks once, the rest once per choice.

        The last token of a choice is never computed, so it needs no slot.
        """
        if max_new_tokens <= 1:
            return self.num_blocks_for(num_prompt)
        full, partial = divmod(num_prompt, self.block_size)
        return full + n * self.num_blocks_for(partial + max_new_tokens - 1)

    def work(self, *, num_prompt: int, max_new_tokens: int, n: int) -> int:
        """Steps that a request needs at most once it is the elder, a full recomputation included."""
        return -(-(num_prompt + n * max_new_tokens) // self.min_chunk) + max_new_tokens

    def wait_bound(self, work: int, earlier_work: int) -> int:
        """Steps from submission to the end at most; `earlier_work` is the sum over the groups live at submission.

        `scheduling.policies.ElderRule` explains why it holds.
        """
        return self.elder_age_steps + 3 * work + earlier_work

    def shortfall(self, share: float, num_steps: int = SHARE_WINDOW_STEPS) -> int:
        """Tokens that a class may lack of its share of `num_steps` steps in which it always has more to compute.

        `scheduling.shares.ClassShares` says of which steps it holds, and why.
        """
        return math.ceil((1 + num_steps / SHARE_WINDOW_STEPS) * share * self.max_num_batched_tokens)


def scheduler_limits(plain: Mapping[str, Any]) -> SchedulerLimits:
    """The limits from the JSON form of `dataclasses.asdict`. Raises ConfigError, and TypeError for an unknown name."""
    shares = {"class_share": LeastShares.parse(plain["class_share"])} if "class_share" in plain else {}
    return SchedulerLimits(**{**plain, **shares})


LIMIT_NAMES = tuple(limit.name for limit in fields(SchedulerLimits))
_LEAST = {limit.name: limit.metadata.get("least", 1) for limit in fields(SchedulerLimits)}


def out_of_range(name: str, value: object) -> str | None:
    """The rule that a limit's value breaks, or None; rules between limits are in `SchedulerLimits.check`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    least = _LEAST[name]
    return None if least <= value < math.inf else f"must be at least {least}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits, with the resolved size of the pool."""

    num_blocks: int
    max_model_len: int = 2048
    plans_ahead: bool = False  # a step is planned before the results of the one before it are known
    num_host_blocks: int = 0  # blocks of host memory, for swapped sequences and evicted prefixes
    swap_seconds: float = 0.0  # duration of one block's copy, to the host or from it
    has_states: bool = False  # the model keeps more of a sequence than its blocks, which no other sequence can share
    speculates: bool = False  # steps may compute guessed tokens
    tells_prefixes: bool = False  # steps tell a router which prompt blocks are cached
    tells_blocks: bool = False  # steps tell which full blocks are cached, with their tokens
    bidirectional: bool = False  # prompts are computed whole
    why_no_text: str = ""  # the reason why the model makes vectors alone; empty: it writes texts
    windows: tuple[Window, ...] = (None,)  # of each group of layers in the pool, the widest first
    limits: SchedulerLimits = field(default_factory=SchedulerLimits)

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds; where windows let go of blocks, in sequences of the full length."""
        if self.windows == (None,):
            return self.num_blocks * self.limits.block_size
        return self.num_blocks * self.max_model_len // self.num_blocks_for(self.max_model_len)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the pool holds, within the context length."""
        return bisect_right(range(1, self.max_model_len + 1), self.num_blocks, key=self.num_blocks_for)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The groups of layers."""
        return kv_groups(self.windows, self.limits.max_num_batched_tokens, plans_ahead=self.plans_ahead)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at most on its way to `num_tokens` tokens."""
        return most_blocks(self.kv_groups, num_tokens, self.limits.block_size)

    def footprint(self, *, num_prompt: int, max_new_tokens: int, n: int) -> int:
        """Blocks that a request holds at most, in all groups."""
        whole = self.limits.footprint(num_prompt=num_prompt, max_new_tokens=max_new_tokens, n=n)
        if self.windows == (None,):
            return whole
        tokens, size = num_prompt + max(max_new_tokens - 1, 0), self.limits.block_size
        choices = n if max_new_tokens > 1 else 1
        return sum(min(whole, choices * group.most_blocks(tokens, size)) for group in self.kv_groups)

    def work(self, *, num_prompt: int, max_new_tokens: int, n: int) -> int:
        """`SchedulerLimits.work`, plus one step with `plans_ahead`, where a request's end is seen one step later."""
        return self.limits.work(num_prompt=num_prompt, max_new_tokens=max_new_tokens, n=n) + int(self.plans_ahead)

    def check(self) -> None:
        """Raise ConfigError, naming the setting and a value that works."""
        for name, value in (("num_blocks", self.num_blocks), ("max_model_len", self.max_model_len)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be at least 1")
        if self.num_host_blocks < 0:
            raise ConfigError(f"num_host_blocks is {self.num_host_blocks}, must be at least 0")
        if self.num_host_blocks and self.windows != (None,):
            raise ConfigError("num_host_blocks is not 0, but windows let go of blocks that a swap would need")
        self.limits.check()

    def largest_max_tokens(self, *, num_prompt: int, n: int) -> int:
        """The largest max_new_tokens that fits such a request; -1 if not even 0 does."""
        if num_prompt > self.max_model_len:
            return -1
        lengths = range(self.max_model_len - num_prompt + 1)
        fitting = bisect_right(
            lengths, self.num_blocks, key=lambda most: self.footprint(num_prompt=num_prompt, max_new_tokens=most, n=n)
        )
        return fitting - 1
