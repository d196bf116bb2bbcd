"""Who makes way for a model that is asked for."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from quire_server.engine.models.budget import Resident, Room, room_for

TURN = 10.0


def model(name: str, *, used: float = 0.0, **more: object) -> Resident:
    return replace(Resident(name=name, weights=10, engine=20, last_used=used, loaded_at=used), **more)


def loaded(name: str, *, used: float, **more: object) -> Resident:
    return model(name, used=used, is_loaded=True, keeps_weights=True, **more)


def asleep(name: str, *, used: float, **more: object) -> Resident:
    return model(name, used=used, keeps_weights=True, **more)


def room(others: list[Resident], budget: int, wanted: Resident | None = None, now: float = 100.0) -> Room:
    return room_for(wanted or model("new"), others, budget, now=now, turn=TURN)


def test_what_fits_is_loaded_at_once():
    assert room([loaded("a", used=1)], 60) == Room(is_free=True)


def test_the_longest_unused_makes_way_and_keeps_its_weights_while_they_have_room():
    assert room([loaded("a", used=2), loaded("b", used=1)], 70) == Room(sleep=("b",))
    assert room([loaded("a", used=2), loaded("b", used=1)], 60) == Room(sleep=("b",), forget=("b",))


def test_weights_that_were_not_used_for_longer_go_before_an_engine_that_was():
    assert room([loaded("a", used=2), asleep("b", used=1)], 60) == Room(forget=("b",))
    assert room([loaded("a", used=1), asleep("b", used=2)], 60) == Room(sleep=("a",))


def test_a_lower_priority_makes_way_first_and_a_pinned_model_never():
    assert room([loaded("a", used=1, priority=1), loaded("b", used=2)], 70) == Room(sleep=("b",))
    assert room([loaded("a", used=1, pinned=True), loaded("b", used=2)], 70) == Room(sleep=("b",))
    assert room([loaded("a", used=1, pinned=True), loaded("b", used=2, pinned=True)], 70) == Room(wait=None)


def test_a_busy_model_has_its_turn_and_one_of_higher_priority_all_that_it_needs():
    busy = loaded("a", used=95, is_busy=True)
    assert room([busy], 40) == Room(wait=5.0)
    assert room([busy], 40, now=105.0) == Room(sleep=("a",))
    assert room([replace(busy, priority=1)], 40, now=105.0) == Room(wait=None)
    assert room([busy, loaded("b", used=99)], 70, now=105.0) == Room(sleep=("b",)), "the idle one goes first"


def test_nothing_is_done_where_it_would_not_be_enough():
    assert room([loaded("a", used=1), loaded("b", used=2, pinned=True)], 50) == Room(wait=None)


def test_an_engine_that_ends_holds_its_memory_until_it_has_ended():
    ending = asleep("a", used=1, is_moving=True, held_now=30)
    assert room([ending], 40) == Room(is_free=False)
    assert room([replace(ending, held_now=None)], 40) == Room(is_free=True)


residents = st.builds(
    Resident,
    name=st.uuids().map(str),
    weights=st.integers(1, 50),
    engine=st.integers(1, 50),
    is_loaded=st.booleans(),
    keeps_weights=st.booleans(),
    is_busy=st.booleans(),
    pinned=st.booleans(),
    priority=st.integers(-1, 1),
    last_used=st.floats(0, 100),
    loaded_at=st.floats(0, 100),
)


@given(residents, st.lists(residents, max_size=8, unique_by=lambda each: each.name), st.integers(1, 300))
def test_after_what_is_done_the_model_fits_and_no_step_is_for_nothing(
    wanted: Resident, others: list[Resident], budget: int
):
    wanted = replace(wanted, is_loaded=False)
    made = room_for(wanted, others, budget, now=100.0, turn=TURN)
    needed = wanted.weights + wanted.engine

    def left(sleep: tuple[str, ...], forget: tuple[str, ...]) -> int:
        total = 0
        for each in others:
            is_loaded = each.is_loaded and each.name not in sleep
            keeps = (each.keeps_weights or each.is_loaded) and each.name not in forget
            total += each.engine * is_loaded + each.weights * (keeps or is_loaded)
        return total

    if made.is_free:
        assert left((), ()) + needed <= budget
        assert not made.sleep
        assert not made.forget
    elif made.sleep or made.forget:
        assert left(made.sleep, made.forget) + needed <= budget
        for name in made.sleep:
            if name not in made.forget:
                assert left(tuple(n for n in made.sleep if n != name), made.forget) + needed > budget
        for name in made.forget:
            assert left(made.sleep, tuple(n for n in made.forget if n != name)) + needed > budget
    by_name = {each.name: each for each in others}
    for name in (*made.sleep, *made.forget):
        each = by_name[name]
        assert not each.pinned
        ripe = each.loaded_at + TURN <= 100.0 and each.priority <= wanted.priority
        assert not each.is_busy or ripe or not each.is_loaded
