"""`quire bench` against real listeners: the server with a fake engine, in closed and open loops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

import pytest

from quire_bench.arguments import parse_arguments
from quire_bench.benchmark import run_benchmark
from quire_bench.load import open_loop
from quire_bench.measures import Measures, measure
from quire_bench.peer_rate import peer_rate
from quire_bench.records import Record, Run
from quire_bench.servers import BenchError, Peer, Server, discover
from quire_bench.workload import Job, LoadPoint, Span, Workload, jobs
from quire_server.state import ServerState
from support.covering import few
from support.events import until
from support.fake_engine import FakeEngine
from support.fakes import listening, make_app, make_state

pytestmark = pytest.mark.anyio
VOCAB = 200  # the fake's tokens are bytes; below 256 are no special ones


def workload(**changes: object) -> Workload:
    lengths = {"input": Span(low=3, high=9), "output": Span(low=2, high=6), "vocab": VOCAB}
    return Workload(**(lengths | changes))


@contextlib.asynccontextmanager
async def quire(state: ServerState | None = None, **options: object) -> AsyncIterator[Server]:
    async with listening(make_app(state, **options)) as listener:
        info = await discover(listener.address, "quire", api_key=None, model=None)
        server = Server(info, api_key=None, timeout=600.0, temperature=0.0)
        try:
            yield server
        finally:
            await server.close()


async def load(server: Server, point: LoadPoint, work: Workload) -> Run:
    async with asyncio.timeout(300):
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


@pytest.mark.parametrize("count", few([1, 4], 4))
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


async def test_tokens_without_text_have_a_chunk_whatever_is_asked_for() -> None:
    """The first three of four are bytes of an unfinished character."""
    emoji = tuple("😀".encode())
    found = []
    for token_ids in (False, True):
        engine = FakeEngine(replies=lambda request, choice: emoji)
        async with quire(engine=engine) as server:
            asking = Server(server.info, api_key=None, timeout=600.0, temperature=0.0, token_ids=token_ids)
            run = await load(asking, streams(1), workload(requests=1, output=Span(low=8, high=8)))
            await asking.close()
        found.append((measure(run).chunks, measure(run).output_tokens))
    assert found == [(8, 8), (8, 8)]


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
    assert results.limits == {}
    assert results.limits_missing == {"one": "not asked for", "two": "not asked for"}
    assert json.loads(results.encode())["servers"][1]["name"] == "two"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--input 600", "takes 512 tokens .* and there are requests of 603"),
        ("--against {url}", "two servers have one name"),
        ("--against {url}/v1,b --model nobody", "answers no request: http_404"),
        ("--baseline static --checkpoint /nowhere/a.gguf", "/nowhere/a.gguf"),
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
    gone = Server(info, api_key=None, timeout=600.0, temperature=0.0)
    measures: Measures = measure(await load(gone, streams(2), workload(requests=4)))
    assert measures.errors == {"unreachable": 4}


async def test_the_rate_of_a_server_for_given_requests() -> None:
    """As students' schedulers have it printed beside their own; blocking, as a command calls it."""
    engine = FakeEngine()
    given = [Job(prompt=(5, 6, 7 + number), output_tokens=3 + number) for number in range(6)]
    async with listening(make_app(engine=engine)) as listener:
        peer = Peer.parse(f"{listener.address},beside")
        found = await asyncio.to_thread(peer_rate, peer, given, streams=2)
        assert (found.name, found.streams) == ("beside", 2)
        assert found.tokens_per_second > 0
        sent = sorted(request.prompt_token_ids for request in engine.submitted if len(request.prompt_token_ids) == 3)
        assert sent == sorted(job.prompt for job in given)
        too_long = [Job(prompt=(5,), output_tokens=10_000_000)]
        with pytest.raises(BenchError, match="beside did not answer all 1 requests: 1 answers have another length"):
            await asyncio.to_thread(peer_rate, peer, too_long, streams=1)
    with pytest.raises(BenchError, match="does not answer"):
        await asyncio.to_thread(peer_rate, Peer.parse("http://127.0.0.1:9"), given, streams=2)
