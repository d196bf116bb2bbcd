"""The grammars that requests ask for, compiled once each: in a thread of their own, or where they are needed.

Owns the vocabulary, a bounded number of compiled grammars and the thread. Promises: a grammar that cannot be followed
is an error, never no grammar. Must not know: rows, sequences, logits.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quire_engine.execution.constrained.vocabulary import GrammarError, load_vocabulary
from quire_engine.grammar_limits import GRAMMAR_LIMITS, MAX_COMPILED

_LONGEST_ERROR = 300  # characters


class Grammars:
    """Compiled grammars by their text. The vocabulary is read for the first of them, or when `warm_up` is called."""

    def __init__(self, folder: Path, vocab_size: int, *, max_compiled: int = MAX_COMPILED) -> None:
        """`folder` has the tokenizer; `vocab_size` is the width of the logits."""
        self._folder, self._vocab_size, self._max_compiled = folder, vocab_size, max_compiled
        self._vocabulary: LLTokenizer | GrammarError | None = None
        self._end_ids: tuple[int, ...] = ()
        self._limits = LLParserLimits(**GRAMMAR_LIMITS)  # type: ignore[arg-type]
        self._changed = Condition()  # guards what follows
        self._compiled: OrderedDict[str, LLMatcher | GrammarError] = OrderedDict()  # least recently used first
        self._awaited: set[str] = set()  # in the queue, or being compiled
        self._queue: SimpleQueue[str] | None = None  # the thread's, once there is one

    def prepare(self, text: str) -> bool:
        """Whether the grammar is compiled, or known not to be one; if not it is begun, in the thread."""
        with self._changed:
            if text in self._compiled:
                self._compiled.move_to_end(text)
                return True
            if text in self._awaited:
                return False
            if self._queue is None:
                self._queue = SimpleQueue()
                # A daemon: when the engine's process ends it ends in the middle of whatever it compiles.
                Thread(target=self._work, args=(self._queue,), name="grammars", daemon=True).start()
            self._awaited.add(text)
            self._queue.put(text)
            return False

    def wait(self, seconds: float) -> None:
        """Until something has been compiled, or so long."""
        with self._changed:
            if self._awaited:
                self._changed.wait(seconds)

    def error(self, text: str) -> str | None:
        """Why a grammar that was prepared is none."""
        with self._changed:
            found = self._compiled.get(text)
        return str(found) if isinstance(found, GrammarError) else None

    def matcher(self, text: str) -> LLMatcher:
        """A new one at the beginning of an output. Compiles what nobody has prepared. Raises GrammarError."""
        with self._changed:
            found = self._compiled.get(text)
        if found is None:
            found = self._compile(text)
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))
        return found.deep_copy()

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The ids that the vocabulary says end a text; none while it has not been read."""
        return self._end_ids

    def warm_up(self) -> None:
        """Read the vocabulary now, when nobody waits: it takes a second where there are 150,000 tokens."""
        if self._vocabulary is None:
            try:
                self._vocabulary = load_vocabulary(self._folder, self._vocab_size)
                self._end_ids = tuple(self._vocabulary.eos_tokens)
            except GrammarError as error:
                self._vocabulary = error

    def _work(self, queue: SimpleQueue[str]) -> None:
        while True:
            self._compile(queue.get())

    def _compile(self, text: str) -> LLMatcher | GrammarError:
        found: LLMatcher | GrammarError
        self.warm_up()
        if isinstance(self._vocabulary, LLTokenizer):
            try:
                found = LLMatcher(self._vocabulary, text, log_level=0, limits=self._limits)
                if found.is_error():
                    found = GrammarError(f"the grammar is not accepted: {first_line(found.get_error())}")
            except BaseException as error:  # a panic of the library is no Exception; whoever waits must be told
                found = GrammarError(f"the grammar cannot be compiled ({type(error).__name__})")
        else:
            found = self._vocabulary or GrammarError("the vocabulary is not there")
        with self._changed:
            self._compiled[text] = found
            self._compiled.move_to_end(text)
            while len(self._compiled) > self._max_compiled:
                self._compiled.popitem(last=False)
            self._awaited.discard(text)
            self._changed.notify_all()
        return found


def first_line(text: str) -> str:
    """What of the library's message a client is shown."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason was given")
    return line[:_LONGEST_ERROR]
