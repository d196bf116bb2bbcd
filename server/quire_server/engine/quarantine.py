"""What has taken the engine down, or made a step raise, remembered by its fingerprint and refused for a while.

Owns the fingerprints. Promises: bounded in number and in time; nothing of a prompt is kept; a look costs nothing while
nothing is remembered. Must not know: processes, HTTP, clocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import replace
from hashlib import sha256

from quire_engine.types import GenerationRequest

QUARANTINE_SECONDS = 600.0
MOST_FINGERPRINTS = 1024


class Quarantine:
    """Fingerprints of proven culprits; beyond the bound the ones that were not asked for longest are forgotten."""

    def __init__(self, *, seconds: float = QUARANTINE_SECONDS, most: int = MOST_FINGERPRINTS) -> None:
        self._seconds = seconds
        self._most = most
        self._until: OrderedDict[bytes, float] = OrderedDict()  # by fingerprint; the last asked for is the last

    def __len__(self) -> int:
        """Fingerprints that are remembered, those whose time is over included."""
        return len(self._until)

    def add(self, request: GenerationRequest, now: float) -> bytes:
        """Refuse the like of a request from now on; its fingerprint."""
        key = fingerprint(request)
        self._until[key] = now + self._seconds
        self._until.move_to_end(key)
        while len(self._until) > self._most:
            self._until.popitem(last=False)
        return key

    def refusal(self, request: GenerationRequest, now: float) -> float | None:
        """Seconds for which the like of this request is still refused; None: it is not."""
        if not self._until:
            return None
        key = fingerprint(request)
        until = self._until.get(key)
        if until is None:
            return None
        if until <= now:
            del self._until[key]
            return None
        # Asking does not prolong it: whoever asks again and again must not be refused for ever.
        self._until.move_to_end(key)
        return until - now


def fingerprint(request: GenerationRequest) -> bytes:
    """SHA-256 of what a request makes the engine compute: prompt, salt and how tokens are chosen.

    The seed is left out: whoever brings none gets a new one each time, and it only decides which token is drawn.
    Names, times, priorities and how long the answer may be say nothing about what is computed first.
    """
    digest = sha256(array("q", request.prompt_token_ids).tobytes())
    digest.update(repr((request.cache_salt, request.n, request.pooling, request.beam)).encode("utf-8", "surrogatepass"))
    digest.update(repr(replace(request.sampling, seed=0)).encode("utf-8", "surrogatepass"))
    return digest.digest()
