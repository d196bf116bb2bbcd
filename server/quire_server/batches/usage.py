"""The tokens of a batch, summed from the usage in the results of its lines, whatever endpoint they had."""

from __future__ import annotations

import msgspec


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all lines that have been answered."""

    input_tokens: int = 0
    cached_tokens: int = 0  # of the input, found in the prefix cache
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of the output

    def __add__(self, other: BatchUsage) -> BatchUsage:
        return BatchUsage(
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
        )

    def shown(self) -> dict[str, object]:
        """OpenAI's object."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """The usage in a result: four fields that chats, completions and vectors write, then those of responses."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    body: _Body


class _Result(msgspec.Struct):
    response: _Response | None


_DECODER = msgspec.json.Decoder(_Result)
_NONE = _Details()


def usage_of(result: bytes) -> BatchUsage:
    """The tokens of one line's result; none where it is an error."""
    response = _DECODER.decode(result).response
    usage = None if response is None else response.body.usage
    if usage is None:
        return BatchUsage()
    of_input = usage.prompt_tokens_details or usage.input_tokens_details or _NONE
    of_output = usage.completion_tokens_details or usage.output_tokens_details or _NONE
    return BatchUsage(
        input_tokens=usage.prompt_tokens or usage.input_tokens or 0,
        cached_tokens=of_input.cached_tokens or 0,
        output_tokens=usage.completion_tokens or usage.output_tokens or 0,
        reasoning_tokens=of_output.reasoning_tokens or 0,
    )
