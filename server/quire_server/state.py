"""The shared state of one running server's routes, and its assembly while the engine starts.

Promises: plain references with a known readiness, read by routes and by the offline API; tokenizer and templates load
while the engine starts. Must not know: routes, sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, cast

from fastapi import Query, Request

from quire_engine.contract.errors import ModelLoadError
from quire_engine.contract.plan import EnginePlan
from quire_engine.contract.types import AdapterFacts, EnginePort, EngineStats, StepOutput
from quire_engine.quality_store import planned_quality
from quire_server.checkpoint.locate import other_names
from quire_server.engine.adapters import AdapterFiles, ServedAdapters
from quire_server.engine.admission import QueueLimits, TenantGate, TtftGate
from quire_server.engine.engine_client import EngineClient
from quire_server.engine.engines import Engines
from quire_server.engine.models.model_set import ModelSet
from quire_server.engine.recovery import Quarantine
from quire_server.engine.replicas import ReplicaSet
from quire_server.engine.request_names import RequestNames
from quire_server.engine.tenants import Tenant, Tenants
from quire_server.errors import BadRequest, ModelNotFound, NotReady, ShuttingDown
from quire_server.http.credentials import Credentials
from quire_server.http.large_reply import ReplyBudget
from quire_server.metrics.metric_catalog import ModelEnd, ModelState
from quire_server.metrics.metrics import Metrics
from quire_server.metrics.usage import UsageBook
from quire_server.settings import ServerLimits, Settings
from quire_server.settings.keys import TenantEntry
from quire_server.text.fault_points import plant
from quire_server.text.grammar_check import GrammarCheck
from quire_server.text.model_text import ModelText, read_model_text
from quire_server.text.text_threads import TextBudget, TextThreads

REMEDY_SECONDS = 5.0  # from the detection of a hang to the end of the engine


async def _nobody_to_tell() -> None:
    return None


@dataclass(slots=True)
class Phase:
    """Whether the server takes requests; several models share one."""

    draining: bool = False  # new requests are refused
    stopping: bool = False  # the server is shutting down


class Catalog:
    """The states of several models, chosen by the names of requests; the first is the default."""

    def __init__(self, states: Sequence[ServerState], models: ModelSet) -> None:
        """The states share what is the server's: the phase, the tenants, the view of all engines."""
        self.states = tuple(states)
        self.models = models
        for state in self.states:
            state.catalog, state.phase = self, self.states[0].phase
            state.adapters.is_taken = partial(self._is_others, state)

    def find(self, name: str | None) -> ServerState | None:
        """The state of the model that a request names; None and an empty name ask for the default. None: unknown."""
        if not name:
            return self.states[0]
        listed = next((state for state in self.states if state.lists(name)), None)
        if listed is not None:
            return listed
        called = [state for state in self.states if state.has_name(name)]
        return called[0] if len(called) == 1 else None  # several may be called alike, such as types of one repository

    def use(self, state: ServerState) -> None:
        """A request has chosen the model. Raises NotReady where its engine cannot be started for now."""
        name = state.model_names[0]
        seconds = self.models.refused_for(name)
        if seconds is not None:
            why = self.models.engines[name].why
            raise NotReady(
                f"The model {name} cannot be loaded: {why}.", retry_after_seconds=seconds, code="model_failed"
            )
        self.models.used(name)

    def _is_others(self, state: ServerState, name: str) -> bool:
        """Whether a name is of another model than this one."""
        return any(other.lists(name) for other in self.states if other is not state)

    def is_full(self, *underway: int) -> bool:
        """Whether no model's queue has a place for a request that comes now."""
        return all(state.client.is_full(*underway) for state in self.states)


