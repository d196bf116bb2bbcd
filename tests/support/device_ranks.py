"""Ranks on devices as threads of one process, of which one runs at a time: simulators are made for one thread.

Promises: whoever waits for the others lets them run; a rank that fails lets all others fail. Must not know: kernels,
models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import TypeVar

import torch
from torch import Tensor

from quire_kernels.ranks import RankLost

Made = TypeVar("Made")
SECONDS = 300.0


class Turns:
    """What `size` ranks share. Its lock is with the rank that runs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition = Condition()
        self.given: dict[tuple[int, int], Tensor] = {}  # by exchange and rank
        self.is_lost = False
        self.exchanges = 0  # that rank 0 has ended

    def until(self, there: Callable[[], bool]) -> None:
        """Let the others run until this is so. Raises RankLost."""
        if not self.condition.wait_for(lambda: there() or self.is_lost, SECONDS) or self.is_lost:
            raise RankLost("another rank of the test has failed")


class OneOfThem:
    """See `DeviceCollective`."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns, self.rank, self.size = turns, rank, turns.size
        self._count = 0

    def parts(self, own: Tensor) -> Tensor:
        assert own.is_contiguous()
        return torch.stack(self._exchanged(own))

    def share(self, values: Tensor) -> None:
        assert values.is_contiguous()
        values.copy_(self._exchanged(values)[0])

    def _exchanged(self, own: Tensor) -> list[Tensor]:
        turns, number = self._turns, self._count
        self._count += 1
        turns.given[number, self.rank] = own.clone()
        turns.condition.notify_all()
        everybody = [(number, rank) for rank in range(self.size)]
        turns.until(lambda: all(each in turns.given for each in everybody))
        found = [turns.given[each] for each in everybody]
        assert len({(part.shape, part.dtype) for part in found}) == 1, "the ranks exchange different things"
        if self.rank == 0:
            turns.exchanges += 1
        return found


def in_turns(size: int, run: Callable[[OneOfThem], Made]) -> list[Made]:
    """What each rank gives; the first exception where there are some, and not that of whoever waited for it."""
    turns = Turns(size)

    def each(rank: int) -> Made:
        with turns.condition:
            try:
                return run(OneOfThem(turns, rank))
            except BaseException:
                turns.is_lost = True
                turns.condition.notify_all()
                raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(each, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda one: isinstance(one, RankLost)):
            raise error
        return [future.result() for future in futures]


def same(results: Sequence[Sequence[Tensor]], expected: Sequence[Tensor]) -> None:
    for rank, found in enumerate(results):
        assert len(found) == len(expected)
        for at, (wanted, got) in enumerate(zip(expected, found, strict=True)):
            assert torch.equal(wanted, got), f"rank {rank}, result {at}"


_RANKS: dict[int, OneOfThem] = {}


@torch.library.custom_op("quire_tests::parts", mutates_args=())
def parts_op(own: Tensor, key: int) -> Tensor:
    return _RANKS[key].parts(own)


@parts_op.register_fake
def _(own, key):
    return own.new_empty(_RANKS[key].size, *own.shape)


@torch.library.custom_op("quire_tests::share", mutates_args=("values",))
def share_op(values: Tensor, key: int) -> None:
    _RANKS[key].share(values)


@share_op.register_fake
def _(values, key):
    pass


class Launched:
    """See `DeviceCollective`: exchanges as single operations, which a simulated device does when it gets to them."""

    def __init__(self, collective: OneOfThem) -> None:
        self.rank, self.size = collective.rank, collective.size
        self._key = id(self)
        _RANKS[self._key] = collective

    def parts(self, own: Tensor) -> Tensor:
        return parts_op(own, self._key)

    def share(self, values: Tensor) -> None:
        share_op(values, self._key)
