"""Graphs that are captured before a step needs them: which, how many, and that steps find them."""

from __future__ import annotations

import logging
import socket
import threading

import pytest
import torch

from quire_engine.contract.types import EngineHealth
from quire_engine.execution import executor
from quire_engine.execution.gpu import graphs, warmup
from quire_engine.execution.gpu.graphs import Bucket, MixedBucket, StepGraphs
from quire_engine.execution.gpu.tables import DRAWS, LIMITS_K
from quire_engine.process import loop
from quire_engine.process.loop import EngineLoop
from quire_engine.process.transport import FrameDecoder, Shutdown, encode_frame
from support.both_runners import Both
from support.model_steps import random_ids
from support.simulated_device import SimulatedDevice


def told(**options) -> Both:
    both = Both(seed=61, **options)
    both.story.add(0, random_ids(14, 0), 14)
    both.story.add(1, random_ids(3, 1), 9, temperature=0.9, seed=4)
    both.story.run()
    return both


def test_steps_find_the_graphs_that_were_captured_ahead():
    both = told(mixed_rows=16)
    assert both.executor.capture_ahead(0.0) == both.executor.prepare() + 1
    assert both.executor.capture_ahead(60.0) == both.executor.prepare() == 0
    captures = both.device.captures
    both.check()
    assert both.device.captures == captures
    assert both.device.replays >= len(both.story.steps) - 1, "all but a step with more sequences than two"


def test_a_start_captures_for_a_while_and_tells_how_many_are_left(monkeypatch, caplog):
    monkeypatch.setattr(executor, "_CAPTURE_SECONDS", 0.0)
    both = told()
    with caplog.at_level(logging.INFO):
        both.executor.capture_graphs()
    assert both.device.captures == 2, "the largest, and one more"
    left = len(both.runner._graphs.missing())
    assert f"{left} graphs of steps are left to be captured" in caplog.text


def test_none_is_captured_while_a_step_is_in_flight():
    both = told()
    batch = both.story.steps[0].batch
    both.executor.launch(batch)
    assert both.executor.prepare() == 0
    assert both.device.captures == 0
    both.executor.collect()
    assert both.executor.prepare() > 0
    assert both.device.captures == 1


def test_short_contexts_come_first_and_many_rows_before_few():
    found = StepGraphs(SimulatedDevice(), max_rows=4, max_context=5000, mixed_rows=32).missing()
    assert found[:6] == [Bucket(size, 256, flags) for size in (4, 2, 1) for flags in (0, DRAWS)]
    assert found[6:8] == [MixedBucket(32, 2, 256), MixedBucket(16, 2, 256)]
    assert {bucket.context for bucket in found} == {256, 1024}, "longer ones when steps were that long"


def test_what_steps_needed_is_foreseen_for_other_sizes():
    device = SimulatedDevice()
    own = StepGraphs(device, max_rows=4, max_context=5000)
    with device.work():
        own.run(Bucket(1, 4096, LIMITS_K), lambda: torch.zeros(1))
    assert set(own.missing()) >= {Bucket(4, 4096, 0), Bucket(2, 256, LIMITS_K)}
    assert Bucket(1, 4096, LIMITS_K) not in own.missing()


def test_room_is_left_for_what_nobody_foresaw(monkeypatch):
    monkeypatch.setattr(graphs, "_MOST_AHEAD", 3)
    both = told()
    assert both.executor.capture_ahead(60.0) == 0
    assert both.device.captures == 3
    both.check()
    assert both.device.captures > 3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: capturing")])
def test_where_one_cannot_be_captured_no_other_is_tried(error):
    both = told()

    def full():
        raise error

    both.device.out_of_memory = full
    assert both.executor.capture_ahead(60.0) == 0
    assert both.device.captures == 0
    both.check()


def test_a_step_for_which_there_is_no_memory_is_left_out(monkeypatch):
    both = told()

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(both.runner._warmup, "_run_empty", full)
    assert both.executor.prepare() == 0
    assert both.device.released == 1


class Chained:
    """A model that has decodes in fewer launches; they give other numbers here, so that it shows who computed."""

    chains_decodes = True

    def __init__(self, decoder) -> None:
        self._decoder, self.asked = decoder, []

    def __getattr__(self, name):
        return getattr(self._decoder, name)

    def forward(self, step, kv):
        self.asked.append((len(step.positions), step.single_ops))
        return self._decoder.forward(step, kv)


def _measured(monkeypatch, seconds) -> Both:
    """Both runners, where a graph's replay takes what `seconds` gives for (rows, single ops), by the clock."""
    both = told(wrap=Chained)
    clock, model = iter([]), both.runner._model

    def replayed():
        rows, single = model.asked[-1]
        return iter([0.0, seconds(rows, single)] * warmup._MEASURED_REPLAYS)

    def now() -> float:
        nonlocal clock
        value = next(clock, None)
        if value is None:
            clock = replayed()
            value = next(clock)
        return value

    monkeypatch.setattr(warmup.time, "perf_counter", now)
    both.executor.choose_launches()
    monkeypatch.undo()
    return both


def test_fewer_launches_are_used_where_they_were_measured_to_be_faster(monkeypatch, caplog):
    with caplog.at_level(logging.INFO):
        both = _measured(monkeypatch, lambda rows, single: 2.0 if single == (rows == 8) else 3.0)
    assert both.runner._launches.chained == {1: True, 8: False}
    assert "1 decodes: 2000.000 ms in fewer launches, 3000.000 ms by single ops" in caplog.text
    assert [both.runner._launches.is_chained(rows) for rows in (1, 2, 4, 8, 16)] == [True, False, False, False, False]
    asked = both.runner._model.asked
    asked.clear()
    both.check()
    assert {single for rows, single in asked if rows == 1} == {False}
    assert {single for rows, single in asked if rows > 1} == {True}, "more decodes, and prompts"


def test_without_a_measurement_single_ops_are_used(monkeypatch, caplog):
    both = told(wrap=Chained)

    def fails(body):
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as planted:
        planted.setattr(both.device, "capture", fails)
        both.executor.choose_launches()
    assert "computed by single ops: no such kernel" in caplog.text
    both.check()
    assert all(single for _, single in both.runner._model.asked[2:])
    plain = told()
    plain.executor.choose_launches()
    assert not plain.runner._launches.chained


class Idle:
    """An engine with nothing to compute and some pieces to prepare; a frame comes after two of them."""

    has_work = False

    def __init__(self, frame_after: int) -> None:
        self.pieces, self.frame_after = 0, frame_after
        self.arrived = threading.Event()
        self.ask = lambda: None

    def rest(self) -> None:
        pass

    def health(self) -> EngineHealth:
        return EngineHealth(alive=True, step_id=0, has_work=False)

    def prepare(self) -> bool:
        self.pieces += 1
        if self.pieces == self.frame_after:
            self.ask()
        return True


def test_an_idle_engine_prepares_until_a_frame_arrives(monkeypatch):
    monkeypatch.setattr(loop, "HEARTBEAT_SECONDS", 0.02)
    engine = Idle(frame_after=3)
    ours, theirs = socket.socketpair()
    engine.ask = lambda: theirs.sendall(encode_frame(Shutdown()))
    with ours, theirs:
        thread = threading.Thread(target=EngineLoop(engine, ours, FrameDecoder()).run, args=([],))
        thread.start()
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert engine.pieces == 3
