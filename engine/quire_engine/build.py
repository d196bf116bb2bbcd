"""The composition root: builds a running engine and its plan from an `EngineConfig`.

Promises: every setting is resolved before the weights are read, every refusal names the setting and a value that works;
`resolve_plan` and `build` share one arithmetic. Must not know: requests, sockets, flags.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch

from quire_engine.contract.config import CpuVariant, DType, EngineConfig, KernelChoice, draft_model
from quire_engine.contract.drafts import Drafter, most_drafted_rows
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.contract.kv_groups import KVLayout, kv_groups, most_blocks, one_group
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.contract.plan import (
    AdapterPart,
    EnginePlan,
    IdentityPart,
    MachinePart,
    ModelPart,
    PoolPart,
    SpeculationPart,
    TokenCost,
    TransferPart,
)
from quire_engine.engine import StepExecutor
from quire_engine.execution.adapters import AdapterCache, adapter_bytes, make_adapters, num_kept
from quire_engine.execution.constrained.grammars import Grammars
from quire_engine.execution.device import compute_dtype, gpu_name, resolve_device, torch_threads
from quire_engine.execution.drafting.choice import own_speculation
from quire_engine.execution.drafting.model import ModelDrafter, check_same_tokens
from quire_engine.execution.drafting.outputs import OutputsDrafter
from quire_engine.execution.drafting.row_costs import measured_rows
from quire_engine.execution.drafting.suffix import SuffixDrafter
from quire_engine.execution.executor import (
    Executor,
    check_planning_ahead,
    make_executor,
    runs_by_itself,
    spare_blocks,
    staging_blocks_for,
)
from quire_engine.execution.gpu.adapters import place_adapters
from quire_engine.execution.gpu.rank_commands import DeviceLeader
from quire_engine.execution.kernel_checks import select_kernels
from quire_engine.execution.kv.block_files import HEADER_BYTES
from quire_engine.execution.kv.kv_storage import KVStorage, block_bytes, pool_blocks
from quire_engine.execution.kv.pool_rows import BlockForm, PoolRows
from quire_engine.execution.kv.prefix_files import PrefixFiles, open_prefix_files
from quire_engine.execution.kv.surviving_pool import SurvivingPool, held_bytes, open_surviving
from quire_engine.execution.loading import Loading
from quire_engine.execution.memory import PoolMemory, pool_memory
from quire_engine.execution.models.checkpoint import fingerprint
from quire_engine.execution.models.found import find_model, is_bidirectional, why_no_text
from quire_engine.execution.models.parameters import Parameters, WeightMemory
from quire_engine.execution.models.served import ModelFacts, ServedModel, Wanted
from quire_engine.execution.numerics import Facts, numeric_facts, numerics_name
from quire_engine.execution.parallel.checks import check_kept, check_ranks
from quire_engine.execution.parallel.devices import DeviceRanks
from quire_engine.execution.parallel.model import Leader
from quire_engine.execution.parallel.processes import RankProcesses
from quire_engine.execution.progress import Tell, tell_nobody
from quire_engine.execution.proven_paths import shown_here, unchecked
from quire_engine.execution.prover_process import ProverProcess
from quire_engine.execution.runner import Runner
from quire_engine.gguf import typed_name
from quire_engine.links.kv_transfer import KVTransfer, open_transfer
from quire_engine.machine import CoreShare, available_memory, core_shares, run_on, usable_cores
from quire_engine.memory_plan import (
    PoolSize,
    check_model_len,
    host_blocks,
    kept_blocks,
    plan_text,
    size_pool,
)
from quire_engine.ranks import ALONE, Rank, with_threads
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.speculation import Speculate, Speculation
from quire_kernels.kernel_set import KernelSet

__all__ = ["BuiltEngine", "build", "plan_text", "resolve", "resolve_plan"]

_log = logging.getLogger(__name__)
_DRAFT_SHARE = 0.25  # of the pool's bytes: the draft model's own pool at most


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine's parts, ready for their first step."""

    plan: EnginePlan
    executor: StepExecutor
    scheduler: Scheduler
    grammars: Grammars
    adapters: AdapterCache | None = None
    store: PrefixFiles | None = None  # of prefixes
    peers: KVTransfer | None = None
    ranks: RankProcesses | DeviceRanks | None = None  # the others
    kernels: KernelSet | None = None  # for measurements

    @property
    def lost_a_killed_rank(self) -> bool:
        return self.ranks is not None and self.ranks.one_was_killed

    def close(self) -> None:
        """Let others have the folder of its files, and the place where it listens, and end the other ranks."""
        if self.store is not None:
            self.store.close()
        if self.peers is not None:
            self.peers.close()
        if self.ranks is not None:
            self.ranks.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Everything that is known without reading a weight."""

    asked: EngineConfig
    model: ModelFacts
    implementation: str  # whose code computes the model; empty: ours
    device: torch.device
    dtype: torch.dtype
    why_dtype: str  # empty: as asked, or the checkpoint's own
    speculation: str  # for the plan
    kernels: KernelSet
    replaced_ops: tuple[str, ...]
    left_out_paths: tuple[str, ...]  # optional paths that these kernels could take
    num_threads: int  # of this rank
    parameters: Parameters
    weights: WeightMemory  # of this rank, where it has a device of its own
    kept_bytes: int  # of what the model keeps for running sequences outside of the pool
    memory: PoolMemory
    layout: KVLayout  # of this rank's pool
    bytes_per_block: int  # of all ranks
    form: BlockForm  # of a block outside of the pool
    num_host_blocks: int
    num_staging_blocks: int  # of the pool, for swaps
    num_kept_blocks: int  # in files at most, of a pool in host memory
    adapter_bytes: int  # of all adapters that may be in memory
    draft: Resolved | None = None  # the model that guesses tokens
    rank: Rank = ALONE

    @property
    def plans_ahead(self) -> bool:
        return self.asked.async_scheduling != "off" and runs_by_itself(self.kernels, self.device)

    @property
    def numerics(self) -> Facts:
        """Everything except the request that the bits of results depend on."""
        return numeric_facts(
            self.asked,
            self.kernels,
            dtype=self.dtype,
            device=self.device,
            implementation=self.implementation,
            replaced_ops=(*self.replaced_ops, *self.left_out_paths),
        )

    def kv_layout(self, checkpoint: str = "") -> bytes:
        """A key for stored blocks: everything except tokens that a block's bytes are known to depend on.

        `checkpoint`: the model's name on all machines, instead of the one of its files here.
        """
        size = self.form.num_bytes if self.form.parts else self.bytes_per_block
        geometry = (self.model.num_layers, self.model.kv_heads, self.asked.limits.block_size, size)
        own, *others = self.numerics
        parts = [] if self.form.parts else [f"{self.rank.size} ranks"]  # a block has a part of each
        return repr((*geometry, checkpoint or own, *others, *parts)).encode()

    @property
    def memories(self) -> int:
        """The number of memories that the weights are divided among: of ranks on devices."""
        return 1 if self.device.type == "cpu" else self.rank.size

    def loaded(self, packed_bytes: int | None) -> WeightMemory:
        """The weights, once it is known what their matrices take."""
        return self.parameters.memory(self.dtype.itemsize, self.kernels, packed_bytes, memories=self.memories)

    @property
    def moves_blocks(self) -> bool:
        """Whether blocks of the pool go elsewhere and come from there: to the host, files or other engines."""
        return bool(self.num_host_blocks or self.num_kept_blocks or self.asked.kv_transfer)

    def wanted(self) -> Wanted:
        """The description of the model to load."""
        return Wanted(
            asked=self.asked,
            model=self.model,
            kernels=self.kernels,
            dtype=self.dtype,
            device=self.device,
            threads=self.num_threads,
            layout=self.layout,
            rank=self.rank,
        )

    def _num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at most."""
        limits = self.asked.limits
        groups = kv_groups(self.layout.windows, limits.max_num_batched_tokens, plans_ahead=self.plans_ahead)
        return most_blocks(groups, num_tokens, limits.block_size)

    def pool(self, pool_bytes: int) -> PoolSize:
        return size_pool(
            pool_bytes=pool_bytes,
            bytes_per_block=self.bytes_per_block,
            num_blocks_for=self._num_blocks_for,
            max_model_len=self.asked.max_model_len,
            positions=self.model.max_position_embeddings,
            max_useful_seqs=self.memory.max_useful_seqs,
        )

    @property
    def bytes_beside_pool(self) -> int:
        """Bytes of the weights, of the draft model's too, of adapters, and of the states of sequences."""
        return self.weights.total + self.kept_bytes + self.draft_weights + self.adapter_bytes

    @property
    def draft_weights(self) -> int:
        """Bytes of the draft model's weights."""
        return 0 if self.draft is None else self.draft.weights.total

    @property
    def draft_block_bytes(self) -> int:
        """Bytes of a block of the draft model's pool; 0: there is none."""
        return 0 if self.draft is None else self.draft.bytes_per_block

    def draft_positions(self, pool: PoolSize) -> int:
        """The longest sequence that the draft model guesses for."""
        return 0 if self.draft is None else min(pool.max_model_len, self.draft.model.max_position_embeddings)

    def draft_blocks(self, pool: PoolSize) -> int:
        """Blocks of the draft model's pool: for all running sequences, in at most a quarter of the pool's bytes."""
        if self.draft is None:
            return 0
        limits, most_bytes = self.asked.limits, int(pool.num_blocks * self.bytes_per_block * _DRAFT_SHARE)
        most = limits.max_num_seqs * limits.num_blocks_for(self.draft_positions(pool))
        return max(1, min(most, most_bytes // self.draft_block_bytes))

    def plan(
        self,
        pool: PoolSize,
        scheduler: SchedulerConfig,
        *,
        load_seconds: float = 0.0,
        blocks_taken_over: int = 0,
        address: str = "",
        row_seconds: tuple[tuple[int, float], ...] = (),
    ) -> EnginePlan:
        """The plan for a pool; what the keywords say is known of a built engine only."""
        asked = self.asked
        return EnginePlan(
            model=self._model_part(),
            cost=self._token_cost(),
            machine=self._machine_part(),
            identity=IdentityPart(
                checkpoint=fingerprint(Path(asked.model)),
                numerics=numerics_name(self.numerics),
                arithmetic=numerics_name(self.numerics[1:]),
            ),
            pool=PoolPart(
                num_bytes=pool.num_blocks * self.bytes_per_block,
                bytes_per_block=self.bytes_per_block,
                dtype=asked.kv_cache_dtype,
                copies=self.bytes_per_block / self.form.num_bytes,
                blocks_taken_over=blocks_taken_over,
                kept_blocks=self.num_kept_blocks,
                kept_in=asked.kv_offload_dir if self.num_kept_blocks else "",
            ),
            scheduler=scheduler,
            transfer=TransferPart(address=address, role=asked.role),
            speculation=SpeculationPart(
                text=self.speculation,
                draft_model=_guessing_model(asked.speculation),
                draft_bytes=self.draft_weights + self.draft_blocks(pool) * self.draft_block_bytes,
                row_seconds=row_seconds,
            ),
            adapters=AdapterPart(
                max_kept=num_kept(asked),
                max_rank=asked.max_lora_rank if asked.enable_lora else 0,
                num_bytes=self.adapter_bytes,
            ),
            load_seconds=load_seconds,
        )

    def _model_part(self) -> ModelPart:
        form = self.model.quantisation
        return ModelPart(
            path=typed_name(self.asked.model),
            architecture=self.model.architecture,
            implementation=self.implementation,
            num_parameters=self.parameters.total,
            vocab_size=self.model.vocab_size,
            hidden_size=self.model.hidden_size,
            dtype=str(self.dtype).removeprefix("torch."),
            why_dtype=self.why_dtype,
            quantization=self.asked.quantization,
            stored_as=self.parameters.stored_as(form),
            gguf_type="" if form is None else form.main_type,
            keeps_stored=bool(self.parameters.kept(self.kernels)),
            weights_bytes=self.weights.total * self.memories,
        )

    def _token_cost(self) -> TokenCost:
        return TokenCost(
            layer_parameters=self.parameters.for_each_token,
            sampled_parameters=self.parameters.for_sampled_tokens,
            weights_read_bytes=self.weights.read,
            expert_bytes=self.weights.experts,
            experts=self.parameters.num_experts,
            experts_per_token=self.parameters.top_k,
            layer_attention=self.model.num_heads * self.model.head_dim * (self.model.num_layers - 1),
            sampled_attention=self.model.num_heads * self.model.head_dim,
        )

    def _machine_part(self) -> MachinePart:
        return MachinePart(
            device=self.device.type,
            gpu=gpu_name(self.device),
            kernels=self.kernels.name,
            cpu_variant=cast(CpuVariant, self.kernels.variant) if self.kernels.variant else None,
            why_cpu_variant=self.kernels.why_variant,
            replaced_ops=self.replaced_ops,
            left_out_paths=self.left_out_paths,
            deterministic=self.asked.deterministic or self.device.type == "cpu",
            num_threads=self.num_threads,
            tensor_parallel_size=self.rank.size,
        )

    def scheduler(self, pool: PoolSize, swap_seconds: float = 0.0) -> SchedulerConfig:
        """The scheduler's configuration. `swap_seconds`: of a block's copy to the host or back, as measured."""
        return SchedulerConfig(
            num_blocks=pool.num_blocks,
            max_model_len=pool.max_model_len,
            plans_ahead=self.plans_ahead,
            num_host_blocks=self.num_host_blocks,
            swap_seconds=swap_seconds,
            has_states=bool(self.kept_bytes),
            bidirectional=is_bidirectional(self.model),
            why_no_text=why_no_text(self.model),
            speculates=self.asked.speculation != "off",
            tells_prefixes=self.asked.tells_prefixes,
            tells_blocks=self.asked.tells_blocks,
            windows=self.layout.windows,
            limits=self.asked.limits,
        )


def _guessing_model(speculation: str) -> str:
    """The model that guesses tokens, as the user has named it; empty: none does."""
    directory = draft_model(speculation)
    return typed_name(directory) if directory else ""


def resolve_plan(config: EngineConfig) -> EnginePlan:
    """The plan without loading the weights, for --dry-run. Raises ConfigError, ModelLoadError.

    On a GPU the workspace of a step is estimated here and measured by `build`, so the pools differ a little.
    """
    resolved = resolve(config)
    pool = resolved.pool(resolved.memory.before_load(resolved.bytes_beside_pool))
    return resolved.plan(pool, resolved.scheduler(pool))


def build(
    config: EngineConfig,
    *,
    memory_fd: int | None = None,
    pool_fd: int | None = None,
    prover: ProverProcess | None = None,
    tell: Tell = tell_nobody,
) -> BuiltEngine:
    """Load the model, size the pool and put the parts together. Raises ConfigError, ModelLoadError.

    `memory_fd`: a memory file for packed weights that outlives this process, empty or filled by the process before.
    `pool_fd`: one for the KV pool of a CPU, which is closed here. `prover`: a process that can check a GPU.
    `tell`: called with the progress of the load.
    """
    started = time.perf_counter()
    tell("preparing", 0, 0)
    shares = core_shares(config.tensor_parallel_size) if config.tensor_parallel_size > 1 else []
    config = with_threads(config)
    if shares:
        run_on(shares[0].cpus)
    resolved = resolve(config, check_kernels=True, prover=prover, tell=tell)
    memory = resolved.memory
    _use_threads(resolved)
    devices, resolved = _with_devices(config, resolved, shares)
    loading = Loading(resolved.wanted(), memory_fd, tell)
    ranks = None if devices is not None else _other_ranks(config, resolved, shares, loading)
    # Weights and a pool that the engine process before left are in memory already, and do not count as free.
    to_come = resolved.bytes_beside_pool - min(resolved.weights.total, loading.held_bytes) - held_bytes(pool_fd)
    pool = resolved.pool(memory.before_load(to_come))
    decoder = loading.load(memory.positions(pool))
    resolved = replace(resolved, weights=resolved.loaded(decoder.packed_bytes))
    adapters = _make_adapters(resolved)
    pool_bytes = memory.after_load(decoder, adapters)
    if pool_bytes is not None:
        pool = resolved.pool(pool_bytes if devices is None else devices.least(pool_bytes))
    drafter = _make_drafter(resolved, pool, tell)
    if ranks is not None:
        sizes = {"num_blocks": pool.num_blocks, "block_bytes": resolved.bytes_per_block // resolved.rank.size}
        decoder = ranks.begin(decoder, **sizes, positions=memory.positions(pool), has_states=bool(resolved.kept_bytes))
    leader = None if devices is None else devices.begin(num_blocks=pool.num_blocks, max_model_len=pool.max_model_len)
    grammars = _make_grammars(config, resolved.model.vocab_size)
    surviving = _surviving(resolved, pool, pool_fd)
    made = _make_executor(resolved, decoder, pool, grammars, adapters, ranks or leader, surviving)
    load_seconds, scheduled = time.perf_counter() - started, resolved.scheduler(pool, made.swap_seconds)
    scheduler, row_seconds = _make_scheduler(resolved, scheduled, drafter, made, surviving)
    plan = resolved.plan(
        pool,
        scheduled,
        load_seconds=load_seconds,
        blocks_taken_over=scheduler.num_taken_over,
        address="" if made.peers is None else made.peers.address,
        row_seconds=row_seconds,
    )
    return BuiltEngine(
        plan=plan,
        executor=made.executor,
        scheduler=scheduler,
        grammars=grammars,
        adapters=adapters,
        store=made.store,
        peers=made.peers,
        ranks=ranks or devices,
        kernels=resolved.kernels,
    )


def _use_threads(resolved: Resolved) -> None:
    """Set torch's threads. Beside workers of the kernels' own they would only wait for each other; and where torch
    computes a model's rows by itself, two threads would cut its sums by the number of rows."""
    alone = resolved.kernels.own_threads or bool(resolved.implementation)
    torch.set_num_threads(1 if alone else resolved.num_threads)


def _make_grammars(config: EngineConfig, vocab_size: int) -> Grammars:
    defaults = Path(config.generation_config) if config.generation_config else None
    return Grammars(Path(config.tokenizer or config.model), vocab_size, defaults=defaults)


def _make_adapters(resolved: Resolved) -> AdapterCache | None:
    asked, model, kernels = resolved.asked, resolved.model, resolved.kernels
    placed = place_adapters(asked, model, kernels, resolved.dtype, resolved.device)
    return make_adapters(asked, model, kernels, placed)


def _other_ranks(
    config: EngineConfig, resolved: Resolved, shares: Sequence[CoreShare], loading: Loading
) -> RankProcesses | None:
    """The other ranks, launched; None: there are none."""
    if resolved.rank.size == 1:
        return None
    given = config, resolved.kernels, resolved.dtype, shares, loading.share()
    return RankProcesses(*given, shares_pools=resolved.moves_blocks)


def _with_devices(
    config: EngineConfig, resolved: Resolved, shares: Sequence[CoreShare]
) -> tuple[DeviceRanks | None, Resolved]:
    """The other ranks on devices of their own, launched, and what this one computes with; None: there are none."""
    if resolved.rank.size == 1 or resolved.device.type == "cpu":
        return None, resolved
    check_kept(resolved.rank.size, resolved.replaced_ops)
    devices = DeviceRanks(
        replace(config, left_out_paths=resolved.asked.left_out_paths), resolved.kernels, resolved.dtype, shares
    )
    return devices, replace(resolved, kernels=devices.kernels)


def _surviving(resolved: Resolved, pool: PoolSize, fd: int | None) -> SurvivingPool | None:
    """The pool in memory that outlives the process. Ranks have pools of their own, and a GPU's is memory of its own."""
    return open_surviving(
        fd,
        resolved.kv_layout() + repr(resolved.layout).encode(),
        is_wanted=resolved.device.type == "cpu" and resolved.rank.size == 1,
        num_blocks=pool.num_blocks,
        block_bytes=resolved.bytes_per_block,
        block_size=resolved.asked.limits.block_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """The executor, and what was opened with its pool."""

    executor: Executor
    swap_seconds: float  # of a block's copy to the host or from it; 0: there is no swap space
    host_keys: tuple[bytes, ...]  # of blocks that the host has from before
    store: PrefixFiles | None
    peers: KVTransfer | None


def _make_executor(  # noqa: PLR0917 - the parts of an engine
    resolved: Resolved,
    decoder: ServedModel,
    pool: PoolSize,
    grammars: Grammars,
    adapters: AdapterCache | None,
    ranks: RankProcesses | DeviceLeader | None,
    surviving: SurvivingPool | None,
) -> _Made:
    """Make the executor with its pool. `ranks`: the others, which have parts of all blocks, or the messages to them on
    devices. `surviving`: memory for the pool.
    """
    kernels, device, limits = resolved.kernels, resolved.device, resolved.asked.limits
    num_blocks = pool.num_blocks + spare_blocks(kernels, device) + resolved.num_staging_blocks
    size, layout = limits.block_size, resolved.layout
    leader = decoder if isinstance(decoder, Leader) else None
    others = ranks if isinstance(ranks, DeviceLeader) else None
    on_copy = leader.copy_blocks if leader is not None else None if others is None else others.copied
    dtype, memory = resolved.dtype, None if surviving is None else surviving.memory
    model = resolved.model
    kv = KVStorage(kernels, model, num_blocks, size, dtype, device, layout=layout, on_copy=on_copy, memory=memory)
    rows = PoolRows(kv.tensor, *(ranks.pools if isinstance(ranks, RankProcesses) else ()), form=resolved.form)
    executor = make_executor(
        decoder,
        kernels,
        kv,
        limits,
        max_model_len=pool.max_model_len,
        num_blocks=pool.num_blocks,
        device=device,
        ahead=resolved.plans_ahead,
        grammars=grammars,
        adapters=adapters,
        num_host_blocks=resolved.num_host_blocks,
        drafts=resolved.asked.speculation != "off",
        faults=resolved.asked.faults,
        rows=rows,
        waited=None if leader is None else leader.waited,
        others=others,
        **({} if surviving is None else {"commit": surviving.commit_next}),
    )
    swap_seconds = executor.swap_seconds() if resolved.num_host_blocks else 0.0
    host_keys: tuple[bytes, ...] = ()
    directory, store = Path(resolved.asked.kv_offload_dir), None
    if resolved.num_kept_blocks:
        places, most = resolved.asked.replicas, resolved.num_kept_blocks
        store = open_prefix_files(directory, resolved.kv_layout(), rows, most, places=places)
    elif resolved.asked.kv_offload_dir:
        host_keys = executor.keep_host_blocks(directory, resolved.kv_layout())
    executor.capture_graphs()
    transfer = resolved.asked.kv_transfer
    peers = None if transfer is None else open_transfer(transfer, rows, resolved.kv_layout)
    return _Made(executor=executor, swap_seconds=swap_seconds, host_keys=host_keys, store=store, peers=peers)


def _make_scheduler(
    resolved: Resolved, config: SchedulerConfig, drafter: Drafter | None, made: _Made, surviving: SurvivingPool | None
) -> tuple[Scheduler, tuple[tuple[int, float], ...]]:
    """Make the scheduler; returns the seconds of steps by their rows too, where tokens are guessed."""
    speculate, measured = _speculate(resolved, config, drafter, made.executor, surviving)
    scheduler = Scheduler(
        config,
        host_keys=made.host_keys,
        store=made.store,
        peers=made.peers,
        record=surviving,
        speculate=speculate,
    )
    return scheduler, tuple(measured.items())


def _make_drafter(resolved: Resolved, pool: PoolSize, tell: Tell) -> Drafter | None:
    """The drafter that the settings name; a draft model is loaded like the model, and has a pool of its own."""
    draft, block_size, length = resolved.draft, resolved.asked.limits.block_size, resolved.draft_positions(pool)
    if draft is None:
        make = {"suffix": SuffixDrafter, "outputs": OutputsDrafter}.get(resolved.asked.speculation)
        return None if make is None else make()
    num_blocks = resolved.draft_blocks(pool)
    model = Loading(draft.wanted(), None, tell).load(length)
    kv = KVStorage(draft.kernels, draft.model, num_blocks, block_size, draft.dtype, draft.device)
    runner = Runner(model, kv.tensor, block_size, draft.device)
    drafter = ModelDrafter(runner, num_blocks=num_blocks, block_size=block_size, max_model_len=length)
    drafter.warm_up()
    return drafter


def _speculate(
    resolved: Resolved,
    config: SchedulerConfig,
    drafter: Drafter | None,
    executor: Executor,
    surviving: SurvivingPool | None,
) -> tuple[Speculate | None, dict[int, float]]:
    """Makes the part of the scheduler that adds this drafter's guesses to plans; the seconds of steps by their rows.

    An earlier engine has measured those, or this one does, in the pool.
    """
    if drafter is None:
        return None, {}
    has_graphs, most = runs_by_itself(resolved.kernels, resolved.device), config.limits.max_num_batched_tokens
    if has_graphs:
        most = min(most, most_drafted_rows(config.limits.max_num_seqs))
    measured = dict(resolved.asked.row_seconds)
    if not measured and not resolved.asked.faults:  # a fault that is planted is for a request
        if surviving is not None:
            surviving.clear()
        measured = measured_rows(executor.execute, config, most, has_graphs=has_graphs)
    make = partial(Speculation, drafter, row_seconds=measured, most_rows=most, plans_ahead=resolved.plans_ahead)
    return make, measured


def resolve(
    config: EngineConfig,
    *,
    check_kernels: bool = False,
    prover: ProverProcess | None = None,
    tell: Tell = tell_nobody,
    beside: KernelSet | None = None,
    rank: int = 0,
) -> Resolved:
    """Everything that is known without the weights. `check_kernels`: check a GPU's kernels on it first, by `prover`.

    `beside`: the kernels of another model, which compute this one too where they can. `rank`: of the configured ones.
    """
    config.limits.check()
    ranks = config.tensor_parallel_size
    found = find_model(with_threads(config))
    model, config = found.facts, found.asked
    check_model_len(config.max_model_len, model.max_position_embeddings)
    device = _device(config)
    dtype, why_dtype = compute_dtype(config.dtype, model.dtype, device, config.kernels)
    parameters = found.parameters(Path(config.model))
    num_threads = (config.num_threads or usable_cores()) // ranks
    shown = shown_here(config, found, device, dtype, tell, prover) if check_kernels else unchecked(config)
    config = shown.config
    kernels, replaced_ops = shown.repaired(select_kernels(config, found, device, dtype, num_threads, tell, beside))
    check_ranks(config, model, kernels, device, found.implementation)
    config, speculation = own_speculation(config, device, has_states=found.state_bytes > 0)
    check_planning_ahead(config.async_scheduling, kernels, device)
    weights = parameters.memory(dtype.itemsize, kernels, memories=1 if device.type == "cpu" else ranks)
    if device.type == "cpu" and not kernels.own_threads and config.num_threads is None:
        num_threads = torch_threads(weights.total)
    layout, bytes_per_block, form = pool_blocks(config, found, kernels, dtype, device)
    num_host_blocks = _host_blocks(config, bytes_per_block, device)
    kept = kept_blocks(config, HEADER_BYTES + bytes_per_block, device.type, found.state_bytes, layout.windows)
    staging = staging_blocks_for(kernels, device, bytes_per_block, num_host_blocks)
    resolved = Resolved(
        asked=config,
        model=model,
        implementation=found.implementation,
        device=device,
        dtype=dtype,
        why_dtype=why_dtype,
        speculation=speculation,
        kernels=kernels,
        replaced_ops=replaced_ops,
        left_out_paths=shown.tell(kernels),
        num_threads=num_threads,
        parameters=parameters,
        weights=weights,
        kept_bytes=found.state_bytes * config.limits.max_num_seqs * ranks,
        memory=pool_memory(
            config, model, kernels, dtype=dtype, device=device, layout=layout, staging_bytes=staging * bytes_per_block
        ),
        layout=layout,
        bytes_per_block=bytes_per_block,
        form=form,
        num_host_blocks=num_host_blocks,
        num_staging_blocks=staging,
        num_kept_blocks=kept,
        adapter_bytes=adapter_bytes(config, model, kernels, device) * ranks,
        rank=Rank(rank, ranks),
    )
    return replace(resolved, draft=_resolve_draft(resolved)) if draft_model(config.speculation) else resolved


def _host_blocks(config: EngineConfig, bytes_per_block: int, device: torch.device) -> int:
    """The blocks of the swap space. Raises ConfigError."""
    on_device = device.type != "cpu" or config.swap_on_cpu
    sizes = {"bytes_per_block": bytes_per_block, "available": available_memory()}
    return host_blocks(config.swap_space, **sizes, on_device=on_device)


def _device(config: EngineConfig) -> torch.device:
    """The device of the settings. Raises ConfigError."""
    device = resolve_device(config.device)
    if config.replicas > 1 and device.type != "cpu":
        raise ConfigError(
            f"replicas={config.replicas}: the engines of one server are divided over a CPU's cores only;"
            " start a server for each GPU, or set device to cpu"
        )
    return device


def _resolve_draft(resolved: Resolved) -> Resolved:
    """The model that guesses tokens, computed as the model itself. Raises ConfigError where it cannot be one."""
    asked, kernels = resolved.asked, resolved.kernels
    config = EngineConfig(
        model=draft_model(asked.speculation),
        ignore_config_keys=asked.ignore_config_keys,
        device=asked.device,
        dtype=cast(DType, str(resolved.dtype).removeprefix("torch.")),
        model_impl=asked.model_impl,
        kernels=cast(KernelChoice, kernels.name),
        cpu_variant=cast(CpuVariant, kernels.variant) if kernels.variant else None,
        quantization=asked.quantization,
        kv_cache_dtype=asked.kv_cache_dtype,
        limits=asked.limits,
        num_threads=resolved.num_threads,
        packed_cache=asked.packed_cache,
        packed_cache_dir=asked.packed_cache_dir,
        packed_cache_size=asked.packed_cache_size,
    )
    try:
        # Of a model by transformers' code the kernels may have a pool of its own, and those of ranks divide products.
        own = resolved.implementation or resolved.rank.size > 1
        draft = resolve(config, beside=None if own else kernels)
        sizes = resolved.model.vocab_size, draft.model.vocab_size
        check_same_tokens(Path(asked.tokenizer or asked.model), Path(config.model), sizes)
        if draft.kept_bytes:
            raise ConfigError("it keeps a recurrent state, which a wrong guess would change")
    except (ConfigError, ModelLoadError) as error:
        raise ConfigError(f"speculation={asked.speculation}: the draft model cannot be used: {error}") from None
    layout = one_group(draft.model.kv_heads)  # blocks are never given back by windows alone
    size = block_bytes(draft.kernels, draft.model, asked.limits.block_size, draft.dtype)
    return replace(draft, layout=layout, bytes_per_block=size)
