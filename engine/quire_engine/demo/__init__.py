"""quire-demo, the tiny trained model that ships with Quire, and the script that trained it.

Promises: a checkpoint folder that loads like any other, without a download.
"""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """The folder of the shipped checkpoint."""
    return Path(__file__).parent / "quire-demo"


def recorded_answers_path() -> Path:
    """The file of greedy answers that the model gave on a CPU."""
    return Path(__file__).parent / "recorded_answers.json"
