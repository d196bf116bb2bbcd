"""The prefix index against plain sets, and told changes against the cache that they tell of, under random calls."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire_engine.contract.block_hashes import MOST_ROUTED, block_hash, root_hash, routed_names, short_name
from quire_engine.contract.types import PrefixChanges
from quire_engine.routing.index import PrefixIndex
from quire_engine.scheduling.prefix_cache import ToldPrefixes

REPLICAS = st.sampled_from(["a", "b", "c"])
CHAINS = st.tuples(st.integers(0, 3), st.integers(1, 6))  # a chain of blocks, and how many of it
MOST = 12


def chain(which: int, depth: int) -> list[bytes]:
    """Chains that begin alike: the first block is common to all, the second to pairs."""
    hashes, parent = [], root_hash("")
    for at in range(depth):
        token = 0 if at == 0 else which // 2 if at == 1 else 10 + which
        parent = block_hash(parent, [token, at])
        hashes.append(parent)
    return hashes


def names(which: int, depth: int) -> tuple[int, ...]:
    return tuple(map(short_name, chain(which, depth)))


class IndexMachine(RuleBasedStateMachine):
    """Replicas whose caches register and forget, tell, lose frames and are asked for snapshots."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(most_blocks=10_000)
        self.small = PrefixIndex(most_blocks=MOST)
        self.caches: dict[str, dict[bytes, int]] = {}
        self.told: dict[str, ToldPrefixes] = {}
        self.known: dict[str, set[int] | None] = {}  # what the index should know; None: a frame was lost
        self.sent: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.count = 0

    @rule(name=REPLICAS)
    def join(self, name: str) -> None:
        for index in (self.index, self.small):
            index.add(name)
        self.caches[name], self.told[name] = {}, ToldPrefixes()
        self.known[name] = set()
        self.sent = {key: one for key, one in self.sent.items() if one[0] != name}

    @rule(name=REPLICAS)
    def leave(self, name: str) -> None:
        for index in (self.index, self.small):
            index.remove(name)
        for each in (self.caches, self.told, self.known):
            each.pop(name, None)
        self.sent = {key: one for key, one in self.sent.items() if one[0] != name}

    @precondition(lambda self: self.caches)
    @rule(name=REPLICAS, which=CHAINS)
    def register(self, name: str, which: tuple[int, int]) -> None:
        if name in self.caches:
            for depth, content in enumerate(chain(*which)):
                if content not in self.caches[name]:
                    self.caches[name][content] = depth
                    self.told[name].register(content, depth)

    @precondition(lambda self: self.caches)
    @rule(name=REPLICAS, which=CHAINS)
    def forget(self, name: str, which: tuple[int, int]) -> None:
        content = chain(*which)[-1]
        if name in self.caches and self.caches[name].pop(content, None) is not None:
            self.told[name].forget(content)

    @precondition(lambda self: self.caches)
    @rule(name=REPLICAS, which=CHAINS)
    def reset(self, name: str, which: tuple[int, int]) -> None:
        if name in self.caches:
            kept = set(chain(*which))
            self.caches[name] = {key: depth for key, depth in self.caches[name].items() if key in kept}
            self.told[name].keep_only(self.caches[name])

    @precondition(lambda self: self.caches)
    @rule(name=REPLICAS, is_lost=st.booleans())
    def tell(self, name: str, is_lost: bool) -> None:
        if name not in self.told or (frame := self.told[name].take()) is None:
            return
        if is_lost:
            self.known[name] = None
            return
        for index in (self.index, self.small):
            assert index.apply(name, frame) == (self.known[name] is not None)
        if self.known[name] is not None:
            self.known[name] = set(map(short_name, self.caches[name]))

    @precondition(lambda self: self.caches)
    @rule(name=REPLICAS)
    def snapshot(self, name: str) -> None:
        if name in self.told:
            snapshot = self.told[name].snapshot()
            for index in (self.index, self.small):
                index.replace(name, snapshot)
            self.known[name] = set(snapshot.registered)

    @precondition(lambda self: self.caches)
    @rule(name=REPLICAS, which=CHAINS)
    def send(self, name: str, which: tuple[int, int]) -> None:
        if name in self.caches:
            self.count += 1
            self.sent[str(self.count)] = name, names(*which)
            for index in (self.index, self.small):
                index.sent(name, str(self.count), names(*which))

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.sent)))
        del self.sent[key]
        for index in (self.index, self.small):
            index.answered(key)

    @invariant()
    def depths_are_those_of_sets(self) -> None:
        if any(known is None for known in self.known.values()):
            return  # until the next frame shows the gap, the index believes what it knew
        for which in range(4):
            blocks = names(which, 6)
            expected = {}
            for name, known in self.known.items():
                assert known is not None
                have = known | {block for to, sent in self.sent.values() if to == name for block in sent}
                depth = next((at for at, block in enumerate(blocks) if block not in have), len(blocks))
                if depth:
                    expected[name] = depth
            assert self.index.depths(blocks) == expected

    @invariant()
    def the_small_one_is_small_and_never_knows_more(self) -> None:
        for name in self.small.replicas:
            assert self.small.num_blocks(name) <= MOST
            assert self.small.num_blocks(name) <= self.index.num_blocks(name)


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase


def test_the_deepest_are_dropped_first() -> None:
    index = PrefixIndex(most_blocks=4)
    index.add("a")
    index.apply("a", PrefixChanges(number=1, registered=(11, 12, 13, 14, 15), depths=(0, 1, 2, 3, 4)))
    assert index.depths((11, 12, 13, 14, 15)) == {"a": 4}
    index.apply("a", PrefixChanges(number=2, registered=(21, 22), depths=(0, 1)))
    assert index.depths((11, 12, 13, 14)) == {"a": 2}
    assert index.depths((21, 22)) == {"a": 2}


def test_many_changes_are_told_in_frames_of_4096() -> None:
    told = ToldPrefixes()
    index = PrefixIndex()
    index.add("a")
    contents = [number.to_bytes(8, "little") * 4 for number in range(1, 10_001)]
    for content in contents:
        told.register(content, 0)
    sizes = []
    while (frame := told.take()) is not None:
        sizes.append(len(frame.registered))
        assert index.apply("a", frame)
    assert sizes == [4096, 4096, 10_000 - 2 * 4096]
    assert index.num_blocks("a") == 10_000
    told.register(b"\xff" * 32, 0)
    told.forget(b"\xff" * 32)
    assert told.take() is None  # it came and went


def test_a_prompt_is_named_to_a_limited_depth() -> None:
    tokens = list(range(16 * (MOST_ROUTED + 5)))
    found = routed_names(tokens, "salt", 16)
    assert len(found) == MOST_ROUTED
    assert found[:3] == routed_names(tokens[:50], "salt", 16)
    assert found[0] != routed_names(tokens[:16], "", 16)[0]
    assert routed_names(tokens[:15], "", 16) == ()
