"""Log-probabilities of many tokens as JSON in pieces, in the shapes of `LogprobFormat`.

Promises: the pieces joined are the JSON of what the format makes of all tokens at once; each is of a few tokens.
Must not know: how they were computed, replies around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from quire_engine.types import TokenLogprobs
from quire_server.http.large_json import IDS_AT_ONCE, Pieces, encode, pieces_of_list, pieces_of_object
from quire_server.text.logprobs import LogprobFormat, chosen

TOKENS_AT_ONCE = 64  # with 20 alternatives each about 2 ms


def prompt_pieces(names: LogprobFormat, positions: Sequence[TokenLogprobs | None], num_top: int) -> Pieces:
    """As `LogprobFormat.prompt`."""
    return Pieces(pieces_of_list(positions, TOKENS_AT_ONCE, lambda some, _: names.prompt(some, num_top)))


def chat_pieces(names: LogprobFormat, positions: Sequence[TokenLogprobs], num_top: int) -> Pieces:
    """As `LogprobFormat.chat`."""
    content = pieces_of_list(positions, TOKENS_AT_ONCE, lambda some, _: names.chat(some, num_top)["content"])
    return Pieces(pieces_of_object({"content": Pieces(content), "refusal": None}))


def completion_pieces(
    names: LogprobFormat,
    positions: Sequence[TokenLogprobs | None],
    first_ids: Sequence[int],
    offsets: Iterator[int],
    num_top: int,
) -> Pieces:
    """As `LogprobFormat.completion`."""
    columns = {
        "tokens": pieces_of_list(
            positions, TOKENS_AT_ONCE, lambda some, at: names.names(some, () if at else first_ids)
        ),
        "token_logprobs": pieces_of_list(positions, IDS_AT_ONCE, lambda some, _: chosen(some)),
        "top_logprobs": pieces_of_list(positions, TOKENS_AT_ONCE, lambda some, _: names.tops(some, num_top)),
        "text_offset": _numbers(offsets),
    }
    return Pieces(pieces_of_object({name: Pieces(column) for name, column in columns.items()}))


def _numbers(numbers: Iterator[int]) -> Iterator[bytes]:
    """A list, computed as it is encoded."""
    start = b"["
    while some := list(islice(numbers, TOKENS_AT_ONCE)):
        yield start + encode(some)[1:-1]
        start = b","
    yield b"]" if start == b"," else b"[]"
