"""The size of the KV pool and the longest sequence, computed from memory, and the plan's text for operators.

Promises: a plan holds at least one sequence of max_model_len, or a ConfigError names a setting that would. Must not
know: torch, devices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.contract.limits import SHARE_WINDOW_STEPS, SchedulerConfig, SchedulerLimits
from quire_engine.contract.plan import (
    AdapterPart,
    EnginePlan,
    MachinePart,
    ModelPart,
    PoolPart,
    SpeculationPart,
    TokenCost,
)

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
CPU_POOL_SHARE = 0.25  # share of the memory that is free after loading, since other programs need some too
CPU_POOL_MAX = 4 << 30  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """The resolved size of the pool."""

    num_blocks: int
    max_model_len: int


def cpu_pool_bytes(free: int, kv_memory: int | None, replicas: int = 1) -> int:
    """Bytes the pool may take on a CPU, where `free` are left beside the weights. Raises ConfigError.

    `replicas`: engines with a pool of this size each; `kv_memory` is for this one.
    """
    if kv_memory is None:
        return min(int(free * CPU_POOL_SHARE), CPU_POOL_MAX) // replicas
    return _checked_kv_memory(free, kv_memory)


def gpu_pool_bytes(*, total: int, free: int, utilization: float, workspace: int, kv_memory: int | None) -> int:
    """Bytes the pool may take on a GPU of `total` bytes, `free` left beside the weights and other processes.

    `workspace`: the bytes that the largest step needs. Raises ConfigError.
    """
    usable = free - workspace
    if kv_memory is not None:
        return _checked_kv_memory(usable, kv_memory)
    budget = int(total * utilization) - (total - free) - workspace
    if budget <= 0:
        # The share that is in use plus one hundredth for the pool, rounded up to a hundredth.
        needed = (total - free + workspace) / total + 0.01
        fix = f"set gpu_memory_utilization to {needed + 0.005:.2f} or more" if needed < 0.99 else "use a larger GPU"
        raise ConfigError(
            f"gpu_memory_utilization={utilization} of {bytes_text(total)} leaves nothing for the KV cache:"
            f" {bytes_text(total - free)} are in use and a step needs {bytes_text(workspace)}; {fix}"
        )
    return min(budget, usable)


def _checked_kv_memory(free: int, kv_memory: int) -> int:
    if kv_memory > free:
        raise ConfigError(
            f"kv_memory={kv_memory} ({bytes_text(kv_memory)}) is more than the {bytes_text(max(0, free))} left beside"
            f" the weights; set kv_memory to {max(0, free)} or less"
        )
    return kv_memory


def host_blocks(swap_space: int, *, bytes_per_block: int, available: int, on_device: bool) -> int:
    """Blocks that a swap space holds, with `available` bytes of host memory. Raises ConfigError."""
    if swap_space == 0:
        return 0
    if not on_device:
        raise ConfigError(
            f"swap_space={swap_space}, but on a CPU the KV cache lies in the same memory: swapping would only copy;"
            " set swap_space to 0, and kv_memory to more if requests are preempted"
        )
    if swap_space < bytes_per_block:
        raise ConfigError(
            f"swap_space={swap_space} holds no block of {bytes_text(bytes_per_block)};"
            f" set swap_space to {bytes_per_block} or more, or to 0"
        )
    if swap_space > available:
        raise ConfigError(
            f"swap_space={swap_space} ({bytes_text(swap_space)}) is more than the {bytes_text(available)}"
            f" of host memory that are free; set swap_space to {available} or less"
        )
    return swap_space // bytes_per_block


def kept_blocks(
    config: EngineConfig, bytes_per_file: int, device: str, state_bytes: int, windows: tuple[int | None, ...]
) -> int:
    """Blocks that `kv_offload_dir` keeps of a pool in host memory at most; 0 where it keeps the swap space, or none.

    `state_bytes`: of what a sequence has outside of its blocks; `windows`: of the groups of layers. Raises ConfigError,
    also where `kv_transfer` cannot be.
    """
    _check_transfer(config, device, state_bytes, windows)
    directory, size = config.kv_offload_dir, config.kv_offload_size
    if not directory or config.swap_space:
        return 0
    if device != "cpu":
        raise ConfigError(f"kv_offload_dir={directory} keeps the swap space; set swap_space to a size too")
    why_not = _why_no_blocks(config, state_bytes, windows)
    if why_not:
        raise ConfigError(f"kv_offload_dir={directory} is not possible: {why_not}; leave it out")
    if size < bytes_per_file:
        raise ConfigError(
            f"kv_offload_dir={directory} may have {size} bytes, which hold no block of {bytes_text(bytes_per_file)};"
            f" give it {bytes_per_file} or more, as DIR:SIZE"
        )
    return size // bytes_per_file


def _check_transfer(config: EngineConfig, device: str, state_bytes: int, windows: tuple[int | None, ...]) -> None:
    """Refuse `kv_transfer` where blocks cannot be passed on; the others as for `kept_blocks`. Raises ConfigError."""
    if config.kv_transfer is None:
        return
    why_not = _why_no_blocks(config, state_bytes, windows)
    if device != "cpu":
        why_not = "KV blocks are passed on from a CPU's pool only"
    elif config.swap_space:
        why_not = "swap_space is set too, and blocks in it cannot be passed on"
    if why_not:
        raise ConfigError(f"kv_listen={config.kv_transfer.listen} is not possible: {why_not}; leave it out")
    if config.kv_transfer.transport != "tcp" and not config.kv_transfer.trusts_network:
        raise ConfigError(
            f"kv_transport={config.kv_transfer.transport} encrypts no block on its way: set kv_trust_network too where"
            " nobody else is on the network between the nodes, or kv_transport to tcp"
        )


def _why_no_blocks(config: EngineConfig, state_bytes: int, windows: tuple[int | None, ...]) -> str:
    """Why a block is of no use to others than those who hold it; empty: it is."""
    if state_bytes:
        return "the model keeps a recurrent state, which no block has"
    if not config.limits.enable_prefix_caching:
        return "what it keeps are cached prefixes, and prefix caching is off for this model or by its setting"
    if windows != (None,):
        return "some layers of this model have a sliding window, and let go of the blocks behind it"
    return ""


def check_model_len(max_model_len: int | None, positions: int) -> None:
    """Refuse a length that the model was not made for."""
    if max_model_len is not None and max_model_len > positions:
        raise ConfigError(
            f"max_model_len={max_model_len} is more than the {positions} positions of the model;"
            f" set max_model_len to {positions} or less"
        )


def size_pool(
    *,
    pool_bytes: int,
    bytes_per_block: int,
    num_blocks_for: Callable[[int], int],
    max_model_len: int | None,
    positions: int,
    max_useful_seqs: int | None,
) -> PoolSize:
    """Turn bytes into blocks. The default of `max_model_len` is the model's, or what the pool holds if less.

    `num_blocks_for`: the blocks that a sequence of so many tokens holds at most; `max_useful_seqs` caps the pool at
    that many sequences of full length. Raises ConfigError.
    """
    num_blocks = pool_bytes // bytes_per_block
    holds = bisect_right(range(1, positions + 1), num_blocks, key=num_blocks_for)
    length = holds if max_model_len is None else max_model_len
    needed = num_blocks_for(max(length, 1)) * bytes_per_block
    if num_blocks * bytes_per_block < needed:
        shorter = f"max_model_len to {holds} or less, or " if holds else ""
        raise ConfigError(
            f"one sequence of {max(length, 1)} tokens needs {bytes_text(needed)} of KV cache,"
            f" {bytes_text(pool_bytes)} are available; set {shorter}kv_memory to {needed} or more"
        )
    if max_useful_seqs is not None:
        num_blocks = min(num_blocks, max_useful_seqs * num_blocks_for(length))
    return PoolSize(num_blocks=num_blocks, max_model_len=length)


def plan_text(plan: EnginePlan, quality: str = "") -> str:
    """The plan in a few lines, for the start and --dry-run. `quality`: the measured loss by quantisation, if known."""
    scheduler, limits = plan.scheduler, plan.scheduler.limits
    length = scheduler.max_model_len
    fits = [_sequences_text(_num_fitting(scheduler, length), length)]
    if length > 1024:
        fits.append(f"{_num_fitting(scheduler, 1024):,} of 1,024 tokens")
    loaded = f", loaded in {plan.load_seconds:.1f} s" if plan.load_seconds else ", estimated"
    if scheduler.bidirectional:
        pace = " each whole, since attention is bidirectional;"
    else:
        pace = f" about {limits.itl_target:g} s beside running streams;" if limits.itl_target else ""
    lines = [
        ("model", _model_text(plan.model, plan.cost)),
        ("device", _machine_text(plan.machine, plan.model.dtype)),
        *([("dtype", plan.model.why_dtype)] if plan.model.why_dtype else []),
        *_variant_lines(plan.machine),
        ("weights", f"{_weights_text(plan.model)}{loaded}{_read_text(plan.cost)}"),
        ("KV cache", _cache_text(plan)),
        *_rank_lines(plan),
        *_swap_lines(scheduler, plan.pool.bytes_per_block),
        *_kept_lines(plan.pool),
        *_speculation_lines(plan.speculation),
        *_adapter_lines(plan.adapters, plan.machine.device, limits.max_loras),
        ("fits", f"{' or '.join(fits)}; at most {limits.max_num_seqs} run at once"),
        ("reserved vs live", _live_text(scheduler, plan.pool.bytes_per_block)),
        (
            "step",
            f"at most {limits.max_num_batched_tokens} tokens, {limits.prefill_chunk} of one prompt;{pace}"
            f" prefix caching {'on' if limits.enable_prefix_caching else 'off'}; {limits.scheduling_policy}",
        ),
    ]
    lines.append(("longest wait", _wait_text(scheduler)))
    lines += _share_lines(limits)
    if quality:
        lines.append(("quality", quality))
    return "\n".join(f"{name:<17}{text}" for name, text in lines)


def summary_text(plan: EnginePlan) -> str:
    """The model's size and how much fits, in one line without its name; `plan_text` has the rest."""
    model, machine, length = plan.model, plan.machine, plan.scheduler.max_model_len
    return (
        f"{model.num_parameters:,} parameters{_stored_text(model)}, on {machine.device} with {_threads_text(machine)};"
        f" weights {_weights_text(model)}, KV cache {bytes_text(plan.pool.num_bytes)},"
        f" {_sequences_text(_num_fitting(plan.scheduler, length), length)}"
    )


