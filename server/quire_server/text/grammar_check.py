"""Checks grammars before they reach the engine: compiles and tries them in processes that can be killed.

Promises: a grammar costs at most a few seconds and a bounded memory of another process, and does not block the event
loop; a refusal is a BadRequest with the reason; verdicts are cached. No process is started before the first grammar.
Must not know: wire models, the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio.to_thread
from anyio import CapacityLimiter

from quire_engine.contract.grammar_limits import GRAMMAR_LIMITS
from quire_server.errors import BadRequest, NotReady
from quire_server.text.worker_process import ProcessDied, WorkerProcess

_SCRIPT = Path(__file__).with_name("grammar_worker.py")
_NUM_PROCESSES = 2
_MEMORY_BYTES = 2**30 + 2**29
_TIME_LIMIT = 4.0  # seconds for one grammar, half of them CPU time
_PATIENCE = 2.0  # seconds that a request waits for a process
_LEAVING_SECONDS = (
    0.5  # time for a process to finish after its client has disconnected; a new one takes as long to start
)
_MAX_VERDICTS = 1024
_MAX_VERDICT_CHARS = 2**22

_OUT_OF_TIME = {signal.SIGPROF}
_OUT_OF_MEMORY = {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS}  # also a stack overflow, by deep nesting


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Rules in Lark, and a client's own grammar, to which the rules refer as @client."""

    rules: str
    client: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    grammar: str = ""  # the accepted grammar in the form for the engine
    refusal: str = ""


class GrammarCheck:
    """The grammar check of one model, for one event loop."""

    def __init__(self, tokenizer: Path, eos_token_ids: Iterable[int], *, time_limit: float = _TIME_LIMIT) -> None:
        """`tokenizer`: the folder of the model's tokenizer.json; `time_limit`: seconds per grammar."""
        setup: Mapping[str, object] = {
            "tokenizer": str(tokenizer / "tokenizer.json"),
            "eos_token_ids": list(eos_token_ids),
            "limits": GRAMMAR_LIMITS,
        }
        self._idle = [
            WorkerProcess(_SCRIPT, setup, time_limit=time_limit, memory_bytes=_MEMORY_BYTES)
            for _ in range(_NUM_PROCESSES)
        ]
        self.processes = tuple(self._idle)
        self._close = weakref.finalize(self, _stop_all, self.processes)
        self._turns = asyncio.Semaphore(_NUM_PROCESSES)
        self._threads: CapacityLimiter | None = None
        self._verdicts = _Verdicts()

    async def accept(self, grammar: Grammar, *, param: str, scope: str = "") -> str:
        """The grammar's text for the engine. Raises BadRequest, which names `param`, and NotReady.

        Verdicts are kept by `scope`: the time of an answer tells no tenant which grammars others have used.
        """
        key = hashlib.sha256(json.dumps([scope, grammar.rules, grammar.client]).encode()).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._ask(grammar)
            self._verdicts.put(key, verdict)
        if verdict.refusal:
            raise BadRequest(f"'{param}' cannot be enforced: {verdict.refusal}.", param=param)
        return verdict.grammar

    def close(self) -> None:
        """End the processes; also done when the object or the interpreter goes away."""
        self._close()

    async def _ask(self, grammar: Grammar) -> _Verdict:
        if self._threads is None:
            self._threads = CapacityLimiter(_NUM_PROCESSES)
        line = json.dumps({"rules": grammar.rules, "client": grammar.client})
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._turns.acquire()
        except TimeoutError:
            raise _busy() from None
        process = self._idle.pop()
        asking = asyncio.ensure_future(anyio.to_thread.run_sync(process.ask, line, limiter=self._threads))
        asking.add_done_callback(partial(self._take_back, process))  # when its thread has finished, not before
        try:
            answer = await asyncio.shield(asking)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(_LEAVING_SECONDS, _end, asking, process)
            raise
        except ProcessDied as died:
            if died.signal in _OUT_OF_TIME:
                return _Verdict(refusal="it takes too long to compile")
            if died.signal in _OUT_OF_MEMORY:
                return _Verdict(refusal="it takes too much memory to compile")
            raise _busy() from died  # the machine was too busy, or an operator killed the process
        if "grammar" in answer:
            return _Verdict(grammar=str(answer["grammar"]))
        return _Verdict(refusal=str(answer["error"]).rstrip(".") or "the reason is not known")

    def _take_back(self, process: WorkerProcess, asking: asyncio.Future[dict[str, object]]) -> None:
        self._idle.append(process)
        self._turns.release()
        if not asking.cancelled():
            asking.exception()  # mark the exception as retrieved, since the client may have disconnected


class _Verdicts:
    """An LRU cache of verdicts, bounded in number and in characters."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._chars = 0

    def get(self, key: bytes) -> _Verdict | None:
        verdict = self._kept.get(key)
        if verdict is not None:
            self._kept.move_to_end(key)
        return verdict

    def put(self, key: bytes, verdict: _Verdict) -> None:
        if key in self._kept:  # two requests compiled the same grammar at the same time
            return
        self._kept[key] = verdict
        self._chars += len(verdict.grammar)
        while len(self._kept) > _MAX_VERDICTS or self._chars > _MAX_VERDICT_CHARS:
            _, dropped = self._kept.popitem(last=False)
            self._chars -= len(dropped.grammar)


def _end(asking: asyncio.Future[dict[str, object]], process: WorkerProcess) -> None:
    """The client has disconnected: kill the process if it still compiles the grammar."""
    if not asking.done():
        process.kill()


def _busy() -> NotReady:
    return NotReady("The processes that check grammars are busy; retry later.", retry_after_seconds=1.0)


def _stop_all(processes: Iterable[WorkerProcess]) -> None:
    for process in processes:
        process.stop()
