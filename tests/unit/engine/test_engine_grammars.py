"""Requests whose grammars are being compiled: they wait outside of the scheduler, and nobody waits for them."""

from __future__ import annotations

from dataclasses import replace

from quire_engine.contract.types import GenerationRequest, StepOutput, TokenOutput
from quire_engine.engine import Engine
from quire_engine.scheduling.scheduler import Scheduler
from support.fake_executor import FakeExecutor, request
from support.limits import scheduler_config


class FakeGrammars:
    """A compiler that is ready with a grammar when it is told to be."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ready: set[str] = set()
        self.waited = self.warmed = 0
        self.ready_after = -1  # waits

    def prepare(self, text: str, scope: str) -> bool:
        if text not in self.ready:
            self.begun.append(text)
        return text in self.ready

    def error(self, text: str) -> str | None:
        return "the grammar is wrong" if text == "wrong" else None

    def wait(self, seconds: float) -> None:
        assert seconds < 0.1, "an abort may come"
        self.waited += 1
        if self.waited == self.ready_after:
            self.ready |= set(self.begun)

    def warm_up(self) -> None:
        self.warmed += 1


def with_grammar(name: str, grammar: str, **options) -> GenerationRequest:
    plain = request(name, **options)
    return replace(plain, sampling=replace(plain.sampling, grammar=grammar))


class Told:
    def __init__(self) -> None:
        self.grammars = FakeGrammars()
        config = scheduler_config(num_blocks=64)
        self.engine = Engine(Scheduler(config), FakeExecutor(16), grammars=self.grammars, check_invariants=True)
        self.engine.on_step = self.take
        self.outputs: list[TokenOutput] = []

    def take(self, step: StepOutput) -> None:
        self.outputs += step.outputs

    def names(self) -> list[str]:
        return [output.request_id for output in self.outputs if output.finish is not None]


def test_others_go_on_while_a_grammar_is_compiled():
    told = Told()
    told.engine.submit(with_grammar("slow", "g"))
    told.engine.submit(request("plain"))
    while told.names() != ["plain"]:
        told.engine.step()
    assert told.grammars.waited == 0
    assert told.engine.has_work
    assert not told.engine.health().has_work, "a step counter that does not move is no hang then"
    told.grammars.ready.add("g")
    while told.engine.has_work:
        told.engine.step()
    assert told.names() == ["plain", "slow"]


def test_with_nothing_else_to_do_it_is_waited_for():
    told = Told()
    told.grammars.ready_after = 3
    told.engine.submit(with_grammar("slow", "g"))
    while told.engine.has_work:
        told.engine.step()
    assert told.names() == ["slow"]
    assert told.grammars.waited == 3


def test_a_grammar_that_is_none_ends_its_request_whether_it_was_known_before_or_not():
    told = Told()
    told.engine.submit(with_grammar("first", "wrong", n=2))
    told.grammars.ready.add("wrong")
    told.engine.submit(with_grammar("second", "wrong"))
    while told.engine.has_work:
        told.engine.step()
    assert sorted(told.names()) == ["first", "first", "second"]
    assert {(output.error, output.culprit) for output in told.outputs} == {("the grammar is wrong", True)}


def test_who_waits_for_a_grammar_can_be_aborted():
    told = Told()
    told.engine.submit(with_grammar("slow", "g"))
    told.engine.abort("slow")
    told.engine.step()
    assert not told.engine.has_work
    told.grammars.ready.add("g")
    assert told.outputs == []


def test_the_first_rest_prepares_for_the_first_grammar():
    told = Told()
    told.engine.rest()
    assert told.grammars.warmed == 1
