"""Admission by growth: how long outputs are expected to be, and the blocks that running groups will hold at most.

A group enters if the pool is expected to hold it and all running groups until their ends. Expectations may be wrong:
then a group is preempted, and a margin grows for a while.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Sequence as Values
from itertools import chain
from typing import Protocol

from quire_engine.scheduling.kv_allocator import KVAllocator
from quire_engine.scheduling.sequence import Group, Sequence
from quire_engine.scheduling.step_prices import StepPrices


def has_room(group: Group, *, need: int, available: int) -> bool:
    """Whether a group's known tokens have room now.

    `need`: blocks for all of them, without the cached prefix; `available`: blocks that can be taken. A preempted group
    needs one block more. Without that block it would take the pool's last one, lose it to the next decode that grows,
    and be computed again for nothing.
    """
    return need + (1 if group.state == "preempted" else 0) <= available


class CapacityPolicy(Protocol):
    """Whether the running groups' growth leaves room for one more, whose known tokens have room now.

    Does not apply to the elder, whose blocks are made available.
    """

    def will_fit(
        self, group: Group, *, need: int, kv: KVAllocator, running: Values[Group], step: int, is_shared: bool = False
    ) -> bool:
        """`need`: the blocks that the group takes at once, of those available; `is_shared`: by several tenants."""
        ...

    def note_end(self, sequence: Sequence) -> None:
        """A choice has ended by itself or at its limit, with all its tokens."""

    def note_preemption(self, step: int) -> None:
        """Blocks were short, so that a group was preempted in this step."""


class ByPrompt:
    """The prompt alone counts, and a full pool preempts. It computes many tokens twice where outputs are long."""

    def will_fit(
        self,
        group: Group,  # noqa: ARG002
        *,
        need: int,  # noqa: ARG002
        kv: KVAllocator,  # noqa: ARG002
        running: Values[Group],  # noqa: ARG002
        step: int,  # noqa: ARG002
        is_shared: bool = False,  # noqa: ARG002
    ) -> bool:
        return True

    def note_end(self, sequence: Sequence) -> None:
        pass

    def note_preemption(self, step: int) -> None:
        pass


class ByExpectedPeak:
    """The expected peak of held blocks stays within the pool, until the last group ends or the entry has paid.

    It has paid when what the group gains is worth more than the tokens that it would lose, at the prices of
    `StepPrices`. Where a step's fixed part is long, an empty seat is dear and the group may enter for a while, though
    it will be preempted; where each token takes its own time, it enters if it is expected to reach its end. Where
    several tenants wait or run, what one of them computes again lengthens the steps of all, so the gain is to be
    `WORTH` tokens at least for each one that may be lost.

    "Past-Future" scheduling of Gong et al., ASPLOS 2025. Blocks held at the end of each output are those of all groups
    that still run then, so groups that are far apart in their outputs share a pool that could not hold them in step.
    The paper draws expected lengths at random from past ones; here they are a quantile of the past lengths that exceed
    what a choice has already, so that equal calls give equal plans.

    A window stops growing at its own length, so all blocks that it will need count from the beginning. Blocks that
    several tables hold are counted by the pool's present share of them, and blocks to come by the share that was merged
    with equal ones lately.
    """

    def __init__(self, prices: StepPrices) -> None:
        self._lengths = OutputLengths()
        self._margin = Margin()
        self._prices = prices

    def will_fit(
        self, group: Group, *, need: int, kv: KVAllocator, running: Values[Group], step: int, is_shared: bool = False
    ) -> bool:
        if not running or group.footprint + sum([other.footprint for other in running]) <= kv.num_blocks:
            return True  # the pool holds all of them at their longest
        size, half = kv.block_size, kv.block_size // 2
        # (tokens to come, slots without a token, blocks that are free at its end) of each sequence
        ends: list[tuple[int, int, float]] = []
        growth = 0
        for each in chain(group.sequences, *(other.sequences for other in running)):
            left = self._lengths.left(each)
            windows = each.window_growth(left) if kv.by_window else 0
            growth += windows
            held = need / len(group.sequences) if each.group is group else each.kv.num_held
            ends.append((left, each.num_spare_slots, held + windows))
        ends.sort()
        used = kv.num_blocks - kv.num_available
        own = used / (used + kv.num_saved) if used else 1.0  # the part of a table that no other table holds
        new = (1.0 - kv.merged_share) / size * sum([group.window is None for group in kv.groups])
        price = self._prices.gain_for_loss(sum([len(other.sequences) for other in running]))
        price = WORTH if price is None else max(price, WORTH if is_shared else LEAST_WORTH)
        room = kv.num_available - need - growth - self._margin.at(step) * min(price, 1.0) * kv.num_blocks
        # Between two ends every sequence grows by a token a step: its spare slots first, then half a block on average.
        count, spare = len(ends), sum([slots - half for _, slots, _ in ends])
        worth = price * len(group.leader.token_ids)
        for num_steps, slots, blocks in ends:
            if (count * min(num_steps, worth) - spare) * new > room:
                return False
            if num_steps >= worth:
                break
            count -= 1
            spare -= slots - half
            room += blocks * own
        return True

    def note_end(self, sequence: Sequence) -> None:
        self._lengths.note(sequence)

    def note_preemption(self, step: int) -> None:
        self._margin.widen(step)


WORTH = 8  # tokens to gain for each one that a group enters with, while prices are unknown or several tenants pay
LEAST_WORTH = 0.25  # where computing again costs next to nothing, so that nobody is preempted for every few tokens
QUANTILE = 0.75  # of past lengths: expectations are to hold for most groups, and the longest few are preempted
_REMEMBERED = 64  # lengths of one kind of request
_MOST_KINDS = 256
_ENOUGH = 8  # lengths from which a quantile is taken; with fewer, half of `max_tokens` is expected
_Kind = tuple[str | None, int]  # (tenant, or None for all; bits of max_tokens)


class OutputLengths:
    """The lengths of the newest outputs, by tenant and by the order of magnitude of `max_tokens`."""

    def __init__(self) -> None:
        self._newest: OrderedDict[_Kind, deque[int]] = OrderedDict()
        self._sorted: dict[_Kind, list[int]] = {}

    def note(self, sequence: Sequence) -> None:
        """A choice has ended."""
        if sequence.group.stop_token_ids:  # without them the length is known
            for kind in _kinds(sequence.group):
                self._add(kind, sequence.num_output_tokens)

    def left(self, sequence: Sequence) -> int:
        """The tokens that an unfinished choice is expected to get yet; 1 at least."""
        group, done = sequence.group, sequence.num_output_tokens
        if group.stop_token_ids and sequence.expected_output <= done:
            sequence.expect(self._expected(group, done))
        total = min(sequence.expected_output, group.max_new_tokens) if group.stop_token_ids else group.max_new_tokens
        return max(total - done, 1)

    def _expected(self, group: Group, done: int) -> int:
        guess = group.max_new_tokens // 2
        for kind in _kinds(group):
            known = self._sorted.get(kind, [])
            if len(known) >= _ENOUGH:
                first, guess = bisect_right(known, done), 0
                if first < len(known):
                    return known[first + int((len(known) - first) * QUANTILE)]
        return max(2 * done, guess)

    def _add(self, kind: _Kind, length: int) -> None:
        newest = self._newest.setdefault(kind, deque())
        self._newest.move_to_end(kind)
        known = self._sorted.setdefault(kind, [])
        if len(newest) == _REMEMBERED:
            del known[bisect_right(known, newest.popleft()) - 1]
        newest.append(length)
        insort(known, length)
        if len(self._newest) > _MOST_KINDS:
            del self._sorted[self._newest.popitem(last=False)[0]]


def _kinds(group: Group) -> tuple[_Kind, _Kind]:
    bits = group.max_new_tokens.bit_length()
    return (group.request.tenant, bits), (None, bits)


_STEP = 1 / 64  # of the pool, for each preemption
_WIDEST = 1 / 4
_HALF_LIFE = 256  # steps


class Margin:
    """The share of the pool that is kept free at an entry: wider after each preemption, and halved in 256 steps."""

    def __init__(self) -> None:
        self._share, self._since = 0.0, 0

    def at(self, step: int) -> float:
        """The margin in a step."""
        return self._share * 0.5 ** ((step - self._since) / _HALF_LIFE) if self._share else 0.0

    def widen(self, step: int) -> None:
        """A group was preempted for blocks."""
        self._share, self._since = min(self.at(step) + _STEP, _WIDEST), step