def _model_text(model: ModelPart, cost: TokenCost) -> str:
    by = f" by {model.implementation}" if model.implementation else ""
    some = f", {cost.active_parameters:,} of them for a token" if cost.experts > 1 else ""
    size = f"{model.num_parameters:,} parameters{some}{_stored_text(model)}"
    return f"{model.path} ({model.architecture}{by}, {size})"


def _stored_text(model: ModelPart) -> str:
    if not model.stored_as:
        return ""
    return f", kept as {model.stored_as}" if model.keeps_stored else f", decoded from {model.stored_as}"


def _weights_text(model: ModelPart) -> str:
    return bytes_text(model.weights_bytes) + (f" in {model.quantization}" if model.quantization else "")


def _machine_text(machine: MachinePart, dtype: str) -> str:
    without = f" without {', '.join(machine.replaced_ops)} (failed their check)" if machine.replaced_ops else ""
    without += f" without {', '.join(machine.left_out_paths)} (not shown here)" if machine.left_out_paths else ""
    deterministic = ", deterministic" if machine.deterministic else ""
    return f"{machine.device}, {dtype}, {machine.kernels} kernels{without}, {_threads_text(machine)}{deterministic}"


def _threads_text(machine: MachinePart) -> str:
    threads = "1 thread" if machine.num_threads == 1 else f"{machine.num_threads} threads"
    return threads if machine.tensor_parallel_size == 1 else f"{machine.tensor_parallel_size} ranks of {threads}"


