"""One front at a node without sockets: what is too long, what it is told of others, which blocks it hears of."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from quire_engine.contract.errors import ProtocolError
from quire_engine.contract.types import (
    BeamParams,
    EngineStats,
    GenerationRequest,
    PrefixChanges,
    StopParams,
    TokenOutput,
)
from quire_engine.process.transport import Codec
from quire_server.engine.nodes import frames
from quire_server.engine.nodes.checks import wrong_in
from quire_server.engine.nodes.frames import NodeStep, request_shifted
from quire_server.engine.nodes.sessions import PrefixLedger, Session, ahead_of, entry_of
from quire_server.engine.recovery import JournalEntry, Quarantine
from support.fakes import make_plan
from support.supervising import request

SMALL = Codec({32: frames.NodeState, 33: NodeStep}, most_bytes=2000)


class FakeLink:
    """What a front gets, in frames of at most 2,000 bytes."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def send(self, frame: Any) -> None:
        SMALL.encode(frame)
        self.got.append(frame)


class FakeEngine:
    """Which requests a supervisor has."""

    def __init__(self) -> None:
        self.quarantine = Quarantine()
        self.live: dict[str, JournalEntry] = {}
        self.aborted: list[str] = []

    def adopt(self, entry: JournalEntry) -> None:
        self.live[entry.request.request_id] = entry

    def has(self, request_id: str) -> bool:
        return request_id in self.live

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.live.pop(request_id, None)


def session(owners: dict[str, Session] | None = None, now: float = 1000.0) -> tuple[Session, FakeLink, FakeEngine]:
    link, engine = FakeLink(), FakeEngine()
    made = Session("10.0.0.1:1", link, engine, {} if owners is None else owners, clock=lambda: now)  # type: ignore[arg-type]
    return made, link, engine


def test_an_output_that_is_too_long_ends_its_request_and_no_other() -> None:
    own, link, engine = session()
    for name in ("long", "short"):
        own.receive(request(name))
    outputs = [
        TokenOutput(request_id="long", token_ids=tuple(range(900))),
        TokenOutput(request_id="short", token_ids=(7,)),
    ]
    own.tell(outputs=outputs, step_id=3, stats=EngineStats(blocks_total=4))
    said = [output for step in link.got for output in step.step.outputs]
    assert [(each.request_id, each.token_ids, each.finish) for each in said] == [
        ("long", (), "error"),
        ("short", (7,), None),
    ]
    assert "too long" in (said[0].error or "")
    assert engine.aborted == ["long"]
    assert own.live == {"short"}


def test_ages_cross_and_clocks_do_not() -> None:
    own, _, engine = session(now=50.0)
    sent = request_shifted(_at(request("r"), arrival=900.0, deadline=907.5), -904.0)
    assert (sent.arrival_time, sent.deadline) == (-4.0, 3.5)
    own.receive(sent)
    got = engine.live["r"].request
    assert (got.arrival_time, got.deadline) == (46.0, 53.5)
    own.tell(stats=EngineStats(blocks_total=1, kv_waiting_since=49.0))
    assert own._stats.kv_waiting_since == -1.0


def _at(asked: Any, *, arrival: float, deadline: float) -> Any:
    return replace(asked, arrival_time=arrival, deadline=deadline)


def test_a_front_hears_of_the_load_of_others_and_of_cached_blocks_in_order() -> None:
    owners: dict[str, Session] = {}
    (one, link, _), (other, _, _) = session(owners), session(owners)
    other.receive(request("a", tuple(range(30))))
    other.receive(request("b", tuple(range(5))))
    assert (ahead_of([one, other], one), ahead_of([one, other], other)) == ((35, 2), (0, 0))
    other.tell(outputs=[TokenOutput(request_id="a", token_ids=(1,))], stats=EngineStats())
    assert ahead_of([one, other], one) == (5, 2)
    ledger = PrefixLedger(3)
    ledger.apply(PrefixChanges(number=1, registered=(1, 2), depths=(0, 1)))
    ledger.apply(PrefixChanges(number=2, registered=(3, 4), depths=(0, 0), forgotten=(2,)))
    one.tell(stats=EngineStats(), prefixes=ledger.snapshot())
    one.tell(stats=EngineStats(), prefixes=PrefixChanges(number=9, forgotten=(1,)))
    told = [step.step.prefixes for step in link.got]
    assert [each.number for each in told] == [1, 2]
    assert (told[0].registered, told[0].depths) == ((1, 3, 4), (0, 0, 0))
    one.forget_prefixes()
    one.tell(stats=EngineStats(), prefixes=PrefixChanges(number=1, registered=(5,), depths=(0,)))
    assert link.got[-1].step.prefixes.number == 1


