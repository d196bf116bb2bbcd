"""Small real tokenizers of the two styles that served models use, built in-process.

Promises: deterministic; special tokens <s>, </s> and, byte-level only, <|im_start|> and <|im_end|>.
Must not know: the modules under test.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "hello world, the quick brown fox jumps over the lazy dog",
    "the world says hello: naïve café, 日本語 and 😀 in the text",
    "def f(x):\n    return x + 1\n",
] * 4


def byte_level() -> Tokenizer:
    """BPE over bytes, as Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.add_tokens([AddedToken("two words", normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """BPE over characters with byte fallback and a space before the text, as Llama 2 and Mistral have it."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=430, special_tokens=special + fallback, show_progress=False)
    plain = [text.replace("日本語", "").replace("😀", "") for text in TEXT]
    trained.train_from_iterator(plain, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """The sentencepiece tokenizer with the other decoder that such files carry."""
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def unigram() -> Tokenizer:
    """Pieces with probabilities and byte fallback, a space before the text, as newer sentencepiece models have it."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, unk_token="<unk>", show_progress=False)
    trained.train_from_iterator([text.replace("日本語", "").replace("😀", "") for text in TEXT], trainer)
    special = ["<unk>", "<s>", "</s>"]
    pieces = [(piece, score) for piece, score in json.loads(trained.to_str())["model"]["vocab"] if piece not in special]
    heads = [(each, 0.0) for each in (*special, *(f"<0x{byte:02X}>" for byte in range(256)))]
    tokenizer = Tokenizer(models.Unigram([*heads, *pieces], 0, True))
    like = sentencepiece()
    tokenizer.normalizer, tokenizer.decoder = like.normalizer, like.decoder
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def words() -> Tokenizer:
    """A WordPiece tokenizer: a decoder whose text is not its tokens' bytes joined."""
    vocab = ["[UNK]", "[SEP]", "hello", "world", "##ly", "##s", "the", "."]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(vocab)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens([AddedToken("[SEP]", special=True)])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    """Writes tokenizer.json and tokenizer_config.json; bos and eos are <s> and </s> where the tokenizer has them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if tokenizer.token_to_id("</s>") is not None:
        config = {"bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
