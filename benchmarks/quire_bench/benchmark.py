"""The benchmark itself: who is measured, in which order, and what is made of it.

Promises: in every round and at every load point all servers are measured one after the other, with the same requests;
whatever was started is stopped. Must not know: HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from quire_bench.arguments import Asked
from quire_bench.baselines import start_baseline
from quire_bench.limits import Limits, probe_limits, shares, why_not_measurable
from quire_bench.llama_bench import find_program, is_program
from quire_bench.measures import Measures, measure
from quire_bench.own_server import own_server
from quire_bench.results import (
    SCHEMA,
    Collected,
    Results,
    command_line,
    describe,
    describe_machine,
    now,
    versions,
)
from quire_bench.servers import BenchError, Peer, Server, ServerInfo, Target, discover
from quire_bench.workload import LoadPoint, Workload, jobs, warm_up
from quire_engine.contract.errors import ModelLoadError
from quire_server.checkpoint.locate import localized
from quire_server.flags import parse_flags

Tell = Callable[[str], None]
_DEFAULT_VOCAB = 1000
_MOST_WARMUP = 32


async def run_benchmark(asked: Asked, argv: Sequence[str], tell: Tell) -> Results:
    """All rounds of all points on all servers; `tell` gets a line per run. Raises BenchError."""
    started, machine = now(), describe_machine()
    async with AsyncExitStack() as stack:
        targets = await _targets(asked, stack)
        infos = [target.info for target in targets]
        workload = replace(asked.workload, vocab=asked.vocab or infos[0].vocab_size or _DEFAULT_VOCAB)
        _check_lengths(asked.points, workload, infos)
        await _warm_up(asked, workload, targets)
        collected = Collected(points=asked.points, servers=infos)
        limits: dict[str, Limits | str] = {}
        for round_number in range(asked.repeat):
            if asked.probe:
                limits = {machine: await _probed(machine, limits.get(machine)) for machine in _machines(infos)}
            for point in asked.points:
                for target in targets:
                    before = await target.kv_use()
                    run = await target.run(point, jobs(workload, point, round_number), workload.seconds)
                    measures, after = measure(run), await target.kv_use()
                    used = after.since(before) if before is not None and after is not None else None
                    collected.add(point, target.info.name, measures, used)
                    tell(_line(round_number, asked.repeat, point, target.info.name, measures))
    known = {machine: found for machine, found in limits.items() if isinstance(found, Limits)}
    _add_shares(collected, workload, known)
    return Results(
        schema=SCHEMA,
        started=started,
        command=command_line(argv),
        versions=versions(),
        machine=machine,
        workload=describe(workload, token_ids=asked.token_ids),
        repeat=asked.repeat,
        limits=known,
        limits_missing=_missing(infos, limits) if asked.probe else {info.name: "not asked for" for info in infos},
        servers=infos,
        points=collected.point_results(),
        knees=collected.knees(),
    )


async def _targets(asked: Asked, stack: AsyncExitStack) -> list[Target]:
    """The first one is what the others are compared with."""
    if asked.url is not None:
        first = asked.url
    else:
        flags = [*asked.serve_flags, *(("--api-key", asked.api_key) if asked.api_key else ())]
        first = Peer(url=await stack.enter_async_context(own_server(flags)), name="quire")
    targets: list[Target] = [await _server(first, asked, api_key=asked.api_key, model=asked.model)]
    model = ["--model", asked.checkpoint] if asked.checkpoint is not None else []
    for peer in asked.against:
        if is_program(peer.url):
            file = str(parse_flags([*asked.serve_flags, *model]).model)
            targets.append(await find_program(peer.url, peer.name, file))
        else:
            targets.append(await _server(peer, asked, api_key=None, model=None))
    for target in targets:
        stack.push_async_callback(target.close)
    if asked.baselines:
        try:  # as the server finds it: a name on the hub, a GGUF file
            config = localized(parse_flags([*asked.serve_flags, *model])).engine_config()
        except ModelLoadError as error:
            raise BenchError(str(error)) from None
        streams = int(max(point.value for point in asked.points))
        for name in asked.baselines:
            baseline = await start_baseline(name, config, streams=streams)
            stack.push_async_callback(baseline.close)
            targets.append(baseline)
    names = [target.info.name for target in targets]
    if len(set(names)) < len(names):
        raise BenchError(f"two servers have one name ({', '.join(names)}); name them: --against URL,NAME")
    return targets


async def _server(peer: Peer, asked: Asked, *, api_key: str | None, model: str | None) -> Server:
    info = await discover(peer.url, peer.name, api_key=api_key, model=model)
    return Server(
        info, api_key=api_key, timeout=asked.timeout, temperature=asked.temperature, token_ids=asked.token_ids
    )


def _check_lengths(points: Sequence[LoadPoint], workload: Workload, infos: Sequence[ServerInfo]) -> None:
    """Check the lengths of requests before minutes go into measuring refusals."""
    if points[0].mode == "trace":
        longest = max(row.input_tokens + row.output_tokens for row in workload.trace[: workload.requests])
        advice = "use a smaller --scale-len"
    else:
        longest = workload.prefix + workload.input.high + workload.output.high
        advice = "use a smaller --input, --output or --prefix"
    for info in infos:
        if info.max_model_len is not None and longest > info.max_model_len:
            raise BenchError(
                f"{info.name} takes {info.max_model_len} tokens of prompt and answer, and there are requests of"
                f" {longest}; {advice}"
            )


async def _warm_up(asked: Asked, workload: Workload, targets: Sequence[Target]) -> None:
    closed = asked.points[0].mode == "concurrency"
    streams = min(_MOST_WARMUP, int(max(point.value for point in asked.points)) if closed else 8)
    count = streams if asked.warmup is None else asked.warmup
    for target in targets:
        if count == 0:
            continue
        point = LoadPoint(mode="concurrency", value=min(streams, count))
        measures = measure(await target.run(point, warm_up(workload, count), None))
        if not measures.ok:
            raise BenchError(f"{target.info.name} answers no request: {'; '.join(measures.error_examples)}")


def _machines(infos: Sequence[ServerInfo]) -> list[str]:
    """Return the machines, each once, of the servers that can be compared with limits."""
    return sorted({info.facts.machine for info in infos if info.facts is not None and not why_not_measurable(info)})


async def _probed(machine: str, before: Limits | str | None) -> Limits | str:
    found = await probe_limits(machine)
    if isinstance(before, Limits):
        return before.best(found) if isinstance(found, Limits) else before
    return found


def _missing(infos: Sequence[ServerInfo], limits: Mapping[str, Limits | str]) -> dict[str, str]:
    """Return why the limits of each server are unknown, for those that lack them; baselines are no servers."""
    missing = {}
    for info in filter(lambda info: info.address, infos):
        reason: Limits | str | None = why_not_measurable(info)
        if reason is None and info.facts is not None:
            reason = limits[info.facts.machine]
        if isinstance(reason, str):
            missing[info.name] = reason
    return missing


def _add_shares(collected: Collected, workload: Workload, limits: Mapping[str, Limits]) -> None:
    for info in collected.servers:
        if info.facts is None or info.facts.machine not in limits or why_not_measurable(info):
            continue
        for point in collected.points:
            collected.shares[point, info.name] = [
                shares(point, workload, run, info.facts, limits[info.facts.machine])
                for run in collected.runs[point, info.name]
            ]


def _line(round_number: int, rounds: int, point: LoadPoint, name: str, run: Measures) -> str:
    bad = ", ".join(f"{count} x {outcome}" for outcome, count in run.errors.items())
    return (
        f"round {round_number + 1}/{rounds}  {point}  {name}: {run.output_tok_s:.1f} tok/s, {run.ok} requests"
        f" in {run.seconds:.1f} s{'; errors: ' + bad if bad else ''}"
    )
