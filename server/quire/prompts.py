"""Converts the accepted forms of prompts, conversations and their parameters into requests.

Promises: a list with one entry for each prompt, in the order given; TypeError or ValueError for every other form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypedDict, cast

from quire.sampling_params import SamplingParams
from quire_server.answering.options import GenerationOptions, PromptOptions
from quire_server.dialects.chat.wire import ChatCompletionRequest
from quire_server.http.body import validate


class TextPrompt(TypedDict):
    """`{"prompt": "..."}`."""

    prompt: str


class TokensPrompt(TypedDict):
    """`{"prompt_token_ids": [...]}`."""

    prompt_token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, as vLLM's scripts name it: `LoRARequest("sql", 1, "/adapters/sql")`."""

    lora_name: str
    lora_int_id: int  # without effect: names are unique
    lora_path: str  # its directory
    base_model_name: str | None = None
    load_inplace: bool = False  # read the directory again


LoRARequests: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt
Conversation: TypeAlias = Sequence[Mapping[str, Any]]

_FORMS = "a prompt is a string, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


def completions(prompts: Sequence[str | list[int]], params: Sequence[SamplingParams]) -> list[GenerationOptions]:
    """One request for each prompt."""
    return [
        _with_prompt(each, PromptOptions(source=[prompt], param="prompt"), show_text=isinstance(prompt, str))
        for prompt, each in zip(prompts, params, strict=True)
    ]


def adapters_for(count: int, given: LoRARequests) -> list[LoRARequest | None]:
    """One for each of `count` prompts."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    each = list(given)
    if len(each) != count:
        raise ValueError(f"there are {count} prompts and {len(each)} lora_requests; give one, or one for each prompt")
    if not all(one is None or isinstance(one, LoRARequest) for one in each):
        raise TypeError("lora_request must be a LoRARequest, or a list of them")
    return each


def chats(
    conversations: Sequence[Conversation],
    params: Sequence[SamplingParams],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
    chat_template_kwargs: Mapping[str, object] | None,
) -> list[GenerationOptions]:
    """One request for each conversation, checked as the server checks messages. Raises BadRequest."""
    requests = []
    for conversation, each in zip(conversations, params, strict=True):
        asked = validate(
            ChatCompletionRequest,
            {
                "messages": [dict(message) for message in conversation],
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "chat_template_kwargs": None if chat_template_kwargs is None else dict(chat_template_kwargs),
            },
        ).options()
        requests.append(replace(_with_prompt(each, asked.prompt, show_text=True), ignored=asked.ignored))
    return requests


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[str | list[int]]:
    """Every prompt as text or as token ids; a list of numbers is one prompt. Raises TypeError, ValueError."""
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [_plain(prompts)]
    if not _is_list(prompts):
        raise TypeError(f"{_FORMS}, not {type(prompts).__name__}")
    return [_plain(prompt) for prompt in prompts]


def conversation_list(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One or several conversations as a list. Raises TypeError."""
    if _is_list(messages):
        if all(isinstance(message, Mapping) for message in messages):
            return [cast(Conversation, messages)] if messages else []
        if all(_is_list(each) for each in messages):
            return list(cast(Sequence[Conversation], messages))
    raise TypeError("messages are a list of {'role': ..., 'content': ...}, or a list of such lists")


def params_for(
    num_prompts: int, params: SamplingParams | Sequence[SamplingParams] | None, default: SamplingParams
) -> list[SamplingParams]:
    """The parameters of each prompt, from one for all or a list with one for each. Raises TypeError, ValueError."""
    if params is None:
        params = default
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise TypeError("sampling_params is a SamplingParams or a list of them")
    if len(params) != num_prompts:
        raise ValueError(
            f"there are {num_prompts} prompts and {len(params)} sampling_params; give one for each, or one for all"
        )
    return list(params)


def _with_prompt(params: SamplingParams, prompt: PromptOptions, *, show_text: bool) -> GenerationOptions:
    """The options of `params` for this prompt. `echo` keeps the prompt's text beside the reply."""
    options = params.options()
    return replace(
        options,
        prompt=replace(prompt, keep_tokens=options.prompt.keep_tokens),
        reply=replace(options.reply, echo=show_text),
    )


def _plain(prompt: object) -> str | list[int]:
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - {"prompt", "prompt_token_ids"}:
            raise ValueError(f"a prompt with {', '.join(sorted(map(repr, unknown)))} is not supported; {_FORMS}")
        # If both are given, the ids are more exact.
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise TypeError(f"{_FORMS}, not {type(prompt).__name__}")
    if not prompt:
        raise ValueError("a prompt must have at least one token")
    if set(map(type, prompt)) != {int}:
        raise TypeError(f"token ids are integers; {_FORMS}")
    return list(prompt)


def _is_ids(prompts: object) -> bool:
    return _is_list(prompts) and bool(prompts) and type(cast(Sequence[object], prompts)[0]) is int


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
