"""Everything that decides what the training makes, and nothing else. Must not know how it is used."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides the result."""

    seed: int = 20
    steps: int = 1560
    vocab_size: int = 2560
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 6
    num_heads: int = 8
    num_kv_heads: int = 4
    head_dim: int = 32
    context: int = 2048
    matrix_lr: float = 0.02  # Muon, hidden matrices
    vector_lr: float = 0.004  # AdamW, embedding and norms
    warmup_steps: int = 40
    decay_steps: int = 600  # at the end, over which the rates fall linearly to zero
    tokenizer_documents: int = 20_000
    workers: int = 2  # processes with a part of each batch; they wait for each other once a step, threads at every op
    threads: int = 1  # of each worker
    precision: str = "bfloat16"  # of the matrix products in training; weights are kept in float32
