"""The decision that another replica computes a prompt: what a front decides by, and a fleet on paper too.

Must not know: sockets, clocks.
"""

from __future__ import annotations

CHUNK_FOR_OTHERS = 64  # tokens that are computed, and passed on, at a time where prompts are computed for others
FEWEST_CHUNKS = 10  # of a prompt at least: the first one has to come within LATE_SHARE of the time that all take
SLOWER = 1.2  # factor on the predicted time of the first token, up to which another replica computes the prompt
LITTLE = 0.05  # seconds that it may be later whatever the factor
# A request that waits for blocks may be later by this share of the time that computing takes, and by these seconds.
LATE_SHARE, LATE_SECONDS = 0.15, 0.005


def is_worth_passing_on(*, missing: int, chunk: int, here: float, there: float) -> bool:
    """Whether a prompt of `missing` uncached tokens is computed elsewhere, in chunks of so many tokens.

    `here`, `there`: the predicted seconds to its first token.
    """
    return missing >= FEWEST_CHUNKS * chunk and there <= SLOWER * here + LITTLE


def latest_arrival(own_seconds: float, come: float, queue_seconds: float = 0.0) -> float:
    """How long a request waits for blocks of which this share has come: about as long as computing those takes.

    `own_seconds`: of computing all of them; `queue_seconds`: that it would have to wait before that.
    """
    return queue_seconds + own_seconds * come + LATE_SHARE * (queue_seconds + own_seconds) + LATE_SECONDS
