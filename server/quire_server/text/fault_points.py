"""Fault injection in text processing, for tests: a token whose decoding raises, processes that stop.

Promises: a server without faults does not call this. Must not know: requests, HTTP.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from itertools import count

from quire_engine.contract.config import Fault, FaultPoint
from quire_server.text.grammar_check import GrammarCheck
from quire_server.text.prompt import ChatTemplate
from quire_server.text.tokenizer import TextTokenizer
from quire_server.text.worker_process import WorkerProcess


def plant(
    faults: Iterable[Fault], tokenizer: TextTokenizer, prompts: ChatTemplate | None, grammars: GrammarCheck
) -> None:
    """Inject those of the faults that concern text processing."""
    processes_of: dict[FaultPoint, tuple[WorkerProcess, ...]] = {
        "template.hang": () if prompts is None else prompts.processes,
        "grammar.hang": grammars.processes,
    }
    for fault in faults:
        if fault.point == "detok.raise":
            tokenizer.token_bytes = _raising(tokenizer.token_bytes, fault.nth)
        hold = _holding(fault.nth)
        for process in processes_of.get(fault.point, ()):
            process.before_asking = hold


def _raising(spell: Callable[[int], bytes], nth: int) -> Callable[[int], bytes]:
    calls = count(1)

    def raising(token_id: int) -> bytes:
        if nth in (0, next(calls)):
            raise RuntimeError("injected: detok.raise")
        return spell(token_id)

    return raising


def _holding(nth: int) -> Callable[[int], None]:
    questions = count(1)

    def hold(pid: int) -> None:
        if nth in (0, next(questions)):
            os.kill(pid, signal.SIGSTOP)

    return hold
