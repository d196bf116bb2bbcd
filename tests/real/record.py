"""Records what transformers computes in float32 from the same files: tokens, log-probabilities, greedy answers.

    pip install accelerate && PYTHONPATH=tests python -m real.record

The weights are those of the GGUF files, decoded by transformers and the library `gguf`; nothing of ours takes part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire_server.checkpoint.trained import TRAINED, fetch
from real.recorded import GREEDY_TOKENS, PROMPTS, PROSE, RECORDED


def greedy(model: Any, prompt: list[int]) -> dict[str, Any]:
    """The most likely tokens, and how far each is ahead of the next likely one."""
    ids, gaps = list(prompt), []
    for _ in range(GREEDY_TOKENS):
        best = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).topk(2)
        gaps.append(round((best.values[0] - best.values[1]).item(), 4))
        ids.append(int(best.indices[0]))
    return {"prompt": prompt, "tokens": ids[len(prompt) :], "gaps": gaps}


@torch.inference_mode()
def record(path: Path) -> dict[str, Any]:
    """Everything of one file."""
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    ids = tokenizer(PROSE)["input_ids"]
    scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    logprobs = scores[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return {
        "token_ids": ids,
        "logprobs": [round(each, 4) for each in logprobs.tolist()],
        "greedy": [greedy(model, tokenizer(prompt)["input_ids"]) for prompt in PROMPTS],
    }


if __name__ == "__main__":
    found = {name: record(fetch(name)) for name in TRAINED}
    lines = [f'"{name}": {json.dumps(each)}' for name, each in found.items()]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    for name, each in found.items():
        mean = sum(each["logprobs"]) / len(each["logprobs"])
        print(name, len(each["token_ids"]), f"{mean:.4f}", [min(answer["gaps"]) for answer in each["greedy"]])
