"""`quire bench` against real listeners: the server with a fake engine, and servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import pytest

from quire_bench.arguments import parse_arguments
from quire_bench.benchmark import run_benchmark
from quire_bench.client import Client
from quire_bench.load import open_loop
from quire_bench.measures import Measures, measure
from quire_bench.records import Record, Run
from quire_bench.servers import BenchError, Server, discover
from quire_bench.workload import Job, LoadPoint, Span, Workload, jobs
from quire_server.state import ServerState
from support.events import until
from support.fakes import FakeEngine, listening, make_app, make_state

pytestmark = pytest.mark.anyio
VOCAB = 200  # the fake's tokens are bytes; below 256 are no special ones


def workload(**changes: object) -> Workload:
    lengths = {"input": Span(low=3, high=9), "output": Span(low=2, high=6), "vocab": VOCAB}
    return Workload(**(lengths | changes))


@contextlib.asynccontextmanager
async def quire(state: ServerState | None = None, **options: object) -> AsyncIterator[Server]:
    async with listening(make_app(state, **options)) as listener:
        info = await discover(listener.address, "quire", api_key=None, model=None)
        server = Server(info, api_key=None, timeout=20.0, temperature=0.0)
        try:
            yield server
        finally:
            await server.close()


async def load(server: Server, point: LoadPoint, work: Workload) -> Run:
    async with asyncio.timeout(30):
        return await server.run(point, jobs(work, point, 0), work.seconds)


def streams(count: int) -> LoadPoint:
    return LoadPoint(mode="concurrency", value=count)


# -- a server that works


async def test_counts_are_exact() -> None:
    engine = FakeEngine()
    async with quire(engine=engine) as server:
        run = await load(server, streams(3), workload(requests=20))
    measures = measure(run)
    assert (measures.requests, measures.ok, measures.errors, measures.wrong_length) == (20, 20, {}, 0)
    sent = list(jobs(workload(requests=20), streams(3), 0))
    assert measures.input_tokens == sum(len(job.prompt) for job in sent)
    assert measures.output_tokens == measures.chunks == sum(job.output_tokens for job in sent)
    assert sorted(request.prompt_token_ids for request in engine.submitted) == sorted(tuple(j.prompt) for j in sent)
    for request in engine.submitted:
        assert request.sampling.is_greedy
        assert request.stop.stop_token_ids == ()
    for record in run.records:
        assert record.due <= record.sent <= record.arrivals[0] <= record.arrivals[-1] <= record.ended
        assert record.arrivals == sorted(record.arrivals)


@pytest.mark.parametrize("count", [1, 4])
async def test_a_closed_loop_keeps_its_streams_busy(count: int) -> None:
    async with quire(engine=FakeEngine(step_seconds=0.002)) as server:
        run = await load(server, streams(count), workload(requests=24, output=Span(low=6, high=6)))
    in_flight = [number for _, number in run.in_flight]
    assert max(in_flight) == count
    assert len(in_flight) == 2 * 24
    assert min(in_flight[2 * count : -2 * count]) >= count - 1
    little = measure(run).little
    assert little.in_flight == pytest.approx(count, rel=0.3)


async def test_seconds_end_a_closed_loop() -> None:
    async with quire(engine=FakeEngine(step_seconds=0.005)) as server:
        run = await load(server, streams(2), workload(seconds=0.3))
    assert measure(run).errors == {}
    assert max(record.sent for record in run.records) < run.started + 0.4
    assert len(run.records) > 5


async def test_arrivals_do_not_wait_for_answers() -> None:
    """Nothing is answered until all have been sent: a loop that waits for answers would never get there."""
    engine = FakeEngine()
    engine.hold()
    point = LoadPoint(mode="rate", value=200.0)
    async with quire(engine=engine) as server:
        running = asyncio.create_task(load(server, point, workload(requests=30)))
        await until(lambda: len(engine.submitted) == 30)
        engine.release()
        run = await running
    dues = [job.due for job in jobs(workload(requests=30), point, 0)]
    assert sorted(record.due - run.started for record in run.records) == pytest.approx(dues)
    assert max(number for _, number in run.in_flight) == 30
    held = max(dues) - min(dues)
    assert max(record.arrivals[0] - record.due for record in run.records) >= held


async def test_waiting_for_the_sender_counts_as_latency() -> None:
    """A sender that was kept from sending makes requests late, not fast."""

    async def send(job: Job, record: Record) -> None:
        time.sleep(0.05)  # noqa: ASYNC251 - as a busy machine would
        record.sent = record.ended = time.perf_counter()
        record.arrivals, record.outcome = [record.ended], "ok"

    run = await open_loop(send, [Job(prompt=[1], output_tokens=1, due=0.0) for _ in range(4)])
    latencies = sorted(record.arrivals[0] - record.due for record in run.records)
    assert latencies[-1] >= 0.2
    assert measure(run).send_lag_ms >= 150


async def test_connections_are_kept() -> None:
    async with quire() as server:
        await load(server, streams(1), workload(requests=3))
        (first,) = server._client._idle
        await load(server, streams(1), workload(requests=3))
        assert server._client._idle == [first]


async def test_tokens_without_text_have_a_chunk_when_ids_are_asked_for() -> None:
    """The first three of four are bytes of an unfinished character."""
    emoji = tuple("😀".encode())
    found = []
    for token_ids in (False, True):
        engine = FakeEngine(replies=lambda request, choice: emoji)
        async with quire(engine=engine) as server:
            asking = Server(server.info, api_key=None, timeout=20.0, temperature=0.0, token_ids=token_ids)
            run = await load(asking, streams(1), workload(requests=1, output=Span(low=8, high=8)))
            await asking.close()
        found.append((measure(run).chunks, measure(run).output_tokens))
    assert found == [(2, 8), (8, 8)]


# -- servers that do not


async def test_refusals_are_counted_by_status() -> None:
    engine = FakeEngine()
    engine.hold()
    state = make_state(engine=engine, max_queued_sequences=2)
    async with quire(state) as server:
        running = asyncio.create_task(load(server, LoadPoint(mode="rate", value=500.0), workload(requests=6)))
        await until(
            lambda: b'quire_rejected_total{model_name="fake",reason="max_num_queued_reqs"} 4' in state.metrics.render()
        )
        engine.release()
        measures = measure(await running)
    assert measures.ok == 2
    assert measures.errors == {"http_429": 4}
    assert measures.error_examples[0].startswith("http_429: {")


async def test_a_request_that_does_not_fit_is_a_400() -> None:
    async with quire(max_model_len=32) as server:
        measures = measure(await load(server, streams(1), workload(requests=2, input=Span(low=40, high=40))))
    assert measures.errors == {"http_400": 2}
    assert measures.output_tok_s == 0


async def test_an_error_in_the_stream_is_an_error() -> None:
    async with quire(engine=FakeEngine(fail_after=2)) as server:
        measures = measure(await load(server, streams(2), workload(requests=4, output=Span(low=5, high=5))))
    assert measures.errors == {"error_event": 4}
    assert measures.output_tokens == 0


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b'data: {"choices":[{"text":"a"}]}'


def framed(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


@contextlib.asynccontextmanager
async def peer(*replies: bytes | None, then_close: bool = True) -> AsyncIterator[str]:
    """Answers each request with the next of `replies` (None: silence), then closes the connection or keeps it."""
    waiting = list(replies)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
                await reader.readexactly(length)
                reply = waiting.pop(0)
                if reply is None:
                    await asyncio.sleep(60)
                else:
                    writer.write(reply)
                if then_close:
                    break
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
    finally:
        server.close()


async def exchanged(url: str, *, patience: float = 5.0, requests: int = 1) -> list[Record]:
    client = Client(url, timeout=patience)
    records = [Record(due=0.0, input_tokens=7, asked_tokens=2) for _ in range(requests)]
    try:
        for record in records:
            await client.send(b"{}", record)
    finally:
        client.close()
    return records


DONE_PART = b"data: [DONE]\n\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":3}}\n\n'


@pytest.mark.parametrize(
    ("parts", "chunks", "tokens"),
    [
        ((CHUNK + b"\n\n", CHUNK + b"\n\n", DONE_PART), 2, (7, 2)),  # no usage: as asked
        ((CHUNK + b"\n\n", USAGE, DONE_PART), 1, (8, 3)),
        ((CHUNK + b"\n\n" + CHUNK + b"\n\n" + USAGE + DONE_PART,), 2, (8, 3)),
        ((CHUNK[:9], CHUNK[9:], b"\n", b"\n" + CHUNK + b"\n", b"\ndata: [DO", b"NE]\n\n"), 2, (7, 2)),
        (
            (CHUNK + b"\r\n\r\n", b": ping\r\n\r\n", b"event: x\r\n" + CHUNK + b"\r\n\r\n", b"data: [DONE]\r\n\r\n"),
            2,
            (7, 2),
        ),
        ((CHUNK.replace(b"data: ", b"data:") + b"\n\n", b"data: [DONE]\n\n"), 1, (7, 2)),
        ((CHUNK[:-1] + b',"usage":null}\n\n', DONE_PART), 1, (7, 2)),
        ((CHUNK[:-1] + b',"usage": {"prompt_tokens": 8, "completion_tokens": 1}}\n\n', DONE_PART), 1, (8, 1)),
        ((CHUNK.replace(b'"a"', b'"\\"error\\" \\"usage\\""') + b"\n\n", DONE_PART), 1, (7, 2)),
    ],
)
async def test_streams_of_other_servers(parts: tuple[bytes, ...], chunks: int, tokens: tuple[int, int]) -> None:
    async with peer(HEAD + framed(*parts) + b"0\r\n\r\n") as url:
        (record,) = await exchanged(url)
    assert (record.outcome, record.detail) == ("ok", "")
    assert len(record.arrivals) == chunks
    assert (record.input_tokens, record.output_tokens) == tokens


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (HEAD + framed(CHUNK + b"\n\n"), "broken"),  # cut off
        (HEAD + framed(CHUNK + b"\n\n") + b"0\r\n\r\n", "broken"),  # ended without [DONE]
        (HEAD + framed(DONE_PART) + b"0\r\n\r\n", "broken"),  # nothing came
        (HEAD + framed(b'data: {"error":{"message":"no"}}\n\n', DONE_PART) + b"0\r\n\r\n", "error_event"),
        (HEAD + framed(b'data: {"usage"\n\n', DONE_PART) + b"0\r\n\r\n", "error_event"),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy", "http_503"),
        (b"HTTP/1.1 500 Oops\r\n\r\nwhat", "http_500"),
        (b"hello\r\n\r\n", "broken"),
        (b"", "broken"),
    ],
)
async def test_whatever_a_server_does_is_a_record(reply: bytes, outcome: str) -> None:
    async with peer(reply) as url:
        (record,) = await exchanged(url)
    assert record.outcome == outcome
    assert record.detail
    assert record.ended > 0


async def test_silence_times_out() -> None:
    async with peer(None) as url:
        (record,) = await exchanged(url, patience=0.2)
    assert record.outcome == "timeout"


async def test_nobody_there() -> None:
    async with peer() as url:
        pass
    (record,) = await exchanged(url)
    assert record.outcome == "unreachable"


async def test_an_idle_connection_that_was_closed_is_nobodys_failure() -> None:
    good = HEAD + framed(CHUNK + b"\n\n", DONE_PART) + b"0\r\n\r\n"
    async with peer(good, good, then_close=True) as url:
        records = await exchanged(url, requests=2)
    assert [record.outcome for record in records] == ["ok", "ok"]


async def test_a_slow_answer_is_not_asked_for_twice() -> None:
    good = HEAD + framed(CHUNK + b"\n\n", DONE_PART) + b"0\r\n\r\n"
    async with peer(good, None, good, then_close=False) as url:
        records = await exchanged(url, requests=3, patience=0.3)
    assert [record.outcome for record in records] == ["ok", "timeout", "ok"]


async def test_servers_that_cannot_be_measured() -> None:
    async with peer() as url:
        pass
    with pytest.raises(BenchError, match="does not answer"):
        await discover(url, None, api_key=None, model=None)
    with pytest.raises(BenchError, match="expected an address"):
        await discover("localhost:8000", None, api_key=None, model=None)
    async with listening(make_app(make_state(api_key=("k",)))) as listener:
        with pytest.raises(BenchError, match="401"):
            await discover(listener.address, None, api_key=None, model=None)
        assert (await discover(listener.address, None, api_key="k", model=None)).model == "fake"


# -- the whole


async def test_servers_take_turns_with_the_same_requests() -> None:
    engines = [FakeEngine(), FakeEngine()]
    told: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        urls = [
            (await stack.enter_async_context(listening(make_app(make_state(engine=engine))))).address
            for engine in engines
        ]
        argv = f"--url {urls[0]},one --against {urls[1]},two --concurrency 1,2,4 --requests 4 --input 8 --output 3"
        argv += f" --repeat 2 --warmup 3 --vocab {VOCAB} --no-probe"
        results = await run_benchmark(parse_arguments(argv.split()), argv.split(), told.append)
    order = [line.split("  ")[1:] for line in told]
    points = ("c=1", "c=2", "c=4")
    expected = [[point, name] for _ in range(2) for point in points for name in ("one", "two")]
    assert [[point, rest.split(":")[0]] for point, rest in order] == expected
    one, two = ([request.prompt_token_ids for request in engine.submitted] for engine in engines)
    assert sorted(one) == sorted(two)
    assert len(one) == len(set(one)) == 3 + 2 * 3 * 4  # the warm-up, then rounds of points
    for result in results.points:
        first, second = result.servers
        assert (first.server, second.server) == ("one", "two")
        assert [run.output_tokens for run in first.rounds] == [12, 12]
        assert first.ratios == {}
        pairs = [a.output_tok_s / b.output_tok_s for a, b in zip(first.rounds, second.rounds, strict=True)]
        assert second.ratios["output_tok_s"].max == pytest.approx(max(pairs))
    assert results.limits is None
    assert results.limits_missing == "not asked for"
    assert json.loads(results.encode())["servers"][1]["name"] == "two"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--input 600", "takes 512 tokens .* and there are requests of 603"),
        ("--against {url}", "two servers have one name"),
        ("--against {url}/v1,b --model nobody", "answers no request: http_404"),
    ],
)
async def test_what_cannot_be_measured_is_said_before_measuring(flags: str, complaint: str) -> None:
    async with listening(make_app(make_state())) as listener:
        argv = f"--url {listener.address} --output 3 {flags.format(url=listener.address)}".split()
        with pytest.raises(BenchError, match=complaint):
            await run_benchmark(parse_arguments([*argv, "--no-probe"]), argv, lambda _: None)


async def test_a_server_that_dies_is_an_error_and_no_exception() -> None:
    async with listening(make_app(make_state())) as listener:
        info = await discover(listener.address, "quire", api_key=None, model=None)
    gone = Server(info, api_key=None, timeout=5.0, temperature=0.0)
    measures: Measures = measure(await load(gone, streams(2), workload(requests=4)))
    assert measures.errors == {"unreachable": 4}
