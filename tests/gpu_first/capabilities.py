"""What the server can do on a GPU, and the jobs whose passing on one shows it.

Promises: a capability has run where all of its jobs passed on one device, at the time of the last of them; the table of
docs/gpu.md says so, which a test holds against the recorded results. Must not know: how jobs run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpu_first.results import PASSED, Result
from support.gpu_run import TRITON_FOLDER

NOT_RUN = "not run"
PATHS_JOB = "optional paths"


def _kernels(*names: str) -> tuple[str, ...]:
    return tuple(f"{TRITON_FOLDER}/test_{name}.py" for name in names)


# By the words of the table, in its order. Without jobs: nothing here could show it on one GPU.
CAPABILITIES: Mapping[str, tuple[str, ...]] = {
    "completions, streams, embeddings, JSON by a schema": ("serve",),
    "every operation against the reference": ("verify",),
    "attention, RoPE, norms, products, choice of tokens": _kernels(
        *("activation", "choose", "decode_attention", "norm", "prefill_attention", "product", "rope_write"),
    ),
    "whole engine, bits alone and in batches": ("tests/model/test_gpu_engine.py", "tests/model/test_bitwise.py"),
    "graphs of steps": _kernels("graphs"),
    "kernels of the FP8 KV cache": _kernels("e4m3"),
    "quality of the FP8 KV cache": ("quality of the FP8 KV cache",),
    "speed of the FP8 KV cache": ("bench kv-types",),
    "speed of kernels and steps": ("bench kernels",),
    "swap to the host": ("tests/model/test_gpu_swap.py",),
    "decodes in five launches a layer": (*_kernels("decode_chain", "chain_audit"), "bench chains"),
    "heads of 512, other families": _kernels("families"),
    "mixtures of experts": _kernels("experts"),
    "GGUF, GPTQ, AWQ, FP8 as stored": (*(*_kernels("stored_product"), "stored formats", "GGUF served", "AWQ served"),),
    "weights converted to int8 and int4": _kernels("quantise"),
    "LoRA adapters": (*_kernels("low_rank"), "adapters"),
    "guessed tokens": ("guessed tokens",),
    "NCCL with one rank": ("NCCL with one rank",),
    "several GPUs for one model": (),
    "attention by libraries": (),
    "container image": (),
}


def shown(jobs: Sequence[str], results: Sequence[Result]) -> str:
    """The date and the device on which all jobs last passed, or that it has not run."""
    latest = ("", "")
    for device in {result.device for result in results}:
        passed = {r.job: r.started for r in results if r.device == device and r.outcome == PASSED}
        if jobs and all(job in passed for job in jobs):
            latest = max(latest, (max(passed[job] for job in jobs), device))
    return _when(*latest) if latest[0] else NOT_RUN


def path_shown(name: str, results: Sequence[Result]) -> str:
    """The date and the device on which an optional path last passed its checks, or that it has not run."""
    facts = [(each, each.facts or {}) for each in results if each.job == PATHS_JOB]
    passed = [(each.started, each.device) for each, found in facts if found.get("paths", {}).get(name) == ""]
    return _when(*max(passed)) if passed else NOT_RUN


def _when(started: str, device: str) -> str:
    return f"{started[:10]}, {device.partition(',')[0]}"


def table(results: Sequence[Result]) -> list[str]:
    """The rows of docs/gpu.md."""
    return [f"| {name} | {shown(jobs, results)} |" for name, jobs in CAPABILITIES.items()]