def _read_text(cost: TokenCost) -> str:
    """The weights that steps of few and of many tokens read, where that depends on their number."""
    if cost.experts == 1:
        return ""
    read = (f"{bytes_text(cost.weights_read(tokens))} for {tokens}" for tokens in (1, 8, 64))
    return f"; a step reads {', '.join(read)} tokens"


def _variant_lines(machine: MachinePart) -> list[tuple[str, str]]:
    """The instruction set of the C++ kernels, and the reason for its choice."""
    if machine.cpu_variant is None:
        return []
    why = f": {machine.why_cpu_variant}" if machine.why_cpu_variant else ""
    return [("instructions", machine.cpu_variant + why)]


def _rank_lines(plan: EnginePlan) -> list[tuple[str, str]]:
    """The memory of each rank, where ranks have memories of their own."""
    ranks = plan.machine.tensor_parallel_size
    if plan.machine.device == "cpu" or ranks == 1:
        return []
    own, pool = bytes_text(plan.model.weights_bytes // ranks), bytes_text(plan.pool.num_bytes // ranks)
    return [("each rank", f"a GPU with {own} of weights and {pool} of the KV cache")]


def _swap_lines(scheduler: SchedulerConfig, bytes_per_block: int) -> list[tuple[str, str]]:
    """The size of the swap space, where there is one."""
    if not scheduler.num_host_blocks:
        return []
    seconds = f"; a block takes {1000 * scheduler.swap_seconds:.3g} ms one way" if scheduler.swap_seconds else ""
    size = bytes_text(scheduler.num_host_blocks * bytes_per_block)
    return [("swap space", f"{size} of host memory = {scheduler.num_host_blocks:,} blocks{seconds}")]


def _kept_lines(pool: PoolPart) -> list[tuple[str, str]]:
    """The bound on prefixes in files, where they are kept beside the pool."""
    if not pool.kept_blocks:
        return []
    size = bytes_text(pool.kept_blocks * pool.bytes_per_block)
    return [("kept prefixes", f"at most {size} = {pool.kept_blocks:,} blocks in files, in {pool.kept_in}")]


def _speculation_lines(speculation: SpeculationPart) -> list[tuple[str, str]]:
    """The way tokens are guessed, and the model that guesses them, where there is one."""
    lines = [("speculation", speculation.text)] if speculation.text else []
    if speculation.draft_model:
        lines.append(("draft model", f"{speculation.draft_model}, {bytes_text(speculation.draft_bytes)}"))
    return lines


def _adapter_lines(adapters: AdapterPart, device: str, at_once: int) -> list[tuple[str, str]]:
    """The memory of adapters, where they are enabled."""
    if not adapters.max_kept:
        return []
    rank, size = adapters.max_rank, bytes_text(adapters.num_bytes)
    if device != "cpu":
        places = f"{at_once} places on the GPU, of rank {rank} or less: {size}"
        return [("adapters", f"{places}; at most {adapters.max_kept} in the host's memory")]
    text = f"at most {adapters.max_kept} in memory, of rank {rank} or less: {size}; {at_once} run at once"
    return [("adapters", text)]


def _cache_text(plan: EnginePlan) -> str:
    pool, scheduler = plan.pool, plan.scheduler
    bytes_per_token = len(scheduler.windows) * pool.bytes_per_block // scheduler.limits.block_size
    copies = _copies_text(pool.copies, plan.machine.tensor_parallel_size)
    return (
        f"{bytes_text(pool.num_bytes)} = {scheduler.num_blocks:,} blocks of {bytes_text(pool.bytes_per_block)}"
        f" = {scheduler.num_slots:,} tokens of {bytes_text(bytes_per_token)}{copies}{_window_text(scheduler)}"
    )


def _copies_text(copies: float, ranks: int) -> str:
    """Return how often a token's keys and values are stored, in words, where ranks share heads; else nothing."""
    if copies <= 1:
        return ""
    why = "all heads" if copies == ranks else "some heads"
    return f", each {copies:.3g} times, since several ranks have {why}"


def _window_text(scheduler: SchedulerConfig) -> str:
    """The groups of layers that let go of tokens, where there are some."""
    windows = [window for window in scheduler.windows if window is not None]
    if not windows:
        return ""
    named = " or ".join(f"{window:,}" for window in sorted(set(windows)))
    return f"; {len(windows)} of {len(scheduler.windows)} groups of layers keep the last {named}"


def _live_text(scheduler: SchedulerConfig, bytes_per_block: int) -> str:
    """The memory that typical sequences hold as they grow, beside a reservation of their full length."""
    tokens = max(1, sum(_typical_request(scheduler)))
    count = min(scheduler.limits.max_num_seqs, _num_fitting(scheduler, tokens))
    live, reserved = (
        count * scheduler.num_blocks_for(length) * bytes_per_block for length in (tokens, scheduler.max_model_len)
    )
    return (
        f"{_sequences_text(count, tokens)} hold{'s' if count == 1 else ''} {bytes_text(live)};"
        f" reserved at full length {'it' if count == 1 else 'they'} would take {bytes_text(reserved)}"
    )


def _typical_request(config: SchedulerConfig) -> tuple[int, int]:
    """Prompt and output tokens of a typical request that fits the context."""
    output = 0 if config.why_no_text else min(128, config.max_model_len // 4)
    return min(512, config.max_model_len // 2), output


def _wait_text(config: SchedulerConfig) -> str:
    """The bound of the elder rule for requests of one size, as `Scheduler.wait_bound` gives it for each."""
    prompt, output = _typical_request(config)
    limits = config.limits
    work = config.work(num_prompt=prompt, max_new_tokens=output, n=1)
    others = limits.max_num_seqs - 1
    alone, behind = limits.wait_bound(work, 0), limits.wait_bound(work, others * work)
    return (
        f"{prompt} tokens in, {output} out end within {alone:,} steps whatever comes later;"
        f" behind {others} such requests within {behind:,}"
    )


def _share_lines(limits: SchedulerLimits) -> list[tuple[str, str]]:
    """The least shares of the service classes, and the bound on what a class may lack of its share."""
    least = limits.class_share
    shares = {name: share for name, share in (("interactive", least.interactive), ("batch", least.batch)) if share}
    if not shares:
        return []
    each = " and ".join(f"{name} {100 * share:.3g} %" for name, share in shares.items())
    lacking = " and ".join(f"{limits.shortfall(share):,}" for share in shares.values())
    text = f"{each} of the tokens while prompts of the class could use more; at most {lacking} less"
    return [("class shares", f"{text} in {SHARE_WINDOW_STEPS} steps, as far as running streams leave room")]


def _num_fitting(scheduler: SchedulerConfig, length: int) -> int:
    return scheduler.num_blocks // scheduler.num_blocks_for(length)


def _sequences_text(count: int, length: int) -> str:
    return f"{count:,} sequence{'' if count == 1 else 's'} of {length:,} token{'' if length == 1 else 's'}"


def bytes_text(count: int) -> str:
    """`1.5 GiB`: three significant digits in binary units."""
    value, unit = float(count), 0
    while value >= 1023.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"
