"""Compiles each grammar that requests ask for once, and applies token masks to logits."""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread
from typing import TypeAlias

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from quire_engine.contract.grammar_limits import GRAMMAR_LIMITS, MAX_COMPILED
from quire_engine.contract.grammar_vocabulary import GrammarVocabulary
from quire_engine.execution.distribution import padded, padded_width
from quire_engine.plain_files import read_plain, read_plain_text

_LONGEST_ERROR = 300  # characters
_FEW_CELLS = 1 << 17  # of logits; of fewer all rows at once cost less than a look at each row's mask
_MAX_KEPT = 256  # masks whose ids are remembered
_MAX_IDS = 8  # of a vocabulary at least one in so many is listed, or the table is used
_LONGEST_PAUSE = 0.05  # seconds for which a step may compile a grammar again
_Key: TypeAlias = tuple[str, str]  # a grammar's text and scope
_log = logging.getLogger(__name__)
Mask: TypeAlias = NDArray[np.int32]  # bit i is id i, for every id of the vocabulary


class GrammarError(Exception):
    """A grammar cannot be followed; one line, safe to show to the client."""


class Grammars:
    """Compiled grammars by their text and scope. The vocabulary is read for the first grammar, or by `warm_up`.

    A grammar is compiled again for each scope (`GenerationRequest.cache_scope`) that uses it, so that no tenant learns
    from the time of a compilation which grammars another has used.
    """

    def __init__(
        self, folder: Path, vocab_size: int, *, defaults: Path | None = None, max_compiled: int = MAX_COMPILED
    ) -> None:
        """`folder` has the tokenizer; `vocab_size` is the width of the logits; `defaults` as `load_vocabulary` says."""
        self._folder, self._vocab_size, self._max_compiled = folder, vocab_size, max_compiled
        self._defaults = defaults
        self._vocabulary: LLTokenizer | GrammarError | None = None
        self._end_ids: tuple[int, ...] = ()
        self._limits = LLParserLimits(**GRAMMAR_LIMITS)  # type: ignore[arg-type]
        self._changed = Condition()  # guards what follows
        self._compiled: OrderedDict[_Key, LLMatcher | GrammarError] = OrderedDict()  # least recently used first
        self._scopes: dict[str, set[str]] = {}  # by text, of those that are compiled
        self._seconds: dict[_Key, float] = {}  # that compiling them took
        self._awaited: set[_Key] = set()  # in the queue, or being compiled
        self._queue: SimpleQueue[_Key] | None = None  # the thread's, once there is one

    def prepare(self, text: str, scope: str) -> bool:
        """Whether the scope's grammar is compiled or known to be invalid; if not, a thread begins to compile it."""
        key = text, scope
        with self._changed:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return True
            if key in self._awaited:
                return False
            if self._queue is None:
                self._queue = SimpleQueue()
                # A daemon: when the engine's process ends it ends in the middle of whatever it compiles.
                Thread(target=self._work, args=(self._queue,), name="grammars", daemon=True).start()
            self._awaited.add(key)
            self._queue.put(key)
            return False

    def wait(self, seconds: float) -> None:
        """Wait until a compilation ends, at most so long."""
        with self._changed:
            if self._awaited:
                self._changed.wait(seconds)

    def error(self, text: str) -> str | None:
        """Why a prepared grammar is invalid; None: it is valid."""
        found = self._found(text)
        return str(found) if isinstance(found, GrammarError) else None

    def matcher(self, text: str) -> LLMatcher:
        """A new matcher at the start of an output. Compiles a grammar that was not prepared. Raises GrammarError."""
        found = self._found(text)
        if found is None:
            found = self._compile(text, "")
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))
        return found.deep_copy()

    def used_up(self, text: str) -> LLMatcher:
        """A matcher at the start of an output that shares nothing with others, since what they share is used up.

        The copies of a matcher share its lexer, and its states are limited: those of one output may leave none for
        the others. So the grammar is compiled again for the next output that begins. Raises GrammarError where
        compiling takes too long for a step.
        """
        with self._changed:
            keys = [(text, scope) for scope in self._scopes.get(text, ())]
            took = max((self._seconds[key] for key in keys), default=0.0)
            for key in keys:
                self._forget(key)
        if took > _LONGEST_PAUSE:
            raise GrammarError("the grammar is too large to be compiled again, and other outputs have used it up")
        return self._new(text)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that the vocabulary says end a text; none while it has not been read."""
        return self._end_ids

    def warm_up(self) -> None:
        """Read the vocabulary now, while the engine is idle: 150,000 tokens take seconds."""
        if self._vocabulary is None:
            try:
                self._vocabulary = load_vocabulary(self._folder, self._vocab_size, self._defaults)
                self._end_ids = tuple(self._vocabulary.eos_tokens)
            except GrammarError as error:
                self._vocabulary = error

    def _work(self, queue: SimpleQueue[_Key]) -> None:
        while True:
            self._compile(*queue.get())

    def _found(self, text: str) -> LLMatcher | GrammarError | None:
        """Return the compiled text of any scope: all are equal, and `prepare` has made the request wait for its own."""
        with self._changed:
            return next((self._compiled[text, scope] for scope in self._scopes.get(text, ())), None)

    def _compile(self, text: str, scope: str) -> LLMatcher | GrammarError:
        found: LLMatcher | GrammarError
        began = time.thread_time()
        try:
            self.warm_up()
            began = time.thread_time()
            found = self._new(text)
        except GrammarError as error:
            found = error
        except BaseException as error:  # the thread goes on with other grammars, and the waiting request must end
            _log.exception("a grammar could not be compiled")
            found = GrammarError(f"the grammar cannot be compiled ({type(error).__name__})")
        with self._changed:
            self._compiled[text, scope] = found
            self._compiled.move_to_end((text, scope))
            self._seconds[text, scope] = time.thread_time() - began
            self._scopes.setdefault(text, set()).add(scope)
            while len(self._compiled) > self._max_compiled:
                self._forget(next(iter(self._compiled)))
            self._awaited.discard((text, scope))
            self._changed.notify_all()
        return found

    def _new(self, text: str) -> LLMatcher:
        """Compile the grammar. Raises GrammarError."""
        if not isinstance(self._vocabulary, LLTokenizer):
            raise GrammarError(str(self._vocabulary or "the vocabulary is not there"))
        try:
            found = LLMatcher(self._vocabulary, text, log_level=0, limits=self._limits)
        except BaseException as error:  # a panic of the library is no Exception, and the waiting request must end
            raise GrammarError(f"the grammar cannot be compiled ({type(error).__name__})") from error
        if found.is_error():
            raise GrammarError(f"the grammar is not accepted: {first_line(found.get_error())}")
        return found

    def _forget(self, key: _Key) -> None:
        text, scope = key
        del self._compiled[key], self._seconds[key]
        self._scopes[text].discard(scope)
        if not self._scopes[text]:
            del self._scopes[text]


def first_line(text: str) -> str:
    """The line of the library's message that a client is shown."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason was given")
    return line[:_LONGEST_ERROR]


