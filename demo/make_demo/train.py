"""Makes quire-demo from nothing: corpus, tokenizer, training, checkpoint files. Run by hand, once.

Promises the same bytes for the same arguments on the same kind of machine and library versions.
Must not be imported by anything that serves; transformers and tokenizers are needed only here.

    python -m make_demo.train --out DIR
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import multiprocessing
from torch.multiprocessing.spawn import spawn
from transformers import Qwen3Config, Qwen3ForCausalLM

from make_demo.checkpoint import model_config, write_checkpoint
from make_demo.recipe import Recipe
from make_demo.tokens import batches, train_tokenizer


def learning_rate_factor(recipe: Recipe, step: int) -> float:
    """Rises, stays at one, falls; so runs of different lengths agree until the shorter one's decay."""
    return min(1.0, (step + 1) / recipe.warmup_steps, (recipe.steps - step) / recipe.decay_steps)


class GradientSum:
    """Adds up the gradients of all workers, in the order of their ranks: so sums do not depend on who is faster."""

    def __init__(self, workers: int, size: int) -> None:
        self._parts = torch.zeros(workers, size).share_memory_()  # type: ignore[no-untyped-call]
        self._barrier = multiprocessing.get_context("spawn").Barrier(workers)

    def add_up(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        """The sum of every worker's `part`; called by all of them."""
        self._parts[rank].copy_(part)
        self._barrier.wait()
        total: torch.Tensor = self._parts.sum(dim=0)
        self._barrier.wait()  # nobody writes the next part before everybody has read this one
        return total


def new_model(recipe: Recipe) -> Qwen3ForCausalLM:
    """Random weights in float32, the same for the same seed."""
    torch.manual_seed(recipe.seed)
    return Qwen3ForCausalLM(Qwen3Config.from_dict({**model_config(recipe), "use_cache": False}))


def part_of_loss(
    recipe: Recipe, model: Qwen3ForCausalLM, ids: torch.Tensor, weights: torch.Tensor, rank: int
) -> torch.Tensor:
    """This worker's rows' share of the batch's mean loss: the shares of all workers add up to it."""
    total_weight = weights[:, 1:].sum()
    ids, weights = ids[rank :: recipe.workers], weights[rank :: recipe.workers]
    learned = weights[:, 1:].flatten().nonzero().flatten()  # positions whose next token counts
    with torch.autocast("cpu", dtype=getattr(torch, recipe.precision), enabled=recipe.precision != "float32"):
        hidden = model.model(input_ids=ids[:, :-1]).last_hidden_state.flatten(0, 1)
        logits = model.lm_head(hidden.index_select(0, learned))  # [positions, vocab]
    targets, target_weights = ids[:, 1:].flatten()[learned], weights[:, 1:].flatten()[learned]
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return (losses * target_weights).sum() / total_weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every worker is handed."""

    recipe: Recipe
    tokenizer_text: str
    gradients: GradientSum
    out: Path
    save_every: int


def work(rank: int, job: Job) -> None:
    """One worker, from random weights; all compute the same updates, and the first writes the checkpoint."""
    recipe, out = job.recipe, job.out
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)
    tokenizer, model = Tokenizer.from_str(job.tokenizer_text), new_model(recipe)
    model.train()
    parameters = list(model.parameters())
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    vectors = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=recipe.matrix_lr, weight_decay=0.01),
        torch.optim.AdamW(vectors, lr=recipe.vector_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    base_rates = [group["lr"] for group in groups]
    started, num_tokens, mean_loss = time.monotonic(), 0, 0.0
    for step, (ids, weights) in zip(range(recipe.steps), batches(recipe, tokenizer), strict=False):
        for group, rate in zip(groups, base_rates, strict=True):
            group["lr"] = rate * learning_rate_factor(recipe, step)
        share = part_of_loss(recipe, model, ids, weights, rank)
        share.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        total = job.gradients.add_up(rank, torch.cat([*(grad.flatten() for grad in grads), share.detach().view(1)]))
        for p, grad in zip(parameters, torch.split(total, [*(p.numel() for p in parameters), 1]), strict=False):
            p.grad = grad.view_as(p)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss = total[-1].item()
        num_tokens += ids[:, 1:].numel()
        mean_loss = loss if step == 0 else 0.98 * mean_loss + 0.02 * loss
        if rank == 0 and (step % 20 == 0 or step == recipe.steps - 1):
            rate = num_tokens / (time.monotonic() - started)
            print(f"step {step} loss {loss:.4f} mean {mean_loss:.4f} tokens {num_tokens} ({rate:.0f}/s)", flush=True)
        if rank == 0 and job.save_every and step % job.save_every == job.save_every - 1:
            write_checkpoint(recipe, tokenizer, model, out, steps=step + 1, num_tokens=num_tokens, loss=mean_loss)
    if rank == 0:
        write_checkpoint(recipe, tokenizer, model, out, steps=recipe.steps, num_tokens=num_tokens, loss=mean_loss)


def train(recipe: Recipe, tokenizer: Tokenizer, out: Path, *, save_every: int) -> None:
    """Trains from random weights and writes the checkpoint at the end (and every `save_every` steps, if not 0)."""
    size = sum(p.numel() for p in new_model(recipe).parameters()) + 1  # the loss goes along
    gradients = GradientSum(recipe.workers, size)
    job = Job(recipe=recipe, tokenizer_text=tokenizer.to_str(), gradients=gradients, out=out, save_every=save_every)
    if recipe.workers == 1:
        work(0, job)
    else:
        spawn(work, args=(job,), nprocs=recipe.workers)  # type: ignore[no-untyped-call]


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
    train(recipe, train_tokenizer(recipe), out, save_every=save_every)


if __name__ == "__main__":
    main()
