"""Every check between a request and the engine, and what is to be run when all have passed.

Promises: nothing is queued here; what is accepted but has no effect is named in `x-quire-ignored`, what was lowered in
`x-quire-clamped`, both for people and what the chat template does not name in `x-quire-notes`.
Must not know: dialects, the shapes of replies, HTTP beyond the errors it raises.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from quire_engine.types import GenerationRequest
from quire_server.answering.beams import beam_params
from quire_server.answering.caller import Caller
from quire_server.answering.choice import TextOptions
from quire_server.answering.constraining.constraints import constraint
from quire_server.answering.infilling import infilled
from quire_server.answering.notes import notes
from quire_server.answering.options import Conversation, GenerationOptions
from quire_server.answering.reading import Reading, reading
from quire_server.answering.sampling import ModelLimits, resolve_sampling, resolve_stop, with_seed
from quire_server.errors import BadRequest, ModelNotFound
from quire_server.state import ServerState
from quire_server.text.tokenizer import TextTokenizer

_THINKING_SWITCHES = ("enable_thinking", "thinking")  # of Qwen's and of DeepSeek's and Granite's templates
_IDS_AT_ONCE = 1 << 16
LEAST_ROOM = 1  # tokens kept free for the answer when a prompt is cut to the context length


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request that has passed every check. Nothing has been queued yet."""

    options: GenerationOptions
    requests: tuple[GenerationRequest, ...]  # one for each prompt
    prompt_texts: tuple[str, ...]  # to be shown with `echo`, else empty
    text: TextOptions
    headers: dict[str, str]


def admit(state: ServerState, model: str | None) -> None:
    """The checks that need no more than the model's name. Raises NotReady, ModelNotFound."""
    if state.draining:
        state.metrics.reject("draining")
        raise state.refusal()
    if not state.knows_model(model):
        raise ModelNotFound(model or "")


async def prepare(state: ServerState, options: GenerationOptions, caller: Caller | None = None) -> Job:
    """Check prompts and parameters against the model and the pool. Raises BadRequest, ContextLengthExceeded."""
    limits = ModelLimits.of(state.client.plan, state.tokenizer, state.settings.max_logprobs)
    source, how = options.prompt.source, None
    if isinstance(source, Conversation):
        rendered = await _render(state, source, options, on_turn=lambda: _refuse_if_full(state))
        source, how = [rendered], reading(state, options, rendered)
    elif options.prompt.infill is not None:
        source, options = await infilled(state, source, options, options.prompt.infill, limits)
    _refuse_too_long(source, options, state.tokenizer, limits)
    prompts, texts = await _encode_prompts(state, source, options, limits)
    sampling = resolve_sampling(options, tokenizer=state.tokenizer, limits=limits)
    if how is not None:
        sampling = replace(sampling, thinking=how.thinking)
    sampling = replace(sampling, grammar=await _grammar(state, options, how))
    beam = beam_params(options, sampling, limits)
    requests: list[GenerationRequest] = []
    caller = caller or Caller()
    for token_ids in prompts:
        if not token_ids:
            raise BadRequest("The prompt is empty: it has no tokens.", param=options.prompt.param)
        stop = resolve_stop(options, sampling, prompt_tokens=len(token_ids), tokenizer=state.tokenizer, limits=limits)
        seed = options.sampling.seed
        request = GenerationRequest(
            request_id=secrets.token_hex(12),
            prompt_token_ids=tuple(token_ids),
            sampling=with_seed(sampling, requested=seed, server_seed=state.settings.seed, token_ids=token_ids),
            stop=stop,
            n=options.sampling.n,
            arrival_time=time.monotonic(),
            priority=options.priority if _is_by_priority(state) else 0,
            cache_salt=options.prompt.cache_salt,
            beam=beam,
        )
        requests.append(caller.claim(request, timeout=options.timeout, is_batch=options.is_batch))
    return Job(
        options=options,
        requests=tuple(requests),
        prompt_texts=tuple(texts),
        text=TextOptions(
            stop=options.stop.strings,
            include_stop=options.stop.include_stop,
            min_tokens=options.stop.min_tokens,
            skip_special_tokens=options.reply.skip_special_tokens,
            interval=state.settings.stream_interval if options.reply.stream else 1,
            new_parser=None if how is None else how.new_parser,
            counts_thoughts=how is not None and state.formats.marks is not None,
            shown_ids=frozenset() if how is None else how.shown_ids,
            # OpenAI's replies to a request that names the function end with "stop": the client knows what they are.
            calls_finish=options.tools is None or options.tools.choice != "function",
        ),
        headers=_headers(state, options, min(request.stop.max_new_tokens for request in requests)),
    )


async def _grammar(state: ServerState, options: GenerationOptions, how: Reading | None) -> str:
    """What the whole reply must obey, compiled once already; empty: nothing. Raises BadRequest."""
    asked = constraint(
        options,
        tool_format=None if how is None else how.call_format,
        thinking=None if how is None else how.thoughts,
        token_id=state.tokenizer.token_id,
    )
    return "" if asked is None else await state.grammars.accept(asked.grammar, param=asked.param)


