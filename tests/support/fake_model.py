"""A model without weights: what follows tokens is a hash of them.

Promises: the same continuations for the same tokens, several of one probability among them. Must not know: slots,
batches, the scheduler.
"""

from __future__ import annotations

from quire_engine.contract.types import GenerationRequest, TokenLogprobs
from support.beam_reference import Found, search

VOCAB_SIZE = 1000


def extend(chain: int, token_id: int) -> int:
    """The hash of the tokens of `chain` and one more; 0 is that of none."""
    return hash((chain, token_id))


def sample(chain: int, choice: int) -> int:
    """What a choice says next."""
    return hash((chain, choice)) % VOCAB_SIZE


def told(token_id: int, chain: int, num_logprobs: int | None) -> TokenLogprobs | None:
    """The log-probabilities that are told with a token."""
    if num_logprobs is None:
        return None
    ids, logprobs = zip(*_likeliest(chain, num_logprobs), strict=True)
    return TokenLogprobs(token_id=token_id, logprob=logprobs[0], rank=1, top_ids=ids, top_logprobs=logprobs)


def expected_beams(wanted: GenerationRequest) -> list[Found]:
    """What beam search must find, computed without any scheduler."""
    assert wanted.beam is not None
    needed = wanted.beam.width + len(wanted.stop.stop_token_ids)

    def likeliest(tokens: tuple[int, ...]) -> list[tuple[int, float]]:
        chain = 0
        for token_id in tokens:
            chain = extend(chain, token_id)
        return _likeliest(chain, needed)

    return search(wanted, likeliest)


def _likeliest(chain: int, count: int) -> list[tuple[int, float]]:
    """Tokens and log-probabilities that follow a chain, the likeliest first."""
    found, logprob = [], -0.25
    for i in range(count):
        found.append(((sample(chain, 0) + 37 * i) % VOCAB_SIZE, logprob))
        logprob -= ((chain >> i % 32) % 4) / 8
    return found
