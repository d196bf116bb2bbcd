"""The engine's configuration as resolved: `EnginePlan`, composed of one record for each subject.

Promises: a plan never changes after it is made; it holds every number that the server needs to check a request. Must
not know: torch, flags.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire_engine.contract.config import CpuVariant, EngineConfig, KVCacheDType, Quantization, Role
from quire_engine.contract.limits import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The model that an engine serves: its size, and how its weights are stored and computed with."""

    path: str  # a directory, or the GGUF file as the user has named it
    architecture: str
    implementation: str = ""  # whose code computes the model, where it is not ours
    num_parameters: int
    vocab_size: int  # width of the logits
    hidden_size: int = 0  # length of an embedding
    dtype: str
    why_dtype: str = ""  # a reason to show to the operator, where the dtype is neither asked for nor the checkpoint's
    quantization: Quantization | None = None
    stored_as: str = ""  # the form of the checkpoint's matrices, where they are quantised
    gguf_type: str = ""  # of a GGUF file as a whole, such as Q4_K_M; empty: the checkpoint is none
    keeps_stored: bool = False  # the kernels compute with that form; else they are decoded at load
    weights_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """The numbers by which the work of a token is estimated: products, attention, weights read; 0: unknown."""

    layer_parameters: int = 0  # multiplied with every token
    sampled_parameters: int = 0  # multiplied with every token whose logits are needed: the last layer's end, the head
    weights_read_bytes: int = 0  # weights read by a step of one token with logits
    expert_bytes: int = 0  # of the weights, those of experts
    experts: int = 1  # of a layer
    experts_per_token: int = 1
    # Query heads x head width x layers: 4 times as many FLOP per token and attended token.
    layer_attention: int = 0  # for all layers but the last
    sampled_attention: int = 0  # for the last layer

    @property
    def active_parameters(self) -> int:
        """The parameters multiplied with a token whose logits are needed."""
        return self.layer_parameters + self.sampled_parameters

    def weights_read(self, tokens: int) -> int:
        """The bytes of weights that a step of so many tokens reads, if every expert is as likely as any other."""
        share = self.experts_per_token / self.experts
        touched = 1.0 - (1.0 - share) ** tokens
        return self.weights_read_bytes + int((touched - share) * self.expert_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePart:
    """The device, kernels, threads and ranks that compute the model."""

    device: str
    gpu: str = ""  # its UUID, as the driver names it; empty on a CPU
    kernels: str
    cpu_variant: CpuVariant | None = None  # instruction set of the C++ kernels; None with other kernels
    why_cpu_variant: str = ""  # a reason to show to the operator
    replaced_ops: tuple[str, ...] = ()  # ops that failed their check at start and run on the reference
    left_out_paths: tuple[str, ...] = ()  # optional paths of the GPU's kernels that it has not shown
    deterministic: bool = False  # a row's bits do not depend on its batch
    num_threads: int  # of each rank
    tensor_parallel_size: int = 1  # ranks that compute the model together


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityPart:
    """The names by which engines are compared: the model's files, and all that the bits of results depend on."""

    checkpoint: str = ""  # changes when a file of the model does
    numerics: str = ""  # engines of one name compute the same bits; a stream may go on with any of them
    arithmetic: str = ""  # the same without the checkpoint, whose name here is of this machine's files


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPart:
    """The memory of the pool of KV blocks, and the blocks that it shares with files and an earlier process."""

    num_bytes: int
    bytes_per_block: int
    dtype: KVCacheDType = "auto"  # of keys and values; auto: the model's
    copies: float = 1.0  # of each token's keys and values: ranks may have the same heads, or all of them
    blocks_taken_over: int = 0  # which the engine process before had computed
    kept_blocks: int = 0  # prefix blocks in files at most, beside a pool in host memory
    kept_in: str = ""  # their directory


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPart:
    """The engine's part in passing KV blocks on: where others fetch its blocks, and which requests it takes."""

    address: str = ""  # HOST:PORT where other engines fetch KV blocks; empty: nowhere
    role: Role = "both"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPart:
    """The way next tokens are guessed, and what it takes."""

    text: str = ""  # how tokens are guessed, or the reason why not; empty: not asked for
    draft_model: str = ""  # the directory of the model that guesses tokens; empty: none does
    draft_bytes: int = 0  # its weights and its pool
    row_seconds: tuple[tuple[int, float], ...] = ()  # of a step by its rows, where tokens are guessed


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPart:
    """The adapters that may be in memory at once, and the memory they take."""

    max_kept: int = 0  # 0: adapters are not enabled
    max_rank: int = 0
    num_bytes: int = 0  # of all adapters in memory, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """The resolved configuration, which is printed, exported and used to check requests."""

    model: ModelPart
    cost: TokenCost = TokenCost()
    machine: MachinePart
    identity: IdentityPart = IdentityPart()
    pool: PoolPart
    scheduler: SchedulerConfig
    transfer: TransferPart = TransferPart()
    speculation: SpeculationPart = SpeculationPart()
    adapters: AdapterPart = AdapterPart()
    load_seconds: float = 0.0  # 0: the plan is an estimate


def for_later_engines(config: EngineConfig, plan: EnginePlan) -> EngineConfig:
    """The configuration for engine processes after the one that made `plan`.

    They keep the pool and the length that requests were checked against, however much memory is free by then. They keep
    the instruction set and a GPU's optional paths too: others round differently, and resumed requests would continue
    with other tokens. And they listen where the first one did, and need not measure again what steps take.
    """
    transfer = config.kv_transfer
    if transfer is not None and plan.transfer.address and not transfer.reached_at:
        transfer = replace(transfer, listen=plan.transfer.address)  # others know it
    return replace(
        config,
        kv_memory=plan.pool.num_bytes or None,
        max_model_len=plan.scheduler.max_model_len,
        cpu_variant=plan.machine.cpu_variant,
        kv_transfer=transfer,
        row_seconds=plan.speculation.row_seconds,
        left_out_paths=plan.machine.left_out_paths,
    )
