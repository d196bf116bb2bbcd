"""Runs `quire engine`: one supervised engine that serves fronts, from its first process to its last.

The exit codes are those of `quire serve`. Promises: fronts learn of a stop before anything ends, so that their streams
go on elsewhere; streams that no other node can take get the drain timeout. Must not know: text.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.roles import CHUNK_FOR_OTHERS
from quire_engine.links.link_security import is_loopback
from quire_engine.memory_plan import plan_text
from quire_engine.quality_store import quality_text
from quire_server.checkpoint.locate import localized
from quire_server.engine.kv_events.configured import cache_listeners
from quire_server.engine.local_replicas import ALIVE_SECONDS
from quire_server.engine.nodes.addresses import is_numeric, parse_address
from quire_server.engine.nodes.model_digest import model_digest, numerics_name, tokenizer_digest
from quire_server.engine.nodes.node import Node
from quire_server.engine.supervisor import Supervisor
from quire_server.flags import ENGINE, CommandLine
from quire_server.http.event_loop import loop_factory
from quire_server.logs import Output
from quire_server.metrics.node_metrics import NodeMetrics
from quire_server.programs.launch import (
    CRASH_LOOP,
    DONE,
    restart_policy,
    run_program,
    security_of,
    show_plan,
)
from quire_server.programs.node_scrape import scraped
from quire_server.programs.service_manager import service_manager
from quire_server.programs.stopping import Stop, first_of, stop_signals
from quire_server.settings import ServerLimits, Settings

log = logging.getLogger("quire")


def run(given: CommandLine) -> int:
    """Serve fronts until a signal; the process's exit code."""
    return run_program(ENGINE, given, _run)


def _run(settings: Settings, output: Output) -> int:
    settings = settings.model_copy(update={"engines": ()})  # a file may name them for fronts
    address = parse_address(settings.listen or "", "--listen")
    if is_numeric(address.host):
        security_of(settings).check_reach(f"--listen {address}", [address.host])
    for text, flag in (
        (settings.metrics_listen, "--metrics-listen"),
        (settings.kv_listen, "--kv-listen"),
        (settings.kv_address, "--kv-address"),
    ):
        if text is not None:
            parse_address(text, flag)
    if settings.faults and not is_loopback(address.host):
        raise ConfigError("--set enable_fault_injection lets fronts break the engine: set --listen 127.0.0.1:PORT")
    settings = localized(settings)
    if settings.dry_run:
        return show_plan(settings)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(settings, output))


async def _serve(settings: Settings, output: Output) -> int:
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, stop.received, signal.SIGHUP)
        policy = restart_policy(settings, tells_alive=True)
        listeners = cache_listeners(settings.kv_events_config, 1)
        config = replace(node_config(settings), tells_blocks=bool(listeners))
        engine = Supervisor(config, policy, stderr=output.for_children, listener=next(iter(listeners), None))
        tokenizer = await asyncio.to_thread(tokenizer_digest, Path(settings.tokenizer or settings.model_path))
        metrics = None
        if settings.metrics_listen is not None:
            metrics = NodeMetrics(settings.model_names[0])
            where_told = parse_address(settings.metrics_listen, "--metrics-listen")
            url = await stack.enter_async_context(scraped(where_told, metrics, engine.load_ratio, settings))
            log.info("the node's metrics are at %s", url)
        node = Node(
            engine,
            security_of(settings),
            silence_seconds=ServerLimits().replica_silence,
            tokenizer=tokenizer,
            metrics=metrics,
        )
        starting = asyncio.create_task(engine.start())
        manager = await stack.enter_async_context(service_manager(stop.asked, lambda: "loading"))
        try:
            where = await node.listen(parse_address(settings.listen or "", "--listen"))
            log.info("a node listens on %s; fronts wait until the model is loaded", ", ".join(map(str, where)))
            digest = await asyncio.to_thread(model_digest, settings.model_path)
            await first_of(starting, stop.asked)
            if not starting.done():
                return DONE
            node.started(_named(starting.result(), digest))
            _greet(starting.result())
            manager.ready(f"a node on {', '.join(map(str, where))}")
            await first_of(stop.asked, engine.dead)
            if not engine.dead.done():
                await _wind_up(node, settings, stop)
            return CRASH_LOOP if engine.dead.done() else DONE
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await node.close()
            await engine.stop()


def node_config(settings: Settings) -> EngineConfig:
    """The configuration of a node's engine: it tells which prompts it has cached, and that it lives.

    One that computes prompts for others does so in small chunks, unless the settings say how: another engine fetches
    the blocks of each while the next one is computed.
    """
    if settings.role == "prefill" and "prefill_chunk" not in settings.model_fields_set:
        settings = settings.model_copy(update={"prefill_chunk": CHUNK_FOR_OTHERS})
    return replace(settings.engine_config(), tells_prefixes=True, alive_seconds=ALIVE_SECONDS)


def _named(plan: EnginePlan, digest: str) -> EnginePlan:
    """The plan with names of checkpoint and numerics that are the same on all machines."""
    numerics = numerics_name(plan.identity.arithmetic, digest)
    return replace(plan, identity=replace(plan.identity, checkpoint=digest, numerics=numerics))


def _greet(plan: EnginePlan) -> None:
    for line in plan_text(plan, quality_text(plan)).splitlines():
        log.info("%s", line)
    log.info("the node is ready: `quire serve --engines` with its address takes requests for it")


async def _wind_up(node: Node, settings: Settings, stop: Stop) -> None:
    """Hand the streams back to the fronts; what no other node takes may finish until the drain timeout."""
    log.info("draining %d requests of %d fronts for up to %g s; Ctrl-C again to stop now", node.num_live,
             node.num_fronts, settings.drain_timeout)  # fmt: skip
    node.drain()
    idle = asyncio.create_task(node.empty())
    await first_of(idle, stop.insisted, seconds=settings.drain_timeout)
    if not idle.done():
        log.warning("ending with %d requests that have not finished", node.num_live)
    idle.cancel()
    await asyncio.gather(idle, return_exceptions=True)
