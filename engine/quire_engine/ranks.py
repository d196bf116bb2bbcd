"""How the heads of a model are divided among the ranks that compute it together.

Promises: every head is computed by some rank, whole; the keys and values that it sees are in that rank's pool. Must not
know: torch, processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.kv_groups import KVHeads
from quire_engine.machine import usable_cores

LENGTH_BYTES = 8  # of a message between ranks, before it


class Rank(NamedTuple):
    """One of `size` processes that compute one model."""

    number: int = 0
    size: int = 1

    def heads(self, count: int) -> slice:
        """The rank's share of `count` heads. Where there are fewer heads than ranks, several ranks have the same one.

        >>> Rank(1, 2).heads(8), Rank(3, 4).heads(2)
        (slice(4, 8, None), slice(1, 2, None))
        """
        first = count * self.number // self.size
        return slice(first, first + max(1, count // self.size))


ALONE = Rank()


def heads_of_rank(heads: Sequence[KVHeads], size: int) -> tuple[KVHeads, ...]:
    """Return for each layer the heads of keys that one rank holds."""
    return tuple([each._replace(number=max(1, each.number // size)) for each in heads])


def dividing(num_heads: int, heads: Sequence[KVHeads], most: int, *, normed_rows: bool = False) -> list[int]:
    """The numbers of ranks, up to `most`, among which the heads can be divided.

    `normed_rows`: all heads of a row are normed together, for which a rank needs more than one.

    >>> dividing(16, [KVHeads(8, 128)], 64)
    [1, 2, 4, 8, 16]
    >>> dividing(6, [KVHeads(2, 64)], 64)
    [1, 2, 6]
    """
    found = []
    for size in range(1, min(most, num_heads) + 1):
        whole = all(each.number % size == 0 or size % each.number == 0 for each in heads)
        if num_heads % size == 0 and whole and not (normed_rows and size > 1 and num_heads == size):
            found.append(size)
    return found


def num_exchanges(num_layers: int) -> int:
    """Exchanges of columns in a decode step: four a layer, and one for the next token.

    >>> num_exchanges(28)
    113
    """
    return 4 * num_layers + 1


def with_threads(config: EngineConfig) -> EngineConfig:
    """The configuration with threads that the ranks share out; alone, as it is.

    Raises ConfigError where a rank would have none: one that waits for its core makes all others wait.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return config
    threads = config.num_threads or usable_cores()
    if threads < size:
        what = f"num_threads={config.num_threads}" if config.num_threads else f"{threads} usable cores"
        raise ConfigError(
            f"tensor_parallel_size={size}: with {what} not every rank has one; set tensor_parallel_size to at most"
            f" {threads}, or num_threads to at least {size}"
        )
    return replace(config, num_threads=threads)
