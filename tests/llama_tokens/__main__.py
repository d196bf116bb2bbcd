"""The tokens of a GGUF file's vocabulary, held against llama.cpp's on the very same file.

    LLAMA_PYTHON=python-with-llama-cpp-python python -m llama_tokens [--strings 10000] [FILE.gguf ...]

Without files one is made of every way of splitting that is read, and of pieces with scores and of unigrams. Special
tokens in texts are parsed, then not parsed. Where tokens differ, the reason must be one in which llama.cpp is known to
differ from the model's own tokenizer, and is proven for each text; any other difference is printed and fails. Beside a
file `FILE.gguf.inp` and `.out` may hold texts and what the model's own tokenizer gave.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unicodedata import category

from tokenizers import Tokenizer

from llama_tokens.strings import CODE, PROSE, strings
from quire_engine.gguf import read_gguf
from quire_server.checkpoint.gguf_tokenizer import SPLITTING, GgufVocabulary
from support.gguf_vocabularies import byte_level, pieces, unigrams, write_vocabulary
from support.llama_splits import SPLITS

_THEIRS = Path(__file__).with_name("theirs.py")
_PARTED = "__ggml_vocab_test__"  # between recorded texts
_MOST_SPECIAL, _SHOWN = 40, 5
_CONTROL, _USER_DEFINED, _UNKNOWN = 3, 4, 2
# Texts that llama.cpp takes for control tokens whatever type the file gives them, and those that it takes for ordinary
# tokens of the user's.
_THEIR_CONTROLS = re.compile(
    r"<\|(eot_id|im_end|end|return|call|flush|calls|endoftext|eom_id|end_of_text|tool_response)\|?>"
    r"|<(end_of_turn|EOT|end_of_utterance|eos|PRE|SUF|MID|PAD|REP|REPO|reponame)>|</s>|_<EOT>|\[(EOT|EOS|PAD)\]"
    r"|<(\|?)fim[-_].*>|<\uff5c(fim\u2581(begin|hole|end)|end\u2581of\u2581sentence)\uff5c>"
    r"|\u2581<(PRE|SUF|MID)>|<\|(code_)?(prefix|suffix|middle)\|>|<\|(repo_name|file_sep)\|>|<turn\|>|\[e~\["
)
_THEIR_SPLITS = {
    **{pre: SPLITS[pre] for pre in ("tekken", "gpt-4o")},
    "deepseek-coder": [
        f"{pattern[:-2]}&&[^\\s]]+" if pattern.startswith("[\u4e00") else pattern
        for pattern in SPLITS["deepseek-coder"]
    ],
}
_THEIR_USERS = frozenset(["<|end|>", "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"])

Ids = list[int]


class Vocabulary:
    """A file, read by us and by llama.cpp."""

    def __init__(self, file: Path, python: str) -> None:
        self.file, self._python = file, python
        metadata = read_gguf(file).metadata
        found = GgufVocabulary(metadata)
        self.tokens, self.kind = found.tokens, found.model
        self.types = metadata.integers("tokenizer.ggml.token_type") or [1] * len(found.tokens)
        self.state: dict[str, Any] = found.tokenizer()
        self.pre = metadata.text("tokenizer.ggml.pre", "") if self.kind == "gpt2" else ""
        self.tokenizer = Tokenizer.from_str(json.dumps(self.state))

    def ours(self, texts: Sequence[str], *, parsed: bool) -> list[Ids]:
        self.tokenizer.encode_special_tokens = not parsed
        return [found.ids for found in self.tokenizer.encode_batch(list(texts))]

    def theirs(self, texts: Sequence[str], *, parsed: bool) -> list[Ids]:
        asked = json.dumps([[text, True, parsed] for text in texts])
        command = [self._python, str(_THEIRS), str(self.file)]
        done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr.strip() or f"{self.file}: llama.cpp ended with {done.returncode}")
        answers: list[Ids] = json.loads(done.stdout)
        return answers

    def special(self) -> list[str]:
        """The texts of its special tokens, some of them where there are many."""
        found = [
            token for token, kind in zip(self.tokens, self.types, strict=True) if kind in {_CONTROL, _USER_DEFINED}
        ]
        return random.Random(1).sample(found, min(_MOST_SPECIAL, len(found)))

    def contested(self, *, parsed: bool) -> list[str]:
        """Texts of tokens whose type llama.cpp changes by their text.

        Of unigrams also U+2581, which transformers takes for a space at the beginning of a word and llama.cpp does not.
        Where special tokens are text, also those that transformers' unigrams may be and llama.cpp's may not.
        """
        found = {
            token
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind != _CONTROL and _THEIR_CONTROLS.fullmatch(token)
        }
        if self.kind == "t5":
            found.add("\u2581")
        if not parsed:
            kinds = {_CONTROL, _UNKNOWN}
            special = {token for token, kind in zip(self.tokens, self.types, strict=True) if kind in kinds}
            found |= special if self.kind == "t5" else special & _THEIR_USERS
            # The library finds the longest token first and then takes it for text, with the beginning of another one.
            found |= {token for token in special if token != token.rstrip()}
        return sorted(found)

    def is_plain(self, text: str) -> bool:
        """False of texts with characters of several code points, for tables that replace characters.

        Such a character is looked up as a whole by transformers and from its first code point on by llama.cpp.
        """
        has_table = (self.state["normalizer"] or {}).get("type") == "Precompiled"
        return not has_table or not any(category(each)[0] == "M" or "\u1100" <= each <= "\u11ff" for each in text)

    def reasons(self) -> Iterator[tuple[str, Callable[[str], str]]]:
        """Why llama.cpp may differ from the model's own tokenizer, and the text for which it must not."""
        normalizer = self.tokenizer.normalizer
        kind = (self.state["normalizer"] or {}).get("type")
        if kind in {"NFC", "Precompiled"}:
            yield f"Unicode is composed first, by {kind}", normalizer.normalize_str
        for side, pattern in (("rstrip", r"({})\s+"), ("lstrip", r"\s+({})")):
            stripping = [re.escape(token["content"]) for token in self.state["added_tokens"] if token[side]]
            if stripping:
                found = re.compile(pattern.format("|".join(stripping)))
                yield "white space beyond ASCII goes with a token", partial(found.sub, r"\1")

    def by_their_split(self) -> Tokenizer | None:
        """Our tokenizer with llama.cpp's expressions, where these are not the model's: in words of both cases they know
        ASCII alone, and no range of characters has white space."""
        family = {"llama4": "gpt-4o", "kanana2": "gpt-4o"}.get(self.pre, self.pre)
        if family not in _THEIR_SPLITS:
            return None
        steps = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in _THEIR_SPLITS[family]
        ]
        level = self.state["pre_tokenizer"]["pretokenizers"][-1]
        return Tokenizer.from_str(
            json.dumps(self.state | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, level]}})
        )

    def named(self, ids: Ids) -> list[str]:
        return [self.tokens[each] for each in ids]


