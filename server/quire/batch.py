"""Runs many requests through one engine: checks all, then runs them together, as many at once as the queue allows.

Promises: outputs in the order of the requests; nothing runs unless every request passes its checks; when one fails or
the call is cancelled, the others are aborted. Must not know: threads, processes.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from quire.outputs import RequestOutput, request_output
from quire.prompts import LoRARequest
from quire_server.answering.answer import collect
from quire_server.answering.generation import Generation
from quire_server.answering.options import GenerationOptions
from quire_server.answering.prepare import Job, prepare
from quire_server.errors import BadRequest
from quire_server.state import ServerState


async def with_adapters(
    state: ServerState, requests: Sequence[GenerationOptions], adapters: Sequence[LoRARequest | None]
) -> list[GenerationOptions]:
    """The requests, each of which names its adapter; those that are not loaded are. Raises BadRequest."""
    for each in dict.fromkeys(adapter for adapter in adapters if adapter is not None):
        served = state.adapters.find(each.lora_name)
        if served is None or served.adapter.path != each.lora_path or each.load_inplace:
            parent = each.base_model_name or ""
            await state.adapters.load(each.lora_name, each.lora_path, in_place=True, parent=parent)
    pairs = zip(requests, adapters, strict=True)
    return [options if each is None else replace(options, model=each.lora_name) for options, each in pairs]


async def prepare_all(state: ServerState, requests: Sequence[GenerationOptions]) -> list[Job]:
    """A job of one prompt for each request. Raises ValueError that names the wrong one of several prompts."""
    jobs = []
    for number, options in enumerate(requests):
        try:
            jobs.append(await prepare(state, options))
        except BadRequest as error:
            where = f"prompt {number}: " if len(requests) > 1 else ""
            raise ValueError(f"{where}{error.message}") from None
    if ignored := {name for options in requests for name in options.ignored}:
        warnings.warn(f"without effect: {', '.join(sorted(ignored))}", stacklevel=2)
    for note in sorted({job.headers["x-quire-notes"] for job in jobs if "x-quire-notes" in job.headers}):
        warnings.warn(note, stacklevel=2)
    return jobs


async def run_all(
    state: ServerState, jobs: Sequence[Job], ids: Iterator[int], on_finished: Callable[[RequestOutput], None]
) -> list[RequestOutput]:
    """Every job's output; `on_finished` is called as each ends. Raises EngineFailed."""
    outputs: dict[int, RequestOutput] = {}
    # Thousands of prompts wait here, where they cost the engine nothing.
    places = asyncio.Semaphore(state.client.max_sequences)

    async def run(number: int, job: Job, request_id: str) -> None:
        try:
            generation = Generation(
                job.requests, job.text, tokenizer=state.model_text.tokenizer, client=state.client, metrics=state.metrics
            )
            choices = await collect(generation)
            outputs[number] = request_output(request_id, job, generation, choices, tokenizer=state.model_text.tokenizer)
        finally:
            for _ in range(job.options.num_sequences):
                places.release()
        on_finished(outputs[number])

    try:
        async with asyncio.TaskGroup() as group:
            for number, job in enumerate(jobs):
                for _ in range(job.options.num_sequences):
                    await places.acquire()
                group.create_task(run(number, job, str(next(ids))))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [outputs[number] for number in range(len(jobs))]
