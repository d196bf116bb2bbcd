"""The text half of a model: its tokenizer, chat templates, formats and defaults, read before an engine runs.

Promises: a start and `--dry-run` read it in the same way; what cannot be served is one line that names the file or the
setting. Must not know: routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.contract.plan import EnginePlan
from quire_engine.gguf import typed_name
from quire_engine.plain_files import is_plain, read_plain_text
from quire_server.settings import Settings
from quire_server.text.generation_config import GenerationDefaults, generation_config_file, generation_defaults
from quire_server.text.parsing.formats import ModelFormats, model_formats
from quire_server.text.pooling_method import PoolingMethod, pooling_method
from quire_server.text.prompt import ChatTemplate
from quire_server.text.scoring_method import ScoringMethod, scoring_method
from quire_server.text.tokenizer import DEFAULT, TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """The parts that turn a model's texts into tokens and back. Its template has processes: `close` ends them."""

    tokenizer: TextTokenizer
    defaults: GenerationDefaults
    formats: ModelFormats  # of replies to prompts of the usual template
    named_formats: Mapping[str, ModelFormats]  # of the other templates, by their names
    scoring: ScoringMethod
    pooling: PoolingMethod
    prompts: ChatTemplate | None  # None: the model has no chat template

    def formats_of(self, template: ChatTemplate | None) -> ModelFormats:
        """The formats of replies to prompts of that template."""
        return self.formats if template is None else self.named_formats.get(template.name, self.formats)

    def close(self) -> None:
        """End the template's processes."""
        if self.prompts is not None:
            self.prompts.close()

    def check(self, settings: Settings, plan: EnginePlan) -> None:
        """Hold the tokenizer against the model's width. Raises ModelLoadError."""
        if self.tokenizer.vocab_size > plan.model.vocab_size:
            raise ModelLoadError(
                f"{_place(settings)}: the tokenizer knows {self.tokenizer.vocab_size} tokens, the model computes"
                f" {plan.model.vocab_size}; they do not belong together"
            )


async def read_model_text(settings: Settings) -> ModelText:
    """Read and check all of it, in threads. Raises ConfigError, ModelLoadError."""
    defaults = generation_defaults(settings.generation_config, settings.override_generation_config, settings.model_path)
    folder = Path(settings.tokenizer or settings.model_path)
    tokenizer = await asyncio.to_thread(
        TextTokenizer.load, folder, generation_config_file(settings.generation_config, folder)
    )
    sources = _sources(settings, tokenizer)
    formats = {
        name: model_formats(settings.tool_call_parser, settings.reasoning_parser, tokenizer, sources.get(name))
        for name in (DEFAULT, *sources)
    }
    scoring = await asyncio.to_thread(scoring_method, settings.pooling, settings.model_path, tokenizer)
    pooling = await asyncio.to_thread(pooling_method, settings.pooling, settings.model_path)
    if scoring.classifier is not None:  # its head belongs to the last token's row
        pooling = PoolingMethod(name="last")
    return ModelText(
        tokenizer=tokenizer,
        defaults=defaults,
        formats=formats.pop(DEFAULT),
        named_formats=formats,
        scoring=scoring,
        pooling=pooling,
        prompts=await _prompts(settings, tokenizer, sources),
    )


def _place(settings: Settings) -> str:
    """Return the name or path that the tokenizer is from, as the user has typed it."""
    return typed_name(settings.tokenizer or settings.model_path)


def _sources(settings: Settings, tokenizer: TextTokenizer) -> dict[str, str]:
    """The templates by their names; one that the operator has chosen is the only one. Raises ConfigError."""
    chosen, own = settings.chat_template, tokenizer.chat_templates
    if chosen is None:
        return own
    if not is_plain(chosen):
        if str(chosen) in own:
            return {DEFAULT: own[str(chosen)]}
        known = f"those of the model are {', '.join(own)}" if own else "the model has none of its own"
        raise ConfigError(
            f"there is no chat template at {chosen}, and none of that name; set --chat-template to a Jinja file or to"
            f" the name of one of the model's templates: {known}"
        )
    try:
        return {DEFAULT: read_plain_text(chosen)}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--chat-template {chosen}: cannot be read: {reason}") from None


async def _prompts(settings: Settings, tokenizer: TextTokenizer, sources: Mapping[str, str]) -> ChatTemplate | None:
    """The usual template, which knows the others; None: there is none. Raises ModelLoadError."""
    if DEFAULT not in sources:
        return None
    variants = {name: source for name, source in sources.items() if name != DEFAULT}
    try:
        return await asyncio.to_thread(
            ChatTemplate, sources[DEFAULT], tokenizer, settings.default_chat_template_kwargs, variants=variants
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{settings.chat_template or _place(settings)}: {error}") from None
