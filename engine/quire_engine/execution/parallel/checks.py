"""Refuses by name the settings and models that ranks cannot serve, before a weight is read.

Must not know: processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError
from quire_engine.execution.models.config import ModelConfig
from quire_engine.execution.models.served import ModelFacts
from quire_engine.ranks import dividing
from quire_kernels.kernel_set import KernelSet
from quire_kernels.ranks import widest_share


def check_ranks(
    asked: EngineConfig, model: ModelFacts, kernels: KernelSet, device: torch.device, implementation: str
) -> None:
    """Raises ConfigError where the settings, the model or the machine do not go with several ranks.

    `implementation`: whose code computes the model; empty: ours, which divides the heads. Transformers' code can have
    all heads in every rank.
    """
    size = asked.tensor_parallel_size
    if size == 1:
        return
    normed_rows = isinstance(model, ModelConfig) and model.family.qk_norm == "row"
    possible = dividing(model.num_heads, model.kv_heads, model.num_heads, normed_rows=normed_rows)
    counts = sorted({heads.number for heads in model.kv_heads})
    on_device = device.type != "cpu"
    reasons = (
        (
            on_device and bool(implementation),
            "the model is computed by transformers' code, which is divided among ranks on a CPU only",
        ),
        (
            not on_device and kernels.join is None,
            f"the {kernels.name} kernels are not divided among ranks; set kernels to cpu",
        ),
        *(_on_devices(asked, model, kernels) if on_device else ()),
        (
            not implementation and size not in possible,
            f"{model.num_heads} heads, and {' or '.join(map(str, counts))} of keys, are not divided among so many"
            f" ranks; set it to {_listed(possible)}",
        ),
    )
    reason = next((text for applies, text in reasons if applies), "")
    if reason:
        raise ConfigError(f"tensor_parallel_size={size}: {reason}")


def check_kept(size: int, replaced_ops: Sequence[str]) -> None:
    """Raises ConfigError where ops of a device's kernels have failed there: other ranks would compute with others."""
    if replaced_ops:
        ops = ", ".join(replaced_ops)
        raise ConfigError(
            f"tensor_parallel_size={size}: on GPUs all ranks need the kernels, of which {ops} failed here"
        )


def _on_devices(asked: EngineConfig, model: ModelFacts, kernels: KernelSet) -> Iterator[tuple[bool, str]]:
    """Whether something is missing that ranks on GPUs need, which have memories of their own, and the reason."""
    size, count = asked.tensor_parallel_size, torch.cuda.device_count()
    yield count < size, f"torch finds {count} GPU{'' if count == 1 else 's'} here; set it to at most {max(1, count)}"
    has_nccl = dist.is_available() and dist.is_nccl_available()
    yield not has_nccl, "GPUs exchange columns by NCCL, which this torch was built without; set it to 1"
    without = kernels.part_of is None
    yield without, f"the {kernels.name} kernels are not divided among ranks on GPUs; set kernels to triton"
    if isinstance(model, ModelConfig):
        without = model.experts is not None and kernels.expert_halves is None
        yield without, "the experts of these kernels are not divided among ranks on GPUs; set quantization to none"
        rows = model.family.qk_norm == "row"
        yield rows, "norms of all heads together are divided among ranks on a CPU only; set it to 1"
    yield asked.enable_lora, "adapters are computed by ranks on a CPU only; set enable_lora to false"
    yield asked.swap_space > 0, "ranks on GPUs have no swap space; set swap_space to 0"
    widths = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size}
    experts = model.experts if isinstance(model, ModelConfig) else None
    if experts is None or not all(experts.layers):
        widths["intermediate_size"] = model.intermediate_size
    if experts is not None:
        widths["size of an expert"] = experts.inner
        widths |= {"size of a shared expert": experts.shared_inner} if experts.shared_inner else {}
    for name, width in widths.items():
        yield widest_share(size, width) * (size - 1) >= width, f"a {name} of {width} leaves a rank without columns"


def _listed(numbers: list[int]) -> str:
    """1, 2 or 4."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