@dataclass(slots=True, kw_only=True)
class ServerState:
    """The parts of a server, or of one of its models; only `phase`, `tasks` and `tenants` change while it runs."""

    settings: Settings
    credentials: Credentials
    limits: ServerLimits = field(default_factory=ServerLimits)
    model_text: ModelText
    client: EngineClient
    engines: Engines  # behind the client
    metrics: Metrics
    model_names: tuple[str, ...]  # those that are listed; the first is the one that replies report
    other_names: tuple[str, ...] = ()  # of the model, which requests may use and no list has
    tenants: Tenants = field(default_factory=Tenants)
    replicas: ReplicaSet | None = None  # the engines, if they are a set; None: there is one engine
    adapters: ServedAdapters = field(default_factory=ServedAdapters)  # that requests may name
    # With API servers beside this process: all of them know what holds, and what they have counted is here.
    settle: Callable[[], Awaitable[None]] = _nobody_to_tell
    names: RequestNames = field(default_factory=RequestNames)
    started: float = field(default_factory=time.time)  # when its engine was ready, seconds since the epoch
    phase: Phase = field(default_factory=Phase)
    catalog: Catalog | None = None  # None: there is one model
    tasks: list[asyncio.Task[None]] = field(default_factory=list)  # tasks that run as long as the server
    text: TextThreads = field(init=False)  # tokenizer and prompts, off the event loop
    grammars: GrammarCheck = field(init=False)
    replies: ReplyBudget = field(init=False)  # the budget of large replies

    def __post_init__(self) -> None:
        self.credentials.on_tenants = self.change_tenants
        texts = TextBudget(
            self.limits.max_text_bytes_queued,
            on_change=self.metrics.text_work,
            on_refused=lambda: self.metrics.reject("max_text_bytes_queued"),
        )
        self.text = TextThreads(self.model_text.tokenizer, self.model_text.prompts, texts)
        self.replies = ReplyBudget(
            self.limits.max_reply_bytes_waiting,
            on_change=self.metrics.large_replies,
            on_refused=lambda: self.metrics.reject("max_reply_bytes_waiting"),
        )
        folder = Path(self.settings.tokenizer or self.settings.model_path)
        self.grammars = GrammarCheck(folder, self.model_text.tokenizer.eos_token_ids)
        if self.settings.faults:
            plant(self.settings.faults, self.model_text.tokenizer, self.model_text.prompts, self.grammars)

    def change_tenants(self, entries: Sequence[TenantEntry]) -> None:
        """Tenants were read again: other keys, weights and limits hold for requests that come from now on."""
        self.tenants = tenants_of(self.settings, entries)
        self.metrics.tenants.change(each.name for each in entries)
        self.client.change_tenants(self.tenants.all)

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self.phase.draining

    @property
    def stopping(self) -> bool:
        """Whether the server is shutting down."""
        return self.phase.stopping

    @property
    def every(self) -> tuple[ServerState, ...]:
        """The states of all models of this server, the default one's first."""
        return (self,) if self.catalog is None else self.catalog.states

    @property
    def in_flight(self) -> int:
        """Accepted and unfinished requests of all models."""
        return sum(each.client.in_flight for each in self.every)

    @property
    def residency(self) -> ModelState:
        """Whether the model is in memory, as its clients see it."""
        if self.catalog is not None:
            return self.catalog.models.engines[self.model_names[0]].state
        return "loaded" if self.engines.trouble() is None else "restarting"

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt and answer together, in tokens."""
        return self.client.plan.scheduler.max_model_len

    @property
    def whole_plan(self) -> EnginePlan:
        """The plan of all engines together: their pools, seats and threads."""
        return self.client.plan if self.replicas is None else self.replicas.whole_plan(self.client.plan)

    def unready_reason(self) -> str | None:
        """A few words for a probe's reply, such as "draining" or "engine restarting"; None when serving."""
        if self.draining:
            return "draining"
        if self.catalog is not None:
            return self.catalog.models.trouble_of(self.model_names[0])
        return self.engines.trouble()

    def server_unready_reason(self) -> str | None:
        """Return why the server is not ready, or None; with several models, all of them together."""
        if self.catalog is None or self.draining:
            return self.unready_reason()
        return self.catalog.models.trouble()

    def fatal_reason(self) -> str | None:
        """Why the process must be restarted; None while it can recover by itself."""
        watched = self.engines if self.catalog is None else self.catalog.models
        if watched.overdue_seconds() > REMEDY_SECONDS:  # the supervisor should have replaced it
            return "engine hung"
        return "task ended" if any(task.done() for task in self.tasks) else None

    def refusal(self) -> NotReady:
        """The error for new requests while the server drains."""
        if self.stopping:
            return ShuttingDown()
        return NotReady("The server is draining: it takes no new requests.", code="draining", close=True)

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The names of this model and its adapters that lists of models have."""
        return (*self.model_names, *self.adapters)

    def lists(self, name: str) -> bool:
        """Whether it is a listed name of this model or of one of its adapters."""
        return name in self.model_names or name in self.adapters

    def has_name(self, name: str) -> bool:
        """Whether requests by this name may be for this model or one of its adapters."""
        return self.lists(name) or name in self.other_names

    def find(self, name: str | None) -> ServerState | None:
        """The state of the model that a request names; None and an empty name ask for the default. None: unknown."""
        if self.catalog is not None:
            return self.catalog.find(name)
        return self if not name or self.has_name(name) else None

    def knows_model(self, name: str | None) -> bool:
        """Whether requests may name this model; None and an empty name ask for the default."""
        return self.find(name) is not None


_CHOSEN = "model_state"  # of a request's own scope


def state_of(request: Request) -> ServerState:
    """The state of the model that the request has chosen; before that, the default one's."""
    chosen = request.scope.get("state", {}).get(_CHOSEN)
    return cast(ServerState, request.app.state.quire if chosen is None else chosen)


