"""When the engine looks at its books: when nothing comes, not between a request's last token and its client."""

import gc
import socket
import threading
import time

import pytest

from quire_engine.contract.types import EngineHealth, EngineStats, StepOutput
from quire_engine.engine import Engine
from quire_engine.process import loop
from quire_engine.process.loop import EngineLoop, Garbage
from quire_engine.process.transport import Alive, FrameDecoder, Shutdown, encode_frame
from support.fake_executor import new_run, request


class Watched:
    """An engine on a pretended pool, and what it did in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, every_step: bool = False) -> None:
        run = new_run()
        self.events: list[str] = []
        check = run.scheduler.check_invariants

        def watched_check() -> None:
            self.events.append("check")
            check()

        monkeypatch.setattr(run.scheduler, "check_invariants", watched_check)
        self.engine = Engine(run.scheduler, run.executor, check_invariants=every_step)
        self.engine.on_step = lambda _: self.events.append("sent")

    def serve(self, name: str) -> None:
        self.engine.submit(request(name, 20, 2))
        while self.engine.has_work:
            self.engine.step()


def test_the_last_output_is_sent_without_a_look_at_the_books(monkeypatch):
    watched = Watched(monkeypatch)
    watched.serve("a")
    assert watched.events == ["sent", "sent"]


def test_at_rest_the_books_are_checked_once(monkeypatch):
    watched = Watched(monkeypatch)
    watched.engine.rest()
    assert not watched.events
    watched.serve("a")
    watched.engine.rest()
    watched.engine.rest()
    assert watched.events == ["sent", "sent", "check"]
    watched.serve("b")
    watched.engine.rest()
    assert watched.events.count("check") == 2


def test_on_request_every_step_is_checked_before_it_is_told(monkeypatch):
    watched = Watched(monkeypatch, every_step=True)
    watched.serve("a")
    watched.engine.rest()
    assert watched.events == ["check", "sent"] * 2


class Waiting:
    """An engine whose steps have nothing to tell: it waits for a grammar."""

    has_work = True

    def __init__(self) -> None:
        self.on_step = None
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        time.sleep(0.002)

    def health(self) -> EngineHealth:
        return EngineHealth(alive=True, step_id=0, has_work=False)


def test_an_engine_that_waits_for_a_grammar_gives_a_sign_of_life(monkeypatch):
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.02)
    engine = Waiting()
    ours, theirs = socket.socketpair()
    theirs.settimeout(300)
    with ours, theirs:
        thread = threading.Thread(target=EngineLoop(engine, ours, FrameDecoder()).run, args=([],))
        thread.start()
        theirs.recv(1 << 16)
        while engine.steps <= 2:  # a busy machine takes no step between some signs
            theirs.recv(1 << 16)
        theirs.sendall(encode_frame(Shutdown()))
        thread.join(timeout=120)
        assert not thread.is_alive()


def test_the_loop_rests_when_nothing_comes(monkeypatch):
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.02)
    watched = Watched(monkeypatch)
    watched.serve("a")
    ours, theirs = socket.socketpair()
    theirs.settimeout(300)
    with ours, theirs:
        engine_loop = EngineLoop(watched.engine, ours, FrameDecoder())
        thread = threading.Thread(target=engine_loop.run, args=([],))
        thread.start()
        theirs.recv(1 << 16)  # the first sign of life
        theirs.recv(1 << 16)
        theirs.sendall(encode_frame(Shutdown()))
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert watched.events == ["sent", "sent", "check"]


def test_a_long_step_is_no_silence_of_the_process():
    """Signs of life come from a thread of their own, whole, between the loop's frames."""
    engine = Waiting()
    engine.step = lambda: time.sleep(0.3)
    ours, theirs = socket.socketpair()
    theirs.settimeout(300)
    decoder, frames = FrameDecoder(), []
    with ours, theirs:
        serving = EngineLoop(engine, ours, FrameDecoder(), alive_seconds=0.01)
        thread = threading.Thread(target=serving.run, args=([],))
        thread.start()
        for number in range(50):
            serving.send(StepOutput(step_id=number, outputs=(), stats=EngineStats()))
        while sum(isinstance(frame, Alive) for frame in frames) < 20:
            frames += decoder.feed(theirs.recv(1 << 16))
        theirs.sendall(encode_frame(Shutdown()))
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert [frame.step_id for frame in frames if isinstance(frame, StepOutput)] == list(range(50))


@pytest.fixture
def collections(monkeypatch):
    """The generations that are collected, in order; Python's own collector is on again behind the test."""
    found = []
    monkeypatch.setattr(loop.gc, "collect", lambda generation=2: found.append(generation))
    yield found
    gc.enable()


def test_garbage_is_collected_between_steps_when_there_is_much_and_at_rest_once(monkeypatch, collections):
    count = 0
    monkeypatch.setattr(loop.gc, "get_count", lambda: (count, 0, 0))
    garbage = Garbage()
    assert not gc.isenabled()
    garbage.rest()
    garbage.after_step()
    assert collections == []
    garbage.rest()
    garbage.rest()
    assert collections == [2]
    count = Garbage.EVERY
    for _ in range(10):
        garbage.after_step()
    assert collections == [2, *[1] * 9, 2]


def test_the_loop_collects_behind_its_steps(monkeypatch, collections):
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.02)
    monkeypatch.setattr(Garbage, "EVERY", 0)
    watched = Watched(monkeypatch)
    ours, theirs = socket.socketpair()
    theirs.settimeout(300)
    with ours, theirs:
        serving = EngineLoop(watched.engine, ours, FrameDecoder(), garbage=Garbage())
        thread = threading.Thread(target=serving.run, args=([request("a", 20, 2)],))
        thread.start()
        decoder, frames = FrameDecoder(), []
        while not any(isinstance(frame, EngineHealth) for frame in frames):
            frames += decoder.feed(theirs.recv(1 << 16))
        theirs.sendall(encode_frame(Shutdown()))
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert collections == [1, 1, 2]
