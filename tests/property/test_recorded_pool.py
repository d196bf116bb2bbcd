"""Engines that are killed at any moment: the next one believes of the pool what is true alone, and computes little.

Each run draws its limits and its requests. Its engines are killed between two steps, in a plan, or in a step of which
some of the writes were made. The next one has the pool's memory as it was left, and the record of it.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Iterable, Sequence

import pytest

from quire_engine.contract.batch import Batch
from quire_engine.contract.block_record import HeldBlock
from quire_engine.contract.types import BeamParams, GenerationRequest
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import FakeExecutor, expected_tokens, request
from support.limits import scheduler_config
from support.scheduler_model import feasible, shrunk_to_fit
from support.seeds import naming

NUM_RUNS = 20  # `make property-test` does many times as many


class Killed(Exception):
    pass


class Memory:
    """A record that outlives its engines; the process may be killed at a call."""

    def __init__(self, dice: random.Random) -> None:
        self.blocks: dict[int, HeldBlock] = {}
        self.calls_left = 0  # until the kill; 0: none comes
        self._dice = dice

    def found(self) -> Iterable[HeldBlock]:
        return list(self.blocks.values())

    def fill(self, block: int, content: bytes, group: int, scope: str) -> None:
        self._write(HeldBlock(block=block, content=content, group=group, scope=scope))

    def begin(self, block: int, parent: bytes, tokens: Sequence[int], scope: str) -> None:
        assert tokens
        self._write(HeldBlock(block=block, content=parent, tokens=tuple(tokens), scope=scope))

    def lose(self, block: int) -> None:
        self.blocks.pop(block, None)
        self._may_be_killed()

    def _write(self, held: HeldBlock) -> None:
        self.blocks.pop(held.block, None)
        self._may_be_killed()
        self.blocks[held.block] = held

    def _may_be_killed(self) -> None:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise Killed


class Server:
    """The journal of requests, and one engine after another."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        min_chunk, max_num_seqs = dice.randint(1, 6), dice.randint(2, 8)
        windows = dice.choice([(None,), (None,), (None,), (None, 6), (5,)])
        swaps = windows == (None,) and dice.random() < 0.3
        self.config = scheduler_config(
            num_blocks=dice.randint(12, 60) * len(windows),
            block_size=dice.choice([1, 2, 4, 8]),
            max_model_len=dice.randint(24, 64),
            max_num_seqs=max_num_seqs,
            num_host_blocks=dice.randint(1, 40) if swaps else 0,
            min_chunk=min_chunk,
            max_num_batched_tokens=max_num_seqs + min_chunk + dice.randint(0, 24),
            prefill_chunk=min_chunk + dice.randint(0, 12),
            itl_target=0.0,
            windows=windows,
        )
        self.columns_from = dice.choice([0, 2, None])
        self.memory = Memory(dice)
        self.slots: dict[tuple[int, int], int] = {}
        self.requests: dict[str, GenerationRequest] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ended: set[tuple[str, int]] = set()
        self.again: deque[GenerationRequest] = deque()
        self.seen: Counter[str] = Counter()
        self.begin()

    def begin(self) -> None:
        """A new engine, which gets what is unfinished."""
        self.memory.calls_left = 0
        self.starved: set[int] = set()  # sequences, once each
        self.scheduler = Scheduler(self.config, record=self.memory, columns_from=self.columns_from)
        self.seen["taken over"] += self.scheduler.num_taken_over
        self.executor = FakeExecutor(self.config.limits.block_size, windows=self.config.windows)
        self.executor.slots = self.slots
        self.scheduler.check_invariants()
        for wanted in self.requests.values():
            known = [tuple(self.tokens[wanted.request_id, choice]) for choice in range(wanted.n)]
            finished = tuple(c for c in range(wanted.n) if (wanted.request_id, c) in self.ended)
            if len(finished) < wanted.n:
                resumed = tuple(known) if any(known) else ()
                if wanted.beam is not None:
                    resumed, finished = (), ()
                self.scheduler.add(
                    dataclasses.replace(wanted, resumed_token_ids=resumed, finished_choices=finished), 0.0
                )

    def play(self) -> None:
        for _ in range(self.dice.randint(2, 5)):
            try:
                self.live()
            except Killed:
                self.seen["kills"] += 1
                self.begin()
        self.memory.calls_left = 0
        while self.scheduler.has_work:
            self.step()
        for wanted in self.requests.values():
            for choice in range(wanted.n if wanted.beam is None else 0):
                assert tuple(self.tokens[wanted.request_id, choice]) == expected_tokens(wanted, choice)

    def live(self) -> None:
        for _ in range(self.dice.randint(1, 5)):
            self.submit()
        self.memory.calls_left = self.dice.choice([0, 0, self.dice.randint(1, 60)])
        for _ in range(self.dice.randint(1, 40)):
            if self.dice.random() < 0.03 and self.scheduler._roster.live:
                name = self.dice.choice(sorted(self.scheduler._roster.live))
                self.scheduler.abort(name)
                del self.requests[name]
            if self.dice.random() < 0.02:
                self.scheduler.reset_prefix_cache()
            once = sorted(set(self.scheduler._roster.sequences) - self.starved)
            if once and self.dice.random() < 0.03:
                self.starved.add(self.dice.choice(once))
                self.executor.starved |= self.starved & set(once)
            self.step()
        batch = self.plan()
        if batch is not None and self.dice.random() < 0.8:
            self.half(batch)
        raise Killed

    def plan(self) -> Batch | None:
        """The next step; nothing is said of what it writes to."""
        batch = self.scheduler.schedule(0.0)
        for item in () if batch is None else batch.items:
            first, count = divmod(item.start, self.config.limits.block_size)
            for table in (item.block_ids, *item.other_block_ids):
                for index, block in enumerate(table[first:]):
                    held = self.memory.blocks.get(block)
                    assert held is None or (index == 0 and 0 < len(held.tokens) <= count), "it is written to"
        return batch

    def half(self, batch: Batch) -> None:
        """Some of the step's writes, whole ones or parts of them."""
        before = dict(self.slots)
        self.executor.execute(batch)
        for slot, written in list(self.slots.items()):
            if before.get(slot) != written:
                self.slots[slot] = self.dice.choice([written, -1, before.get(slot, -2)])

    def step(self) -> None:
        batch = self.plan()
        if batch is None:
            return
        self.seen["computed"] += batch.num_tokens
        for output in self.scheduler.apply(batch, self.executor.execute(batch), 0.0):
            assert output.finish != "error"
            key = output.request_id, output.choice
            self.tokens[key] += output.token_ids
            if output.finish is not None:
                self.ended.add(key)
        self.scheduler.check_invariants()

    def submit(self) -> None:
        dice, name = self.dice, f"r{len(self.tokens)}"
        length, family = dice.randint(1, 24), dice.randint(0, 2)
        n = dice.choice([1, 1, 1, 2, 3])
        wanted = request(
            name,
            tuple(p if p < 9 + family else p + 50 * family for p in range(length)),
            dice.choice([1, 5, 12, 20, 30]),
            n=n,
            salt=dice.choice(["", "", "a\0", "b\0c"]),
            penalty=dice.choice([0.0, 1.0]),
            beam=BeamParams(width=n + 1, length_penalty=1.0, early_stopping=True) if dice.random() < 0.05 else None,
        )
        wanted = shrunk_to_fit(self.config, wanted)
        if feasible(self.config, wanted):
            self.requests[name] = wanted
            self.scheduler.add(wanted, 0.0)
            self.tokens |= {(name, choice): [] for choice in range(wanted.n)}


