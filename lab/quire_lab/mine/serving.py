"""Serves one load with a real model under several schedulers, and says what each was worth.

Promises: the same requests, model, pool and limits for all; a scheduler's steps are checked by the referee before they
are computed; the tokens of every request are held against those that it gets alone. The model has its own process.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quire_bench.workload import Job
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.own_modules import module_command
from quire_lab.mine.referee import Arrival, Counts, Machine, Plan, Referee, Request, SchedulerUnderTest, Slice
from quire_lab.simulation.kv_memory import kv_shape

MACHINE = Machine(num_blocks=40, block_size=16, max_num_seqs=8, max_num_batched_tokens=128)
_END_SECONDS = 20.0


class ModelProcess:
    """The embedded model, or another one, that computes given steps: `with ModelProcess(path, machine) as model`."""

    def __init__(self, path: Path, machine: Machine) -> None:
        self._path, self._machine = path, machine

    def __enter__(self) -> Self:
        machine, command = self._machine, module_command("quire_engine.tools.given_steps")
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        limits = SchedulerLimits(
            block_size=machine.block_size,
            max_num_seqs=machine.max_num_seqs,
            max_num_batched_tokens=machine.max_num_batched_tokens,
            prefill_chunk=machine.max_num_batched_tokens,
        )
        config = EngineConfig(
            model=str(self._path),
            device="cpu",
            limits=limits,
            kv_memory=machine.num_blocks * kv_shape(self._path).bytes_per_block(machine.block_size),
            max_model_len=min(512, machine.num_blocks * machine.block_size),
        )
        try:
            made = self.ask(asdict(config))
            if made["num_blocks"] < machine.num_blocks:
                raise ConfigError(f"the model's pool has {made['num_blocks']} blocks, not {machine.num_blocks}")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def ask(self, question: object) -> dict[str, Any]:
        """The reply to a configuration or a step. Raises ConfigError, ModelLoadError."""
        if self._child.stdin is None or self._child.stdout is None:
            raise ModelLoadError("the model's process has no pipes")
        try:
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise ModelLoadError(f"the model's process has ended with exit code {self._child.wait()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise (ConfigError if reply["kind"] == "config" else ModelLoadError)(reply["error"])
        return reply


@dataclass(slots=True, kw_only=True)
class Served:
    """The outcome of the load under one scheduler."""

    name: str
    counts: Counts
    tokens: dict[str, list[int]] = field(default_factory=dict)  # by request
    model_seconds: float = 0.0
    plan_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    @property
    def tokens_per_second(self) -> float:
        """Output tokens a second of the model's time and the plans'."""
        return self.num_tokens / max(self.model_seconds + self.plan_seconds, 1e-9)


class _Computing:
    """Gives every plan of a run to the model."""

    def __init__(self, model: ModelProcess, prompts: Mapping[str, list[int]], served: Served, turn: int) -> None:
        self._model, self._prompts, self._served, self._turn = model, prompts, served, turn
        self._added: set[str] = set()

    def watch(self, plan: Plan, live: Mapping[str, Request]) -> None:
        new = [each.request_id for each in plan.slices if each.request_id not in self._added]
        self._added.update(new)
        asked = {
            "add": {
                self._name(name): {
                    "prompt": self._prompts[name],
                    "max_new_tokens": live[name].arrival.max_new_tokens,
                }
                for name in new
            },
            "preempted": [self._name(name) for name in plan.preempted],
            "slices": [(self._name(each.request_id), each.num_tokens, each.blocks) for each in plan.slices],
        }
        reply = self._model.ask(asked)
        self._served.model_seconds += reply["seconds"]
        for name, token in reply["tokens"].items():
            self._served.tokens.setdefault(name.partition(" ")[2], []).append(token)

    def _name(self, request_id: str) -> str:
        return f"{self._turn} {request_id}"  # each run has requests of its own


class _Timed:
    """A scheduler with a watch on how long its plans take."""

    def __init__(self, scheduler: SchedulerUnderTest) -> None:
        self._scheduler = scheduler
        self.seconds = 0.0

    def add(self, request_id: str, num_prompt_tokens: int, max_new_tokens: int) -> None:
        self._scheduler.add(request_id, num_prompt_tokens, max_new_tokens)

    def schedule(self) -> Plan:
        began = time.perf_counter()
        try:
            return self._scheduler.schedule()
        finally:
            self.seconds += time.perf_counter() - began

    def ended(self, request_id: str) -> None:
        self._scheduler.ended(request_id)

    def num_free(self) -> int:
        return self._scheduler.num_free()


class _Alone:
    """One request after the other, each in the first blocks: what every request gets when nobody else is there."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._waiting: dict[str, list[int]] = {}  # known and computed tokens

    def add(self, request_id: str, num_prompt_tokens: int, max_new_tokens: int) -> None:  # noqa: ARG002
        self._waiting[request_id] = [num_prompt_tokens, 0]

    def schedule(self) -> Plan:
        name, one = next(iter(self._waiting.items()))
        count = min(one[0] - one[1], self._machine.max_num_batched_tokens)
        one[1] += count
        blocks = tuple(range(-(-one[1] // self._machine.block_size)))
        one[0] += one[0] == one[1]
        return Plan(slices=(Slice(request_id=name, num_tokens=count, blocks=blocks),))

    def ended(self, request_id: str) -> None:
        del self._waiting[request_id]

    def num_free(self) -> int:
        return self._machine.num_blocks


class Bench:
    """One load and one model for several schedulers."""

    def __init__(self, model: ModelProcess, machine: Machine, load: Iterable[Arrival], vocabulary: int) -> None:
        """`vocabulary`: token ids below it make up the prompts."""
        self._model, self._machine, self._load = model, machine, tuple(load)
        drawn = random.Random(11)
        self._prompts = {
            one.request_id: [drawn.randrange(vocabulary) for _ in range(one.num_prompt)] for one in self._load
        }
        self._turn = 0

    @property
    def jobs(self) -> list[Job]:
        """The load as requests to a server, in the order of their arrival."""
        return [Job(prompt=self._prompts[one.request_id], output_tokens=one.max_new_tokens) for one in self._load]

    def serve(self, name: str, scheduler: SchedulerUnderTest) -> Served:
        """Serve the load. Raises Broken, StudentError, ConfigError, ModelLoadError."""
        self._turn += 1
        served = Served(name=name, counts=Counts())
        computing = _Computing(self._model, self._prompts, served, self._turn)
        timed = _Timed(scheduler)
        referee = Referee(self._machine, self._load, watch=computing.watch)
        served.counts = referee.run(timed)
        served.plan_seconds = timed.seconds
        return served

    def alone(self) -> dict[str, list[int]]:
        """The tokens of each request without the others."""
        found: dict[str, list[int]] = {}
        for one in self._load:
            self._turn += 1
            served = Served(name="alone", counts=Counts())
            computing = _Computing(self._model, self._prompts, served, self._turn)
            only = Arrival(request_id=one.request_id, num_prompt=one.num_prompt, max_new_tokens=one.max_new_tokens)
            Referee(self._machine, [only], watch=computing.watch).run(_Alone(self._machine))
            found |= served.tokens
        return found


def serving_load(num_requests: int = 24) -> tuple[Arrival, ...]:
    """A load that outgrows the pool: short and long answers, arriving while others run."""
    drawn = random.Random(5)
    return tuple(
        Arrival(
            request_id=f"r{number}",
            num_prompt=drawn.choice((12, 24, 48, 140)),
            max_new_tokens=drawn.choice((8, 16, 32, 120)),
            step=1 + 3 * number,
        )
        for number in range(num_requests)
    )
