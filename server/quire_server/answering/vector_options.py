"""What vectors are asked for, whichever dialect asked: the neutral request between the wire and the engine.

Promises: frozen plain values; where an error must name a parameter, its name in the dialect is here too.
Must not know: any dialect, the model, how texts become vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TextInput:
    """One text."""

    source: str | Sequence[int]
    param: str  # what the dialect calls it


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOptions:
    """One request's texts, of each of which a vector is wanted."""

    inputs: Sequence[TextInput]
    model: str | None = None  # None: the one that is served
    id: str | None = None  # of the reply; None: the HTTP request's
    add_special_tokens: bool = True
    keep_tokens: int | None = None  # only so many tokens of each text; -1: what the context holds
    keep_start: bool = True  # of a text that is cut; else its end is kept
    dimensions: int | None = None  # the first ones of each vector, for models that were trained to be cut
    normalize: bool = True  # to a length of 1
    priority: int = 0  # lower is earlier, under the priority policy
    timeout: float | None = None  # seconds; None: as long as it takes
    is_batch: bool = False  # it may wait for those that are not
    cache_salt: str = ""
    ignored: tuple[str, ...] = ()  # names of fields that were accepted without effect
