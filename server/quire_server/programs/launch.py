"""Runs `quire serve`: turns its settings into a running server and returns an exit code.

Owns SIGTERM and SIGINT from its first process to its last. The exit code is 0 after a signal, 2 for invalid settings, 1
for a model that cannot be loaded and 70 for an engine that keeps crashing; every failure prints one line.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire_engine.contract.errors import ConfigError, CrashLoop, QuireError
from quire_engine.contract.plan import EnginePlan
from quire_engine.links.link_security import LinkSecurity, link_security
from quire_engine.machine import core_shares
from quire_engine.memory_plan import plan_text
from quire_engine.quality_store import quality_text
from quire_server.checkpoint.locate import localized
from quire_server.engine.engines import Engines
from quire_server.engine.json_child import ask
from quire_server.engine.kv_events.configured import cache_listeners
from quire_server.engine.local_replicas import LocalReplicas, divided_config
from quire_server.engine.nodes.addresses import is_numeric, parse_sources
from quire_server.engine.nodes.model_digest import tokenizer_digest
from quire_server.engine.nodes.node_set import NodeSet
from quire_server.engine.replica_routing import Router
from quire_server.engine.restart_policy import RestartPolicy
from quire_server.engine.supervisor import Supervisor
from quire_server.flags import SERVE, CommandLine
from quire_server.http.event_loop import loop_factory
from quire_server.http.tls import tls_context
from quire_server.logs import Output, writing
from quire_server.logs.output import check_collector
from quire_server.programs.several_launch import SeveralEngines
from quire_server.programs.stopping import Stop, stop_signals
from quire_server.programs.warming import read_prefixes
from quire_server.settings import ModelEntry, ServerLimits, Settings, SettingsError, several_models
from quire_server.settings.experiments import spelled
from quire_server.settings.sources import with_flags
from quire_server.showing import loading

DONE, FAILED, BAD_USAGE, CRASH_LOOP = 0, 1, 2, 70
_SPARE_SECONDS = 10.0  # after the engine is ready, since a launch takes a core from the first requests

log = logging.getLogger("quire")


def run(given: CommandLine) -> int:
    """Serve until a signal; the process's exit code."""
    return run_program(SERVE, given, _run)


def run_program(name: str, given: CommandLine, body: Callable[[Settings, Output], int]) -> int:
    """Run a server's program; every failure is one line and an exit code."""
    with writing(given.settings.log_level, given.settings.log_format) as output:
        for line in given.warnings:
            log.warning("%s", line)
        for line in given.notes:
            log.info("%s", line)
        try:
            return body(given.settings, output)
        except ConfigError as error:
            output.say(f"{name}: {with_flags(str(error), spelled)}")
            return BAD_USAGE
        except QuireError as error:
            output.say(f"{name}: {error}")
            return CRASH_LOOP if isinstance(error, CrashLoop) else FAILED
        except BrokenPipeError:  # the plan is printed to stdout
            raise
        except OSError as error:  # such as a file that cannot be read, or a full disk
            log.debug("where it happened", exc_info=True)
            output.say(f"{name}: {_of_file(error)}")
            return FAILED


def _run(settings: Settings, output: Output) -> int:
    tls_context(settings)  # checks the files, which are read again when the socket listens
    if settings.warm_prefix is not None:
        read_prefixes(settings.warm_prefix)  # checks the file, which is read again when the engine is ready
    check_collector("traces", settings.otlp_traces_endpoint)
    check_collector("metrics", settings.otlp_metrics_endpoint)
    try:
        entries = several_models(settings)
    except SettingsError as error:
        raise ConfigError(str(error)) from None
    if entries:
        entries = tuple(replace(entry, settings=localized(entry.settings)) for entry in entries)
    else:
        settings = localized(settings)
    if settings.dry_run and settings.engines:
        raise ConfigError(
            "--dry-run prints an engine's plan, and this server has none: ask a node, `quire engine --dry-run`"
        )
    if settings.dry_run:
        return asyncio.run(_show_plans([each.settings for each in entries] or [settings], entries))
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve_several(entries, output) if entries else _serve(settings, output))


def _of_file(error: OSError) -> str:
    """The message of an OSError with the file's name."""
    if error.filename is None:
        return error.strerror or str(error)
    return f"{error.filename}: {error.strerror}"


def show_plan(settings: Settings) -> int:
    """Print the memory plan of a node's engine without loading the model."""
    _print_plan(_plan_of(settings))
    return DONE


def _plan_of(settings: Settings) -> EnginePlan:
    config = settings.engine_config()
    if settings.replicas > 1:
        config = divided_config(config, settings.replicas)
    (plan,) = ask("dry_run", config, EnginePlan)
    return plan


