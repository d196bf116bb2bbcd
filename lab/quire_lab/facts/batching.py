"""Facts on batches and blocks: F1, F2, F8, F12.

Promises: exact counts, of requests whose lengths are exact. Where requests that were sent together come apart on a busy
machine, what needs them together is not shown.
"""

from __future__ import annotations

import time
from functools import partial

from quire_lab.facts.fact import Fact, Try, equal, near, tried
from quire_lab.facts.live import Live
from quire_lab.facts.logs import apart, arrivals_of, recorded

LENGTHS = (32, 128, 64, 256)  # the reference's example
_LONGEST_FIRST = sorted(LENGTHS, reverse=True)  # so that all overlap, however late the last is sent
_PROMPT = 8  # tokens of the 32, 128, ...
_SECONDS_WATCHED = 2.5  # a gauge is told once a second
NEAR = 14  # steps within which the four must arrive, in order, for the peak of those that arrive at once


def static_batching(live: Live) -> list[Fact]:
    """F1, F2: static slots for 32, 128, 64 and 256 tokens are 46.875 % full."""
    return tried(partial(_one_batch, live))


def _one_batch(live: Live) -> Try:
    begin = live.last_step()
    useful = live.gain("quire_static_batching_slots_total", use="useful")
    padding = live.gain("quire_static_batching_slots_total", use="padding")
    tokens = live.gain("quire_generation_tokens_total")
    live.together([partial(live.complete, live.prompt(2), length) for length in _LONGEST_FIRST])
    live.until_idle()
    reserved = useful() + padding()
    return Try(
        certain=(equal("F1 tokens generated", 480, tokens()), equal("F1 useful token slots", 480, useful())),
        others=(
            equal("F1 slots of a static batch", 1024, reserved),
            near("F1 static batching's efficiency", 0.46875, useful() / reserved if reserved else 0.0, within=0.0),
            near("F2 padding of a static batch", 0.53125, padding() / reserved if reserved else 0.0, within=0.0),
        ),
        missing=apart(recorded(live, begin), len(LENGTHS)),
    )


def blocks_of_a_length(live: Live) -> list[Fact]:
    """F8: 500 tokens are ceil(500 / B) blocks, and as many more fit as the last block has left, not one more."""
    size = live.block_size
    blocks = -(-500 // size)
    slack = blocks * size - 500
    facts = []
    for more, expected in ((slack, blocks), (slack + 1, blocks + 1)):
        taken = live.gain("quire_kv_blocks_taken_total")
        live.complete(live.prompt(500), more + 1)  # the last token is never computed: it needs no slot
        live.until_idle()
        facts.append(equal(f"F8 blocks of 500 tokens and {more} more", expected, taken()))
    return facts


def block_growth(live: Live) -> list[Fact]:
    """F12: 2 + 8 + 4 + 16 blocks are taken in all, 16 at once at most, and 64 by static slots."""
    return [*tried(partial(_growing, live)), *tried(partial(_static, live))]


def _growing(live: Live) -> Try:
    size, begin = live.block_size, live.last_step()
    own = [-(-(length - 1) // size) for length in LENGTHS]
    # All advance together: when one ends, the others have as many tokens as it had.
    peak = max(sum(-(-(min(length, end) - 1) // size) for length in LENGTHS if length >= end) for end in LENGTHS)
    taken = live.gain("quire_kv_blocks_taken_total")
    with live.watched() as seconds:
        # In this order: the peak is the same when each comes a few steps after the one before.
        live.together([partial(live.complete, live.prompt(_PROMPT), length - _PROMPT) for length in LENGTHS])
        live.until_idle()
    told = recorded(live, begin)
    came = arrivals_of(told, [length - _PROMPT for length in LENGTHS])
    in_order = came == sorted(came) and came[-1] <= NEAR
    late = "" if in_order else f"the requests came after {', '.join(map(str, came))} steps"
    got = max((second["frame"]["blocks"]["peak"] for second in seconds), default=0)
    return Try(
        certain=(equal("F12 blocks taken, sum at completion", sum(own), taken()),),
        others=(equal("F12 blocks used at once, peak", peak, got),),
        missing=apart(told, len(LENGTHS)) or late,
    )


def _static(live: Live) -> Try:
    """Measure the blocks of static slots; a gauge has them at the end of a second, so the requests are repeated."""
    longest = min(live.max_model_len - _PROMPT, 256 - _PROMPT)
    with live.watched() as seconds:
        calls = [partial(live.complete, live.prompt(_PROMPT), min(length, longest)) for length in _LONGEST_FIRST]
        until = time.monotonic() + _SECONDS_WATCHED
        while time.monotonic() < until:
            live.together(calls)
    frames = [second["frame"] for second in seconds]
    got = max((frame["blocks"]["static_longest"] for frame in frames), default=0)
    missing = "" if any(frame["running"] == len(LENGTHS) for frame in frames) else "no second ended with all four"
    expected = len(LENGTHS) * -(-(longest + _PROMPT - 1) // live.block_size)
    return Try(others=(equal("F12 blocks of static slots", expected, got),), missing=missing)
