"""An engine process without a model, for tests of the supervisor: real scheduler, loop and frames, invented tokens.

`python fake_engine_process.py FD PARENT_PID`. The model name in the START frame says how it misbehaves: "ok",
"fail-config", "fail-model", "exit-at-start", "hang-at-start", "slow-start" or "slow-start:SECONDS" (it says eight times
how far it is), "picky" (a later start must ask for the instruction set of the first), "hang:TOKEN" or "poison:TOKEN" (a
prompt with TOKEN hangs or kills it).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "engine"), str(ROOT / "tests")]

from quire_engine.contract.batch import Batch, SampledToken, StepResult  # noqa: E402
from quire_engine.contract.config import EngineConfig  # noqa: E402
from quire_engine.contract.plan import EnginePlan  # noqa: E402
from quire_engine.engine import Engine  # noqa: E402
from quire_engine.process.loop import EngineLoop  # noqa: E402
from quire_engine.process.transport import FrameDecoder, LoadProgress, StartFailed, encode_frame  # noqa: E402
from quire_engine.scheduling.scheduler import Scheduler  # noqa: E402
from support.limits import scheduler_config  # noqa: E402
from support.plans import changed, small_plan  # noqa: E402

PICKED = "avx2"
STEP_SECONDS = 0.002
SLOW_STEPS, SLOW_STEP_SECONDS = 8, "0.25"  # of "slow-start"


def next_token(token_ids: list[int], choice: int) -> int:
    """Depends on the whole history, so that a wrong resume shows in every later token."""
    value = choice + 1
    for token in token_ids:
        value = (value * 1103515245 + token + 12345) & 0x7FFFFFFF
    return value % 997


class InventingExecutor:
    """Samples `next_token`; misbehaves as told."""

    def __init__(self, behaviour: str) -> None:
        self._kind, _, argument = behaviour.partition(":")
        self._trigger = int(argument) if argument.isdecimal() else -1
        self._token_ids: dict[int, list[int]] = {}  # of each sequence; no cached prefix leaves a hole
        self._result = StepResult()

    max_in_flight = 1

    def launch(self, batch: Batch) -> None:
        self._result = self._execute(batch)

    def prepare(self) -> int:
        return 0

    def collect(self) -> StepResult:
        return self._result

    def _execute(self, batch: Batch) -> StepResult:
        time.sleep(STEP_SECONDS)
        samples = {}
        for item in batch.items:
            prompt = item.prompt_token_ids
            if self._trigger in prompt and self._kind == "poison":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self._trigger in prompt and self._kind == "hang":
                time.sleep(3600)
            tokens = self._token_ids.setdefault(item.sequence_id, list(prompt))
            tokens[item.start : item.end] = item.token_ids
            if item.wants_sample:
                known = tokens[: item.end]
                samples[item.sequence_id] = (SampledToken(token_id=next_token(known, item.choice)),)
                for fork in item.forks:
                    samples[fork.sequence_id] = (SampledToken(token_id=next_token(known, fork.choice)),)
        return StepResult(samples=samples)


def make_plan(model: str = "ok", **scheduler: int) -> EnginePlan:
    """The plan that the process announces."""
    settings = {"num_blocks": 512, "max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 128}
    settings["enable_prefix_caching"] = False
    return small_plan(
        scheduler_config(**{**settings, **scheduler}),
        model={"path": model, "num_parameters": 0, "vocab_size": 1000, "weights_bytes": 0},
        machine={"kernels": "none"},
        pool={"num_bytes": 0, "bytes_per_block": 0},
    )


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=fd)
    decoder = FrameDecoder()
    frames = []
    while not frames:
        frames = decoder.feed(connection.recv(1 << 16))
    start, *early = frames
    assert isinstance(start, EngineConfig)
    if start.model == "fail-config":
        connection.sendall(encode_frame(StartFailed(kind="config", message="no room: try --kv-memory 1GiB")))
        sys.exit(2)
    is_later = start.max_model_len is not None  # the supervisor holds later ones to what the first one found
    if start.model == "picky" and is_later and start.cpu_variant != PICKED:
        connection.sendall(encode_frame(StartFailed(kind="config", message=f"asked for {start.cpu_variant}")))
        sys.exit(2)
    if start.model == "fail-model":
        connection.sendall(encode_frame(StartFailed(kind="model", message="model.safetensors is missing")))
        sys.exit(1)
    if start.model == "exit-at-start":
        sys.exit(3)
    while start.model == "hang-at-start":
        time.sleep(1)
    kind, _, seconds = start.model.partition(":")
    for done in range(SLOW_STEPS if kind == "slow-start" else 0):
        connection.sendall(encode_frame(LoadProgress(phase="reading weights", done=done, total=SLOW_STEPS)))
        time.sleep(float(seconds or SLOW_STEP_SECONDS))
    plan = make_plan(start.model)
    if start.model == "picky":
        plan = changed(plan, machine={"cpu_variant": PICKED})
    engine = Engine(Scheduler(plan.scheduler), InventingExecutor(start.model), check_invariants=True)
    loop = EngineLoop(engine, connection, decoder, alive_seconds=start.alive_seconds)
    loop.send(plan)
    loop.run(early)


if __name__ == "__main__":
    main(int(sys.argv[1]))
