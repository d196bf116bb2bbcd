"""Vocabularies as GGUF files have them, trained on texts: byte-level merges, pieces with scores, and unigrams.

Promises: tokens join what every way of splitting keeps apart, so that another split is another result. Must not know:
the reader under test.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from support.gguf_files import write_gguf

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|user|>\n", "[INST]", "<pad>")
USER_DEFINED = ("<think>", "</think>", "\n\n\n", "     ", "<0xZZ>", "ñandú")
_SPACE = "\u2581"
_LINES = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
# What any file of the architecture says.
_SHAPE = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.block_count": 1,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-6,
}


def write_vocabulary(path: Path, values: dict[str, Any]) -> Path:
    """A file without tensors."""
    return write_gguf(path, _SHAPE | values)


def byte_level(texts: Sequence[str], size: int) -> dict[str, Any]:
    """Merges over whole lines; `tokenizer.ggml.pre` is left to the caller."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [_LINES, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    state = tokenizer.to_str()
    merges = _merges(state)
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    plain = [token for token, _ in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*plain, *SPECIAL, *USER_DEFINED],
        "tokenizer.ggml.token_type": [1] * len(plain) + [3] * len(SPECIAL) + [4] * len(USER_DEFINED),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": len(plain),
        "tokenizer.ggml.eos_token_id": len(plain),
        "tokenizer.ggml.add_bos_token": True,
    }


def pieces(texts: Sequence[str], size: int) -> dict[str, Any]:
    """As sentencepiece's BPE: the scores are the places of the merges, some letters have bytes alone."""
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=size, limit_alphabet=300, show_progress=False)
    tokenizer.pre_tokenizer = _LINES
    tokenizer.train_from_iterator([text.replace(" ", _SPACE) for text in texts], trainer)
    vocabulary = tokenizer.get_vocab()
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    heads = ["<unk>", "<s>", "</s>", *SPECIAL]
    # A text of a special token is no piece, nor is its beginning, from which llama.cpp makes it.
    known = [
        piece
        for piece in sorted(vocabulary, key=lambda piece: vocabulary[piece])
        if len(piece) == 1 or not any(piece in token for token in (*heads, *bytes_))
    ]
    longer, letters = [piece for piece in known if len(piece) > 1], [piece for piece in known if len(piece) == 1]
    user = [each for each in USER_DEFINED if each not in vocabulary]
    tokens = [*heads, *bytes_, *user, *longer, *letters]
    kinds = [2] + [3] * (len(heads) - 1) + [6] * 256 + [4] * len(user) + [1] * len(known)
    zeros = len(heads) + 256 + len(user)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * zeros + [-float(place) for place in range(len(known))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def unigrams(texts: Sequence[str], size: int) -> dict[str, Any]:
    """Pieces with the logarithms of their frequencies; white space is one space, as in most such models."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    heads = ["<pad>", "</s>", "<unk>", *(each for each in SPECIAL if each != "<pad>")]
    trainer = trainers.UnigramTrainer(vocab_size=size, show_progress=False, unk_token="<unk>", special_tokens=heads)
    tokenizer.train_from_iterator([" ".join(text.split(" ")) for text in texts], trainer)
    vocabulary = [(token, score) for token, score in _unigrams(tokenizer.to_str()) if token not in heads]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [*heads, *(token for token, _ in vocabulary)],
        "tokenizer.ggml.scores": [0.0] * len(heads) + [score for _, score in vocabulary],
        "tokenizer.ggml.token_type": [3, 3, 2] + [3] * (len(heads) - 3) + [1] * len(vocabulary),
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    }


def _merges(state: str) -> list[str]:
    return [each if isinstance(each, str) else " ".join(each) for each in json.loads(state)["model"]["merges"]]


def _unigrams(state: str) -> list[tuple[str, float]]:
    return [(token, float(score)) for token, score in json.loads(state)["model"]["vocab"]]
