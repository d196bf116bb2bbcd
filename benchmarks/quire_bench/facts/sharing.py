"""Facts on shared prefixes: F11, F13, F14.

Promises: prompts are new to the server, so that what is shared was shared here.
"""

from __future__ import annotations

from functools import partial
from statistics import median

from quire_bench.facts.fact import Fact, at_most, equal, near
from quire_bench.facts.live import Live

_CHATS, _PREFIX = 16, 200
_ANSWER = 400  # tokens at most
_REPEATS = 5


def shared_prefix(live: Live) -> list[Fact]:
    """F11, F13: 16 cold chats with a prompt of 200 tokens share its blocks, and the prompt is computed once."""
    size = live.block_size
    prompt = live.prompt(_PREFIX)
    # Long enough that seconds pass, and so that all 16 fit: who is preempted computes its prompt again.
    blocks_each = (int(live.label("quire_cache_config_info", "num_blocks")) - _PREFIX // size) // _CHATS
    answer = max(1, min(_ANSWER, live.max_model_len - _PREFIX, (blocks_each - 2) * size))
    computed = live.gain("quire_engine_computed_tokens_total", kind="prefill")
    with live.watched() as seconds:
        chat = partial(live.complete, prompt, answer, temperature=1)
        live.together([chat] * _CHATS)
        live.until_idle()
    blocks = [second["frame"]["blocks"] for second in seconds if second["frame"]["blocks"]["used"]]
    shared = max((one["shared"] for one in blocks), default=0)
    # The last block is half full: each chat computes what is its own part of it at most.
    least = _PREFIX // size
    return [
        Fact(
            name="F11 shared blocks of 16 chats with one prompt",
            expected=f"{least} full ones, {least + 1} before the first answer is written",
            got=f"{shared}",
            ok=shared in {least, least + 1},
        ),
        at_most("F11 prompt tokens computed for them", _PREFIX + (_CHATS - 1) * (_PREFIX - least * size), computed()),
        at_most("F11 blocks taken for 16 prompts (208 without sharing)", least + 1 + _CHATS, _blocks_of_prompts(live)),
        equal(
            "F13 used blocks that are neither shared nor one sequence's",
            0,
            max((abs(one["used"] - one["shared"] - one["unshared"]) for one in blocks), default=0),
        ),
    ]


def _blocks_of_prompts(live: Live) -> float:
    """Blocks taken for 16 equal prompts of 200 tokens that come at once, with two tokens of output each."""
    prompt = live.prompt(_PREFIX)
    taken = live.gain("quire_kv_blocks_taken_total")
    live.together([partial(live.complete, prompt, 2)] * _CHATS)
    live.until_idle()
    return taken()


def saved_prefill(live: Live) -> list[Fact]:
    """F14: tokens found in the cache, times what a token of a prompt costs, are the first token's gain."""
    long = min(1024, live.max_model_len - 8)
    short = long // 4

    def first_token(prompts: list[list[int]]) -> float:
        """Median seconds, by the server's own clock."""
        found = []
        for prompt in prompts:
            seconds = live.gain("quire_time_to_first_token_seconds_sum")
            live.complete(prompt, 1)
            found.append(seconds())
        return median(found)

    shorts, longs = ([live.prompt(length) for _ in range(_REPEATS)] for length in (short, long))
    cold_short, cold_long = first_token(shorts), first_token(longs)
    slope = (cold_long - cold_short) / (long - short)
    hits = live.gain("quire_prefix_cache_hit_tokens_total")
    warm_long = first_token(longs)
    saved = hits() / _REPEATS * slope
    return [near("F14 seconds saved of the first token", saved, cold_long - warm_long, within=0.2, unit=" s")]