async def count_prompt_tokens(state: ServerState, options: GenerationOptions) -> int:
    """Of all prompts, whether they fit or not. Raises BadRequest."""
    limits = ModelLimits.of(state.client.plan, state.tokenizer, state.settings.max_logprobs)
    source = options.prompt.source
    if isinstance(source, Conversation):
        source = [await _render(state, source, options)]
    prompts, _ = await _encode_prompts(state, source, options, limits)
    return sum(len(token_ids) for token_ids in prompts)


async def _encode_prompts(
    state: ServerState, source: Sequence[str | Sequence[int]], options: GenerationOptions, limits: ModelLimits
) -> tuple[list[Sequence[int]], list[str]]:
    """Token ids of each prompt and, for echo, its text: as it was sent, or what its ids or those left of it say.

    Ids that a client sent are all shown; of a text that was cut, special tokens only where the reply shows them, since
    the client need not have written them.
    """
    prompts: list[Sequence[int]] = []
    texts: list[str] = []
    for prompt in source:
        if prompts:
            await asyncio.sleep(0)  # many short prompts are a long one
        whole: Sequence[int]
        if isinstance(prompt, str):
            whole = await state.text.encode(prompt, add_special_tokens=options.prompt.add_special_tokens)
        else:
            await _check_ids(prompt, options.prompt.param, limits)
            whole = prompt
        token_ids = _cut(whole, options, limits.scheduler.max_model_len)
        prompts.append(token_ids)
        if not options.reply.echo:
            continue
        if not isinstance(prompt, str):
            texts.append(await state.text.decode(token_ids))
        elif token_ids == whole:
            texts.append(prompt)
        else:
            skip = options.reply.skip_special_tokens
            texts.append(state.tokenizer.decode(token_ids, skip_special_tokens=skip))
    return prompts, texts


async def _check_ids(ids: Sequence[int], param: str, limits: ModelLimits) -> None:
    """Some at a time: one that is cut may have millions."""
    for at in range(0, len(ids), _IDS_AT_ONCE):
        if at:
            await asyncio.sleep(0)
        limits.check_ids(ids[at : at + _IDS_AT_ONCE], param)


def _refuse_too_long(
    source: Sequence[str | Sequence[int]], options: GenerationOptions, tokenizer: TextTokenizer, limits: ModelLimits
) -> None:
    """What cannot fit, however it is tokenized, is not. Raises ContextLengthExceeded."""
    if options.prompt.keep_tokens is not None:
        return
    for prompt in source:
        is_text = isinstance(prompt, str)
        least = tokenizer.least_tokens(len(prompt)) if is_text else len(prompt)
        limits.check_length(least, options.prompt.param, is_exact=not is_text)


def _refuse_if_full(state: ServerState) -> None:
    """The queue may have filled while a text waited for its turn: then all work on it would be for nothing."""
    refusal = state.client.refusal()
    if refusal is not None:
        raise refusal


async def _render(
    state: ServerState,
    conversation: Conversation,
    options: GenerationOptions,
    on_turn: Callable[[], None] = lambda: None,
) -> str:
    text = await state.text.render(
        conversation.messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        kwargs={**effort_variables(state, options.reasoning.effort), **conversation.template_variables},
        tools=conversation.tools,
        on_turn=on_turn,
    )
    if text is None:
        raise BadRequest("This model has no chat template; use /v1/completions.", param=options.prompt.param)
    return text


def _cut(token_ids: Sequence[int], options: GenerationOptions, max_model_len: int) -> Sequence[int]:
    """The prompt's last (or first) tokens, where only some are to be kept."""
    keep = options.prompt.keep_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        asked = options.stop.max_tokens
        wanted = asked if asked is not None else options.stop.default_max_tokens or LEAST_ROOM
        keep = max(max_model_len - max(wanted, LEAST_ROOM), 1)
    return token_ids[:keep] if options.prompt.keep_start else token_ids[max(len(token_ids) - keep, 0) :]


def _without_effect(state: ServerState, options: GenerationOptions) -> list[str]:
    """The fields that the dialect found to have no effect, and those that have none on this server."""
    names = list(options.ignored)
    if options.priority and not _is_by_priority(state):
        names.append("priority")
    if options.reasoning.effort is not None and not effort_variables(state, options.reasoning.effort):
        names.append(options.reasoning.effort_param)
    if options.reasoning.max_tokens is not None and state.formats.marks is None:
        names.append(options.reasoning.max_tokens_param)
    return names


def _headers(state: ServerState, options: GenerationOptions, max_new_tokens: int) -> dict[str, str]:
    """What had no effect, what the template does not name, and a max_tokens that was lowered."""
    source = options.prompt.source
    conversation = source if isinstance(source, Conversation) else Conversation(messages=())
    headers = notes(state, _without_effect(state, options), conversation.messages, conversation.template_variables)
    if options.stop.max_tokens is not None and max_new_tokens < options.stop.max_tokens:
        headers["x-quire-clamped"] = f"{options.stop.max_tokens_param}={max_new_tokens}"
    return headers


def _is_by_priority(state: ServerState) -> bool:
    return state.client.plan.scheduler.limits.scheduling_policy == "priority"


def effort_variables(state: ServerState, effort: str | None) -> dict[str, object]:
    """The template's variables that say how much to think: its own of that name, or a switch for whether at all."""
    known = frozenset() if state.prompts is None else state.prompts.variables
    if effort is None:
        return {}
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    return {name: effort != "none" for name in _THINKING_SWITCHES if name in known}
