"""From documents to token ids: the tokenizer, the weight of each token in the loss, the batches of the training.

Promises that a document's ids are those of its text as the chat template writes it, and the same batches for the same
recipe. Must not know the model.
"""

from __future__ import annotations

import json
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from make_demo.corpus import documents
from make_demo.recipe import Recipe
from make_demo.turns import Document, spans

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]  # of content
# Digits one by one, so that sums are learned by place; words with the space before them.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s"
# (rows, row length) of successive steps: short rows learn starts, long ones learn to use the whole context.
ROW_SHAPES = [(8, 512), (4, 1024), (8, 512), (4, 1024), (2, 2048)]


def train_tokenizer(recipe: Recipe) -> Tokenizer:
    """Byte-level BPE over the first documents of the corpus; any UTF-8 text can be encoded.

    The control tokens have the first ids, then come the markers, which are ordinary tokens: they are part of what a
    model writes, and of what is decoded.
    """
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[*CONTROL_TOKENS, *MARKERS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    apart = re.compile("|".join(re.escape(token) for token in [*CONTROL_TOKENS, *MARKERS]))
    texts = ("".join(text for text, _ in spans(doc)) for doc in documents(recipe.seed, recipe.tokenizer_documents))
    tokenizer.train_from_iterator((part for text in texts for part in apart.split(text) if part), trainer)
    saved = json.loads(tokenizer.to_str())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] not in MARKERS
    return Tokenizer.from_str(json.dumps(saved))


def encode(tokenizer: Tokenizer, doc: Document) -> tuple[list[int], list[float]]:
    """Token ids of a document, its separator included, and the loss weight of each: that of its first character."""
    pieces = spans(doc)
    encoding = tokenizer.encode("".join(text for text, _ in pieces))
    ends = list(accumulate(len(text) for text, _ in pieces))
    weights = [pieces[bisect_right(ends, start)][1] for start, _ in encoding.offsets]
    return [*encoding.ids, 0], [*weights, 1.0]


def batches(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Per step: ids [rows, length + 1] int64 and weights of the same shape. Every row starts with a fresh document."""
    stream = (encode(tokenizer, doc) for doc in documents(recipe.seed, sys.maxsize))
    step = 0
    while True:
        rows, length = ROW_SHAPES[step % len(ROW_SHAPES)]
        length = min(length, recipe.context)
        row_ids, row_weights = [], []
        for _ in range(rows):
            ids: list[int] = []
            weights: list[float] = []
            while len(ids) <= length:
                more_ids, more_weights = next(stream)
                ids += more_ids
                weights += more_weights
            row_ids.append(ids[: length + 1])
            row_weights.append(weights[: length + 1])
        yield torch.tensor(row_ids), torch.tensor(row_weights)
        step += 1
