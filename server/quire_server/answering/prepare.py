"""Checks a request and turns it into engine requests. Nothing is queued here.

The header `x-quire-ignored` names fields without effect, `x-quire-clamped` a value that was lowered; `x-quire-notes` is
for people.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import anyio.to_thread
from fastapi import Request

from quire_engine.contract.types import Adapter, BeamParams, GenerationRequest, SamplingParams, ThinkingParams
from quire_server.answering.caller import Caller
from quire_server.answering.choice import TextOptions
from quire_server.answering.constraining.calls import reading_format
from quire_server.answering.constraining.constraints import Thinking, constraint
from quire_server.answering.options import (
    BeamOptions,
    Conversation,
    GenerationOptions,
    Infill,
    SamplingNumbers,
)
from quire_server.answering.sampling import ModelLimits, resolve_sampling, resolve_stop, with_defaults, with_seed
from quire_server.errors import BadRequest, Unsupported
from quire_server.metrics.request_record import CURRENT
from quire_server.state import ServerState, choose, state_of
from quire_server.text.infilling import Infilling, Parts
from quire_server.text.parsing.formats import FORCED, ModelFormats
from quire_server.text.parsing.reply_parser import ReplyParser
from quire_server.text.parsing.tool_format import ToolFormat
from quire_server.text.prompt import ChatTemplate
from quire_server.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyParsing:
    """How the replies to one chat request are parsed, and what the engine must know about it."""

    new_parser: Callable[[], ReplyParser]
    shown_ids: frozenset[int]  # special tokens that the parser needs
    thinking: ThinkingParams | None = None  # None: no limit
    call_format: ToolFormat | None = None  # None: no calls are parsed
    thoughts: Thinking | None = None  # the block that may come before the answer


def reply_parsing(state: ServerState, options: GenerationOptions, prompt: str) -> ReplyParsing | None:
    """Return how replies to a rendered conversation are parsed; None where all output is the answer's text."""
    tools = options.tools
    may_call = tools is not None and tools.choice != "none"
    formats = _formats(state, options)
    marks = formats.marks
    if not may_call and marks is None and not formats.calls.reads_thoughts:
        return None
    is_open = marks is not None and _is_open(options, prompt, marks.start, marks.end)
    call_format = _call_format(state, options)

    def new_parser() -> ReplyParser:
        return ReplyParser(
            marks=marks,
            is_open=is_open,
            tool_format=call_format,
            tools={tool.name: tool.parameters for tool in tools.tools} if tools is not None and may_call else {},
            parallel=tools is None or tools.parallel,
        )

    return ReplyParsing(
        new_parser=new_parser,
        shown_ids=formats.shown_ids(reads_calls=call_format is formats.calls),
        thinking=_budget(state, options, is_open=is_open),
        call_format=call_format,
        thoughts=_thoughts(state, options, prompt, is_open=is_open),
    )


def template_of(state: ServerState, options: GenerationOptions) -> ChatTemplate | None:
    """The chat template of a request; None: it has no conversation, or the model no template. Raises BadRequest."""
    source = options.prompt.source
    if state.model_text.prompts is None or not isinstance(source, Conversation):
        return None
    return state.model_text.prompts.chosen(has_tools=bool(source.tools), name=source.template)


def _formats(state: ServerState, options: GenerationOptions) -> ModelFormats:
    """The formats of replies to a request."""
    return state.model_text.formats_of(template_of(state, options))


def _call_format(state: ServerState, options: GenerationOptions) -> ToolFormat | None:
    """The format in which calls are parsed; None: none are.

    A template without tools has the prompt describe plain JSON calls. A format that reads thoughts too is read in every
    reply.
    """
    template = template_of(state, options)
    calls = state.model_text.formats_of(template).calls
    if calls.reads_thoughts:
        return calls
    shows_tools = template is not None and template.shows_tools
    return reading_format(options.tools, calls if shows_tools else FORCED)