def compare(vocabulary: Vocabulary, texts: Sequence[str], *, parsed: bool) -> tuple[str, int]:
    """A line of the report, and the number of differences without a reason, which are printed."""
    contested = vocabulary.contested(parsed=parsed)
    asked = [text for text in texts if not any(token in text for token in contested) and vocabulary.is_plain(text)]
    ours, theirs = vocabulary.ours(asked, parsed=parsed), vocabulary.theirs(asked, parsed=parsed)
    left = [place for place in range(len(asked)) if ours[place] != theirs[place]]
    parts: Counter[str] = Counter({"equal": len(asked) - len(left)})
    for reason, change in vocabulary.reasons():
        again = vocabulary.theirs([change(asked[place]) for place in left], parsed=parsed)
        kept = [place for place, ids in zip(left, again, strict=True) if ours[place] != ids]
        parts[reason] = len(left) - len(kept)
        left = kept
    if left and (other := vocabulary.by_their_split()) is not None:
        other.encode_special_tokens = not parsed
        again = [found.ids for found in other.encode_batch([asked[place] for place in left])]
        kept = [place for place, ids in zip(left, again, strict=True) if theirs[place] != ids]
        parts["by an expression that is not the model's"] = len(left) - len(kept)
        left = kept
    for place in sorted(left, key=lambda place: len(asked[place]))[:_SHOWN]:
        print(f"  {asked[place]!a}")
        print(f"    llama.cpp {vocabulary.named(theirs[place])}\n    ours      {vocabulary.named(ours[place])}")
    parts["left out for what is in them"] = len(texts) - len(asked)
    parts["WITHOUT A REASON"] = len(left)
    told = ", ".join(f"{count} {part}" for part, count in parts.items() if count)
    special = "special tokens parsed" if parsed else "special tokens as text"
    return f"{vocabulary.file.name} ({vocabulary.pre or vocabulary.kind}), {special}: {told}", len(left)


def recorded(vocabulary: Vocabulary) -> tuple[str, int] | None:
    """What the model's own tokenizer gave, where that lies beside the file."""
    beside = [vocabulary.file.with_name(vocabulary.file.name + end) for end in (".inp", ".out")]
    if not all(path.is_file() for path in beside):
        return None
    texts = beside[0].read_text(encoding="utf-8").split(f"\n{_PARTED}\n")
    wanted = [[int(each) for each in line.split()] for line in beside[1].read_text().split("\n")]
    vocabulary.tokenizer.encode_special_tokens = False
    wrong = 0
    for text, ids in zip(texts, wanted, strict=False):
        found = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
        if found != ids:
            wrong += 1
            print(
                f"  {ascii(text)[:300]}\n    recorded {vocabulary.named(ids)}\n    ours     {vocabulary.named(found)}"
            )
    return f"{vocabulary.file.name}, recorded: {len(wanted)} texts, {wrong} differ", wrong


def made(folder: Path) -> list[Path]:
    """A file of each way to make tokens that is read."""
    lines = [line for text in strings(6000, seed=7) for line in text.splitlines() if line]
    level, spm = byte_level(lines, 4000), pieces(lines, 3000)
    files = [
        write_vocabulary(folder / f"made-{pre}.gguf", level | {"tokenizer.ggml.pre": pre}) for pre in sorted(SPLITTING)
    ]
    files.append(write_vocabulary(folder / "made-pieces.gguf", spm))
    bare = spm | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_eos_token": True}
    files.append(write_vocabulary(folder / "made-pieces-bare.gguf", bare))
    grams = unigrams([*PROSE, *CODE] * 20, 2000)  # which have a token for each character
    files.append(write_vocabulary(folder / "made-unigrams.gguf", grams))
    return files


def main() -> int:
    parser = argparse.ArgumentParser(prog="llama_tokens", description="Tokens of GGUF files, held against llama.cpp's.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.gguf")
    parser.add_argument("--strings", type=int, default=10_000, help="texts for each file [10000]")
    given = parser.parse_args()
    python, wrong, started = os.environ.get("LLAMA_PYTHON", sys.executable), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for file in given.files or made(Path(name)):
            vocabulary = Vocabulary(file, python)
            texts = strings(given.strings, specials=vocabulary.special(), seed=3)
            lines = [compare(vocabulary, texts, parsed=True), compare(vocabulary, texts, parsed=False)]
            lines += [line] if (line := recorded(vocabulary)) is not None else []
            for told, differ in lines:
                print(told, flush=True)
                wrong += differ
    print(f"{wrong} differences without a reason, {time.monotonic() - started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
