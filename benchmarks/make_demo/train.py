"""Makes quire-demo from nothing: corpus, tokenizer, training, checkpoint files. Run by hand, once.

Promises the same bytes for the same arguments on the same kind of machine and library versions.
Must not be imported by anything that serves; transformers and tokenizers are needed only here.

    python -m make_demo.train --out DIR
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

from make_demo.corpus import Document, documents
from make_demo.model_card import CHAT_TEMPLATE, model_card

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
# Digits one by one, so that sums are learned by place; words with the space before them.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s"
# (rows, row length) of successive steps: short rows learn starts, long ones learn to use the whole context.
ROW_SHAPES = [(16, 256), (8, 512), (16, 256), (8, 512), (2, 2048)]
PROMPT_WEIGHT = 0.1  # loss weight of what users say, against 1 for what the model says


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the result."""

    seed: int = 20
    steps: int = 1700
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 5
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    context: int = 2048
    matrix_lr: float = 0.02  # Muon, hidden matrices
    vector_lr: float = 0.004  # AdamW, embedding and norms
    warmup_steps: int = 40
    decay_steps: int = 300  # at the end, over which the rates fall linearly to zero
    tokenizer_documents: int = 20_000
    threads: int = 2
    precision: str = "bfloat16"  # of the matrix products in training; weights are kept in float32


def train_tokenizer(recipe: Recipe) -> Tokenizer:
    """Byte-level BPE over the first documents of the corpus; any UTF-8 text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    contents = (
        part
        for doc in documents(recipe.seed, recipe.tokenizer_documents)
        for part in ([doc.text] if doc.text else [f"{m.role}\n{m.content}" for m in doc.messages])
    )
    tokenizer.train_from_iterator(contents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, doc: Document) -> tuple[list[int], list[float]]:
    """Token ids of a document, its separator included, and the loss weight of each."""

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text).ids)

    tokens: list[int] = ids(doc.text)
    weights = [1.0] * len(tokens)
    for message in doc.messages:
        weight = 1.0 if message.role == "assistant" else PROMPT_WEIGHT
        for text, w in [
            (f"<|im_start|>{message.role}\n", 0.0 if message.role == "assistant" else PROMPT_WEIGHT),
            (f"{message.content}<|im_end|>", weight),
            ("\n", PROMPT_WEIGHT),
        ]:
            part = ids(text)
            tokens += part
            weights += [w] * len(part)
    return [*tokens, 0], [*weights, 1.0]


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


def model_config(recipe: Recipe) -> dict[str, object]:
    """The config.json of the checkpoint."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": recipe.vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": recipe.context,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": None,
        "torch_dtype": "bfloat16",
    }


def learning_rate_factor(recipe: Recipe, step: int) -> float:
    """Rises, stays at one, falls; so runs of different lengths agree until the shorter one's decay."""
    return min(1.0, (step + 1) / recipe.warmup_steps, (recipe.steps - step) / recipe.decay_steps)


def train(recipe: Recipe, tokenizer: Tokenizer, out: Path, *, save_every: int) -> None:
    """Trains from random weights and writes the checkpoint at the end (and every `save_every` steps, if not 0)."""
    model = Qwen3ForCausalLM(Qwen3Config.from_dict({**model_config(recipe), "use_cache": False}))  # float32
    model.train()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    vectors = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=0.01),
        torch.optim.AdamW(vectors, lr=recipe.vector_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    base_rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    started, num_tokens, mean_loss = time.monotonic(), 0, 0.0
    for step, (ids, weights) in zip(range(recipe.steps), batches(recipe, tokenizer), strict=False):
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, base_rates, strict=True):
            group["lr"] = rate * learning_rate_factor(recipe, step)
        with torch.autocast("cpu", dtype=getattr(torch, recipe.precision), enabled=recipe.precision != "float32"):
            logits = model(input_ids=ids[:, :-1]).logits  # [rows, length, vocab]
        losses = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        target_weights = weights[:, 1:].flatten()
        loss = (losses * target_weights).sum() / target_weights.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        num_tokens += losses.numel()
        mean_loss = loss.item() if step == 0 else 0.98 * mean_loss + 0.02 * loss.item()
        if step % 20 == 0 or step == recipe.steps - 1:
            rate = num_tokens / (time.monotonic() - started)
            print(
                f"step {step} loss {loss.item():.4f} mean {mean_loss:.4f} tokens {num_tokens} ({rate:.0f}/s)",
                flush=True,
            )
        if save_every and step % save_every == save_every - 1:
            write_checkpoint(recipe, tokenizer, model, out, steps=step + 1, num_tokens=num_tokens, loss=mean_loss)
    write_checkpoint(recipe, tokenizer, model, out, steps=recipe.steps, num_tokens=num_tokens, loss=mean_loss)


def write_checkpoint(
    recipe: Recipe, tokenizer: Tokenizer, model: torch.nn.Module, out: Path, *, steps: int, num_tokens: int, loss: float
) -> None:
    """All files of a checkpoint folder; nothing in them depends on the clock or the machine's name."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": recipe.context,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    training = {**asdict(recipe), "steps_done": steps, "num_tokens": num_tokens, "mean_loss": round(loss, 4)}
    training["num_parameters"] = sum(w.numel() for w in weights.values())
    training["torch"] = torch.__version__
    files = {
        "config.json": model_config(recipe),
        "generation_config.json": {"eos_token_id": [2, 0], "pad_token_id": 0},
        "tokenizer_config.json": tokenizer_config,
        "training.json": training,
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (out / "README.md").write_text(model_card(training), encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Command line: every field of `Recipe` is a flag."""
    parser = argparse.ArgumentParser(description="Make the quire-demo checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--save-every", type=int, default=0, help="also write it every so many steps")
    for name, value in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    chosen = vars(parser.parse_args(arguments))
    out, save_every = chosen.pop("out"), chosen.pop("save_every")
    recipe = Recipe(**chosen)
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    torch.use_deterministic_algorithms(True)
    train(recipe, train_tokenizer(recipe), out, save_every=save_every)


if __name__ == "__main__":
    main()