def _thoughts(state: ServerState, options: GenerationOptions, prompt: str, *, is_open: bool) -> Thinking | None:
    """The block that may come before a constrained answer; None: the model is not to think."""
    marks = _formats(state, options).marks
    if marks is None:
        return None
    is_asked = _asks_to_think(state, options)
    # A block that the prompt has closed is not opened again.
    if not is_open and (is_asked is False or prompt.rstrip().endswith(marks.end)):
        return None
    return Thinking(marks=marks, is_open=is_open, is_asked=is_asked is True)


def _asks_to_think(state: ServerState, options: GenerationOptions) -> bool | None:
    """Whether the request, or else a default of the server, switches thinking on or off; None: the model decides.

    It is off by word alone, and on only by a variable that the template has.
    """
    effort, source, template = options.reasoning.effort, options.prompt.source, template_of(state, options)
    if options.reasoning.max_tokens == 0:
        return False
    wish = None
    if effort is not None and (effort == "none" or effort_variables(template, effort)):
        wish = effort != "none"
    known = frozenset() if template is None else template.variables
    own = source.template_variables if isinstance(source, Conversation) else {}
    for variables in (own,) if wish is not None else (state.settings.default_chat_template_kwargs, own):
        for name in _THINKING_SWITCHES:
            if variables.get(name) is False or (variables.get(name) is True and name in known):
                wish = bool(variables[name])
    return wish


def _is_open(options: GenerationOptions, prompt: str, start: str, end: str) -> bool:
    """Whether the prompt ends inside a block of thoughts, opened by its template or by the message to continue."""
    if prompt.rstrip().endswith(start):
        return True
    source = options.prompt.source
    if not isinstance(source, Conversation) or not source.continue_final_message:
        return False
    content = source.messages[-1].get("content")
    return isinstance(content, str) and content.rfind(start) > content.rfind(end)


def _budget(state: ServerState, options: GenerationOptions, *, is_open: bool) -> ThinkingParams | None:
    marks, most = _formats(state, options).marks, options.reasoning.max_tokens
    if marks is None or most is None:
        return None
    return ThinkingParams(
        start_ids=tuple(state.model_text.tokenizer.encode(marks.start, add_special_tokens=False)),
        end_ids=tuple(state.model_text.tokenizer.encode(marks.end, add_special_tokens=False)),
        is_open=is_open,
        max_tokens=most,
    )


async def infill_prompts(
    state: ServerState,
    source: Sequence[str | Sequence[int]],
    options: GenerationOptions,
    infill: Infill,
    limits: ModelLimits,
) -> tuple[list[Sequence[int]], GenerationOptions]:
    """Each prompt with its suffix as token ids, and the options with the stop ids of infilling.

    Raises BadRequest, also where the model has no tokens for it, and ContextLengthExceeded.
    """
    infilling = Infilling.of(state.model_text.tokenizer)
    if infilling is None:
        raise Unsupported(
            f"'{infill.param}' is not supported by this model: its tokenizer has no tokens for the middle of a text.",
            param=infill.param,
        )
    special = options.prompt.add_special_tokens
    prompts: list[Sequence[int]] = []
    for prefix in source:
        parts = Parts(
            prefix=prefix, suffix=infill.suffix, begun=infill.begun, extras=infill.extras, add_special_tokens=special
        )
        limits.check_length(state.model_text.tokenizer.least_tokens(parts.num_chars), infill.param, is_exact=False)
        prompts.append(await state.text.infill(infilling, parts))
    stop_ids = (*options.stop.token_ids, *infilling.stop_ids)
    return prompts, replace(options, stop=replace(options.stop, token_ids=tuple(dict.fromkeys(stop_ids))))


