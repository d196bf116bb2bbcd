"""A `Recovery` by plain calls, for the tests of what is sent again and of whom a crash is blamed on."""

from quire_engine.contract.types import (
    EngineStats,
    GenerationRequest,
    SamplingParams,
    StepOutput,
    StopParams,
    TokenOutput,
)
from quire_server.engine.recovery import JournalEntry, Loss, Recovery


def request(request_id: str, n: int = 1) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(),
        stop=StopParams(max_new_tokens=8),
        n=n,
    )


def serving(*names: str) -> Recovery:
    """An engine that is ready and has these requests."""
    recovery = Recovery()
    for name in names:
        recovery.admit(JournalEntry(request(name)))
    return recovery


def sent(recovery: Recovery) -> list[str]:
    """What goes to the engine now."""
    names = []
    while (resumed := recovery.next_request()) is not None:
        names.append(resumed.request_id)
    return names


def step(*outputs: TokenOutput) -> StepOutput:
    return StepOutput(step_id=1, outputs=outputs, stats=EngineStats())


def progress(recovery: Recovery, *names: str) -> list[str]:
    """A token for each. Returns whose token is delivered."""
    delivered = recovery.record(step(*(TokenOutput(request_id=name, token_ids=(5,)) for name in names)))
    return [output.request_id for output in delivered.outputs]


def crash(recovery: Recovery, loss: Loss = Loss.CRASH, *, now: float = 0.0) -> list[str]:
    """Returns who is guilty."""
    return [entry.request.request_id for entry in recovery.crashed(loss, now=now)]
