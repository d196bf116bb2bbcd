"""Facts on shared prefixes: F11, F13, F14.

Promises: prompts are new to the server, so that what is shared was shared here. Counts are exact; seconds speak against
a server only where every round does.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from quire_lab.facts.fact import Fact, Try, at_most, equal, not_shown, tried
from quire_lab.facts.live import Live

_CHATS, _PREFIX = 16, 200
_ANSWER = 400  # tokens at most
_ROUNDS = 9  # all to one side by chance: one in 256
_WITHIN = 0.2


def shared_prefix(live: Live) -> list[Fact]:
    """F11, F13: 16 cold chats with a prompt of 200 tokens share its blocks, and the prompt is computed once."""
    return [
        *tried(partial(_chats_of_one_prompt, live)),
        at_most(
            "F11 blocks taken for 16 prompts (208 without sharing)",
            _PREFIX // live.block_size + 1 + _CHATS,
            _blocks_of_prompts(live),
        ),
    ]


def _chats_of_one_prompt(live: Live) -> Try:
    size = live.block_size
    prompt = live.prompt(_PREFIX)
    # Long enough to look often, and so that all 16 fit: who is preempted computes its prompt again.
    blocks_each = (int(live.label("quire_cache_config_info", "num_blocks")) - _PREFIX // size) // _CHATS
    answer = max(1, min(_ANSWER, live.max_model_len - _PREFIX, (blocks_each - 2) * size))
    computed = live.gain("quire_engine_computed_tokens_total", kind="prefill")
    looks: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:
        chats = pool.submit(live.together, [partial(live.complete, prompt, answer, temperature=1)] * _CHATS)
        while not chats.done():
            looks.append(live.debug("kv"))
        chats.result()
    live.until_idle()
    beside = [look for look in looks if len(look["tables"]) > 1]
    shared = max((look["sharing"]["shared"] for look in looks), default=0)
    # The last block is half full: each chat computes what is its own part of it at most.
    least = _PREFIX // size
    wrong = (abs(each["blocks"]["used"] - each["sharing"]["shared"] - each["sharing"]["unshared"]) for each in looks)
    return Try(
        certain=(
            at_most(
                "F11 prompt tokens computed for them", _PREFIX + (_CHATS - 1) * (_PREFIX - least * size), computed()
            ),
            equal("F13 used blocks that are neither shared nor one sequence's", 0, max(wrong, default=0)),
        ),
        others=(
            Fact(
                name="F11 shared blocks of 16 chats with one prompt",
                expected=f"{least} full ones, {least + 1} before the first answer is written",
                got=f"{shared}",
                ok=shared in {least, least + 1},
            ),
        ),
        missing="" if beside else "nobody looked while two of the chats were there",
    )


def _blocks_of_prompts(live: Live) -> float:
    """Blocks taken for 16 equal prompts of 200 tokens that come at once, with two tokens of output each."""
    prompt = live.prompt(_PREFIX)
    taken = live.gain("quire_kv_blocks_taken_total")
    live.together([partial(live.complete, prompt, 2)] * _CHATS)
    live.until_idle()
    return taken()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Seconds to the first token in one round: of a short and a long new prompt, and of the long one once more."""

    cold_short: float
    cold_long: float
    warm_long: float
    hits: float  # tokens that were found in the cache
    more: int  # tokens of the long prompt beyond the short one's

    @property
    def expected(self) -> float:
        """Seconds that the tokens found would have taken."""
        return self.hits * (self.cold_long - self.cold_short) / self.more

    @property
    def got(self) -> float:
        """Seconds that were saved."""
        return self.cold_long - self.warm_long


def saved_prefill(live: Live) -> list[Fact]:
    """F14: tokens found in the cache, times what a token of a prompt costs, are the first token's gain."""
    long = min(1024, live.max_model_len - 8)
    short = long // 4

    def first_token(prompt: list[int]) -> float:
        """Seconds by the server's own clock."""
        seconds = live.gain("quire_time_to_first_token_seconds_sum")
        live.complete(prompt, 1)
        return seconds()

    rounds = []
    for _ in range(_ROUNDS):
        prompt = live.prompt(long)
        cold_short, cold_long = first_token(live.prompt(short)), first_token(prompt)
        hits = live.gain("quire_prefix_cache_hit_tokens_total")
        warm_long = first_token(prompt)
        one = Saving(cold_short=cold_short, cold_long=cold_long, warm_long=warm_long, hits=hits(), more=long - short)
        rounds.append(one)
    found, least = median(one.hits for one in rounds), (long - 1) // live.block_size * live.block_size
    kept = Fact(
        name=f"F14 tokens of {long:,} that the cache had, median",
        expected=f"at least {least:,}",
        got=f"{found:,.0f}",
        ok=found >= least,
    )
    if int(live.label("quire_cache_config_info", "kv_tokens")) < 2 * long and not kept.ok:
        kept = not_shown(kept.name, f"{kept.got}: the pool is too small to keep them beside the next prompt")
    return [kept, seconds_saved(rounds)]


def seconds_saved(rounds: Sequence[Saving]) -> Fact:
    """Whether the median is as expected; where it is not, whether every round is too low, or every one too high."""
    expected, got = median(one.expected for one in rounds), median(one.got for one in rounds)
    name = "F14 seconds saved of the first token"
    if abs(got - expected) <= _WITHIN * abs(expected):
        return Fact(name=name, expected=f"{expected:.4g} s ± {_WITHIN:.0%}", got=f"{got:.4g} s", ok=True)
    low = all(one.got < (1 - _WITHIN) * one.expected for one in rounds)
    high = all(one.got > (1 + _WITHIN) * one.expected for one in rounds)
    if low or high:
        said = f"{got:.4g} s, {'less' if low else 'more'} in all {len(rounds)} rounds"
        return Fact(name=name, expected=f"{expected:.4g} s ± {_WITHIN:.0%}", got=said, ok=False)
    spread = f"{min(one.got for one in rounds):.4g} to {max(one.got for one in rounds):.4g} s"
    return not_shown(name, f"{got:.4g} s for {expected:.4g} s expected, and {spread} in single rounds")
