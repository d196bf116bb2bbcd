"""The tokenizer that a GGUF file describes, as the tokenizer.json of the model that it was converted from.

Promises: the vocabulary, merges and special tokens are the file's; a way of splitting text that is not known is refused
by name, since guessing it would change tokens. Must not know: torch.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_engine.gguf import Metadata, shown

_KEY = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
DEFAULT_TEMPLATE = "default"  # the name of a template that no other name is for, as in transformers
_ADVICE = "put the model's tokenizer.json beside the file, or name its folder with --tokenizer"
_NONE = (1 << 32) - 1  # an id that stands for none
_MOST_WORK = 1 << 30  # characters compared to find the merges of a vocabulary
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
_SPACE = "\u2581"
# Texts of tokens that end a turn or a text, in files that name only one of them. Whatever type a file gives them, they
# are control tokens: converters and fine-tuning tools store them as NORMAL or USER_DEFINED by mistake.
_ENDS = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<turn|>",
        "<|tool_response>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<eos>",
        "<end_of_utterance>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ]
)
# Texts that are an end only as a control token: elsewhere it is HTML, which Gemma's vocabularies have as tokens.
_ENDS_IF_CONTROL = frozenset(["</s>"])
# Texts of tokens of code models before another repository or file, where the text in hand is over.
_ENDS_OF_FILES = frozenset(
    [
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    ]
)
# Texts of tokens that begin a turn or stand between its parts; files that store the ends as NORMAL store these so too.
_MARKS = frozenset(
    [
        *("<start_of_turn>", "<|turn>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    ]
)
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Ids of the models whose files need not name them: sentencepiece's BPE, and its unigrams.
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"bos_token": 1, "eos_token": 2, "unk_token": 0},
    "t5": {"eos_token": 1, "unk_token": 2, "pad_token": 0},
}
# Tokens behind which Phi 3 does not drop white space, as it does behind its others.
_KEEPS_SPACE = frozenset(["<unk>", "<s>", "<|endoftext|>"])

_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_CASED_UPPER = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_REST_OF_CASED = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """How text is cut into words before their bytes are merged, as the models' own tokenizer.json say."""

    patterns: tuple[str, ...] = ()  # one after another; none: that of GPT-2
    digits_alone: bool = False
    composed: bool = False  # Unicode is brought into form C first
    whole_words: bool = False  # a word that is a token is not made of merges
    adds_bos: bool = False


