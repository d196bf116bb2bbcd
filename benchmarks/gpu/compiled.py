"""A static decode of the same checkpoint, compiled by torch: what one gets without an engine.

Promises: a static cache, one graph for a step, no scheduler, no pages, no sampling beyond the greatest logit; on a CPU
it runs uncompiled. Must not know: our kernels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

Row = dict[str, str | int | float]


class StaticDecoder(torch.nn.Module):
    """A dense Qwen3 with a cache [layers, 2, streams, kv_heads, positions, head_dim] of a fixed size."""

    def __init__(self, path: Path, streams: int, positions: int, device: torch.device) -> None:
        super().__init__()
        self.config = json.loads((path / "config.json").read_text())
        self.weights = {name: value.to(device) for name, value in load_file(path / "model.safetensors").items()}
        config, dim = self.config, self.config["head_dim"]
        size = (config["num_hidden_layers"], 2, streams, config["num_key_value_heads"], positions, dim)
        self.cache = torch.zeros(size, dtype=torch.bfloat16, device=device)
        inverse = config["rope_theta"] ** -(torch.arange(0, dim, 2, device=device, dtype=torch.float32) / dim)
        angles = torch.arange(positions, device=device, dtype=torch.float32)[:, None] * inverse
        self.cos, self.sin = (torch.cat([f(angles)] * 2, dim=1) for f in (torch.cos, torch.sin))
        self.places = torch.arange(positions, device=device)

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        """ids [streams], the position [1] of all of them -> logits [streams, V]."""
        config, w = self.config, self.weights
        dim, eps = config["head_dim"], config["rms_norm_eps"]
        seen = (self.places <= position)[None, None, None]
        x = F.embedding(ids, w["model.embed_tokens.weight"])

        def normed(values: Tensor, name: str) -> Tensor:
            return F.rms_norm(values, values.shape[-1:], w[f"{name}.weight"], eps)

        def turned(values: Tensor) -> Tensor:
            wide = values.float()
            other = torch.cat([-wide[..., dim // 2 :], wide[..., : dim // 2]], dim=-1)
            return (wide * self.cos[position] + other * self.sin[position]).to(values.dtype)

        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            h = normed(x, f"{name}.input_layernorm")
            q, k, v = (F.linear(h, w[f"{name}.self_attn.{part}_proj.weight"]).view(len(h), -1, dim) for part in "qkv")
            q, k = turned(normed(q, f"{name}.self_attn.q_norm")), turned(normed(k, f"{name}.self_attn.k_norm"))
            keys, values = self.cache[layer]
            keys.index_copy_(2, position, k[:, :, None])
            values.index_copy_(2, position, v[:, :, None])
            mixed = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=seen, enable_gqa=True)
            x = x + F.linear(mixed.flatten(1), w[f"{name}.self_attn.o_proj.weight"])
            h = normed(x, f"{name}.post_attention_layernorm")
            gate, up = (F.linear(h, w[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, w[f"{name}.mlp.down_proj.weight"])
        return F.linear(normed(x, "model.norm"), w["model.embed_tokens.weight"])


def decode(decoder: StaticDecoder, prompts: Tensor, answers: int, *, compile_step: bool) -> tuple[Tensor, float]:
    """prompts [streams, n] one by one, then greedy tokens: those [streams, answers], and the seconds of a step."""
    step = torch.compile(decoder, fullgraph=True, mode="reduce-overhead") if compile_step else decoder
    device = prompts.device
    ids, found, started = prompts[:, 0], list[Tensor](), 0.0
    for at in range(prompts.shape[1] + answers - 1):
        if at == prompts.shape[1] + answers // 2:
            _wait(device)
            started = time.perf_counter()
        logits = step(ids, torch.tensor([at], device=device))
        chosen = logits.argmax(dim=1)
        following = at + 1 < prompts.shape[1]
        ids = prompts[:, at + 1] if following else chosen
        if not following:
            found.append(chosen.clone())
    _wait(device)
    steps = answers - 1 - answers // 2
    return torch.stack(found, dim=1), (time.perf_counter() - started) / max(1, steps)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def compiled_rows(path: Path, device: torch.device, streams: Sequence[int], context: int, steps: int) -> list[Row]:
    """The static decode's step by the number of streams; prompts are short, the cache is as long as `context`."""
    found: list[Row] = []
    for count in streams:
        decoder = StaticDecoder(path, count, context + 2 * steps, device)
        vocabulary = decoder.config["vocab_size"]
        prompts = torch.randint(vocabulary, (count, 8), generator=torch.Generator().manual_seed(0)).to(device)
        _, seconds = decode(decoder, prompts, 2 * steps, compile_step=device.type == "cuda")
        found.append({"what": "compiled by torch", "streams": count, "ms": seconds * 1e3, "tokens/s": count / seconds})
    return found