def beam_params(options: GenerationOptions, sampling: SamplingParams, limits: ModelLimits) -> BeamParams | None:
    """None where tokens are sampled. `sampling` has everything except the seed.

    Raises BadRequest for options that would change the ranking of beams, which are not supported.
    """
    asked = options.beam
    if asked is None:
        return None
    _check_width(asked, options, limits)
    for name, wrong in _refused(options).items():
        if wrong:
            raise BadRequest(
                f"Beam search ranks texts by the model's own log-probabilities; '{name}' cannot be combined with it.",
                param=name,
            )
    if options.stop.max_tokens == 0:
        param = options.stop.max_tokens_param
        raise BadRequest(f"Beam search needs '{param}' to be at least 1.", param=param)
    if sampling.grammar or sampling.thinking is not None:  # from forced or strict tools
        param = options.reasoning.max_tokens_param if sampling.thinking is not None else "tools"
        raise BadRequest(
            f"Beam search follows the model alone; what '{param}' asks for here would force tokens.", param=param
        )
    return BeamParams(width=asked.width, length_penalty=asked.length_penalty, early_stopping=asked.early_stopping)


def _check_width(asked: BeamOptions, options: GenerationOptions, limits: ModelLimits) -> None:
    param, n_param, most = asked.width_param, options.sampling.n_param, limits.scheduler.limits.max_choices
    if asked.width < options.sampling.n:
        raise BadRequest(f"'{param}' must be at least '{n_param}'.", param=param)
    if asked.width > most:
        raise BadRequest(f"'{param}' must be at most {most} on this server.", param=param)


def _refused(options: GenerationOptions) -> dict[str, bool]:
    """Return whether the request uses each option that beam search does not support, by the option's field."""
    sampling = options.sampling
    structure = "response_format" if options.structure is None else options.structure.param
    numbers = {field.name: getattr(sampling, field.name) != field.default for field in fields(SamplingNumbers)}
    return numbers | {
        "temperature": sampling.temperature not in (0.0, 1.0),
        "logit_bias": bool(sampling.logit_bias),
        "allowed_token_ids": bool(sampling.allowed_token_ids),
        "bad_words": bool(sampling.bad_words),
        "stop": bool(options.stop.strings),
        structure: options.structure is not None,
    }


_REPORTABLE = re.compile(r"[A-Za-z0-9_. -]{1,64}")
_MAX_REPORTED = 16
_NONE: Mapping[str, object] = {}


def notes(
    state: ServerState,
    without_effect: Sequence[str],
    messages: Sequence[Mapping[str, object]] = (),
    variables: Mapping[str, object] = _NONE,
    template: ChatTemplate | None = None,
) -> dict[str, str]:
    """Headers that name the fields without effect, and parts of the conversation that the chat template does not use.

    Raises BadRequest for fields without effect if the operator has set the server to refuse them.
    """
    headers, texts = {}, []
    if without_effect:
        listed = _header_list(without_effect)
        if state.settings.strict:
            raise BadRequest(
                f"Without effect on this server: {listed}. It is set to refuse such fields.",
                param=without_effect[0],
                code="unknown_parameter",
            )
        headers["x-quire-ignored"] = listed
        texts.append(f"without effect: {listed}")
    if template is not None:
        found = template.unnamed(messages, variables)
        texts += [
            f"the chat template does not name the {kind} {_header_list(names)}"
            for kind, names in found.items()
            if names
        ]
    if texts:
        headers["x-quire-notes"] = "; ".join(texts)
    return headers


def adapter_header(adapter: Adapter | None) -> dict[str, str]:
    """The adapter that computes a reply, and the digest of its files."""
    return {} if adapter is None else {"x-quire-adapter": f"{adapter.name}@sha256:{adapter.digest}"}


