"""What is done to each part of the table in docs/operations.md, and what must come of it: kill, stop, exception, slow,
full disk. Where a fault cannot happen to a part, or is planted by another command, the record says why.

Must not know: how a server is started.
"""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.processes import lives
from walk.scene import HUGE, PROMPTS, SCHEMA, Scene, chat

FAULTS = ("kill", "stop", "exception", "slow", "full disk")
MAIN, ENGINE, RANK = "quire_server.cli", "quire_engine.process", "quire_engine.process.rank"
LONG = "word " * 3000  # encoded in a thread
KEPT_PROMPT = "A prefix that is kept, " * 120  # longer than the shortest that goes to files
LEAST_KEPT = 32  # blocks: those of the shortest
OTHERS = 8  # such prompts fill the pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fault of one part: the server's flags, what is planted in its processes, and what is done then.

    `files`: what its folder has at the start, by name; `key`: what clients send.
    """

    act: Callable[[Scene], Awaitable[None]]
    flags: tuple[str, ...] = ()
    plants: tuple[dict[str, Any], ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    key: str = ""


Part = dict[str, Trial | str]  # by fault: what is tried, or why it cannot be


def plant(target: str, how: str, *, process: str = MAIN, after: int = 0, times: int = 1) -> dict[str, Any]:
    return {"process": process, "target": target, "how": how, "after": after, "times": times}


# ------------------------------------------------------------------------------------------------ what is done


async def _streams(scene: Scene) -> None:
    await scene.streams()
    await scene.live()


async def _streams_again(scene: Scene) -> None:
    await scene.streams()
    await scene.streams()
    await scene.live()


async def _signalled(
    program: str, number: signal.Signals, use: Callable[[Scene], Awaitable[None]], scene: Scene
) -> None:
    """A process gets a signal, is used, and is another one afterwards."""
    await use(scene)
    old = await scene.process(program)
    old.send_signal(number)
    await use(scene)
    await scene.replaced(program, old)
    await scene.live()


async def _engine_signalled(number: signal.Signals, scene: Scene) -> None:
    engine = await scene.process(ENGINE)

    async def disturb() -> None:
        engine.send_signal(number)

    await scene.streams(disturb)
    await scene.replaced(ENGINE, engine)
    await scene.live()


async def _rank_signalled(number: signal.Signals, scene: Scene) -> None:
    rank = await scene.process(RANK)

    async def disturb() -> None:
        rank.send_signal(number)

    await scene.streams(disturb)
    await scene.live()


async def _main_killed(scene: Scene) -> None:
    children = psutil.Process(scene.server.process.pid).children(recursive=True)
    scene.server.process.kill()
    scene.server.process.wait()
    await scene.until("the end of all children", lambda: not any(lives(each.pid) for each in children), 10.0)


async def _main_stopped(scene: Scene) -> None:
    process = psutil.Process(scene.server.process.pid)

    async def disturb() -> None:
        process.suspend()
        await asyncio.sleep(3.0)
        process.resume()

    await scene.streams(disturb)
    await scene.live()


async def _api_server_signalled(number: signal.Signals, scene: Scene) -> None:
    old = await scene.process("quire_server.api_servers")
    old.send_signal(number)
    await scene.replaced("quire_server.api_servers", old)
    await scene.until("two API servers", lambda: len(scene.processes("quire_server.api_servers")) == 2)
    await _answers_in_time(scene)


async def _answers_in_time(scene: Scene) -> None:
    """Connections that were open may have ended; new ones are answered."""
    for _ in range(20):
        with suppress(httpx.TransportError):
            await scene.streams()
            return
        await asyncio.sleep(0.5)
    raise AssertionError("no API server answers")


async def _chat(scene: Scene) -> None:
    await scene.post("/v1/chat/completions", chat())


async def _grammar(scene: Scene) -> None:
    """A schema that has not been checked before: a verdict that is known asks no process."""
    schema = {"type": "object", "properties": {f"n{uuid.uuid4().hex}": {"type": "integer"}}}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    await scene.post("/v1/chat/completions", chat(response_format=shape, max_tokens=30))


async def _huge(scene: Scene) -> None:
    await scene.post("/tokenize", {"prompt": HUGE})


async def _fails_once(path: str, asked: dict[str, Any], scene: Scene) -> None:
    """Only the request that the fault is in fails."""
    await scene.post(path, asked, status=500)
    await scene.post(path, asked)
    await _streams(scene)


async def _grammar_fails_once(scene: Scene) -> None:
    def asked(name: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {name: {"type": "integer"}}}  # an error of one grammar is remembered
        shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        return chat(response_format=shape, max_tokens=30)

    await scene.post("/v1/chat/completions", asked("one"), status={400, 500})
    await scene.post("/v1/chat/completions", asked("two"))
    await _streams(scene)


async def _slow_only(path: str, asked: dict[str, Any], scene: Scene) -> None:
    """A slow request of one client is the only slow thing."""
    slow = asyncio.create_task(scene.post(path, asked))
    await _streams(scene)
    await slow


async def _batch(scene: Scene) -> None:
    """A batch of four lines ends with four answers."""
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 4}}
        for i in range(4)
    ]
    content = "\n".join(json.dumps(line) for line in lines).encode()
    async with httpx.AsyncClient(base_url=scene.server.url, timeout=60) as http:
        file = await http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
        assert file.status_code == 200, file.text
        asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=asked)).json()
        async with asyncio.timeout(90):
            while batch["status"] not in {"completed", "failed", "expired"}:
                await asyncio.sleep(0.2)
                batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
    assert batch["status"] == "completed", batch
    assert batch["request_counts"]["completed"] == 4, batch


async def _batch_and_streams(scene: Scene) -> None:
    await asyncio.gather(_batch(scene), scene.streams())
    await scene.live()


async def _log_goes_on(scene: Scene) -> None:
    for _ in range(20):  # each time brings lines to write, few or many at once
        await _streams(scene)
        if (scene.folder / "fired").exists():
            break
    else:
        raise AssertionError("the fault has not come")
    await _streams(scene)
    await scene.logged("log lines were lost")


async def _stderr_goes_on(scene: Scene) -> None:
    """The engine prints its stacks, twice; the first time they cannot be passed on."""
    engine = await scene.process(ENGINE)
    engine.send_signal(signal.SIGUSR1)
    await scene.until("the fault", (scene.folder / "fired").exists)
    await asyncio.sleep(0.5)
    engine.send_signal(signal.SIGUSR1)
    await scene.logged("most recent call first")
    await _streams(scene)


async def _ends_in_time(scene: Scene) -> None:
    """Streams go on, and the server ends within its time."""
    await _streams(scene)
    scene.server.process.send_signal(signal.SIGTERM)
    await scene.until("the server's end", lambda: scene.server.process.poll() is not None, 25.0)
    assert scene.server.process.returncode == 0, scene.server.process.returncode


async def _kept(scene: Scene, done: Callable[[], bool]) -> None:
    """A long prompt's blocks are on their way to files; when they are, others take their place in the pool, and the
    prompt is asked for again."""
    asked = {"prompt": KEPT_PROMPT, "max_tokens": 8, "temperature": 0}
    first = await scene.post("/v1/completions", asked)
    await scene.until("the writer", done)
    for number in range(OTHERS):
        await scene.post("/v1/completions", {"prompt": f"{number}: {KEPT_PROMPT}", "max_tokens": 1})
    again = await scene.post("/v1/completions", asked)
    assert again.json()["choices"][0]["text"] == first.json()["choices"][0]["text"], "another answer"
    await _streams(scene)


async def _read_again(scene: Scene) -> None:
    await _kept(scene, lambda: scene.server.metric("quire_kept_kv_blocks") >= LEAST_KEPT)


async def _not_written(scene: Scene) -> None:
    await _kept(scene, lambda: "KV blocks are written no more" in scene.server.log())


async def _counts_go_on(scene: Scene) -> None:
    """The file cannot be written for some seconds; then it has all that was counted meanwhile."""
    await scene.streams()
    await scene.logged("cannot be written")
    await scene.streams()
    await scene.until("a file with the counts", lambda: sum(_counted(scene.folder / "usage.json")) == 2 * len(PROMPTS))


def _counted(file: Path) -> Iterator[int]:
    """The requests that a file of usage has, of each day, tenant and model."""
    for tenants in json.loads(file.read_text())["days"].values():
        for models in tenants.values():
            yield from (counts["requests"] for counts in models.values())


async def _beyond_help(scene: Scene) -> None:
    await scene.beyond_help()
    await scene.streams()


async def _begins_anew(task: str, scene: Scene) -> None:
    """The task fails, is logged, and does its work again."""
    await scene.logged(f"the task {task} has failed")
    await scene.until("its next round", lambda: len(scene.fired()) == 1)
    await scene.live(seconds=1.0)
    _, tasks = await asyncio.to_thread(scene.names, scene.server.process.pid)
    assert task in tasks, tasks
    await scene.streams()


async def _silent_api_server_after_failure(scene: Scene) -> None:
    """The watch has failed; it begins anew and still ends an API server that is silent."""
    await scene.logged("the task api-servers-watch has failed")
    await _api_server_signalled(signal.SIGSTOP, scene)


async def _api_server_after_failure(scene: Scene) -> None:
    old = await scene.process("quire_server.api_servers")
    old.kill()
    await scene.logged("the task api-server-")
    await scene.until("two API servers", lambda: len(scene.processes("quire_server.api_servers")) == 2)
    await _answers_in_time(scene)


async def _supervision_fails(scene: Scene) -> None:
    """The server cannot watch its engine: it ends, with a line, and leaves nothing."""
    children = psutil.Process(scene.server.process.pid).children(recursive=True)
    (await scene.process(ENGINE)).kill()
    await scene.until("the server's end", lambda: scene.server.process.poll() is not None)
    assert scene.server.process.returncode != 0
    await scene.until("the end of all children", lambda: not any(lives(each.pid) for each in children), 10.0)


async def _learn(scene: Scene) -> None:
    """The page's stream of events goes on after the failure."""
    seen = 0
    asking = httpx.AsyncClient(base_url=scene.server.url, timeout=60)
    async with asking as http, asyncio.timeout(60), http.stream("GET", "/learn/events") as events:
        assert events.status_code == 200, events.status_code
        async for line in events.aiter_lines():
            seen += line.startswith("data:")
            if seen >= 2 and scene.fired():
                break
    await _streams(scene)


