"""Exercises on what can be imported: S2.1, S3.3.

Promises: each script runs in a process of its own, so that nothing is loaded there but what it asks for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from quire_bench.servers import BenchError
from quire_lab.exercises.own import OwnServers
from quire_lab.facts.fact import Fact

_PATIENCE = 180.0
_ON_A_CPU = ("env", "QUIRE_DEVICE=cpu", "QUIRE_KV_MEMORY=8MiB")

# docs/measuring.md shows it too.
WITHOUT_A_MODEL = """\
import sys

from quire_engine.contract.batch import SampledToken, StepResult
from quire_engine.contract.limits import SchedulerConfig
from quire_engine.scheduling.block_pool import BlockPool
from quire_engine.scheduling.blocks import PageTable
from quire_engine.scheduling.scheduler import Scheduler
from quire_engine.scheduling.sequence import Sequence
from quire_engine.contract.types import GenerationRequest, SamplingParams, StopParams

print(*(each.__name__ for each in (BlockPool, PageTable, Sequence, Scheduler)))

pool, table = BlockPool(4), PageTable(block_size=16)
table.extend([pool.take(), pool.take(), pool.take()])
print("block and offset of position 37:", *table.position_to_slot(37), "- free blocks:", pool.num_free)

scheduler = Scheduler(SchedulerConfig(num_blocks=32, max_model_len=256))
for job in (10, 50, 100, 200):
    wanted = GenerationRequest(
        request_id=str(job), prompt_token_ids=(job,), sampling=SamplingParams(), stop=StopParams(max_new_tokens=job)
    )
    scheduler.add(wanted, now=0.0)

batches = []
while (batch := scheduler.schedule(now=float(len(batches)))) is not None:
    batches.append(batch)
    # A model would compute the batch's slices here.
    samples = {item.sequence_id: (SampledToken(token_id=7),) for item in batch.items if item.wants_sample}
    scheduler.apply(batch, StepResult(samples=samples), now=float(len(batches)))

slices = [item for batch in batches for item in batch.items]
print(len(batches), "iterations,", len(slices), "token-steps, peak batch", max(len(batch.items) for batch in batches))
print("torch is loaded:", "torch" in sys.modules)
"""
PRINTED = (
    "BlockPool PageTable Sequence Scheduler",
    "block and offset of position 37: 2 5 - free blocks: 1",
    "200 iterations, 360 token-steps, peak batch 4",
    "torch is loaded: False",
)
_PROMPTS = ("Once upon a time", "Hello, my name is")
FOR_VLLM = f"""\
from vllm import LLM, SamplingParams

llm = LLM(model="quire-demo", tensor_parallel_size=1, gpu_memory_utilization=0.5, max_model_len=256)
for output in llm.generate({list(_PROMPTS)!r}, SamplingParams(temperature=0.0, max_tokens=16)):
    print(repr(output.outputs[0].text))
"""


def without_a_model() -> list[Fact]:
    """S2.1: pool, page table, sequence and scheduler are there without a model, and serve the jobs of S3.1."""
    lines = _printed(WITHOUT_A_MODEL)
    whats = ("public classes", "a pool and a table", "the scheduler's jobs", "what is loaded")
    return said_as_expected([f"S2.1 {what}" for what in whats], PRINTED, lines)


def script_for_vllm(own: OwnServers) -> list[Fact]:
    """S3.3: a script for vLLM with another import; its texts are those that a server of the same model gives."""
    lines = _printed(FOR_VLLM.replace("from vllm import", "from quire import"), *_ON_A_CPU)
    body = {"prompt": list(_PROMPTS), "temperature": 0, "max_tokens": 16}
    choices = json.load(own.narrow().request("POST", "/v1/completions", body))["choices"]
    texts = [repr(choice["text"]) for choice in sorted(choices, key=lambda choice: int(choice["index"]))]
    return said_as_expected([f"S3.3 what follows {prompt!r}" for prompt in _PROMPTS], texts, lines)


def said_as_expected(names: Sequence[str], expected: Sequence[str], got: Sequence[str]) -> list[Fact]:
    """Line by line; a line that is not there is one that differs."""
    lines = [*got, *[""] * (len(expected) - len(got))]
    return [
        Fact(name=name, expected=one, got=other or "nothing", ok=one == other)
        for name, one, other in zip(names, expected, lines, strict=False)
    ]


def _printed(script: str, *before: str) -> list[str]:
    """The lines that a script prints. Raises BenchError where it fails."""
    command = [*before, sys.executable, "-P", "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        raise BenchError(f"the script was not done after {_PATIENCE:g} s") from None
    if done.returncode:
        raise BenchError(f"the script ended with {done.returncode}: {done.stderr.strip()[-120:]}")
    return done.stdout.splitlines()