def choose(request: Request, name: str | None) -> ServerState:
    """Choose the model of this name for the request: the one place that decides it. Raises ModelNotFound."""
    state = state_of(request)
    found = state.find(name)
    if found is None:
        raise not_found(state, name or "")
    if found is not state:
        request.scope["state"][_CHOSEN] = found
    return found


def not_found(state: ServerState, name: str) -> ModelNotFound:
    """The error for a name that no model of the server has; it lists those that there are."""
    return ModelNotFound(name, [known for each in state.every for known in each.listed_names])


async def choose_by_query(
    request: Request,
    model: Annotated[str | None, Query(max_length=4096, description="of several; else the first")] = None,
) -> None:
    """Choose the request's model by the address's query, for routes without a body. Raises ModelNotFound."""
    if model is not None:
        choose(request, model)


async def build_state(
    settings: Settings,
    engines: Engines,
    starting: asyncio.Future[EnginePlan],
    credentials: Credentials | None = None,
    *,
    usage: UsageBook | None = None,
    limits: ServerLimits | None = None,
    read_adapter: Callable[[str], Awaitable[AdapterFacts]] | None = None,
) -> ServerState:
    """Load tokenizer and templates while the engine starts, then wait for it. Raises ConfigError, ModelLoadError.

    Without `credentials` the keys and tenants of the settings hold; without `usage` it is counted in their file;
    without `limits` their defaults hold. `read_adapter`: as `ServedAdapters` takes it.
    """
    credentials = Credentials(settings) if credentials is None else credentials
    usage = usage or UsageBook(settings.model_names[0], file=settings.first_keys.tenants.usage_file)
    text = await read_model_text(settings)
    try:
        plan = await starting
        text.check(settings, plan)
        adapters = await _adapters(settings, engines, read_adapter)
    except BaseException:
        text.close()  # otherwise its processes would live as long as the error's traceback
        raise
    tenants = tenants_of(settings, credentials.known.tenants)  # which may have been read again since the start
    metrics = _metrics(settings, engines.whole_plan(plan), tenants, usage)
    replicas = engines if isinstance(engines, ReplicaSet) else None
    engines.on_restart = metrics.engine_restarted
    metrics.history.num_engines = lambda: max(engines.num_replicas, 1)
    client = new_client(
        engines, settings, plan, metrics, engines.quarantine, tenants=tenants.all, num_replicas=engines.num_replicas
    )
    if replicas is not None:
        _tell_of_replicas(replicas, metrics, lambda: _resize(replicas, settings, client, metrics))
    return ServerState(
        settings=settings,
        limits=limits or ServerLimits(),
        credentials=credentials,
        model_text=text,
        client=client,
        engines=engines,
        tenants=tenants,
        metrics=metrics,
        model_names=settings.model_names,
        other_names=other_names(settings),
        replicas=replicas,
        adapters=adapters,
    )


async def check_model(settings: Settings, plan: EnginePlan) -> None:
    """Check what a start checks beside the engine's plan: keys, texts, templates and adapters.

    Raises ConfigError, ModelLoadError.
    """
    Credentials(settings)
    text = await read_model_text(settings)
    try:
        text.check(settings, plan)
    finally:
        text.close()
    files, config = AdapterFiles(), settings.engine_config()
    await files.read_ahead([(config, module.path) for module in settings.lora_modules])
    await _load_adapters(settings, ServedAdapters(taken=_own_names(settings), read=partial(files.read, config)))


def _own_names(settings: Settings) -> tuple[str, ...]:
    """All names of the model, which no adapter may have."""
    return (*settings.model_names, *other_names(settings))


async def build_catalog(
    entries: Sequence[Settings],
    models: ModelSet,
    credentials: Credentials,
) -> ServerState:
    """The states of several models, whose engines are asleep; returns the default one's. Raises as `build_state`."""
    first = entries[0]
    files = AdapterFiles()
    await files.read_ahead([(each.engine_config(), module.path) for each in entries for module in each.lora_modules])
    usage = UsageBook(first.model_names[0], file=first.first_keys.tenants.usage_file)
    building = []
    for settings in entries:
        name = settings.model_names[0]
        engine = models.engines[name]
        planned: asyncio.Future[EnginePlan] = asyncio.get_running_loop().create_future()
        planned.set_result(engine.plan)
        own = usage if settings is first else usage.beside(name)
        reader = partial(files.read, settings.engine_config())
        building.append(build_state(settings, engine.supervisor, planned, credentials, usage=own, read_adapter=reader))
    built = await asyncio.gather(*building, return_exceptions=True)
    states = [each for each in built if isinstance(each, ServerState)]
    failures = [each for each in built if isinstance(each, BaseException)]
    if failures:
        for state in states:
            state.text.close()
        raise failures[0]
    catalog = Catalog(states, models)

    def change_tenants(entries: Sequence[TenantEntry]) -> None:
        for state in states:
            state.change_tenants(entries)

    credentials.on_tenants = change_tenants
    for state in states:
        _follow(state, catalog)
    return states[0]


