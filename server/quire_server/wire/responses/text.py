"""The field `text` of a response: what its text must look like.

Promises: a format that validates is one of OpenAI's three. Must not know: which schemas can be followed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from quire_server.wire.common import WireModel
from quire_server.wire.extras import review_extras


class PlainText(WireModel):
    type: Literal["text"] = "text"


class JsonObject(WireModel):
    type: Literal["json_object"]


class JsonSchema(WireModel):
    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    type: Literal["json_schema"]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = Field(None, description="without effect: the text always follows the schema")


Format = Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")]


class TextOptions(WireModel):
    format: Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="without effect, and reported")

    def shown(self) -> dict[str, object]:
        """As the reply repeats it."""
        wanted = self.format or PlainText(type="text")
        if not isinstance(wanted, JsonSchema):
            return {"format": {"type": wanted.type}, "verbosity": self.verbosity or "medium"}
        schema = {
            "type": wanted.type,
            "name": wanted.name,
            "description": wanted.description,
            "schema": wanted.schema_,
            "strict": bool(wanted.strict),
        }
        return {"format": schema, "verbosity": self.verbosity or "medium"}

    def without_effect(self) -> list[str]:
        extras = {"verbosity": self.verbosity, **(self.model_extra or {})}
        return review_extras(extras)