def _header_list(names: Sequence[str]) -> str:
    """Names as one header value: harmless characters, bounded length."""
    shown = [name if _REPORTABLE.fullmatch(name) else "?" for name in names[:_MAX_REPORTED]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")


_THINKING_SWITCHES = ("enable_thinking", "thinking")  # in the templates of Qwen; of DeepSeek and Granite
_IDS_AT_ONCE = 1 << 16
LEAST_ROOM = 1  # tokens left for the answer when a prompt is cut to the context length


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request. Nothing has been queued yet."""

    options: GenerationOptions
    requests: tuple[GenerationRequest, ...]  # one for each prompt
    prompt_texts: tuple[str, ...]  # the texts for `echo`, else empty
    text: TextOptions
    headers: dict[str, str]


def admit(request: Request, model: str | None) -> ServerState:
    """The checks that need only the model's name, by which the request is for that model. Raises NotReady,
    ModelNotFound.
    """
    state = state_of(request)
    if state.draining:
        state.metrics.reject("draining")
        raise state.refusal()
    state = choose(request, model)
    if state.catalog is not None:
        state.catalog.use(state)
        story = CURRENT.get()
        if story is not None:
            story.model = state.model_names[0]
    return state


async def prepare(state: ServerState, options: GenerationOptions, caller: Caller | None = None) -> Job:
    """Check prompts and parameters against the model and the pool. Raises BadRequest, ContextLengthExceeded."""
    _refuse_other_models(state)
    tokenizer, most_tokens = state.model_text.tokenizer, state.model_text.defaults.most_tokens
    limits = ModelLimits.of(state.client.plan, tokenizer, state.settings.max_logprobs, most_tokens)
    options = _completed(state, options)
    source, parsing = options.prompt.source, None
    if isinstance(source, Conversation):
        rendered = await _render(state, source, options, on_turn=lambda: _refuse_if_full(state))
        source, parsing = [rendered], reply_parsing(state, options, rendered)
    elif options.prompt.infill is not None:
        source, options = await infill_prompts(state, source, options, options.prompt.infill, limits)
    _refuse_too_long(source, options, tokenizer, limits)
    prompts, texts = await _encode_prompts(state, source, options, limits)
    sampling = resolve_sampling(options, tokenizer=tokenizer, limits=limits)
    sampling = sampling if parsing is None else replace(sampling, thinking=parsing.thinking)
    caller = caller or Caller()
    grammar, opener = await _grammar(state, options, parsing, caller.cache_scope)
    sampling = replace(sampling, grammar=grammar, thinking_opener=opener)
    beam = beam_params(options, sampling, limits)
    seed, own_seed, adapter = options.sampling.seed, state.settings.seed, state.adapters.bound(options.model)
    requests: list[GenerationRequest] = []
    for token_ids in prompts:
        if requests:
            await asyncio.sleep(0)  # the seeds of many long prompts are digests of all their ids
        if not token_ids:
            raise BadRequest("The prompt is empty: it has no tokens.", param=options.prompt.param)
        stop = resolve_stop(options, sampling, prompt_tokens=len(token_ids), tokenizer=tokenizer, limits=limits)
        request = GenerationRequest(
            request_id=secrets.token_hex(12),
            prompt_token_ids=tuple(token_ids),
            sampling=with_seed(sampling, requested=seed, server_seed=own_seed, token_ids=token_ids),
            stop=stop,
            n=options.sampling.n,
            arrival_time=time.monotonic(),
            priority=options.priority if _is_by_priority(state) else 0,
            cache_salt=options.prompt.cache_salt,
            cache_ttl=options.prompt.cache_ttl,
            beam=beam,
            tells_progress=options.reply.progress and options.reply.stream,
            speculates=options.speculates,
            prediction=await _prediction(state, options, limits),
        ).bound_to(adapter)
        requests.append(caller.claim(request, timeout=options.timeout, is_batch=options.is_batch))
    return Job(
        options=options,
        requests=tuple(requests),
        prompt_texts=tuple(texts),
        text=_text_options(state, options, parsing),
        headers=_headers(state, options, adapter, min(request.stop.max_new_tokens for request in requests)),
    )


def _completed(state: ServerState, options: GenerationOptions) -> GenerationOptions:
    """Fill in what the request leaves out, by the model's defaults and the server's settings."""
    options = with_defaults(options, state.model_text.defaults.sampling, state.model_text.defaults.max_tokens)
    if state.settings.enable_force_include_usage:
        options = replace(options, reply=replace(options.reply, usage_at_end=True, usage_always=True))
    return options


def _refuse_other_models(state: ServerState) -> None:
    if state.model_text.scoring.classifier is not None:
        raise BadRequest(
            "This model classifies texts and cannot generate text; use /classify, /v1/score or /v1/rerank.",
            code="generation_not_supported",
        )
    if why := state.client.plan.scheduler.why_no_text:
        raise BadRequest(
            f"This model returns embeddings and cannot generate text: {why};"
            " use /v1/embeddings, /v1/score or /v1/rerank.",
            code="generation_not_supported",
        )


def _text_options(state: ServerState, options: GenerationOptions, parsing: ReplyParsing | None) -> TextOptions:
    """The options for turning the reply's tokens into text."""
    return TextOptions(
        stop=options.stop.strings,
        include_stop=options.stop.include_stop,
        min_tokens=options.stop.min_tokens,
        skip_special_tokens=options.reply.skip_special_tokens,
        new_parser=None if parsing is None else parsing.new_parser,
        counts_thoughts=parsing is not None and _formats(state, options).marks is not None,
        shown_ids=frozenset() if parsing is None else parsing.shown_ids,
        # As with OpenAI, a reply to a request that names the function ends with "stop".
        calls_finish=options.tools is None or options.tools.choice != "function",
    )


async def _grammar(
    state: ServerState, options: GenerationOptions, parsing: ReplyParsing | None, scope: str
) -> tuple[str, int | None]:
    """The grammar for the whole reply, checked by a compilation, and its `opener`; empty: none. Raises BadRequest."""
    make = partial(
        constraint,
        options,
        tool_format=None if parsing is None else parsing.call_format,
        thinking=None if parsing is None else parsing.thoughts,
        token_id=state.model_text.tokenizer.token_id,
    )
    # Schemas are compiled beside the event loop: large ones take longer than it may pause.
    is_short = options.tools is None and (options.structure is None or options.structure.kind != "json_schema")
    asked = make() if is_short else await anyio.to_thread.run_sync(make)
    if asked is None:
        return "", None
    return await state.grammars.accept(asked.grammar, param=asked.param, scope=scope), asked.opener


async def count_prompt_tokens(state: ServerState, options: GenerationOptions) -> int:
    """The number of tokens of all prompts, whether they fit or not. Raises BadRequest."""
    limits = ModelLimits.of(state.client.plan, state.model_text.tokenizer, state.settings.max_logprobs)
    source = options.prompt.source
    if isinstance(source, Conversation):
        source = [await _render(state, source, options)]
    prompts, _ = await _encode_prompts(state, source, options, limits)
    return sum(len(token_ids) for token_ids in prompts)


async def _encode_prompts(
    state: ServerState, source: Sequence[str | Sequence[int]], options: GenerationOptions, limits: ModelLimits
) -> tuple[list[Sequence[int]], list[str]]:
    """Token ids of each prompt and, for echo, its text: as sent, or decoded from its ids or the ids left after a cut.

    All ids that a client sent are shown. For a text that was cut, special tokens are shown only where the reply shows
    them, because the client may not have written them.
    """
    prompts: list[Sequence[int]] = []
    texts: list[str] = []
    written = [prompt for prompt in source if isinstance(prompt, str)]
    encoded = iter(await state.text.encode_each(written, add_special_tokens=options.prompt.add_special_tokens))
    for prompt in source:
        if prompts:
            await asyncio.sleep(0)  # let streams run between many short prompts
        whole: Sequence[int]
        if isinstance(prompt, str):
            whole = next(encoded)
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
            texts.append(state.model_text.tokenizer.decode(token_ids, skip_special_tokens=skip))
    return prompts, texts


async def _prediction(state: ServerState, options: GenerationOptions, limits: ModelLimits) -> tuple[int, ...]:
    """The tokens of the client's guess of the answer, as many as an answer may have; none where they are of no use."""
    if not options.prediction or not options.speculates or state.settings.speculation == "off":
        return ()
    (token_ids,) = await state.text.encode_each([options.prediction], add_special_tokens=False)
    return tuple(token_ids[: limits.scheduler.max_model_len])


async def _check_ids(ids: Sequence[int], param: str, limits: ModelLimits) -> None:
    """Check ids in parts, since a prompt that will be cut may have millions."""
    for at in range(0, len(ids), _IDS_AT_ONCE):
        if at:
            await asyncio.sleep(0)
        limits.check_ids(ids[at : at + _IDS_AT_ONCE], param)


def _refuse_too_long(
    source: Sequence[str | Sequence[int]], options: GenerationOptions, tokenizer: TextTokenizer, limits: ModelLimits
) -> None:
    """Refuse prompts that cannot fit, before they are tokenized. Raises ContextLengthExceeded."""
    if options.prompt.keep_tokens is not None:
        return
    for prompt in source:
        is_text = isinstance(prompt, str)
        least = tokenizer.least_tokens(len(prompt)) if is_text else len(prompt)
        limits.check_length(least, options.prompt.param, is_exact=not is_text)


def _refuse_if_full(state: ServerState) -> None:
    """Refuse the request if the queue has filled while its text waited for a thread."""
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
        kwargs={
            **effort_variables(template_of(state, options), options.reasoning.effort),
            **conversation.template_variables,
        },
        tools=conversation.tools,
        template=conversation.template,
        on_turn=on_turn,
    )
    if text is None:
        raise BadRequest("This model has no chat template; use /v1/completions.", param=options.prompt.param)
    return text