def _follow(state: ServerState, catalog: Catalog) -> None:
    """Let the model's health, metrics and plan follow its engine."""
    name = state.model_names[0]
    engine, metrics = catalog.models.engines[name], state.metrics
    state.client.seconds_until_engine = partial(catalog.models.seconds_until_loaded, name)
    metrics.models.now = lambda: (engine.state, engine.memory_bytes)

    def loaded(plan: EnginePlan, seconds: float) -> None:
        state.client.plan = plan
        metrics.models.loaded()
        metrics.load_took(seconds)

    def ended(cause: ModelEnd) -> None:
        metrics.models.ended(cause)
        state.client.on_step(
            StepOutput(step_id=0, outputs=(), stats=EngineStats())
        )  # nothing runs, and the pool is empty

    engine.on_loaded, engine.on_ended = loaded, ended


def _tell_of_replicas(replicas: ReplicaSet, metrics: Metrics, on_members: Callable[[], None]) -> None:
    replicas.on_members = on_members
    replicas.on_restart = metrics.replica_restarted
    replicas.on_route, replicas.on_move = metrics.replicas.decided, metrics.replicas.moved
    replicas.on_answered, replicas.sources.on_source = metrics.replicas.answered, metrics.replicas.sourced
    replicas.on_moved, metrics.replica_rows = metrics.replicas.move_seconds, replicas.rows
    metrics.replicas_wanted = replicas.wanted
    metrics.history.replicas = lambda: metrics.replicas.board(replicas.rows())


def _resize(replicas: ReplicaSet, settings: Settings, client: EngineClient, metrics: Metrics) -> None:
    """Replicas have joined or left: the queue and the pool are theirs together."""
    seats = max(replicas.num_replicas, 1) * client.plan.scheduler.limits.max_num_seqs
    client.resize(seats=seats, max_sequences=seats + settings.max_num_queued_reqs)
    metrics.resize(replicas.whole_plan(client.plan).scheduler.num_blocks)


async def _adapters(
    settings: Settings, engines: Engines, read: Callable[[str], Awaitable[AdapterFacts]] | None
) -> ServedAdapters:
    """The adapters of the settings, loaded. Raises ModelLoadError."""
    control = engines.control if settings.enable_lora else None
    return await _load_adapters(settings, ServedAdapters(control, taken=_own_names(settings), read=read))


async def _load_adapters(settings: Settings, adapters: ServedAdapters) -> ServedAdapters:
    for module in settings.lora_modules:
        try:
            await adapters.load(module.name, module.path, parent=module.base_model_name)
        except (BadRequest, NotReady) as error:
            raise ModelLoadError(f"--lora-modules {module.name}: {error.message}") from None
    return adapters


def new_client(
    port: EnginePort,
    settings: Settings,
    plan: EnginePlan,
    metrics: Metrics,
    quarantine: Quarantine | None = None,
    *,
    tenants: tuple[Tenant, ...] = (),
    num_replicas: int = 1,
) -> EngineClient:
    """The engine client with admission control, limited by the settings."""
    step_tokens = num_replicas * plan.scheduler.limits.max_num_batched_tokens
    seats = num_replicas * plan.scheduler.limits.max_num_seqs
    return EngineClient(
        port,
        plan=plan,
        limits=QueueLimits(
            max_sequences=seats + settings.max_num_queued_reqs,
            max_prompt_tokens=settings.max_num_queued_tokens,
        ),
        seats=seats,
        metrics=metrics,
        tenants=TenantGate(tenants, metrics.tenants, time.monotonic()) if tenants else None,
        ttft=None if settings.slo_ttft is None else TtftGate(settings.slo_ttft, step_tokens=step_tokens),
        quarantine=quarantine,
    )


def _metrics(settings: Settings, plan: EnginePlan, tenants: Tenants, usage: UsageBook) -> Metrics:
    """The metrics of a server whose engine has made `plan`."""
    metrics = Metrics(
        settings.model_names[0],
        max_model_len=plan.scheduler.max_model_len,
        tenants=[each.name for each in tenants.all],
        usage=usage,
    )
    quality = planned_quality(plan)
    metrics.observe_plan(plan, None if quality is None else quality.mean_kl)
    return metrics


def tenants_of(settings: Settings, entries: Iterable[TenantEntry]) -> Tenants:
    """The tenants of the tenants file; without a file but with fair queueing, each key is a tenant."""
    by_digest = {
        digest: Tenant(**entry.model_dump(exclude={"key_sha256"})) for entry in entries for digest in entry.key_sha256
    }
    return Tenants(by_digest, keys_are_tenants=not by_digest and settings.scheduling_policy == "wfq")
