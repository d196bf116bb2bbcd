"""The grammar process: tries a grammar with the model's tokenizer before the engine gets it; JSON lines in and out.

Promises: it dies when a grammar takes too long or too much memory, or when its parent is gone; an accepted grammar was
compiled and followed for some tokens within the engine's limits. `grammar_check` starts it by file name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import resource
import signal
import sys
from collections.abc import Mapping

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from quire_engine.contract.grammar_vocabulary import GrammarVocabulary, shown
from quire_engine.plain_files import read_plain_text

_TRIED_TOKENS = 48  # complex grammars fail within the first tokens
_TRIES = 2
_NICENESS = 10  # so that running streams come first
_SETUP_SECONDS = 30  # to read a large vocabulary on a busy machine
_MAX_MESSAGE_CHARS = 400

_IS_LARK = re.compile(r"^\s*(%llguidance\b|\??start\s*:)", re.MULTILINE)
_RULE = re.compile(r"[ \t]*[A-Za-z_][\w-]*\s*::=")
_EBNF_PART = re.compile(
    r"""
    ("(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' | \[(?:[^\]\\\n]|\\.)*\])  # a text or a class of characters
    | (\#[^\n]*)                                                          # a comment
    | (\s*\n\s*)                                                          # the end of a line
    | [^"'\[\#\s]+ | [ \t\r]+ | .
    """,
    re.VERBOSE,
)


class _Refused(Exception):
    """The reason why a grammar is refused."""


class GrammarTrial:
    """Tries grammars with the model's tokenizer."""

    def __init__(self, tokenizer: str, eos_token_ids: list[int], limits: Mapping[str, int]) -> None:
        # The text, not the path: the library would take a missing path for a name to download.
        self._vocabulary = GrammarVocabulary(read_plain_text(tokenizer))
        ends = eos_token_ids or self._vocabulary.end_ids
        self._tokenizer = LLTokenizer(self._vocabulary.text, eos_token=ends or None)
        self._limits = LLParserLimits(**limits)  # type: ignore[arg-type]

    def accept(self, rules: str, client: str) -> str:
        """The grammar for the engine: `rules` in Lark, with `client`'s grammar in place of @client.

        Raises _Refused.
        """
        grammar = rules
        if client:
            client = self._vocabulary.by_id(_lark(client))
            named = [{"lark_grammar": rules}, {"name": "client", "lark_grammar": client}]
            grammar = client if rules == "start: @client" else json.dumps({"grammars": named})
        for seed in range(_TRIES):
            self._follow(grammar, random.Random(seed))
        return grammar

    def _follow(self, grammar: str, choice: random.Random) -> None:
        """Follow the grammar with random allowed tokens."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        _check(matcher)
        for position in range(_TRIED_TOKENS):
            mask = matcher.compute_bitmask()
            if matcher.is_error() and "NoExtension" in matcher.get_error():
                raise _Refused("no text fulfils it" if position == 0 else "a text that it allows to begin has no end")
            _check(matcher)
            if matcher.is_stopped():
                return
            token_id = _allowed(mask, choice)
            if token_id is None:
                raise _Refused("no token of this model's vocabulary can begin or continue it")
            matcher.consume_token(token_id)
            _check(matcher)


def _allowed(mask: bytes, choice: random.Random) -> int | None:
    """A random id whose bit is set."""
    at = choice.randrange(len(mask))
    for i in itertools.chain(range(at, len(mask)), range(at)):
        if mask[i]:
            return i * 8 + choice.choice([bit for bit in range(8) if mask[i] >> bit & 1])
    return None


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise _Refused(_reason(matcher.get_error()))


def _reason(message: str) -> str:
    """The library's message without its excerpts, which quote our rules around the client's text."""
    lines = [line for line in message.splitlines() if not re.match(r"\s*(\d+ \||\^)", line) and line.strip()]
    text = shown(" ".join(" ".join(lines).replace("<non-verbose/>", "").split()))
    text = re.sub(r"^at \d+\(\d+\): ", "", text).removeprefix("failed to compile JSON schema: ")
    if text.startswith("oneOf constraints"):
        text = "'oneOf' is not supported where no type, constant or required property tells its schemas apart"
    if text.startswith(("lexer error: too many", "Parser Error: Current row")):
        text = f"it is too complex ({text})"
    return text[:_MAX_MESSAGE_CHARS]


def _lark(text: str) -> str:
    """A client's grammar in Lark: as it is, or converted from EBNF with `::=`."""
    if text.lstrip().startswith("{"):
        raise _Refused("it is neither Lark, with a rule 'start:', nor EBNF, with a rule 'root ::='")
    if _IS_LARK.search(text):
        return text
    if "::=" not in text:
        raise _Refused("it has neither a rule 'start:', as Lark has, nor a rule 'root ::=', as EBNF has")
    try:
        return gbnf_to_lark(_one_rule_a_line(text))
    except RecursionError:
        raise _Refused("it is nested too deeply") from None
    except GbnfToLarkError as error:
        raise _Refused(str(error)) from None
    except Exception as error:  # the converter raises bare ones
        raise _Refused(str(error)) from None


def _one_rule_a_line(text: str) -> str:
    """EBNF without comments, each rule on one line: for the converter a line break ends a rule."""
    parts = []
    for match in _EBNF_PART.finditer(text):
        literal, comment, line_end = match.groups()
        if literal is not None and literal.startswith("'"):
            raise _Refused(f"texts stand in double quotes, not {literal[:32]}")
        if line_end is not None:
            parts.append("\n" if _RULE.match(text, match.end()) else " ")
        elif comment is None:
            parts.append(match[0])
    return "".join(parts).strip() + "\n"


def _limit(memory_bytes: int) -> None:
    """The kernel enforces all limits: no grammar can outlive them."""
    with contextlib.suppress(ValueError, OSError):  # not every system can bound address space
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # running out of memory aborts
    os.nice(_NICENESS)
    for number in (signal.SIGALRM, signal.SIGPROF):  # handlers and masks are inherited from the parent
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGPROF})


def _time(seconds: float) -> None:
    """Limit CPU time to half of `seconds` and elapsed time to `seconds`, for busy machines. 0: no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds / 2)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def main(seconds: float, memory_bytes: int) -> None:
    """The first line has the tokenizer's file, its end-of-text ids and the limits; each further line is a grammar."""
    _limit(memory_bytes)
    trial: GrammarTrial | None = None
    for line in sys.stdin.buffer:
        _time(seconds if trial is not None else _SETUP_SECONDS)
        reply: dict[str, object]
        try:
            asked = json.loads(line)
            if trial is None:
                trial = GrammarTrial(asked["tokenizer"], asked["eos_token_ids"], asked["limits"])
                reply = {}
            else:
                reply = {"grammar": trial.accept(asked["rules"], asked["client"])}
        except _Refused as refusal:
            reply = {"error": str(refusal)}
        except BaseException as error:  # a panic of the library is no Exception
            reply = {"error": _reason(str(error)) or type(error).__name__}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
        _time(0)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
