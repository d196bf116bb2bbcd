"""When steps may begin under an operator's orders, and that everything runs again when nobody repeats them."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from dataclasses import replace

import pytest

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import Unanswerable
from quire_engine.contract.types import EngineHealth, EngineStats, StepOutput
from quire_engine.process import loop
from quire_engine.process.loop import EngineLoop
from quire_engine.process.pace import LEASE_SECONDS, Pace
from quire_engine.process.transport import Control, FrameDecoder, Inspected, Shutdown, encode_frame
from support.supervising import request, run, supervised


def test_it_runs_until_it_is_told_otherwise():
    pace = Pace()
    assert pace.delay(0.0) == 0.0
    assert pace.order({"mode": "pause"}, 10.0) == {"mode": "pause", "seconds": 0.0, "steps_left": 0}
    assert pace.delay(11.0) == LEASE_SECONDS - 1.0


def test_a_pause_lets_as_many_steps_through_as_are_asked_for():
    pace = Pace()
    pace.order({"mode": "pause"}, 0.0)
    pace.order({"mode": "pause", "steps": 2}, 0.0)
    for _ in range(2):
        assert pace.delay(0.0) == 0.0
        pace.begins(0.0)
    assert pace.delay(0.0) > 0.0
    pace.order({"mode": "pause", "steps": 1}, 0.0)
    assert pace.order({"mode": "pause", "steps": 1}, 0.0)["steps_left"] == 2, "two clicks are two steps"
    assert pace.order({"mode": "run"}, 0.0)["steps_left"] == 0


def test_slow_steps_begin_a_while_after_each_other():
    pace = Pace()
    pace.order({"mode": "slow", "seconds": 0.5}, 0.0)
    assert pace.delay(0.0) == 0.0
    pace.begins(1.0)
    assert pace.delay(1.2) == pytest.approx(0.3)
    assert pace.delay(1.5) == 0.0


@pytest.mark.parametrize("order", [{"mode": "pause"}, {"mode": "slow", "seconds": 5.0}])
def test_nobodys_requests_wait_for_a_watcher_who_has_gone(order):
    pace = Pace()
    pace.order(order, 0.0)
    pace.begins(0.0)
    pace.order({}, LEASE_SECONDS - 0.1)
    assert pace.delay(LEASE_SECONDS - 0.1) > 0.0
    assert pace.order({}, LEASE_SECONDS - 0.1)["mode"] == order["mode"], "what is repeated goes on to hold"
    over = 2 * LEASE_SECONDS
    assert pace.delay(over) == 0.0
    assert pace.order({}, over)["mode"] == "run", "and is not repeated back to life"


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ({"mode": "stop"}, "'stop'"),
        ({"mode": "slow", "seconds": 60.0}, "seconds is 60"),
        ({"mode": "slow", "seconds": 0.0}, "from 0.02"),
        ({"mode": "pause", "steps": 65}, "steps is 65"),
        ({"mode": "run", "steps": 1}, "for a pause"),
    ],
)
def test_what_it_cannot_be_is_refused(order, said):
    pace = Pace()
    with pytest.raises(Unanswerable, match=said):
        pace.order(order, 0.0)
    assert pace.mode == "run"


class Busy:
    """An engine that always has work."""

    has_work = True

    def __init__(self) -> None:
        self.on_step = None
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        self.on_step(StepOutput(step_id=self.steps, outputs=(), stats=EngineStats()))
        time.sleep(0.001)

    def health(self) -> EngineHealth:
        return EngineHealth(alive=True, step_id=self.steps, has_work=True)


def test_a_paused_loop_answers_and_gives_signs_of_life_but_computes_nothing(monkeypatch):
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.02)
    engine, decoder = Busy(), FrameDecoder()
    ours, theirs = socket.socketpair()
    theirs.settimeout(300)

    def ask(**order: object) -> dict[str, object]:
        theirs.sendall(encode_frame(Control(token=1, what="pace", argument=json.dumps(order))))
        while True:
            for frame in decoder.feed(theirs.recv(1 << 16)):
                if isinstance(frame, Inspected):
                    assert not frame.error, frame.error
                    return json.loads(frame.body)

    def signs_of_life(count: int) -> None:
        while count > 0:
            count -= sum(isinstance(frame, EngineHealth) for frame in decoder.feed(theirs.recv(1 << 16)))

    with ours, theirs:
        thread = threading.Thread(target=EngineLoop(engine, ours, FrameDecoder(), pace=Pace()).run, args=([],))
        thread.start()
        assert ask(mode="pause")["mode"] == "pause"
        before = engine.steps
        signs_of_life(5)
        assert engine.steps == before
        ask(mode="pause", steps=3)
        signs_of_life(5)
        assert engine.steps == before + 3
        ask(mode="run")
        while engine.steps < before + 20:
            theirs.recv(1 << 16)
        theirs.sendall(encode_frame(Shutdown()))
        thread.join(timeout=120)
        assert not thread.is_alive()


def test_an_engine_without_the_setting_cannot_be_paused():
    async def body() -> None:
        async with supervised() as (supervisor, client):
            with pytest.raises(Unanswerable, match="not started as one that may be paused"):
                await supervisor.control("pace", '{"mode":"pause"}')
            supervisor.submit(request("r", tokens=3))
            await client.until(lambda: ("r", 0) in client.ends)
            await asyncio.sleep(0)

    run(body)
    assert not EngineConfig(model="a").learn
    assert replace(EngineConfig(model="a"), learn=True).learn