def load_vocabulary(folder: Path, num_ids: int, defaults: Path | None = None) -> LLTokenizer:
    """The text of each token id, from the folder's `tokenizer.json`. Nothing is downloaded.

    `defaults`: the folder of the generation_config.json that is read instead of the folder's own.
    Columns of the `num_ids` logits that the tokenizer does not know have no text.
    Holds the interpreter's lock for seconds where there are 150,000 tokens. Raises GrammarError, naming the file.
    """
    file = folder / "tokenizer.json"
    try:
        # The text, not the path: a path that is not there would be taken for a name to download.
        vocabulary = GrammarVocabulary(read_plain_text(file))
        ends = _end_ids(folder, defaults or folder) or vocabulary.end_ids
        return LLTokenizer(vocabulary.text, n_vocab=num_ids, eos_token=ends or None)
    except OSError as error:
        raise GrammarError(f"grammars need {file.name}, which cannot be read: {error.strerror}") from None
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise GrammarError(f"grammars cannot be followed with this model's {file.name}: {reason}") from None


def _end_ids(folder: Path, defaults: Path) -> list[int]:
    """The ids that the model's files say end a text; none where they do not say."""
    found: list[int] = []
    for file in (defaults / "generation_config.json", folder / "config.json"):
        try:
            value = json.loads(read_plain(file)).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        found += [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]
    return list(dict.fromkeys(found))


