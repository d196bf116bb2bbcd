"""The attention shapes and the steps of the checks.

Promises: every step stays within the sequences' lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quire_kernels.verify.steps import Slice


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The shape of an attention layer and of the pool it reads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None
    norms: bool = True
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        added = f", window {self.window}" if self.window else ""
        added += f", softcap {self.softcap:g}" if self.softcap else ""
        added += ", sinks" if self.sinks else ""
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, blocks of {self.block_size}{added}"


def batches(lengths: Sequence[int], rows: Sequence[int]) -> Iterator[tuple[str, list[Slice]]]:
    """Named steps over sequences of these lengths: decode, prompts, chunks and mixtures, with `rows` rows each."""
    count, longest = len(lengths), max(range(len(lengths)), key=lambda i: lengths[i])
    for num_rows in rows:
        ends = [(i % count, max(1, lengths[i % count] - i // count)) for i in range(num_rows)]
        yield f"decode, {num_rows} rows", [Slice(sequence, end - 1, 1) for sequence, end in ends]
    for num_rows in (n for n in rows if 1 < n < lengths[longest]):
        yield f"prompt, {num_rows} rows", [Slice(longest, 0, num_rows)]
        start = lengths[longest] - num_rows
        yield f"chunk, {num_rows} rows after {start}", [Slice(longest, start, num_rows)]
    mixed = [
        Slice(s, length - min(length, 1 + 16 * (s % 3)), min(length, 1 + 16 * (s % 3)))
        for s, length in enumerate(lengths)
    ]
    yield f"mixed, {sum(part.rows for part in mixed)} rows", mixed
    whole = [Slice(s, 0, length) for s, length in enumerate(lengths)]
    yield f"prompts, {sum(lengths)} rows", whole
