"""A byte-level tokenizer for tests of the server: its files, made once per process, and the loaded one.

Promises: bytes 0..255 are the ids 0..255; four special tokens follow.
Must not know: torch, the engine.
"""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from quire_server.text.tokenizer import TextTokenizer

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
SPECIAL_TOKENS = {BOS: "<|bos|>", EOS: "<|end|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}
VOCAB_SIZE = 260  # bytes 0..255 are the ids 0..255
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def _tokenizer_home() -> tempfile.TemporaryDirectory[str]:
    home = tempfile.TemporaryDirectory(prefix="fake-tokenizer-")
    write_tokenizer(Path(home.name))
    return home


def tokenizer_path() -> Path:
    """A directory with the byte-level tokenizer's files, made once per process."""
    return Path(_tokenizer_home().name)


def write_tokenizer(path: Path) -> None:
    """tokenizer.json and its companions: one token per byte, id = byte, and four special tokens."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS.values()])
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, IM_END], "bos_token_id": BOS}))
    (path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": EOS}))


@functools.cache
def load_tokenizer() -> TextTokenizer:
    from quire_server.text.tokenizer import TextTokenizer

    return TextTokenizer.load(tokenizer_path())
