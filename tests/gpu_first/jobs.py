"""What `make gpu-first` runs, in the order in which a user would meet it: parts, and the jobs of each.

Promises: every job is a command of the project's own tests, benchmarks or commands. On the simulated device the same
jobs run by Triton's interpreter, the CPU's kernels and simulated GPUs, at tiny sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from support import gpu_run

CUDA, SIMULATED = "cuda", "simulated"
FACTS = "{facts}"  # in a command: the file for a job's own JSON

_WEB = ("fastapi", "httptools", "llguidance", "msgspec", "multipart", "pydantic_settings", "uvicorn")
_MAKING = ("gguf", "safetensors", "tokenizers", "transformers")  # of checkpoints
_BENCH_SUMMARY = r"^(?:NOT MEASURED: .*|\S.*; [\d,]+ s)$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process. `command` follows the interpreter; `needs` are modules without which it cannot begin."""

    name: str
    command: tuple[str, ...]
    seconds: float  # its own limit: beyond it, it hangs
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    passing: tuple[int, ...] = (0,)  # exit codes
    summary: str = r"^\s*(\S.*)$"  # the last line of its output that matches, which the table shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Jobs that share a limit, `at_once` of them at a time."""

    letter: str
    title: str
    seconds: float
    jobs: tuple[Job, ...]
    at_once: int = 1


def parts(device: str, seen: Collection[str] = ()) -> tuple[Part, ...]:
    """All parts in their order, for a GPU or for the simulated device; test files that were `seen` on one come last."""
    on = "cuda" if device == CUDA else "cpu"
    unseen_first = sorted(gpu_run.jobs(), key=lambda job: job.name in seen)
    return (
        Part(
            letter="a",
            title="start, verification, answers",
            seconds=100,
            at_once=2,
            jobs=(
                _module("serve", "gpu_first.answers", "start", on, seconds=60, needs=_WEB),
                _module("verify", *_verify(on), seconds=100, needs=_WEB),
                _module(
                    "optional paths", "gpu_first.paths", on, FACTS, seconds=60, needs=("safetensors", "tokenizers")
                ),
                _module("answers alone and in a batch", "gpu_first.answers", "batch", on, seconds=60, needs=_WEB),
            ),
        ),
        Part(
            letter="b",
            title="tests, unseen files first",
            seconds=130,
            at_once=gpu_run.MOST_AT_ONCE if device == CUDA else 1,
            jobs=tuple(_tests(job, device) for job in unseen_first),
        ),
        Part(
            letter="c",
            title="speed of 1 to 256 streams, old and new launches",
            seconds=110,
            jobs=(
                _bench("bench decode", "decode", on, seconds=45),
                _bench("bench chains", "gaps,chains", on, seconds=45),
                _bench("bench http", "http", on, seconds=100, needs=_WEB),
                _bench("bench nano", "nano", on, seconds=45),
                _bench("bench kernels", "kernels,model,demo", on, seconds=100),
            ),
        ),
        Part(
            letter="d",
            title="GGUF, GPTQ, AWQ, FP8 as stored",
            seconds=40,
            at_once=3 if device == CUDA else 1,
            jobs=(
                _selected("stored formats", "tests/kernels/triton/test_families.py", "stored", device, seconds=38),
                _module("GGUF served", "gpu_first.stored", "gguf", on, seconds=38, needs=(*_WEB, *_MAKING)),
                _module("AWQ served", "gpu_first.stored", "awq", on, seconds=38, needs=(*_WEB, *_MAKING)),
            ),
        ),
        Part(
            letter="e",
            title="guessed tokens",
            seconds=30,
            jobs=(_module("guessed tokens", "gpu_first.answers", "speculation", on, seconds=28, needs=_WEB),),
        ),
        Part(
            letter="f",
            title="FP8 KV cache: quality, speed and capacity",
            seconds=50,
            jobs=(_quality(device), _bench("bench kv-types", "kv-types", on, seconds=48)),
        ),
        Part(
            letter="g",
            title="swap under load",
            seconds=30,
            jobs=(
                _selected("swapped requests", "tests/model/test_gpu_swap.py", "swapped_requests", device, seconds=28),
            ),
        ),
        Part(
            letter="h",
            title="adapters",
            seconds=30,
            jobs=(_module("adapters", "gpu_first.answers", "adapters", on, seconds=28, needs=_WEB),),
        ),
        Part(
            letter="i",
            title="NCCL with one rank",
            seconds=20,
            jobs=(_ranks(device),),
        ),
        Part(
            letter="j",
            title="attention of prompts: own, torch's, libraries'",
            seconds=30,
            jobs=(_bench("bench attention", "contiguous", on, seconds=28),),
        ),
    )


def _module(name: str, module: str, *arguments: str, seconds: float, needs: Sequence[str] = ()) -> Job:
    return Job(name=name, command=("-m", module, *arguments), seconds=seconds, needs=tuple(needs))


def _verify(on: str) -> tuple[str, ...]:
    return ("quire_server.cli", "verify", "--device", on, "--deterministic", "--json", FACTS)


def _bench(name: str, which: str, on: str, *, seconds: float, needs: Sequence[str] = ()) -> Job:
    return Job(
        name=name,
        command=("-m", "gpu", "--device", on, "--parts", which, "--out", FACTS),
        seconds=seconds,
        needs=("safetensors", *needs),
        summary=_BENCH_SUMMARY,
    )


def _tests(job: gpu_run.Job, device: str) -> Job:
    arguments, environment = job.arguments, dict(job.environment)
    if device == SIMULATED and job.environment:  # kernels, which the interpreter runs
        arguments, environment = (*arguments, "-m", "not sim"), {"TRITON_INTERPRET": "1"}
    elif device == SIMULATED:
        arguments = (arguments[0], "-m", "not gpu")
    return Job(
        name=job.name,
        command=("-m", "pytest", "-p", "no:cacheprovider", *arguments),
        environment=environment,
        seconds=125,
        needs=gpu_run.NEEDED,
        passing=(0,) if device == CUDA else (0, 5),  # 5: the file has nothing for this device
        summary=r"^=*\s*(.* in \d.*?)[\s=]*$",
    )


def _selected(name: str, file: str, which: str, device: str, *, seconds: float) -> Job:
    """The tests of a file whose names have a word, as a job of their own."""
    (job,) = [_tests(each, device) for each in gpu_run.jobs() if each.name == file]
    *command, last = job.command
    command = [*command, f"{last} and {which}"] if command[-1] == "-k" else [*job.command, "-k", which]
    return replace(job, name=name, command=tuple(command), seconds=seconds)


def _quality(device: str) -> Job:
    name = "quality of the FP8 KV cache"
    if device == SIMULATED:
        return Job(name=name, command=("-m", "support.simulated_gpus", "quality"), seconds=45)
    command = ("-m", "quire_server.cli", "eval-quant", "--device", device, "--quantization", "none")
    return Job(
        name=name,
        command=(*command, "--kv-cache-dtype", "fp8", "--json", FACTS),
        seconds=45,
        needs=_WEB,
        summary=r"^.*\bfp8\b.*$",
    )


def _ranks(device: str) -> Job:
    if device == CUDA:
        return _selected("NCCL with one rank", "tests/kernels/test_cpu_ranks.py", "one_rank", device, seconds=18)
    return Job(name="NCCL with one rank", command=("-m", "support.simulated_gpus", "same"), seconds=18)
