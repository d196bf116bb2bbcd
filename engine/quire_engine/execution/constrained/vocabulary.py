"""What the ids of a vocabulary spell, for grammars: llguidance's view of a `tokenizer.json`.

Promises: nothing is fetched from anywhere; every failure is a GrammarError that names the file.
Must not know: grammars, requests, the model.
"""

from __future__ import annotations

import json
from pathlib import Path

from llguidance import LLTokenizer


class GrammarError(Exception):
    """A grammar cannot be followed; one line, safe to show to the client."""


def load_vocabulary(folder: Path, num_ids: int) -> LLTokenizer:
    """Of the `num_ids` columns of the logits those that the tokenizer knows are there; the others spell nothing.

    Holds the interpreter's lock for a second where there are 150,000 tokens. Raises GrammarError.
    """
    file = folder / "tokenizer.json"
    try:
        # The text, not the path: a path that is not there would be taken for a name to download.
        text = file.read_text(encoding="utf-8")
        return LLTokenizer(text, n_vocab=num_ids, eos_token=_end_ids(folder) or None)
    except OSError as error:
        raise GrammarError(f"grammars need {file.name}, which cannot be read: {error.strerror}") from None
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise GrammarError(f"grammars cannot be followed with this model's {file.name}: {reason}") from None


def _end_ids(folder: Path) -> list[int]:
    """The ids that the model's files say end a text; none where they do not say."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            continue
        found += [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
    return list(dict.fromkeys(found))
