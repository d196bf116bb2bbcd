"""The counter-based random generator behind every draw: Philox4x32-10.

Promises: a draw is a pure function of (seed, choice, position), so nothing has to be stored, restored or replayed.
Must not know: torch, requests, distributions.
"""

from __future__ import annotations

_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words from a 128-bit counter and a 64-bit key, both little word first.

    Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, the Philox4x32-10 variant.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK_32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK_32,
        )
        k0 = (k0 + _WEYL_0) & _MASK_32
        k1 = (k1 + _WEYL_1) & _MASK_32
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """The draw for one token: a double in [0, 1), a multiple of 2^-53.

    The seed (any int, taken modulo 2^64) is the key. The position is the low half of the counter and the choice
    the high half, so the n choices of a request have disjoint streams.
    """
    seed &= _MASK_64
    counter = (position & _MASK_32, (position >> 32) & _MASK_32, choice & _MASK_32, (choice >> 32) & _MASK_32)
    low, high, _, _ = philox4x32(counter, (seed & _MASK_32, seed >> 32))
    return (((high << 32) | low) >> 11) * 2.0**-53
