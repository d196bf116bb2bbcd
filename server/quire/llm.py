"""`LLM`: a model in this script, without a server.

Promises: the same tokens and texts as the server for the same requests, by the same code; ValueError for impossible
values, before anything runs; RuntimeError when the engine fails.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from quire.batch import prepare_all, run_all, with_adapters
from quire.beams import BeamSearchOutput, BeamSearchParams, beams_of, searches
from quire.engine_thread import EngineThread
from quire.outputs import RequestOutput, empty_line
from quire.progress import progress
from quire.prompts import (
    Conversation,
    LoRARequest,
    LoRARequests,
    Prompt,
    adapters_for,
    chats,
    completions,
    conversation_list,
    params_for,
    prompt_list,
)
from quire.sampling_params import SamplingParams
from quire.tokenizer import Tokenizer
from quire.vectors import EmbeddingRequestOutput, ScoringRequestOutput, embed_all, score_all, scored, vector_options
from quire_engine.contract.errors import ConfigError, ModelLoadError, QuireError
from quire_server.answering.options import GenerationOptions
from quire_server.answering.ranking import PairOptions
from quire_server.answering.vectors import VectorOptions
from quire_server.checkpoint.locate import localized
from quire_server.errors import ApiError, BadRequest
from quire_server.settings import REMOVED, Settings, SettingsError, load_settings, removed_line, suggest
from quire_server.settings.engine_fields import EngineFields
from quire_server.state import ServerState

_OF_A_SERVER = {"model", "served_model_name", "max_num_queued_reqs", "max_num_queued_tokens"}
ARGUMENTS = frozenset(EngineFields.model_fields) - _OF_A_SERVER


def engine_settings(model: str | os.PathLike[str], arguments: Mapping[str, object]) -> Settings:
    """The settings of one LLM: the arguments, else `QUIRE_*` variables, else the defaults."""
    unknown = [name for name in arguments if name not in ARGUMENTS]
    if unknown:
        if unknown[0] in REMOVED:
            raise TypeError(as_arguments(f"LLM(): {removed_line(unknown[0], unknown[0])}"))
        hint = suggest(unknown[0], ARGUMENTS)
        known = hint if "did you mean" in hint else f"; it has {', '.join(sorted(ARGUMENTS))}"
        raise TypeError(f"LLM() has no argument {unknown[0]!r}{known}")
    try:
        # No queue limit, since callers wait for the end anyway.
        settings = load_settings({**arguments, "model": os.fspath(model), "max_num_queued_tokens": None})
    except SettingsError as error:
        raise ValueError(as_arguments(str(error))) from None
    try:
        return localized(settings)
    except ModelLoadError as error:
        raise ValueError(as_arguments(str(error))) from None


def as_arguments(text: str) -> str:
    """A message with settings as arguments instead of flags: `--max-num-seqs 3` is `max_num_seqs 3`."""
    return re.sub(r"--(?:set )?([a-z][a-z_-]*)", lambda flag: flag[1].replace("-", "_"), text)


class LLM:
    """A loaded model. The engine is a child process that ends with `close`, with this object or with the script.

    Calls from several threads take turns. The prompts of a call are batched continuously, as in the server.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: object) -> None:
        """Load the checkpoint in a directory, or the embedded "quire-demo".

        `settings` are those of `quire serve` for the model, its memory and its schedule, by their names: dtype,
        quantization, max_model_len, seed, gpu_memory_utilization, max_num_seqs and so on. Raises TypeError for other
        names, ValueError for what cannot work, RuntimeError when the engine does not start.
        """
        checked = engine_settings(model, settings)
        self._thread = EngineThread()
        # Runs once: by `close`, when this object is garbage-collected, or at the interpreter's end.
        self._finalizer = weakref.finalize(self, self._thread.close)
        self._ids = itertools.count()
        try:
            with _plain_errors():
                self._work = _Work(self._thread.call(self._thread.open(checked)))
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Continue each prompt: one, or a list of texts, token ids or both. Outputs are in the order of the prompts.

        `sampling_params`: for all prompts, or a list with one for each; without them the model's own defaults hold.
        `lora_request`: the adapter of all prompts, or a list with one or None for each; needs `enable_lora`.
        `use_tqdm` shows a progress bar on stderr, and a line where the model ended outputs with their first token.
        """
        plain = prompt_list(prompts)
        params = params_for(len(plain), sampling_params, self.get_default_sampling_params())
        outputs = self._run(completions(plain, params), use_tqdm=use_tqdm, lora_request=lora_request)
        if use_tqdm and (said := empty_line(outputs)):
            print(said, file=sys.stderr)
        return outputs

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answer each conversation, with the model's chat template. One conversation gives a list of one output.

        The template opens the assistant's turn, unless `continue_final_message` continues the last message.
        """
        if not self._work.can_chat:
            raise ValueError("this model has no chat template; use generate")
        conversations = conversation_list(messages)
        params = params_for(len(conversations), sampling_params, self.get_default_sampling_params())
        with _plain_errors():
            requests = chats(
                conversations,
                params,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
        return self._run(requests, use_tqdm=use_tqdm, lora_request=lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        lora_request: LoRARequests = None,
    ) -> list[BeamSearchOutput]:
        """The best hypotheses of each prompt by beam search, as many as its width, the best first.

        `lora_request` is as in `generate`.
        """
        outputs = self._run(searches(prompt_list(prompts), params), use_tqdm=use_tqdm, lora_request=lora_request)
        return [beams_of(output, params, self._work.tokenizer) for output in outputs]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding for each prompt, of L2 norm 1, pooled as the setting `pooling` says.

        `dimensions` cuts the vectors to their first numbers; `truncate_prompt_tokens` keeps the first tokens of each
        prompt, -1 as many as the context holds.
        """
        options = vector_options(
            prompt_list(prompts),
            dimensions=dimensions,
            normalize=normalize,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        with _plain_errors(), progress(len(options.inputs), shown=use_tqdm) as on_finished:
            return self._thread.call(self._work.embed(options, self._ids, on_finished))

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How alike texts are, one against each of many, or pair by pair: by the model's own scores, or the cosine."""
        left, right = prompt_list(data_1), prompt_list(data_2)
        if not left or len(left) not in {1, len(right)}:
            raise ValueError(f"there are {len(left)} and {len(right)} texts; give one, or as many on both sides")
        options = vector_options([*left, *right], truncate_prompt_tokens=truncate_prompt_tokens)
        if self._work.reads_pairs:
            pairs = PairOptions(texts=options, num_left=len(left))
            with _plain_errors(), progress(len(right), shown=use_tqdm) as on_finished:
                return self._thread.call(self._work.score(pairs, self._ids, on_finished))
        with _plain_errors(), progress(len(options.inputs), shown=use_tqdm) as on_finished:
            embedded = self._thread.call(self._work.embed(options, self._ids, on_finished))
        return scored(embedded, len(left))

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of calls without any: the model's generation_config.json, as the settings change it.

        Parameters that are given are taken as they are, with the defaults of `SamplingParams`.
        """
        return SamplingParams(**self._work.defaults)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with its chat template."""
        return self._work.tokenizer

    def close(self) -> None:
        """End the engine process. Idempotent; every later call raises RuntimeError."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self, requests: Sequence[GenerationOptions], *, use_tqdm: bool, lora_request: LoRARequests = None
    ) -> list[RequestOutput]:
        adapters = adapters_for(len(requests), lora_request)
        with _plain_errors(), progress(len(requests), shown=use_tqdm) as on_finished:
            return self._thread.call(self._work.run(requests, adapters, self._ids, on_finished))


class _Work:
    """The coroutines of an LLM. It must not refer to the LLM, which ends when it is garbage-collected."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._turn = asyncio.Lock()
        self.can_chat = state.model_text.prompts is not None
        self.reads_pairs = not state.model_text.scoring.is_cosine
        self.tokenizer = Tokenizer(state.model_text.tokenizer, state.model_text.prompts)
        self.defaults: dict[str, Any] = state.model_text.defaults.shown

    async def run(
        self,
        requests: Sequence[GenerationOptions],
        adapters: Sequence[LoRARequest | None],
        ids: Iterator[int],
        on_finished: Callable[[RequestOutput], None],
    ) -> list[RequestOutput]:
        async with self._turn:
            jobs = await prepare_all(self._state, await with_adapters(self._state, requests, adapters))
            return await run_all(self._state, jobs, ids, on_finished)

    async def embed(
        self, options: VectorOptions, ids: Iterator[int], on_finished: Callable[[None], None]
    ) -> list[EmbeddingRequestOutput]:
        async with self._turn:
            return await embed_all(self._state, options, ids, on_finished)

    async def score(
        self, options: PairOptions, ids: Iterator[int], on_finished: Callable[[None], None]
    ) -> list[ScoringRequestOutput]:
        async with self._turn:
            return await score_all(self._state, options, ids, on_finished)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Built-in exceptions, which need no import: ValueError for arguments, RuntimeError for the engine."""
    try:
        yield
    except (BadRequest, ConfigError, ModelLoadError) as error:
        raise ValueError(as_arguments(str(error))) from None
    except (ApiError, QuireError) as error:
        raise RuntimeError(str(error)) from None
