"""An engine whose ranks are processes on GPUs that are not there: `python -m support.simulated_gpus WHAT`.

Tensors for a GPU are made on the CPU, devices are simulated ones, and ranks meet by Gloo; all else is what
a machine with GPUs runs. Must not know: what a test expects.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import quire_engine.build
import quire_engine.build_rank
import quire_engine.execution.executor
from quire_engine.build import BuiltEngine, build
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import QuireError
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams
from quire_engine.execution.parallel import devices
from quire_engine.execution.proven_paths import unchecked
from quire_engine.process import device_rank
from quire_engine.ranks import Rank
from quire_engine.tools import quality
from quire_kernels.ranks import TorchDistributed
from support.checkpoints import shared_checkpoint
from support.device_ranks import Launched
from support.limits import PLAIN_POLICIES
from support.model_steps import random_ids
from support.offline import generate
from support.simulated_device import SimulatedDevice
from support.simulated_kernels import SIMULATED

GPUS = 2
LIMITS = SchedulerLimits(
    max_num_seqs=6, max_num_batched_tokens=40, prefill_chunk=24, max_num_partial_prefills=2, **PLAIN_POLICIES
)
BLOCKS, BLOCK_BYTES = 9, 2 * 2 * 2 * 16 * 32 * 4


class OnTheCpu(TorchFunctionMode):
    """Whoever asks for a GPU gets the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*tree_map(_moved, args), **tree_map(_moved, kwargs or {}))


def _moved(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


class Machine:
    """This process as one on such a machine."""

    def __init__(self) -> None:
        self.device = SimulatedDevice()  # the last one made
        for name in ("set_device", "synchronize", "reset_peak_memory_stats", "empty_cache"):
            setattr(torch.cuda, name, lambda *_: None)
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: GPUS
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_name = lambda _: "a simulated GPU"  # type: ignore[assignment]
        torch.cuda.memory_allocated = lambda _: 1000  # type: ignore[assignment]
        torch.cuda.max_memory_allocated = lambda _: 2000  # type: ignore[assignment]
        torch.cuda.mem_get_info = lambda _: (64 << 30, 80 << 30)  # type: ignore[assignment]
        dist.is_nccl_available = lambda: True
        kernels = replace(SIMULATED, part_of=lambda w, _: w)
        quire_engine.build.select_kernels = lambda *_: kernels
        quire_engine.build.shown_here = lambda config, *_: unchecked(config)
        quire_engine.build.gpu_name = lambda _: "GPU-simulated"
        quire_engine.execution.executor.CudaDevice = self.made  # type: ignore[assignment, misc]
        quire_engine.build_rank.CudaDevice = self.made  # type: ignore[assignment, misc]
        devices.meet = meet
        devices._command = lambda rank: [sys.executable, "-m", __spec__.name, "rank", str(rank), str(os.getpid())]
        quire_engine.build_rank.meet = meet
        # A device goes on by itself: whoever may wait for another process lets its own go on before.
        device_rank.receive = partial(self.after_all_work, device_rank.receive)
        send = devices.Children.send
        devices.Children.send = lambda *given: self.after_all_work(send, *given)  # type: ignore[method-assign]

    def made(self, _: torch.device) -> SimulatedDevice:
        self.device = SimulatedDevice()
        return self.device

    def after_all_work(self, call: Callable[..., Any], *given: Any) -> Any:
        self.device.finish()
        return call(*given)


def meet(place: Path, rank: Rank) -> Launched:
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank.number, world_size=rank.size)
    assert dist.group.WORLD is not None
    return Launched(TorchDistributed(dist.group.WORLD))


def asked(**changes: Any) -> EngineConfig:
    """Too little memory for six: some requests are preempted."""
    plain = {"device": "cuda", "max_model_len": 128, "kv_memory": BLOCKS * BLOCK_BYTES, "limits": LIMITS}
    return EngineConfig(model=str(shared_checkpoint()), dtype="float32", **{**plain, **changes})


def requests() -> list[GenerationRequest]:
    shared = random_ids(20, 99)
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 1, "num_logprobs": 2},
        {"temperature": 1.2, "top_k": 9, "seed": 2},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 1.1, "seed": 5, "grammar": 'start: "quick " /[a-z ]{8}/ " fox jumps"'},
        {"temperature": 0.0, "num_prompt_logprobs": 1},
        {"temperature": 0.7, "top_p": 0.8, "min_tokens": 4, "seed": 3},
    ]
    return [
        GenerationRequest(
            request_id=f"r{i}",
            prompt_token_ids=(*shared[: 5 * i], *random_ids(7 + 3 * i, i)),
            sampling=SamplingParams(**each),
            stop=StopParams(max_new_tokens=10 + 2 * i, stop_token_ids=tuple(range(0, 512, 40))),
            n=3 if i == 2 else 1,
        )
        for i, each in enumerate(options)
    ]


def _same() -> None:
    """Tokens and log-probabilities of two ranks, and of one that is waited for."""
    one = build(asked(device="cpu", kernels="reference", async_scheduling="off"))
    expected = generate(one, requests())
    machine = Machine()
    with OnTheCpu():
        two = build(asked(tensor_parallel_size=GPUS, num_threads=2))
        assert machine.device.captures >= 1
        found = generate(two, requests())
        assert found == expected
        assert any(each.num_preemptions for each in found.values())
        assert machine.device.replays > 10
        plans = [built.plan for built in (one, two)]
        assert [plan.pool.num_bytes for plan in plans] == [BLOCKS * BLOCK_BYTES] * 2
        assert [plan.machine.tensor_parallel_size for plan in plans] == [1, GPUS]
        assert plans[1].model.weights_bytes > plans[0].model.weights_bytes  # of the embedding, which both have
        pids = _pids(two)
        two.close()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            raise AssertionError("a rank is left behind")


def _lost(by: signal.Signals) -> None:
    """A rank ends while this process waits for something else."""
    Machine()
    with OnTheCpu():
        built = build(asked(tensor_parallel_size=GPUS, num_threads=2))
        os.kill(_pids(built)[0], by)
        time.sleep(120)


def _quality() -> None:
    """What a KV cache of fp8 costs there, as `quire eval-quant` measures it."""
    kernels = replace(SIMULATED, attention=_in_fp8)
    Machine()
    quire_engine.build.select_kernels = lambda config, *_: kernels if config.kv_cache_dtype == "fp8" else SIMULATED
    variants = [quality.Variant(), quality.Variant(kv_cache_dtype="fp8")]
    with OnTheCpu():
        same, fp8 = quality.measure(shared_checkpoint(), variants, None, num_threads=1, device="cuda")
    assert (same.device, same.max_kl, same.greedy_agreement) == ("cuda", 0.0, 1.0)
    assert 0 < fp8.mean_kl < 0.1, fp8
    print(fp8)


def _in_fp8(q: Any, shape: Any, kv: Any, layer: int, step: Any) -> Any:
    """Attention over keys and values that are rounded to fp8 when they are read."""
    return SIMULATED.attention(q, shape, kv.to(torch.float8_e4m3fn).to(kv.dtype), layer, step)


def _pids(built: BuiltEngine) -> tuple[int, ...]:
    assert built.ranks is not None
    return built.ranks.pids


def main(what: str, *numbers: str) -> int:
    if what == "rank":
        Machine()
        with OnTheCpu():
            return device_rank.main(*map(int, numbers))
    try:
        {
            "same": _same,
            "killed": partial(_lost, signal.SIGKILL),
            "crashed": partial(_lost, signal.SIGABRT),
            "quality": _quality,
        }[what]()
    except QuireError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an interpreter that ends beside Gloo's threads may abort