async def _deep_check(scene: Scene) -> None:
    assert (await scene.get("/health/deep")).status_code == 500
    assert (await scene.get("/health/deep")).status_code == 200
    await _streams(scene)


async def _model_fails_once(scene: Scene) -> None:
    asked = {"model": "b", "prompt": "a", "max_tokens": 2}
    await scene.post("/v1/completions", asked, status=503)
    await scene.streams()  # of the other model
    await asyncio.sleep(6.0)
    await scene.post("/v1/completions", asked)


# ------------------------------------------------------------------------------------------------ the record

SIGNALS = "a signal is for a whole process: its row"
NO_FILE = "it writes no file"
NO_WAIT = "it waits for nothing outside of the server"
WAITED_FOR = "whoever waits for it is a request of its own: its row"
BITS = "its times are the step's"
BY_RANKS = "needs GPUs: `make rank-test` kills and stops such ranks on simulated ones"
BY_NODES = "needs a second machine's server: `make replica-test` kills, stops and cuts off nodes under streams"
BY_OFFLINE = "no server has it: tests/model/test_llm_life.py"
BY_COMMAND = "a command has it, which ends with one line: tests/unit/server/commands"
BATCHES = ("--batch-dir", "{folder}/batches")
KEPT = ("--kv-offload-dir", "{folder}/kv")
KEY = "key-of-a-tenant"
TENANTS = f"tenants: [{{name: a, key_sha256: [{sha256(KEY.encode()).hexdigest()}]}}]\nusage_file: usage.json\n"
SERVERS = ("--api-server-count", "2")
EVENTS = ("--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "ipc://{folder}/events"}')
DEAD_COLLECTOR = ("--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces")
DEAD_METERS = ("--otlp-metrics-endpoint", "http://127.0.0.1:9/v1/metrics")
RANKS = ("--tensor-parallel-size", "2")


def thread(**tried: Trial | str) -> Part:
    """A thread or a task: signals are the process's."""
    return {"kill": SIGNALS, "stop": SIGNALS, "slow": NO_WAIT, "full disk": NO_FILE} | _named(tried)


def elsewhere(why: str) -> Part:
    return dict.fromkeys(FAULTS, why)


def _named(tried: dict[str, Trial | str]) -> Part:
    return {name.replace("_", " "): each for name, each in tried.items()}


def planted(target: str, how: str, act: Callable[[Scene], Awaitable[None]], *flags: str, **more: Any) -> Trial:
    return Trial(act=act, flags=flags, plants=(plant(target, how, **more),))


def signals(program: str, use: Callable[[Scene], Awaitable[None]], **more: Trial | str) -> Part:
    return {
        "kill": Trial(act=partial(_signalled, program, signal.SIGKILL, use)),
        "stop": Trial(act=partial(_signalled, program, signal.SIGSTOP, use)),
        "full disk": NO_FILE,
    } | _named(more)


_T, _L, _E = "quire_server.text", "quire_server.logs.output", "quire_engine.execution"
_STORE, _FLEET = "quire_server.batches.store:BatchStore", "quire_server.api_servers.fleet"
LIMITS = "an exception is the question's answer, 400, and too much time its limit: `make hostile`, held-workers"
GRAMMARS = f"{_E}.constrained.grammars:Grammars"
FILES = f"{_E}.kv.block_files:BlockFiles"

RECORD: dict[tuple[str, str], Part] = {
    ("process", "quire serve"): {
        "kill": Trial(act=_main_killed),
        "stop": Trial(act=_main_stopped),
        "exception": "its requests and tasks have rows; what ends its loop is the row of `listener`",
        "slow": "what takes long runs beside the loop; `make hostile` measures the loop",
        "full disk": "its files have rows: `batches`, `usage`, `log writer`",
    },
    ("process", "quire_engine.process"): {
        "kill": Trial(act=partial(_engine_signalled, signal.SIGKILL)),
        "stop": Trial(act=partial(_engine_signalled, signal.SIGSTOP)),
        "exception": planted(
            "quire_engine.process.loop:EngineLoop.drain_inbox", "raise", _streams_again, process=ENGINE, after=40
        ),
        "slow": planted("quire_engine.engine:Engine.step", "slow:2", _streams, process=ENGINE, after=30),
        "full disk": "its files have rows: `kv writer`, `kv files`, `packed weights`",
    },
    ("process", "quire_engine.process.rank"): {
        "kill": Trial(act=partial(_rank_signalled, signal.SIGKILL), flags=RANKS),
        "stop": Trial(act=partial(_rank_signalled, signal.SIGSTOP), flags=RANKS),
        "exception": "a rank computes what the engine does: a step that raises is the engine's, `make rank-test`",
        "slow": BITS,
        "full disk": NO_FILE,
    },
    ("process", "quire_engine.process.device_rank"): elsewhere(BY_RANKS),
    ("process", "quire_server.api_servers"): {
        "kill": Trial(act=partial(_api_server_signalled, signal.SIGKILL), flags=SERVERS),
        "stop": Trial(act=partial(_api_server_signalled, signal.SIGSTOP), flags=SERVERS),
        "exception": "an exception is its request's, or its link's, which ends it as a kill does",
        "slow": "it answers counts every half second, or is ended as one that is stopped",
        "full disk": NO_FILE,
    },
    ("process", "template_worker.py"): signals("template_worker.py", _chat, exception=LIMITS, slow=LIMITS),
    ("process", "grammar_worker.py"): signals("grammar_worker.py", _grammar, exception=LIMITS, slow=LIMITS),
    ("process", "tokenizer_worker.py"): signals("tokenizer_worker.py", _huge, exception=LIMITS, slow=LIMITS),
    ("process", "quire_engine.tools"): elsewhere(
        "it ends with its answer: tests/unit/server/engine/test_json_child.py"
    ),
    ("thread", "text"): thread(
        exception=planted(
            "quire_server.text.tokenizer:TextTokenizer.encode",
            "raise",
            partial(_fails_once, "/tokenize", {"prompt": LONG}),
            after=0,
        ),
        slow=planted(
            "quire_server.text.tokenizer:TextTokenizer.encode",
            "slow:2",
            partial(_slow_only, "/tokenize", {"prompt": LONG}),
        ),
    ),
    ("thread", "AnyIO worker thread"): thread(
        exception=planted(
            "quire_server.http.body:BodyReader._validated",
            "raise",
            partial(_fails_once, "/tokenize", {"prompt": LONG * 4}),
        ),
        slow=planted(
            "quire_server.http.body:BodyReader._validated",
            "slow:2",
            partial(_slow_only, "/tokenize", {"prompt": LONG * 4}),
        ),
    ),
    ("thread", "asyncio"): elsewhere("without uvloop it is `uvloop`"),
    ("thread", "uvloop"): elsewhere("what runs there are the waits of tasks that have rows: `usage`, `batch-checks`"),
    ("thread", "tokenizer-reaper"): elsewhere("it waits for the end of a process that was killed"),
    ("thread", "batches"): thread(
        exception=planted(f"{_STORE}.finish_line", "raise", _batch_and_streams, *BATCHES),
        slow=planted(f"{_STORE}.finish_line", "slow:2", _batch_and_streams, *BATCHES),
        full_disk=planted(f"{_STORE}.finish_line", "full", _batch_and_streams, *BATCHES),
    ),
    ("thread", "log writer"): thread(
        exception=planted(f"{_L}:LineWriter._write", "raise", _log_goes_on, after=3),
        slow=planted(f"{_L}:LineWriter._write", "slow:3", _streams, after=3),
        full_disk=planted(f"{_L}:LineWriter._write", "full", _log_goes_on, after=3, times=3),
    ),
    ("thread", "children's stderr"): thread(exception=planted(f"{_L}:Output._put", "raise", _stderr_goes_on)),
    ("thread", "kv-events"): thread(
        exception=planted(
            "quire_server.engine.kv_events.publisher:Publisher._publish", "raise", _streams_again, *EVENTS
        ),
        slow=planted("quire_server.engine.kv_events.publisher:Publisher._publish", "slow:2", _streams, *EVENTS),
    ),
    **{
        ("thread", name): thread(
            exception=Trial(act=_ends_in_time, flags=flags),
            slow="a collector that is gone is the slowest: it is waited for at the end",
        )
        for name, flags in (
            ("OtelBatchSpanRecordProcessor", DEAD_COLLECTOR),
            ("OtelPeriodicExportingMetricReader", DEAD_METERS),
        )
    },
    ("thread", "traces"): elsewhere("it runs at the end: the row of `OtelBatchSpanRecordProcessor`"),
    ("thread", "meters"): elsewhere("it runs at the end: the row of `OtelPeriodicExportingMetricReader`"),
    ("thread", "quire"): elsewhere(BY_OFFLINE),
    ("thread", "alive"): thread(
        exception=planted(
            "quire_engine.process.loop:EngineLoop._tell_alive",
            "raise",
            _streams_again,
            "--replicas",
            "2",
            process=ENGINE,
        ),
    ),
    ("thread", "adapters"): elsewhere(
        "`make hostile`, planted-adapters: 20 files and paths, and disks that do not answer"
    ),
    ("thread", "adapter"): elsewhere("the same in a process that ends with its answer"),
    ("thread", "grammars"): thread(
        exception=planted(f"{GRAMMARS}.warm_up", "panic", _grammar_fails_once, process=ENGINE),
        slow=planted(
            f"{GRAMMARS}._new",
            "slow:2",
            _slow_grammar := partial(
                _slow_only,
                "/v1/chat/completions",
                chat(
                    response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
                    max_tokens=30,
                ),
            ),
            process=ENGINE,
        ),
    ),
    ("thread", "kv writer"): thread(
        exception=planted(f"{FILES}.write", "raise", _not_written, *KEPT, process=ENGINE),
        slow=planted(f"{FILES}.write", "slow:3", _read_again, *KEPT, process=ENGINE),
        full_disk=planted(f"{FILES}.write", "full", _not_written, *KEPT, process=ENGINE),
    ),
    ("thread", "kv reader"): thread(
        exception=planted(f"{FILES}.read", "raise", _read_again, *KEPT, process=ENGINE),
        slow=planted(f"{FILES}.read", "slow:3", _read_again, *KEPT, process=ENGINE),
    ),
    ("thread", "kv files"): elsewhere(
        "a CPU swaps nothing, and only a swap space has them: tests/unit/engine/execution/test_kv_files.py"
    ),
    **{("thread", name): elsewhere(BY_NODES) for name in ("kv fetcher", "kv accept", "kv lender")},
    ("thread", "packed weights"): elsewhere(
        "the embedded model is smaller than what is kept: tests/unit/engine/execution/test_packed_files.py"
    ),
    **{
        ("thread", name): elsewhere("the start fails with one line: tests/model/test_loading.py")
        for name in ("weights", "compiler", "pack")
    },
    ("thread", "rank"): elsewhere(BY_RANKS),
    ("thread", "reference"): elsewhere("a step that raises is the step's: `make hostile`, step-raises"),
    ("thread", "verify"): elsewhere(BY_COMMAND),
    ("task", "event-loop-watch"): thread(exception=planted("quire_server.app:watch_event_loop", "raise", _beyond_help)),
    ("task", "seconds"): thread(
        exception=planted("quire_server.metrics.metrics:Metrics.tick", "raise", _beyond_help, after=3)
    ),
    ("task", "usage"): thread(
        exception=planted("quire_server.metrics.usage:UsageBook.save", "raise", _beyond_help),
        slow="it writes in a thread, and nobody waits for it",
        full_disk=Trial(
            act=_counts_go_on,
            flags=("--tenants", "{folder}/tenants.yaml"),
            plants=(plant("quire_server.metrics.usage:UsageBook._write", "full", after=1, times=3),),
            files={"tenants.yaml": TENANTS},
            key=KEY,
        ),
    ),
    ("task", "models"): elsewhere("`make models-test`: kills at each phase of a swap, a model that cannot be loaded"),
    ("task", "model"): elsewhere("`make models-test`: kills at each phase of a swap, a model that cannot be loaded"),
    ("task", "batches"): thread(
        exception=planted(
            "quire_server.batches.runner:BatchRunner._round", "raise", _batch_and_streams, *BATCHES, after=1
        ),
        full_disk=planted(f"{_STORE}.begin", "full", _batch_and_streams, *BATCHES),
    ),
    ("task", "batch-checks"): thread(
        exception=planted("quire_server.batches.checking:InputChecks._next", "raise", _batch_and_streams, *BATCHES),
        slow=planted(f"{_STORE}.add_lines", "slow:2", _batch_and_streams, *BATCHES),
        full_disk=planted(f"{_STORE}.add_lines", "full", _batch_and_streams, *BATCHES),
    ),
    ("task", "memory"): thread(
        exception=planted("quire_server.http.memory:MemoryReturn.look", "raise", partial(_begins_anew, "memory"))
    ),
    ("task", "stats"): thread(
        exception=planted("quire_server.metrics.metrics:Metrics.throughput", "raise", partial(_begins_anew, "stats"))
    ),
    ("task", "listener"): elsewhere("what ends it ends the server: tests/api/test_listener.py"),
    ("task", "engine-supervisor"): thread(
        exception=planted("quire_server.engine.supervisor:Supervisor._account_for", "raise", _supervision_fails)
    ),
    ("task", "api-server"): thread(
        exception=planted(f"{_FLEET}:ApiServers._run", "raise", _api_server_after_failure, *SERVERS, after=2)
    ),
    ("task", "api-servers-watch"): thread(
        exception=planted(
            f"{_FLEET}:ApiServers._ask_each",
            "raise",
            _silent_api_server_after_failure,
            *SERVERS,
            after=4,
        )
    ),
    **{
        ("task", name): elsewhere(BY_NODES)
        for name in (
            "nodes",
            "node",
            "node-accept",
            "node-watch",
            "node-model",
            "node-handshake",
            "node-session",
            "node-metrics",
        )
    },
    ("task", "learn-watch"): thread(
        exception=planted("quire_server.learning.watch:Watch._ask", "raise", _learn, "--set", "learn=true", after=1)
    ),
    ("task", "deep-check"): thread(exception=planted("quire_server.answering.deep_check:_run", "raise", _deep_check)),
    **{
        ("task", name): elsewhere("it is one order or request, whose answer has the error: tests/api")
        for name in ("reload", "forwarded-request")
    },
    ("task", "service manager"): elsewhere(
        "systemd ends the server: tests/unit/server/programs/test_service_manager.py"
    ),
}