def test_an_id_in_use_and_a_request_in_quarantine_are_answered() -> None:
    own, link, engine = session()
    own.receive(request("r"))
    own.receive(request("r", (9,)))
    engine.quarantine.add(request("bad", (6, 6, 6)), time.monotonic())
    own.receive(request("alike", (6, 6, 6)))
    ends = [(output.request_id, output.error, output.culprit) for step in link.got for output in step.step.outputs]
    assert ends[0] == ("r", "the request's id is in use at the node", False)
    assert ends[1][0] == "alike"
    assert ends[1][2] is True
    assert list(engine.live) == ["r"]
    with pytest.raises(ProtocolError, match="which no front sends"):
        own.receive(EngineStats())


def test_a_moved_requests_entry_begins_with_its_tokens() -> None:
    moved = replace(request("r", n=2), resumed_token_ids=((1, 2), (3,)), finished_choices=(1,))
    entry = entry_of(moved)
    assert entry.has_tokens
    entry.record(TokenOutput(request_id="r", token_ids=(5,)))
    assert entry.resumed_request().resumed_token_ids == ((1, 2, 5), (3,))
    assert entry.record(TokenOutput(request_id="r", finish="length"))
    assert entry_of(request("fresh")).resumed_request().resumed_token_ids == ()


PLAN = make_plan(max_model_len=64)
SAMPLED = request("r").sampling
ODD: dict[str, GenerationRequest] = {
    "no prompt": request("r", ()),
    "a long prompt": request("r", (1,) * 65),
    "a token of 2^40": request("r", (1, 1 << 40)),
    "a token below 0": request("r", (-1,)),
    "many tokens": request("r", tokens=1 << 62),
    "no weight": replace(request("r"), weight=0.0),
    "no number": replace(request("r"), weight=float("nan")),
    "an infinite time": replace(request("r"), deadline=float("inf")),
    "a large seed": replace(request("r"), sampling=replace(SAMPLED, seed=1 << 63)),
    "no probability": replace(request("r"), sampling=replace(SAMPLED, top_p=-1.0)),
    "no temperature": replace(request("r"), sampling=replace(SAMPLED, temperature=float("nan"))),
    "a bias of a token": replace(request("r"), sampling=replace(SAMPLED, logit_bias=((1 << 40, 1.0),))),
    "an infinite bias": replace(request("r"), sampling=replace(SAMPLED, logit_bias=((1, float("inf")),))),
    "a banned token": replace(request("r"), sampling=replace(SAMPLED, banned_sequences=((1, 1 << 40),))),
    "log-probabilities": replace(request("r"), sampling=replace(SAMPLED, num_logprobs=1 << 40)),
    "a stop token": replace(request("r"), stop=StopParams(max_new_tokens=1, stop_token_ids=(1 << 40,))),
    "a guess": replace(request("r"), prediction=(1 << 40,)),
    "an answer": replace(request("r"), resumed_token_ids=((1 << 40,),)),
    "a choice": replace(request("r"), finished_choices=(7,)),
    "beams": replace(request("r"), beam=BeamParams(width=1 << 40)),
    "a long name": replace(request("r"), tenant="x" * 5000),
}


@pytest.mark.parametrize("name", ODD)
def test_a_request_that_no_server_would_make_ends_with_an_error_and_reaches_no_engine(name: str) -> None:
    own, link, engine = session()
    own._wrong_in = lambda asked: wrong_in(asked, PLAN)
    own.receive(ODD[name])
    (output,) = link.got[-1].step.outputs
    assert (output.finish, output.culprit) == ("error", True)
    assert output.error.startswith("the node cannot compute it: it has ")
    assert len(output.error) < 200
    assert not engine.live
    own.receive(request("good"))
    assert list(engine.live) == ["good"]


@pytest.mark.parametrize(
    "odd",
    [
        request("r", n=1_000_000),
        request("r", n=0),
        request("x" * 5000),
        replace(request("r"), resumed_token_ids=((),) * 9),
    ],
    ids=["a million choices", "no choice", "a long name", "answers of other choices"],
)
def test_a_request_that_no_refusal_fits_ends_the_connection(odd: GenerationRequest) -> None:
    own, link, engine = session()
    with pytest.raises(ProtocolError, match="a request"):
        own.receive(odd)
    assert not engine.live
    assert not link.got
