"""The line about outputs that the model ended with their first token."""

from __future__ import annotations

import pytest

from quire.outputs import CompletionOutput, RequestOutput, empty_line
from quire_server.answering.choice import ChoiceFinish


def output(text: str, *, reason: ChoiceFinish = "stop", stopped_by: str | int | None = None) -> RequestOutput:
    choice = CompletionOutput(
        index=0,
        text=text,
        token_ids=[2],
        cumulative_logprob=None,
        logprobs=None,
        finish_reason=reason,
        stop_reason=stopped_by,
    )
    return RequestOutput(
        request_id="0", prompt="p", prompt_token_ids=[1], prompt_logprobs=None, outputs=[choice], num_cached_tokens=0
    )


def test_outputs_that_the_model_ended_at_once_are_counted() -> None:
    said = empty_line([output(""), output(" Paris."), output("")])
    assert said.startswith("2 of 3 outputs are empty")
    assert "ignore_eos=True" in said


@pytest.mark.parametrize(
    "outputs",
    [[], [output("text")], [output("", stopped_by=".")], [output("", stopped_by=7)], [output("", reason="length")]],
    ids=["nothing", "text", "a stop string", "a stop token", "no token"],
)
def test_outputs_that_the_script_ended_itself_are_not(outputs: list[RequestOutput]) -> None:
    assert empty_line(outputs) == ""