def test_what_is_taken_over_is_right(request: pytest.FixtureRequest) -> None:
    num_runs = NUM_RUNS * int(request.config.getoption("--times", 1))
    seen: Counter[str] = Counter()
    for seed in range(num_runs):
        with naming(seed):
            server = Server(seed)
            server.play()
        seen += server.seen
    print(dict(seen))
    assert seen["kills"] > num_runs
    assert seen["taken over"] > seen["kills"]


@pytest.mark.parametrize("prompt", [40, 64, 71])
def test_only_the_last_token_is_computed_again(prompt: int) -> None:
    server = Server(0)
    server.config = scheduler_config(num_blocks=64, block_size=16, max_num_batched_tokens=512, itl_target=0.0)
    server.columns_from = None
    server.begin()
    for name in "ab":
        wanted = server.requests[name] = request(name, prompt, 40)
        server.tokens[name, 0] = []
        server.scheduler.add(wanted, 0.0)
    for _ in range(25):
        server.step()
    known = prompt + len(server.tokens["a", 0])
    server.half(server.scheduler.schedule(0.0))  # type: ignore[arg-type]
    server.begin()
    batch = server.scheduler.schedule(0.0)
    assert batch is not None
    assert [(item.start, item.end) for item in batch.items] == [(known - 1, known)] * 2
