"""The store of past responses: its bounds, whose responses are whose, what a response goes on from."""

from __future__ import annotations

import random

from quire_server.dialects.responses.rendering import item_id, new_stem, response_id
from quire_server.dialects.responses.store import ResponseStore, StoredItem, StoredResponse


def make(previous: StoredResponse | None = None, *, text: str = "", stem: str | None = None) -> StoredResponse:
    stem = stem or new_stem()
    return StoredResponse(
        id=response_id(stem),
        raw=b"{}",
        input=[StoredItem(id=item_id("msg", stem, 0, of_input=True), raw=text.encode())],
        output=[StoredItem(id=item_id("msg", stem, 0), raw=b"answer to " + text.encode())],
        previous=previous,
    )


def roomy(**bounds: int) -> ResponseStore:
    return ResponseStore(**{"max_responses": 100, "max_bytes": 2**20, **bounds})


def texts(response: StoredResponse) -> list[str]:
    return [item.raw.decode() for item in response.history()]


def test_a_response_is_its_owners() -> None:
    store, response = roomy(), make(text="a")
    store.put("ann", response)
    assert store.get("ann", response.id) is response
    assert store.get("bob", response.id) is None
    assert store.item("bob", response.output[0].id) is None
    assert not store.delete("bob", response.id)
    assert store.item("ann", response.output[0].id) is response.output[0]
    assert store.item("ann", response.input[0].id) is response.input[0]
    assert store.item("ann", "msg_unknown") is None


def test_the_longest_unused_goes_first() -> None:
    store = roomy(max_responses=2)
    first, second, third = (make() for _ in range(3))
    store.put("", first)
    store.put("", second)
    store.get("", first.id)
    store.put("", third)
    assert [store.get("", each.id) is each for each in (first, second, third)] == [True, False, True]


def test_bytes_are_bounded() -> None:
    one = make(text="x" * 1000)
    store = roomy(max_bytes=3 * one.size + 10)
    responses = [make(text="x" * 1000) for _ in range(10)]
    for response in responses:
        store.put("", response)
    assert len(store) == 3
    assert store.num_bytes == 3 * one.size
    store.put("", make(text="x" * 10_000))  # larger than all the room
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_flood_of_one_owner_evicts_its_own() -> None:
    store = roomy(max_responses=10)
    mine = [make(text="a") for _ in range(4)]
    for response in mine:
        store.put("ann", response)
    for _ in range(1000):
        store.put("bob", make(text="b"))
    assert [store.get("ann", response.id) for response in mine] == mine
    late = [make(text="c") for _ in range(8)]
    for response in late:
        store.put("cid", response)
    kept = [store.get("cid", response.id) is not None for response in late]
    assert kept == [False] * 4 + [True] * 4, "three owners have 3, 3 and 4 of 10"
    assert len(store) == 10


def test_owners_keep_responses_by_their_weights() -> None:
    store = roomy(max_responses=12)
    stored = {"ann": [make(text="a") for _ in range(30)], "bob": [make(text="b") for _ in range(30)]}
    for pair in zip(*stored.values(), strict=True):
        for (owner, weight), response in zip((("ann", 1.0), ("bob", 2.0)), pair, strict=True):
            store.put(owner, response, weight=weight)
    kept = {owner: sum(store.get(owner, one.id) is not None for one in own) for owner, own in stored.items()}
    assert kept == {"ann": 4, "bob": 8}


def test_so_does_one_of_large_responses() -> None:
    small = make(text="a")
    store = roomy(max_bytes=20 * small.size)
    store.put("ann", small)
    for _ in range(50):
        store.put("bob", make(text="b" * 10 * small.size))
    assert store.get("ann", small.id) is small
    assert store.num_bytes <= 20 * small.size


def test_a_conversation_outlives_its_beginnings_place() -> None:
    store = roomy(max_responses=1)
    turn = make(text="0")
    store.put("", turn)
    for number in range(1, 5):
        turn = make(turn, text=str(number))
        store.put("", turn)
    assert len(store) == 1
    expected = [text for number in range(5) for text in (str(number), f"answer to {number}")]
    assert texts(turn) == expected
    assert store.num_bytes == 5 * turn.size  # none is counted twice, and all that is kept is counted
    assert store.delete("", turn.id)
    assert store.num_bytes == 0


def test_deleting_keeps_what_goes_on_from_it() -> None:
    store = roomy()
    first = make(text="a")
    left, right = make(first, text="b"), make(first, text="c")
    for response in (first, left, right):
        store.put("", response)
    assert store.delete("", first.id)
    assert store.get("", first.id) is None
    assert store.item("", first.output[0].id) is None
    assert texts(right) == ["a", "answer to a", "c", "answer to c"]
    store.delete("", left.id)
    assert store.num_bytes == first.size + right.size
    store.delete("", right.id)
    assert store.num_bytes == 0


def test_going_on_from_what_is_gone_meanwhile() -> None:
    store = roomy(max_responses=1)
    first = make(text="a")
    store.put("", first)
    store.put("", make(text="b"))  # takes its place while it is gone on from
    store.put("", make(first, text="c"))
    assert store.num_bytes == 2 * first.size


def reachable(listed: list[StoredResponse]) -> int:
    """The bytes of all that is listed or gone on from, found the slow way."""
    found: dict[int, int] = {}
    for response in listed:
        turn: StoredResponse | None = response
        while turn is not None:
            found[id(turn)] = turn.size
            turn = turn.previous
    return sum(found.values())


def test_the_count_of_bytes_is_exact_after_anything() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        store = ResponseStore(max_responses=rng.randint(1, 6), max_bytes=rng.randint(3000, 20_000))
        made: list[StoredResponse] = []
        for _ in range(100):
            if rng.random() < 0.2 and made:
                store.delete("", rng.choice(made).id)
            else:
                previous = rng.choice(made) if made and rng.random() < 0.7 else None
                made.append(make(previous, text="x" * rng.randint(0, 2000)))
                store.put("", made[-1])
            listed = [response for response in made if store.get("", response.id) is response]
            assert store.num_bytes == reachable(listed)
            assert len(listed) == len(store)