def _print_plan(plan: EnginePlan) -> None:
    print(plan_text(plan, quality_text(plan)))


async def _show_plans(models: Sequence[Settings], entries: Sequence[ModelEntry]) -> int:
    """Print the plans of a server's models once each of them could be served: what a start refuses is refused here.

    Raises ConfigError, ModelLoadError.
    """
    if entries:
        plans = await SeveralEngines(entries, RestartPolicy(), stderr=None).plan()
    else:
        plans = [await asyncio.to_thread(_plan_of, models[0])]
    from quire_server.state import check_model  # noqa: PLC0415 - slow, and only a dry run needs it here

    for settings, plan in zip(models, plans, strict=True):
        await check_model(settings, plan)
    for plan in plans:
        _print_plan(plan)
    return DONE


async def _serve_several(entries: Sequence[ModelEntry], output: Output) -> int:
    """The engines start when requests come; only their plans are made at the start."""
    settings = entries[0].settings
    policy = restart_policy(settings, tells_alive=False)
    return await _run_server(settings, lambda: SeveralEngines(entries, policy, stderr=output.for_children))


async def _serve(settings: Settings, output: Output) -> int:
    return await _run_server(settings, lambda: engines_of(settings, output))


async def _run_server(settings: Settings, make_engines: Callable[[], Engines | SeveralEngines]) -> int:
    """Start the engine process first: it takes longest, and the server's modules are imported meanwhile."""
    with stop_signals() as stop:
        engines = make_engines()
        starting: asyncio.Task[Any] = asyncio.create_task(engines.start())
        in_text = settings.log_format == "text"
        showing = asyncio.create_task(
            loading.show(lambda: engines.progress, starting, bar=in_text and loading.has_terminal())
        )
        try:
            serve = await asyncio.to_thread(_serve_function)
            if stop.asked.done():
                return DONE
            drained = await serve(settings, engines, starting, stop)
            return DONE if drained else CRASH_LOOP
        finally:
            showing.cancel()
            starting.cancel()
            await asyncio.gather(starting, showing, return_exceptions=True)
            await engines.stop()


def _serve_function() -> Callable[
    [Settings, Engines | SeveralEngines, asyncio.Task[Any], Stop], Coroutine[Any, Any, bool]
]:
    from quire_server.programs.serving import serve  # noqa: PLC0415 - slow: imported while the engine starts

    return serve


def engines_of(settings: Settings, output: Output) -> Engines:
    """One supervised engine, several behind one port, or those of nodes."""
    if settings.engines:
        return _nodes(settings)
    policy = restart_policy(settings, tells_alive=settings.replicas > 1)
    listeners = cache_listeners(settings.kv_events_config, settings.replicas)
    config = replace(settings.engine_config(), tells_blocks=bool(listeners))
    if settings.replicas == 1:
        return Supervisor(config, policy, stderr=output.for_children, listener=next(iter(listeners), None))
    return LocalReplicas(
        config,
        policy,
        listeners=listeners,
        count=settings.replicas,
        router=_router(settings),
        shares=core_shares(settings.replicas),
        stderr=output.for_children,
    )


def restart_policy(settings: Settings, *, tells_alive: bool) -> RestartPolicy:
    """The policy of supervisors. `tells_alive`: engines send signs of life also during a step."""
    return RestartPolicy(
        max_restarts=settings.max_engine_restarts,
        hang_seconds=settings.engine_hang_timeout,
        absent_seconds=ServerLimits().replica_silence if tells_alive else None,
        spare_seconds=_SPARE_SECONDS,
    )


def security_of(settings: Settings) -> LinkSecurity:
    """The secrets of links between fronts and nodes. Raises ConfigError."""
    return link_security(settings.engine_tls_cert, settings.engine_tls_key, settings.engine_tls_ca)


def _router(settings: Settings) -> Router:
    return Router(settings.route_policy, ttft_target=settings.slo_ttft or 0.0)


def _nodes(settings: Settings) -> NodeSet:
    """Engines of other machines. Raises ConfigError."""
    sources, security = parse_sources(settings.engines), security_of(settings)
    for source in sources:
        if source.address is not None and not source.has_many and is_numeric(source.address.host):
            security.check_reach(f"--engines {source.address}", [source.address.host])
    return NodeSet(
        sources,
        security,
        router=_router(settings),
        model=str(settings.model_path),
        tokenizer=tokenizer_digest(Path(settings.tokenizer or settings.model_path)),
        silence_seconds=ServerLimits().replica_silence,
    )
