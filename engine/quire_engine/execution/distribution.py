"""The choice of a token from processed logits: a total order of tokens, truncation, the draw and its random numbers.

A row's result is bitwise independent of the other rows of the call: every step is elementwise, a selection, integer
arithmetic, or one softmax of a row that starts on the same alignment whatever its index.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Probabilities become integers in units of 2^-52, whose sums are exact in any order (and below 2^53, so exact in a
# double too). Tokens below that unit are never drawn; one row of float32 probabilities cannot resolve them anyway.
_UNIT = float(1 << 52)
_ALIGNMENT = 64  # columns; CUDA's softmax sums a row in an order that depends on the row's alignment
_PREFIX = 1024  # tokens; nearly every nucleus fits, and selecting them is far cheaper than sorting a vocabulary
_MASK_32 = 0xFFFFFFFF
_MASK_64 = 0xFFFFFFFFFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
SLICE_BYTES = 32 << 20  # of float32 logits that are worked on at once: temporaries take a few times as much


def rows_per_slice(vocab_size: int, slice_bytes: int = SLICE_BYTES) -> int:
    return max(1, slice_bytes // (4 * vocab_size))


def is_finite(logits: Tensor) -> Tensor:
    """[S] bool, by the extremes: both propagate NaN."""
    low, high = torch.aminmax(logits, dim=1)
    return torch.isfinite(low) & torch.isfinite(high)


def padded(logits: Tensor) -> Tensor:
    """A private copy of [S, V] as [S, V'] with V' a multiple of the alignment, filled with -inf."""
    num_rows, vocab_size = logits.shape
    copy = logits.new_full((num_rows, padded_width(vocab_size)), -torch.inf)
    copy[:, :vocab_size] = logits
    return copy


def padded_width(vocab_size: int) -> int:
    """The V' of `padded`."""
    return -(-vocab_size // _ALIGNMENT) * _ALIGNMENT


def order_keys(values: Tensor) -> Tensor:
    """Unique int64 keys [S, V] of float32 values: larger is greater, and of equal values the lower id is greater."""
    bits = (values + 0.0).view(torch.int32)  # + 0.0 makes the two zeros one
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # IEEE 754 bits as integers in the order of the floats
    ids = torch.arange(values.shape[1] - 1, -1, -1, device=values.device)
    return ordered.to(torch.int64) * (1 << 32) + ids


def key_ids(keys: Tensor, vocab_size: int) -> Tensor:
    """The token ids that `order_keys` of `vocab_size` columns put into these keys."""
    return vocab_size - 1 - (keys & 0xFFFFFFFF)


def keep_top_k(values: Tensor, top_k: Sequence[int]) -> Tensor:
    """True for the `top_k[s]` greatest of each row [S, V]; of equal values the lowest ids stay."""
    keys = order_keys(values)
    counts = torch.tensor(top_k, device=values.device)
    greatest = keys.topk(min(max(top_k), values.shape[1]), dim=1).values
    return keys >= greatest.gather(1, counts.unsqueeze(1) - 1)


def keep_top_p(probabilities: Tensor, top_p: Sequence[float]) -> Tensor:
    """True for each row's nucleus [S, V]: the shortest run of most likely tokens that holds `top_p[s]` of the mass.

    Holtzman et al.: "The Curious Case of Neural Text Degeneration", 2019. The most likely token always stays.
    """
    vocab_size = probabilities.shape[1]
    weights = _weights(probabilities)
    share = torch.tensor(top_p, dtype=torch.float64, device=probabilities.device).unsqueeze(1)
    wanted = share * weights.sum(dim=1, keepdim=True)
    keys = order_keys(probabilities)
    # A GPU sorts a vocabulary faster than the host can ask whether the prefix was enough.
    width = min(_PREFIX, vocab_size) if probabilities.device.type == "cpu" else vocab_size
    while True:
        greatest = keys.topk(width, dim=1).values
        mass = weights.gather(1, key_ids(greatest, vocab_size)).cumsum(dim=1)
        if width == vocab_size or bool((mass[:, -1:] >= wanted).all()):
            break
        width = vocab_size
    size = (mass < wanted).sum(dim=1, keepdim=True).clamp_max_(width - 1)  # index of the nucleus' last token
    return keys >= greatest.gather(1, size)


def keep_min_p(probabilities: Tensor, min_p: Sequence[float]) -> Tensor:
    """True for tokens at least `min_p[s]` times as likely as the row's most likely one (Nguyen et al., 2024)."""
    share = torch.tensor(min_p, device=probabilities.device).unsqueeze(1)
    return probabilities >= share * probabilities.amax(dim=1, keepdim=True)


def draw(probabilities: Tensor, uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """One token a row by the inverse of the cumulative distribution in id order, and whether there was any to draw.

    Probabilities [S, V] need not sum to one. The cumulative sum is of integers, hence exact: it cannot depend on how
    a device splits it. Returns ids [S] int64 and possible [S] bool.
    """
    cumulative = _weights(probabilities).cumsum(dim=1)
    total = cumulative[:, -1:]
    target = (torch.tensor(uniforms, dtype=torch.float64, device=total.device).unsqueeze(1) * total).to(torch.int64)
    target = torch.minimum(target, total - 1)  # a product close to the total may round up to it
    ids = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return ids.clamp_max_(probabilities.shape[1] - 1), (total > 0).squeeze(1)


def _weights(probabilities: Tensor) -> Tensor:
    return (probabilities * _UNIT).to(torch.int64)


def uniform(seed: int, choice: int, position: int) -> float:
    """The draw for one token: a double in [0, 1), a multiple of 2^-53.

    A pure function of its arguments, so nothing has to be stored, restored or replayed. The seed (any int, taken modulo
    2^64) is the key. The position is the low half of the counter and the choice the high half, so the n choices of a
    request have disjoint streams.
    """
    seed &= _MASK_64
    counter = (position & _MASK_32, (position >> 32) & _MASK_32, choice & _MASK_32, (choice >> 32) & _MASK_32)
    low, high, _, _ = philox4x32(counter, (seed & _MASK_32, seed >> 32))
    return (((high << 32) | low) >> 11) * 2.0**-53


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
