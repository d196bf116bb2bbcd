"""The model's tokenizer: text to ids, ids to text, and the bytes of each token."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from quire_engine.contract.errors import ModelLoadError
from quire_engine.gguf import typed_name
from quire_engine.plain_files import read_plain, read_plain_text
from quire_server.errors import BadRequest

DEFAULT, TOOL_USE = "default", "tool_use"  # names of chat templates: the usual one, and that of requests with tools
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Surface:
    """How vocabulary entries spell bytes. `space` and `byte_fallback` are for the sentencepiece style."""

    style: str  # "byte_level", "sentencepiece" or "other"
    space: str = ""  # the character that stands for a space
    byte_fallback: bool = False  # whether "<0x0A>" is the byte 10


class TextTokenizer:
    """A `tokenizer.json` with its neighbouring files: special tokens, end-of-text ids, the chat template.

    As with Hugging Face tokenizers, the text of a special token is encoded as that token: a chat message that contains
    "<|im_end|>" ends its turn. Immutable after `load` and safe to call from many threads; decoding never raises for any
    id.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        config: Mapping[str, object],
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> None:
        tokenizer.no_truncation()  # settings from training, which would corrupt prompts
        tokenizer.no_padding()
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        self._tokenizer = tokenizer
        self._config = dict(config)
        self._surface = _surface(tokenizer)
        # The bytes of a token, perhaps a part of a UTF-8 character; empty for an unknown id.
        self.token_bytes: Callable[[int], bytes] = cache(self._spelled_bytes)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self.special_tokens: dict[str, str] = dict(special_tokens)
        self.chat_templates: dict[str, str] = dict(chat_templates or {})  # their sources by name
        self.file = file  # the tokenizer.json it was read from, if any
        self._longest_token = longest_token(tokenizer)
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_token_id: int | None = vocab.get(self.bos_token) if self.bos_token is not None else None
        own_eos = [vocab[self.eos_token]] if self.eos_token in vocab else []
        # A config that several checkpoints share can name ids that this tokenizer does not have; they are ignored.
        known = [i for i in (*own_eos, *eos_token_ids) if 0 <= i < self.vocab_size]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(known))  # the tokenizer's own first
        flagged = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        named = {vocab[token] for token in self.special_tokens.values() if token in vocab}
        self.special_ids: frozenset[int] = frozenset(flagged | named | _declared_special(config))

    @classmethod
    def load(cls, path: Path, generation_config: Path | None = None) -> TextTokenizer:
        """Read `tokenizer.json` and the configuration files beside it; `generation_config` is read instead of its own.

        Raises ModelLoadError naming the file that is missing or wrong.
        """
        file = path / "tokenizer.json"
        if not file.is_file():
            hint = ""
            if (path / "tokenizer.model").is_file():
                hint = "; it has only a sentencepiece tokenizer.model: convert it by saving a fast tokenizer"
            raise ModelLoadError(f"{typed_name(file)}: the file is missing{hint}")
        try:
            tokenizer = Tokenizer.from_buffer(read_plain(file))
        except (KeyboardInterrupt, SystemExit):
            raise
        except OSError as exc:
            raise ModelLoadError(f"{typed_name(file)}: {exc.strerror}") from exc
        except BaseException as exc:  # the library raises bare Exception, and panics, which are BaseException
            reason = " ".join(str(exc).split())
            raise ModelLoadError(f"{typed_name(file)}: not a tokenizer: {reason}") from exc
        config = _read_json(path / "tokenizer_config.json")
        special_tokens = _special_tokens(_read_json(path / "special_tokens_map.json"), config)
        eos_token = special_tokens.get("eos_token")
        if eos_token is not None and tokenizer.token_to_id(eos_token) is None:
            raise ModelLoadError(
                f"{typed_name(path / 'tokenizer_config.json')}: eos_token {eos_token!r} is not in {file.name}"
            )
        loaded = cls(
            tokenizer,
            config=config,
            special_tokens=special_tokens,
            eos_token_ids=[
                *_eos_ids(generation_config or path / "generation_config.json"),
                *_eos_ids(path / "config.json"),
            ],
            chat_templates=_chat_templates(path, config),
            file=file,
        )
        if loaded.vocab_size == 0:
            raise ModelLoadError(f"{typed_name(file)}: the vocabulary is empty")
        return loaded

    @property
    def chat_template(self) -> str | None:
        """The source of the usual chat template; None: the model has none."""
        return self.chat_templates.get(DEFAULT)

    @property
    def joins_bytes(self) -> bool:
        """Whether a text is the concatenation of its tokens' bytes, except for a space at its start."""
        return self._surface.style != "other"

    @property
    def drops_first_space(self) -> bool:
        """Whether the first token of a text loses a space that the same token has elsewhere."""
        return self._surface.style == "sentencepiece"

    def least_tokens(self, num_chars: int) -> int:
        """A lower bound on the number of tokens of any text with so many characters."""
        return -(-num_chars // self._longest_token) if self._longest_token else 0

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; `add_special_tokens` runs the post-processor of tokenizer.json.

        Raises BadRequest for text that is not valid Unicode.
        """
        return self._ids(text, add_special_tokens)

    def encode_pair(self, one: str, other: str, *, add_special_tokens: bool) -> list[int]:
        """Encode two texts that belong together, joined by the post-processor. Raises BadRequest."""
        return self._ids((one, other), add_special_tokens)

    def _ids(self, text: str | tuple[str, str], add_special_tokens: bool) -> list[int]:
        try:
            # The batch form releases the GIL, so that a long text does not block the event loop.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except (TypeError, UnicodeEncodeError) as exc:
            raise BadRequest("The text is not valid Unicode: it has a lone surrogate.") from exc
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence. Ids outside the vocabulary have no text."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        shown = [i for i in ids if 0 <= i < self.vocab_size and i not in skipped]
        texts: list[str] = self._tokenizer.decode_batch([shown], skip_special_tokens=False)
        return texts[0]

    def token_text(self, token_id: int) -> str:
        """The token for display; bytes that are not UTF-8 on their own are shown as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def vocabulary_string(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an unknown id."""
        token: str | None = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return token or ""

    def token_id(self, text: str) -> int | None:
        """The id of a vocabulary entry; marks and special tokens are spelled as their text."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id

    def info(self) -> dict[str, object]:
        """JSON values for evaluation tools: special tokens, chat template and limits."""
        names = (*SPECIAL_NAMES[:4], "chat_template")
        limit = self._config.get("model_max_length")
        return {
            "tokenizer_class": self._config.get("tokenizer_class") or "PreTrainedTokenizerFast",
            **dict.fromkeys(names),
            **self.special_tokens,
            "chat_template": self.chat_template,
            "vocab_size": self.vocab_size,
            "model_max_length": limit if isinstance(limit, int) else None,
            "add_bos_token": self._config.get("add_bos_token"),
            "add_eos_token": self._config.get("add_eos_token"),
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": list(self.eos_token_ids),
        }

    def _spelled_bytes(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        if token is None:
            return b""
        if self._surface.style == "byte_level":
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token, spelled as itself
                return token.encode()
        if self._surface.style == "sentencepiece":
            byte = _fallback_byte(token) if self._surface.byte_fallback else None
            return byte if byte is not None else token.replace(self._surface.space, " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()


def _byte_of_char() -> dict[str, int]:
    """Byte-level BPE spells each byte as one printable character (GPT-2's table): printable Latin-1 as itself,
    the other 68 bytes in order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _fallback_byte(token: str) -> bytes | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return bytes([int(token[3:5], 16)])
    except ValueError:
        return None


def _surface(tokenizer: Tokenizer) -> _Surface:
    """Find out the style from the decoder, whose parts the library shows only in its pickled state (JSON)."""
    if tokenizer.decoder is None:
        return _Surface(style="other")
    state = json.loads(tokenizer.decoder.__getstate__())
    parts = {part["type"]: part for part in (state["decoders"] if state["type"] == "Sequence" else [state])}
    kinds = set(parts)
    if kinds in ({"ByteLevel"}, {"ByteLevel", "Fuse"}):
        return _Surface(style="byte_level")
    space = ""
    if "Metaspace" in parts:
        space = parts["Metaspace"]["replacement"]
    elif "Replace" in parts and parts["Replace"]["content"] == " ":
        space = parts["Replace"]["pattern"].get("String", "")
    only_left = "Strip" not in parts or (parts["Strip"]["stop"] == 0 and parts["Strip"]["content"] == " ")
    if space and only_left and kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return _Surface(style="sentencepiece", space=space, byte_fallback="ByteFallback" in kinds)
    return _Surface(style="other")


def _read_json(file: Path) -> dict[str, object]:
    """A JSON object, empty where the file is missing."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(read_plain(file))
    except (OSError, ValueError, RecursionError) as exc:
        raise ModelLoadError(f"{typed_name(file)}: not readable as JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise ModelLoadError(f"{typed_name(file)}: must hold a JSON object")
    return value


def _special_tokens(*sources: Mapping[str, object]) -> dict[str, str]:
    """Special tokens by name; a token is a string or an object with `content`, and later sources win."""
    found: dict[str, str] = {}
    for source in sources:
        for name in SPECIAL_NAMES:
            value = source.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[name] = content
    return found


def _declared_special(config: Mapping[str, object]) -> set[int]:
    """Ids that tokenizer_config.json marks as special though tokenizer.json may not."""
    declared = config.get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return set()
    return {
        int(i) for i, token in declared.items() if i.isdecimal() and isinstance(token, dict) and token.get("special")
    }


def _eos_ids(file: Path) -> list[int]:
    value = _read_json(file).get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    ids = [i for i in listed if isinstance(i, int) and not isinstance(i, bool)]
    if len(ids) != len(listed):
        raise ModelLoadError(f"{typed_name(file)}: eos_token_id must be an integer or a list of integers")
    return ids


def _chat_templates(path: Path, config: Mapping[str, object]) -> dict[str, str]:
    """The sources of the chat templates by name: those of tokenizer_config.json, over which files of their own win."""
    found: dict[str, str] = {}
    value = config.get("chat_template")
    named = value if isinstance(value, list) else [] if value is None else [{"name": DEFAULT, "template": value}]
    for entry in named:
        name, template = (entry.get(key) if isinstance(entry, dict) else None for key in ("name", "template"))
        if not isinstance(name, str) or not isinstance(template, str):
            raise ModelLoadError(
                f"{typed_name(path / 'tokenizer_config.json')}: chat_template must be text or a list of named templates"
            )
        found[name] = template
    files = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    if (own := path / "chat_template.jinja").is_file():
        files[DEFAULT] = own
    for name, file in files.items():
        try:
            found[name] = read_plain_text(file)
        except (OSError, ValueError) as exc:
            raise ModelLoadError(f"{typed_name(file)}: not readable as text: {exc}") from exc
    return found


_NFC_SHRINKS = 4  # most characters of a text per character of its composed form
_KEEP_ALL = frozenset({"ByteLevel", "Metaspace", "Digits"})


def longest_token(tokenizer: Tokenizer) -> int:
    """The most characters of a text that one token can stand for; 0: no bound is known.

    With it, a text that can never fit is refused by its length, before tokenization. There is no bound if the tokenizer
    may drop or merge characters without limit, such as by an unknown token or by stripping spaces.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    model, normalizer, splitter = tokenizer.model, _state(tokenizer.normalizer), _state(tokenizer.pre_tokenizer)
    if type(model).__name__ not in {"BPE", "Unigram"} or not _knows_all(tokenizer, vocabulary, normalizer, splitter):
        return 0
    if _strips(tokenizer.get_added_tokens_decoder().values()) or not _keeps_all(splitter):
        return 0
    return max(map(len, vocabulary), default=0) * _shrinks(normalizer)


def _state(part: Any) -> Mapping[str, Any] | None:
    """The configuration of a part, which the library shows only in its pickled state, which is JSON."""
    return None if part is None else json.loads(part.__getstate__())


def _knows_all(
    tokenizer: Tokenizer,
    vocabulary: Mapping[str, int],
    normalizer: Mapping[str, Any] | None,
    splitter: Mapping[str, Any] | None,
) -> bool:
    """Whether every byte has a token, so that no character is unknown."""
    if _has(normalizer, "ByteLevel") or _has(splitter, "ByteLevel"):
        return all(char in vocabulary for char in pre_tokenizers.ByteLevel.alphabet())
    falls_back = bool(getattr(tokenizer.model, "byte_fallback", False))
    return falls_back and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _strips(added: Iterable[AddedToken]) -> bool:
    return any(token.lstrip or token.rstrip for token in added)


def _keeps_all(step: Mapping[str, Any] | None) -> bool:
    """Whether splitting keeps all characters."""
    if step is None:
        return True
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Sequence":
        return all(map(_keeps_all, step["pretokenizers"]))
    return step["type"] in _KEEP_ALL


def _shrinks(step: Mapping[str, Any] | None) -> int:
    """The factor by which normalization may shorten a text; 0: unknown."""
    if step is None:
        return 1
    match step["type"]:
        case "Sequence":
            factor = 1
            for each in step["normalizers"]:
                factor *= _shrinks(each)
            return factor
        case "NFC":
            return _NFC_SHRINKS
        case "Prepend" | "ByteLevel":
            return 1
        case "Replace":
            pattern = step["pattern"].get("String", "")
            return 1 if 0 < len(pattern) <= len(step["content"]) else 0
    return 0


def _has(step: Mapping[str, Any] | None, kind: str) -> bool:
    if step is None:
        return False
    parts = [*step.get("pretokenizers", ()), *step.get("normalizers", ())]
    return step["type"] == kind or any(_has(part, kind) for part in parts)