_OF_GPT2 = _Split()
_OF_CODE = _Split(digits_alone=True)
_OF_LLAMA3 = _Split(patterns=(rf"{_ENGLISH}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",), whole_words=True, adds_bos=True)
_OF_GPT4 = _Split(patterns=_OF_LLAMA3.patterns)
_OF_GLM = _Split(patterns=_OF_LLAMA3.patterns, whole_words=True)
_OF_DISTILLED_QWEN = _Split(patterns=(rf"{_ENGLISH}|{_WORD}|\p{{N}}|{_REST}",))
_OF_QWEN = _Split(patterns=_OF_DISTILLED_QWEN.patterns, composed=True)
_OF_QWEN35 = _Split(
    patterns=(
        rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    composed=True,
)
_OF_TEKKEN = _Split(patterns=(rf"{_CASED}|{_CASED_UPPER}|\p{{N}}|{_REST_OF_CASED}",), whole_words=True, adds_bos=True)
_OF_GPT4O = _Split(patterns=(rf"{_CASED}{_ENGLISH}?|{_CASED_UPPER}{_ENGLISH}?|\p{{N}}{{1,3}}|{_REST_OF_CASED}",))
_OF_SEED = _Split(patterns=(rf"{_ENGLISH}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",))
_OF_DEEPSEEK_CODER = _Split(
    patterns=(
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    )
)
_OF_DEEPSEEK3 = _Split(
    patterns=(
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
# The values of tokenizer.ggml.pre.
SPLITTING = {
    **dict.fromkeys(("llama-bpe", "llama-v3", "llama3", "falcon3", "pixtral", "midm-2.0"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _OF_GPT4),
    "glm4": _OF_GLM,
    **dict.fromkeys(("qwen2", "megrez"), _OF_QWEN),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2"), _OF_DISTILLED_QWEN),
    "qwen35": _OF_QWEN35,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4", "mpt", "mellum", "trillion"), _OF_GPT2),
    **dict.fromkeys(("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"), _OF_CODE),
    "command-r": _Split(digits_alone=True, composed=True),
    "tekken": _OF_TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _OF_GPT4O),
    "seed-coder": _OF_SEED,
    "deepseek-coder": _OF_DEEPSEEK_CODER,
    "deepseek-v3": _OF_DEEPSEEK3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """The ids and texts that a file names, and what it says of chats."""

    texts: Mapping[str, str]  # by the names of tokenizer_config.json
    end_ids: tuple[int, ...]  # that end a text
    bos_id: int | None
    chat_templates: Mapping[str, str]  # by their names; the usual one is DEFAULT_TEMPLATE

    def config(self, max_length: object) -> dict[str, object]:
        """The file tokenizer_config.json."""
        templates: object = [{"name": name, "template": text} for name, text in self.chat_templates.items()]
        if self.chat_templates.keys() == {DEFAULT_TEMPLATE}:
            templates = self.chat_templates[DEFAULT_TEMPLATE]
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            **self.texts,
            **({"chat_template": templates} if templates else {}),
        }


class GgufVocabulary:
    """The tokens of a file. Raises ModelLoadError for what does not fit together."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        tokens = metadata.texts(_KEY + "tokens")
        self.model = metadata.text(_KEY + "model", "none")
        if not tokens:
            raise self._error("tokens", "there are no tokens")
        self.tokens = [token or f"[EMPTY_{place}]" for place, token in enumerate(tokens)]
        self._ids = {token: place for place, token in enumerate(self.tokens)}
        if len(self._ids) != len(self.tokens):
            twice = next(token for place, token in enumerate(self.tokens) if self._ids[token] != place)
            raise self._error("tokens", f"{shown(twice)} is there twice")
        types = metadata.integers(_KEY + "token_type")
        if types is not None and len(types) != len(tokens):
            raise self._error("token_type", f"{len(types)} values for {len(tokens)} tokens")
        given = types or [_NORMAL] * len(tokens)
        self._types = list(map(_own_type, self.tokens, given))
        self.corrected = [
            token for token, kind, own in zip(self.tokens, given, self._types, strict=True) if kind != own
        ]  # tokens that the file gives a wrong type

    def special(self) -> SpecialTokens:
        """The special tokens, by the keys that name them and by their texts."""
        ids = {name: self._special_id(name) for name in _SPECIAL}
        return SpecialTokens(
            texts={name: self.tokens[place] for name, place in ids.items() if place is not None},
            end_ids=self.end_ids(),
            bos_id=ids["bos_token"],
            chat_templates=self._chat_templates(),
        )

    def _chat_templates(self) -> dict[str, str]:
        """The templates by their names: the usual one, and those whose keys end with a name."""
        found = {key.removeprefix(_TEMPLATE + "."): key for key in sorted(self._metadata.keys())}
        keys = {name: key for name, key in found.items() if name != key}
        if self._metadata.has(_TEMPLATE):
            keys = {DEFAULT_TEMPLATE: _TEMPLATE, **keys}
        return {name: self._metadata.text(key) for name, key in keys.items()}

    def end_ids(self) -> tuple[int, ...]:
        """The ids that end a text: those that keys name, then those whose texts say so."""
        named = [self._special_id("eos_token"), self._id("eot_token_id"), self._id("eom_token_id")]
        told = [place for place, token in enumerate(self.tokens) if self._is_end(token, self._types[place])]
        return tuple(dict.fromkeys(each for each in [*named, *told] if each is not None))

    def tokenizer(self) -> dict[str, Any]:
        """The file tokenizer.json."""
        if self.model == "gpt2":
            return self._byte_level()
        if self.model == "llama":
            return self._sentencepiece()
        if self.model == "t5":
            return self._unigrams()
        raise self._error("model", f"{shown(self.model)} is not read; {_ADVICE}")

    def _error(self, key: str, reason: str) -> Exception:
        return self._metadata.error(f"{_KEY}{key}: {reason}")

    def _is_end(self, token: str, kind: int) -> bool:
        """Whether a token's text says that it ends a turn, in this vocabulary."""
        if token == "<|end|>":  # of a channel, in models that answer in several; another token ends them all
            return "<|return|>" not in self._ids and not {"<|calls|>", "<|flush|>"} <= self._ids.keys()
        if token in _ENDS_OF_FILES:
            return kind in {_CONTROL, _USER_DEFINED}
        return token in _ENDS or (token in _ENDS_IF_CONTROL and kind == _CONTROL)

    def _special_id(self, name: str) -> int | None:
        return self._id(_SPECIAL[name], _DEFAULTS.get(self.model, {}).get(name))

    def _id(self, key: str, default: int | None = None) -> int | None:
        value = self._metadata.raw(_KEY + key)
        if value is None and default is not None and default < len(self.tokens):
            value = default
        if value is None or value == _NONE:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self._error(key, f"{shown(value)} is none of {len(self.tokens)} tokens")
        return value

    def _added(self) -> list[dict[str, Any]]:
        """Tokens that are found in a text before it is cut into words."""
        kinds = {_CONTROL: True, _UNKNOWN: True, _USER_DEFINED: False}
        # Files do not say which tokens take the white space beside them: those of Phi 3, and the mask of XLM-RoBERTa.
        is_phi3 = self.model == "llama" and self._metadata.text("general.architecture", "") == "phi3"
        return [
            {
                "id": place,
                "content": self.tokens[place],
                "single_word": False,
                "lstrip": self.model == "t5" and self.tokens[place] == "<mask>",
                "rstrip": is_phi3 and self.tokens[place] not in _KEEPS_SPACE,
                "normalized": False,
                "special": kinds[kind],
            }
            for place, kind in enumerate(self._types)
            if kind in kinds
        ]

    def _byte_level(self) -> dict[str, Any]:
        pre = self._metadata.text(_KEY + "pre", "default")
        split = SPLITTING.get(pre)
        if split is None:
            raise self._error("pre", f"the way of splitting text {shown(pre)} is not known; {_ADVICE}")
        steps: list[dict[str, Any]] = []
        if split.digits_alone:
            steps.append({"type": "Digits", "individual_digits": True})
        steps += [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in split.patterns
        ]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        steps.append({**level, "use_regex": not split.patterns})
        return {
            **self._frame(adds_bos=split.adds_bos),
            "normalizer": {"type": "NFC"} if split.composed else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": {**level, "use_regex": True},
            "model": self._bpe(self._merges(), ignore_merges=split.whole_words),
        }

    def _merges(self) -> list[list[str]]:
        found = []
        for place, merge in enumerate(self._metadata.texts(_KEY + "merges")):
            cut = merge.find(" ", 1)
            left, right = merge[:cut], merge[cut + 1 :]
            if cut < 0 or not {left, right, left + right} <= self._ids.keys():
                raise self._error("merges", f"number {place}, {shown(merge)}, is not made of tokens")
            found.append([left, right])
        if not found:
            raise self._error("merges", f"there are none; {_ADVICE}")
        return found

    def _sentencepiece(self) -> dict[str, Any]:
        prefix = self._metadata.boolean(_KEY + "add_space_prefix", True)
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        normalizer: dict[str, Any] = replace
        decoders: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix:
            normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replace]}
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._special_id("unk_token")
        return {
            **self._frame(adds_bos=True),
            "normalizer": normalizer,
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._bpe(
                self._merges_of_scores(),
                unk_token=None if unknown is None else self.tokens[unknown],
                byte_fallback=_BYTE in self._types,
                fuse_unk=True,
            ),
        }

    def _merges_of_scores(self) -> list[list[str]]:
        """Each way to make a token of two, the tokens with the highest scores first: what sentencepiece's BPE does."""
        scores = self._scores()
        pieces = [place for place, kind in enumerate(self._types) if kind not in {_UNKNOWN, _CONTROL, _BYTE}]
        if sum(len(self.tokens[place]) ** 2 for place in pieces) > _MOST_WORK:
            raise self._error("tokens", "they are too long for their merges to be found")
        known = {self.tokens[place]: place for place in pieces}
        merges: list[list[str]] = []
        for place in sorted(pieces, key=lambda place: -scores[place]):
            token = self.tokens[place]
            cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
            pairs = [(known[left], known[right]) for left, right in cuts if left in known and right in known]
            merges += [[self.tokens[left], self.tokens[right]] for left, right in sorted(pairs)]
        return merges

    def _scores(self) -> Sequence[float]:
        scores = self._metadata.floats(_KEY + "scores")
        if scores is None or len(scores) != len(self.tokens):
            raise self._error("scores", f"{0 if scores is None else len(scores)} values for {len(self.tokens)} tokens")
        return scores

    def _unigrams(self) -> dict[str, Any]:
        """Return the JSON of a tokenizer that cuts texts at the best sum of scores, like sentencepiece's unigrams."""
        if not self._metadata.boolean(_KEY + "remove_extra_whitespaces", False):
            raise self._error("remove_extra_whitespaces", f"unigrams that keep all spaces are not read; {_ADVICE}")
        unknown = self._special_id("unk_token")
        if unknown is None:
            raise self._error("unknown_token_id", f"there is none, which unigrams need; {_ADVICE}")
        words = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
        space = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": "always", "split": False}
        return {
            **self._frame(adds_bos=False, adds_eos=True),
            "normalizer": self._charsmap(),
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, space]},
            "decoder": space,
            "model": {
                "type": "Unigram",
                "unk_id": unknown,
                "vocab": list(map(list, zip(self.tokens, self._scores(), strict=True))),
                "byte_fallback": False,
            },
        }

    def _charsmap(self) -> dict[str, Any] | None:
        """The normalizer: the replacements of characters that sentencepiece makes before it cuts a text."""
        values = self._metadata.integers(_KEY + "precompiled_charsmap")
        if values is None:
            return None
        data = bytes(value & 0xFF for value in values)
        return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}

    def _bpe(self, merges: list[list[str]], **how: object) -> dict[str, Any]:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **how,
            "vocab": self._ids,
            "merges": merges,
        }

    def _frame(self, *, adds_bos: bool, adds_eos: bool = False) -> dict[str, Any]:
        """The parts that all styles share: the added tokens, and those that are put around a text."""
        ids = {name: self._special_id(name) for name in ("bos_token", "eos_token")}
        bos = ids["bos_token"] if self._metadata.boolean(_KEY + "add_bos_token", adds_bos) else None
        eos = ids["eos_token"] if self._metadata.boolean(_KEY + "add_eos_token", adds_eos) else None
        processor = None
        if bos is not None or eos is not None:
            processor = {
                "type": "TemplateProcessing",
                "single": self._around("A", bos, eos),
                "pair": [*self._around("A", bos, eos), *self._around("B", bos, eos)],
                "special_tokens": {
                    self.tokens[each]: {"id": self.tokens[each], "ids": [each], "tokens": [self.tokens[each]]}
                    for each in (bos, eos)
                    if each is not None
                },
            }
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            "post_processor": processor,
        }

    def _around(self, text: str, bos: int | None, eos: int | None) -> list[dict[str, Any]]:
        kind = "AB".index(text)
        before, after = (
            [] if each is None else [{"SpecialToken": {"id": self.tokens[each], "type_id": kind}}]
            for each in (bos, eos)
        )
        return [*before, {"Sequence": {"id": text, "type_id": kind}}, *after]


def _own_type(token: str, kind: int) -> int:
    """The type of a token; a wrong one of ends and marks is corrected, since their texts leave no doubt."""
    if token in _ENDS:
        return _CONTROL
    return _CONTROL if token in _MARKS and kind == _NORMAL else kind
