"""How one model writes its thoughts and its calls: as the operator says, or as its files show.

Promises: a name that is unknown ends the start, before a model is loaded. Must not know: requests, how text is read.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire_server.text.parsing.forced import FORCED
from quire_server.text.parsing.formats import detect_tool_format, tool_format
from quire_server.text.parsing.reasoning import ThinkingMarks, detect_reasoning, reasoning_format
from quire_server.text.parsing.tool_format import ToolFormat
from quire_server.text.tokenizer import TextTokenizer

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    """Without any: thoughts are a part of the text, and calls are forced upon the model as plain JSON."""

    calls: ToolFormat = FORCED
    marks: ThinkingMarks | None = None
    calls_markers: frozenset[int] = frozenset()  # tokens that the readers must see, even where they are special
    marks_ids: frozenset[int] = frozenset()

    def shown_ids(self, *, reads_calls: bool) -> frozenset[int]:
        """Special tokens that the reader of a reply has to see."""
        return self.calls_markers | self.marks_ids if reads_calls else self.marks_ids


PLAIN = ModelFormats()


def model_formats(calls: str, reasoning: str, tokenizer: TextTokenizer, template: str | None) -> ModelFormats:
    """By the settings of those names, "auto" being what the chat template shows. Raises ConfigError."""
    form = tool_format(calls) if calls != AUTO else detect_tool_format(template or "")
    marks: ThinkingMarks | None = None
    if reasoning == AUTO:
        found = detect_reasoning(template, tokenizer.token_id) if template is not None else None
        marks = None if found is None else found.marks(tokenizer.token_id)
    elif reasoning != NONE:
        marks = reasoning_format(reasoning).marks(tokenizer.token_id)
    form = form or FORCED
    found_ids = (tokenizer.token_id(marker) for marker in form.markers)
    return ModelFormats(
        calls=form,
        marks=marks,
        calls_markers=frozenset(token_id for token_id in found_ids if token_id is not None),
        marks_ids=frozenset(i for i in (marks.start_id, marks.end_id) if i is not None) if marks else frozenset(),
    )
