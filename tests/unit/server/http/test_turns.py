"""Turns of the event loop: one piece of work in each, in order, and what has begun before what is new."""

from __future__ import annotations

import asyncio

from quire_server.http.turns import Turns


async def _turn_of_each(turns: Turns, count: int) -> list[int]:
    """In which turn of the loop each of so many pieces of work was called."""
    loop, number = asyncio.get_running_loop(), 0
    called: list[int] = []

    def next_turn() -> None:
        nonlocal number
        number += 1
        if len(called) < count:
            loop.call_soon(next_turn)

    loop.call_soon(next_turn)
    for _ in range(count):
        if turns.is_free():
            called.append(number)
        else:
            turns.wait(lambda: called.append(number))
    while len(called) < count:  # noqa: ASYNC110 - turns of the loop are counted
        await asyncio.sleep(0)
    return called


def test_each_turn_of_the_loop_has_one_piece_of_work() -> None:
    async def run() -> None:
        called = await _turn_of_each(Turns(), 5)
        assert called == sorted(set(called))

    asyncio.run(run())


def test_who_comes_alone_has_the_turn_at_once() -> None:
    async def run() -> None:
        turns = Turns()
        assert turns.is_free()
        await asyncio.sleep(0)
        assert turns.is_free()
        assert not turns.is_free()

    asyncio.run(run())


def test_what_has_begun_goes_on_first_and_all_others_in_order() -> None:
    async def run() -> None:
        turns, order = Turns(), list[str]()

        async def begun(name: str) -> None:
            await turns.go_on()
            order.append(name)

        assert turns.is_free()
        turns.wait(lambda: order.append("new 1"))
        turns.wait(lambda: order.append("new 2"))
        first, left = asyncio.create_task(begun("begun 1")), asyncio.create_task(begun("has left"))
        await asyncio.sleep(0)
        left.cancel()
        await first
        while turns.num_waiting:  # noqa: ASYNC110 - the next turn of the loop is enough
            await asyncio.sleep(0)
        assert order == ["new 1", "begun 1", "new 2"]

    asyncio.run(run())


def test_work_that_fails_does_not_hold_up_the_rest() -> None:
    async def run() -> None:
        turns, order = Turns(), list[str]()
        asyncio.get_running_loop().set_exception_handler(lambda *_: order.append("failed"))

        def fail() -> None:
            raise ValueError

        assert turns.is_free()
        turns.wait(fail)
        turns.wait(lambda: order.append("done"))
        for _ in range(4):
            await asyncio.sleep(0)
        assert order == ["failed", "done"]

    asyncio.run(run())
