"""The fields for structured outputs by the names of OpenAI, vLLM, SGLang and llama.cpp's server, and for beam search.

A request has at most one structure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from quire_server.answering.options import BeamOptions, Structure
from quire_server.dialects.common import MAX_CHOICES, GenerationFields, WireModel, review_extras
from quire_server.errors import BadRequest, Unsupported


class BeamFields(GenerationFields):
    """The fields of beam search; without `use_beam_search` they are refused where they would have an effect."""

    use_beam_search: bool | None = Field(
        None, description="search the n likeliest texts instead of sampling; they come at the end, also in a stream"
    )
    beam_width: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(
        None, description="live beams; n by default, and in completions best_of"
    )
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = Field(
        None, description="of beams: a text's log-probability is divided by its tokens to this power; 1 by default"
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="of beams: as in transformers; false by default"
    )

    def beam_options(self, best_of: int | None = None) -> BeamOptions | None:
        """None where tokens are sampled. Raises BadRequest."""
        if not self.use_beam_search:
            without_effect = {
                "beam_width": self.beam_width in (None, 1),
                "length_penalty": self.length_penalty in (None, 1.0),
                "early_stopping": self.early_stopping in (None, False),
            }
            for name, is_off in without_effect.items():
                if not is_off:
                    raise BadRequest(f"'{name}' needs 'use_beam_search': true.", param=name)
            return None
        if self.beam_width is not None and best_of not in (None, self.beam_width):
            raise BadRequest("'best_of' and 'beam_width' mean the same in beam search; give one.", param="beam_width")
        named = [("beam_width", self.beam_width), ("best_of", best_of), ("n", self.n or 1)]
        param, width = next((param, width) for param, width in named if width is not None)
        return BeamOptions(
            width=width,
            width_param=param,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=self.early_stopping or False,
        )


MAX_GRAMMAR_CHARS = 65_536  # characters of a schema or a grammar
MAX_REGEX_CHARS = 4096  # characters; forced text costs time for every token
MAX_STRUCTURE_CHOICES = 4096

SchemaOrText = dict[str, object] | Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
RegexText = Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)]
ChoiceText = Annotated[str, Field(min_length=1, max_length=4096)]
ChoiceList = Annotated[list[ChoiceText], Field(fail_fast=True, min_length=1, max_length=MAX_STRUCTURE_CHOICES)]


class NamedSchema(WireModel):
    """OpenAI's wrapper of a schema."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: dict[str, object] | None = Field(None, alias="schema", description="a JSON schema, 2020-12")
    strict: bool | None = Field(None, description="without effect: a schema is always enforced")


class ResponseFormat(WireModel):
    type: Annotated[str, Field(max_length=64)] = Field(description="text, json_object or json_schema")
    json_schema: NamedSchema | None = Field(None, description="with the type json_schema")
    schema_: dict[str, object] | None = Field(
        None, alias="schema", description="of the object, with the type json_object"
    )

    @model_validator(mode="after")
    def _check_type(self) -> ResponseFormat:
        if self.type not in ("text", "json_object", "json_schema"):
            raise Unsupported(
                f"'response_format' of the type '{self.type}' is not supported; 'text', 'json_object' and"
                " 'json_schema' are.",
                param="response_format",
            )
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            if self.schema_ is None:
                raise ValueError("the type json_schema needs a json_schema with a schema")
        elif self.type != "json_schema" and self.json_schema is not None:
            raise ValueError(f"the type {self.type} has no json_schema")
        return self

    def structure(self) -> Structure | None:
        if self.type == "text":
            return None
        schema = self.schema_
        if self.json_schema is not None and self.json_schema.schema_ is not None:
            schema = self.json_schema.schema_
        return _schema(schema, "response_format") if schema is not None else _object("response_format")


class StructuredOutputs(WireModel):
    """vLLM's field; exactly one structure."""

    json_: SchemaOrText | None = Field(None, alias="json", description="a JSON schema, or its text")
    regex: RegexText | None = None
    choice: ChoiceList | None = None
    grammar: GrammarText | None = Field(None, description="in Lark, or in EBNF as xgrammar and llama.cpp have it")
    json_object: bool | None = None
    structural_tag: str | None = Field(None, description="not supported; null")
    disable_any_whitespace: bool | None = Field(None, description="JSON without whitespace between its parts")
    disable_additional_properties: bool | None = Field(
        None, description="not supported; say additionalProperties: false in the schema"
    )
    whitespace_pattern: str | None = Field(None, description="not supported; null")

    @model_validator(mode="after")
    def _check_forms(self) -> StructuredOutputs:
        for name, value in (
            ("structural_tag", self.structural_tag),
            ("whitespace_pattern", self.whitespace_pattern),
            ("disable_additional_properties", self.disable_additional_properties or None),
        ):
            if value is not None:
                raise Unsupported(
                    f"'{name}' in 'structured_outputs' is not supported by this server.", param="structured_outputs"
                )
        if len(list(self.structures())) != 1:
            raise ValueError("give exactly one of json, regex, choice, grammar and json_object")
        return self

    def structures(self) -> Iterator[Structure]:
        param, compact = "structured_outputs", bool(self.disable_any_whitespace)
        if self.json_ is not None:
            yield _schema(self.json_, param, compact=compact)
        if self.regex is not None:
            yield Structure(kind="regex", value=self.regex, param=param)
        if self.choice is not None:
            yield _choice(self.choice, param)
        if self.grammar is not None:
            yield Structure(kind="grammar", value=self.grammar, param=param)
        if self.json_object:
            yield _object(param, compact=compact)


