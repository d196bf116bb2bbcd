"""A tiny random checkpoint of EmbeddingGemma's kind, and its vectors by transformers and the modules' definitions.

Promises: bidirectional attention with windows in one of two layers, mean pooling, two dense modules, prompts.
Must not know: the modules under test.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from support.checkpoints import make_model, write_tokenizer

WINDOW = 40  # of both sides together
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
_WIDTHS = {"2_Dense": (96, 64), "3_Dense": (48, 96)}


class EmbeddingGemma:
    """The model, and the checkpoint of it that is written to `path`."""

    def __init__(self, path: Path, dtype: str = "float32") -> None:
        self.model = make_model("gemma3", kind="TextModel", use_bidirectional_attention=True, sliding_window=WINDOW)
        self.model.to(getattr(torch, dtype)).save_pretrained(path)
        self.model.float()
        write_tokenizer(path)
        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        generator = torch.Generator().manual_seed(1)
        self._dense = {where: torch.randn(*size, generator=generator) / 8 for where, size in _WIDTHS.items()}
        kinds = {"": "Transformer", "1_Pooling": "Pooling"}
        kinds |= dict.fromkeys(self._dense, "Dense") | {"4_Normalize": "Normalize"}
        modules = [{"path": where, "type": f"sentence_transformers.models.{kind}"} for where, kind in kinds.items()]
        _write(path / "modules.json", modules)
        _write(path / "config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": None})
        _write(path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True, "include_prompt": True})
        for where, weight in self._dense.items():
            rows, columns = weight.shape
            config = {"in_features": columns, "out_features": rows, "bias": False}
            _write(path / where / "config.json", config | {"activation_function": "torch.nn.modules.linear.Identity"})
            save_file({"linear.weight": weight}, str(path / where / "model.safetensors"))

    def ids(self, text: str) -> list[int]:
        """The text's tokens."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def vector(self, text: str, dimensions: int | None = None) -> Tensor:
        """Its vector, of length 1."""
        with torch.inference_mode():
            row = self.model(torch.tensor([self.ids(text)])).last_hidden_state[0].mean(0)
        for weight in self._dense.values():
            row = weight @ row
        row = row / row.norm()
        return row if dimensions is None else row[:dimensions] / row[:dimensions].norm()


def _write(file: Path, value: object) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(value))