def _cut(token_ids: Sequence[int], options: GenerationOptions, max_model_len: int) -> Sequence[int]:
    """The prompt's last (or first) tokens, where the request limits them."""
    keep = options.prompt.keep_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        asked = options.stop.max_tokens
        wanted = asked if asked is not None else options.stop.default_max_tokens or LEAST_ROOM
        keep = max(max_model_len - max(wanted, LEAST_ROOM), 1)
    return token_ids[:keep] if options.prompt.keep_start else token_ids[max(len(token_ids) - keep, 0) :]


def _without_effect(state: ServerState, options: GenerationOptions) -> list[str]:
    """The fields that have no effect in the dialect or on this server."""
    names = list(options.ignored)
    if options.priority and not _is_by_priority(state):
        names.append("priority")
    effort, template = options.reasoning.effort, template_of(state, options)
    if effort is not None and not effort_variables(template, effort):
        names.append(options.reasoning.effort_param)
    if options.tools is not None and any(tool.input_grammar for tool in options.tools.tools):
        form = _call_format(state, options)
        if form is not None and not form.writes_json:
            names.append("tools.format")
    if options.reasoning.max_tokens is not None and state.model_text.formats_of(template).marks is None:
        names.append(options.reasoning.max_tokens_param)
    if options.prediction and state.settings.speculation == "off":
        names.append("prediction")
    return names


def _headers(
    state: ServerState, options: GenerationOptions, adapter: Adapter | None, max_new_tokens: int
) -> dict[str, str]:
    """Headers for fields without effect, unused parts of the conversation, a lowered max_tokens, and the adapter."""
    source = options.prompt.source
    conversation = source if isinstance(source, Conversation) else Conversation(messages=())
    headers = notes(
        state,
        _without_effect(state, options),
        conversation.messages,
        conversation.template_variables,
        template_of(state, options),
    )
    if options.stop.max_tokens is not None and max_new_tokens < options.stop.max_tokens:
        headers["x-quire-clamped"] = f"{options.stop.max_tokens_param}={max_new_tokens}"
    return headers | adapter_header(adapter)


def _is_by_priority(state: ServerState) -> bool:
    return state.client.plan.scheduler.limits.scheduling_policy == "priority"


def effort_variables(template: ChatTemplate | None, effort: str | None) -> dict[str, object]:
    """The template's variables for the reasoning effort: `reasoning_effort`, or a switch for thinking."""
    known = frozenset() if template is None else template.variables
    if effort is None:
        return {}
    if "reasoning_effort" in known:
        return {"reasoning_effort": effort}
    return {name: effort != "none" for name in _THINKING_SWITCHES if name in known}