class StructuredFields(BeamFields):
    """The fields of both endpoints: the structure by all its names, beside the common ones."""

    response_format: ResponseFormat | None = Field(None, description="text, any JSON object, or a JSON schema")
    structured_outputs: StructuredOutputs | None = Field(None, description="a schema, regex, choice or grammar")
    guided_json: SchemaOrText | None = Field(None, description="the older name of structured_outputs.json")
    guided_regex: RegexText | None = Field(None, description="the older name of structured_outputs.regex")
    guided_choice: ChoiceList | None = Field(None, description="the older name of structured_outputs.choice")
    guided_grammar: GrammarText | None = Field(None, description="the older name of structured_outputs.grammar")
    guided_json_object: bool | None = Field(None, description="the older name of structured_outputs.json_object")
    json_schema: SchemaOrText | None = Field(None, description="SGLang's and llama.cpp's name of a JSON schema")
    regex: RegexText | None = Field(None, description="SGLang's name of a regular expression")
    ebnf: GrammarText | None = Field(None, description="SGLang's name of a grammar")
    grammar: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None = Field(
        None, description="llama.cpp's name of a grammar; empty: none"
    )

    def structure(self) -> Structure | None:
        """The structure that is asked for, or None. Raises BadRequest for more than one."""
        found = list(self._structures())
        if len(found) > 1:
            raise BadRequest(
                f"'{found[0].param}' and '{found[1].param}' both constrain the answer; give one.",
                param=found[1].param,
            )
        return found[0] if found else None

    def ignored_structure_fields(self) -> list[str]:
        """The names of fields without effect. Raises BadRequest for unsupported ones."""
        ignored = []
        if (form := self.response_format) is not None:
            ignored += [f"response_format.{name}" for name in review_extras(form.model_extra)]
            if form.json_schema is not None:
                extras = review_extras(form.json_schema.model_extra)
                ignored += [f"response_format.json_schema.{name}" for name in extras]
        if self.structured_outputs is not None:
            extras = review_extras(self.structured_outputs.model_extra)
            ignored += [f"structured_outputs.{name}" for name in extras]
        return ignored

    def _structures(self) -> Iterator[Structure]:
        if self.response_format is not None and (structure := self.response_format.structure()) is not None:
            yield structure
        if self.structured_outputs is not None:
            yield from self.structured_outputs.structures()
        for schema, param in ((self.guided_json, "guided_json"), (self.json_schema, "json_schema")):
            if schema is not None:
                yield _schema(schema, param)
        if self.guided_choice is not None:
            yield _choice(self.guided_choice, "guided_choice")
        if self.guided_json_object:
            yield _object("guided_json_object")
        texts: tuple[tuple[Literal["regex", "grammar"], str, str | None], ...] = (
            ("regex", "guided_regex", self.guided_regex),
            ("regex", "regex", self.regex),
            ("grammar", "guided_grammar", self.guided_grammar),
            ("grammar", "ebnf", self.ebnf),
            ("grammar", "grammar", self.grammar),
        )
        for kind, param, value in texts:
            if value:
                yield Structure(kind=kind, value=value, param=param)


def _schema(schema: dict[str, object] | str, param: str, *, compact: bool = False) -> Structure:
    value = schema if isinstance(schema, str) else json.dumps(schema)
    if len(value) > MAX_GRAMMAR_CHARS:
        raise BadRequest(
            f"The schema in '{param}' has {len(value)} characters; at most {MAX_GRAMMAR_CHARS} are taken.", param=param
        )
    return Structure(kind="json_schema", value=value, param=param, compact=compact)


def _choice(choices: list[str], param: str) -> Structure:
    value = json.dumps(choices)
    if len(value) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"'{param}' has more than {MAX_GRAMMAR_CHARS} characters in all.", param=param)
    return Structure(kind="choice", value=value, param=param)


def _object(param: str, *, compact: bool = False) -> Structure:
    return Structure(kind="json_object", param=param, compact=compact)