@dataclass(slots=True)
class MaskWriter:
    """Applies masks: a logit whose bit is not set becomes -inf, whatever the width of the logits.

    The ids of recent masks are kept, since most steps of most grammars allow the same tokens as earlier ones.
    """

    _tables: dict[torch.device, Tensor] = field(default_factory=dict)
    _kept: OrderedDict[bytes, tuple[bool, NDArray[np.int64]] | None] = field(default_factory=OrderedDict)

    def masked(self, logits: Tensor, masks: Mapping[int, Mask]) -> Tensor:
        """`distribution.padded` of logits [S, V], with the masks applied to the rows that have one."""
        if not masks or logits.device.type != "cpu":
            copy = padded(logits)
            self.apply(copy, masks)
            return copy
        if logits.numel() <= _FEW_CELLS:
            return _masked_together(logits, masks)
        width = logits.shape[1]
        copy = logits.new_empty(len(logits), padded_width(width))
        sources, targets = logits.numpy(), copy.numpy()
        targets[:, width:] = -np.inf
        for row, source in enumerate(sources):
            mask = masks.get(row)
            if mask is None:
                targets[row, :width] = source
            else:
                self._mask_row(source, targets[row, :width], mask)
        return copy

    def apply(self, logits: Tensor, masks: Mapping[int, Mask]) -> None:
        """Change the rows of logits [S, V] that have a mask, in place."""
        if masks:
            self._apply_table(logits, masks)

    def _apply_table(self, logits: Tensor, masks: Mapping[int, Mask]) -> None:
        """Eight cells at a time: 0 or -inf to add, looked up by the eight bits."""
        octets = np.stack(list(masks.values())).view(np.uint8)
        known = min(8 * octets.shape[1], logits.shape[1])
        index = torch.from_numpy(octets).to(logits.device, torch.int32)
        added = torch.nn.functional.embedding(index, self._table(logits)).flatten(1)[:, :known]
        # Columns beyond the vocabulary are there for alignment, and -inf already.
        if len(masks) == len(logits):
            logits[:, :known].add_(added)
        else:
            logits[:, :known].index_add_(0, torch.tensor(list(masks), device=logits.device), added)

    # numpy's indexing takes half the time of torch's.
    def _mask_row(self, source: NDArray[np.float32], target: NDArray[np.float32], bits: Mask) -> None:
        """Write the row `source` with its mask into `target`, which is as wide and not initialised."""
        key = bits.tobytes()
        if key in self._kept:
            self._kept.move_to_end(key)
            found = self._kept[key]
        else:
            found = self._kept[key] = _listed(bits, len(source))
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        if found is None:
            target[:] = source
            self._apply_table(torch.from_numpy(target).unsqueeze(0), {0: bits})
            return
        is_allowed, ids = found
        if is_allowed:
            target.fill(-np.inf)
            target[ids] = source[ids]
        else:
            target[:] = source
            target[ids] = -np.inf

    def _table(self, like: Tensor) -> Tensor:
        """[256, 8]: what eight bits add to eight cells."""
        table = self._tables.get(like.device)
        if table is None:
            bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1, bitorder="little")
            table = torch.where(torch.from_numpy(bits).bool(), 0.0, -torch.inf).to(like.device, like.dtype)
            self._tables[like.device] = table
        return table


def _masked_together(logits: Tensor, masks: Mapping[int, Mask]) -> Tensor:
    lines = np.concatenate(list(masks.values())).view(np.uint8).reshape(len(masks), -1)
    if len(masks) < len(logits):
        every = np.full((len(logits), lines.shape[1]), 255, dtype=np.uint8)
        every[list(masks)] = lines
        lines = every
    flags = np.unpackbits(lines, axis=1, bitorder="little", count=logits.shape[1]).view(np.bool_)
    found = torch.where(torch.from_numpy(flags), logits, -torch.inf)
    return found if padded_width(logits.shape[1]) == logits.shape[1] else padded(found)


def _listed(bits: Mask, width: int) -> tuple[bool, NDArray[np.int64]] | None:
    """The ids that a mask allows, or those that it does not, whichever are few; None if neither are."""
    flags = np.unpackbits(bits.view(np.uint8), bitorder="little", count=width).view(np.bool_)
    num_allowed, few = int(np.count_nonzero(flags)), width // _MAX_IDS
    if num_allowed <= few:
        return True, np.flatnonzero(flags)
    if width - num_allowed <= few:
        return False, np.flatnonzero(~flags)
    return None
