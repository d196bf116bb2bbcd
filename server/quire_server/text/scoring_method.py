"""How this server scores pairs of texts and classifies texts: as the checkpoint was trained for it.

Promises: a classifier's labels and activation are those of its config.json. Must not know: requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quire_engine.contract.errors import ConfigError, ModelLoadError
from quire_engine.plain_files import read_plain
from quire_server.text.matrices import Projection
from quire_server.text.pooling_method import PoolingChoice
from quire_server.text.tokenizer import TextTokenizer

Activation = Literal["softmax", "sigmoid", "none"]

_CLASSIFIER = "ForSequenceClassification"
_ACTIVATIONS: dict[str, Activation] = {
    "regression": "none",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
}
_MAX_BYTES = 64 << 20
# The prompt that Qwen3-Reranker was trained with: it answers yes or no.
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifier:
    """The head of a …ForSequenceClassification: a linear layer on the last token's row."""

    head: Projection
    labels: tuple[str, ...]
    activation: Activation

    def values(self, row: Sequence[float], *, activates: bool = True) -> list[float]:
        """A value for each label, from the row after the final norm: probabilities, or logits."""
        logits = self.head.apply(row)
        activation = self.activation if activates else "none"
        if activation == "softmax":
            powers = [math.exp(value - max(logits)) for value in logits]
            return [power / sum(powers) for power in powers]
        return [sigmoid(value) for value in logits] if activation == "sigmoid" else logits


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringMethod:
    """The scoring method of this server: by a classifier, by the answer "yes" or "no", else by vectors' cosine."""

    classifier: Classifier | None = None
    answers: tuple[int, int] | None = None  # the tokens "no" and "yes", of models that answer with one of them

    @property
    def is_cosine(self) -> bool:
        return self.classifier is None and self.answers is None


COSINE = ScoringMethod()


def scoring_method(asked: PoolingChoice, model: Path, tokenizer: TextTokenizer) -> ScoringMethod:
    """A classifier's head, whatever is asked; the answers, also for `auto` where the checkpoint's modules name them or
    the model is called a Qwen3 reranker; else the cosine.

    Raises ConfigError for a tokenizer without the tokens, ModelLoadError for a classifier without its head.
    """
    config = _read(model / "config.json")
    names = config.get("architectures")
    if isinstance(names, list) and names and str(names[0]).endswith(_CLASSIFIER):
        return ScoringMethod(classifier=_classifier(model, config))
    answers = _answers_of_modules(model) if asked in ("auto", "yes-no") else None
    if answers is not None:
        return ScoringMethod(answers=answers)
    is_reranker = "qwen3-reranker" in model.resolve().as_posix().lower()
    if asked != "yes-no" and not (asked == "auto" and is_reranker):
        return COSINE
    no, yes = tokenizer.token_id("no"), tokenizer.token_id("yes")
    if no is None or yes is None:
        raise ConfigError("--pooling yes-no: the tokenizer has no tokens 'yes' and 'no'")
    return ScoringMethod(answers=(no, yes))


def question(query: str, document: str, instruction: str | None) -> str:
    """The prompt that asks whether a document answers a query, for models that say yes or no."""
    told = instruction or DEFAULT_INSTRUCTION
    return f"{_BEFORE}<Instruct>: {told}\n<Query>: {query}\n<Document>: {document}{_AFTER}"


def share_of_yes(no: float, yes: float, *, activates: bool = True) -> float:
    """The probability of "yes" among the two answers, from their log-probabilities; or the difference of logits."""
    return sigmoid(yes - no) if activates else yes - no


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def _answers_of_modules(model: Path) -> tuple[int, int] | None:
    """The tokens that sentence-transformers' module for such models names, if the checkpoint has it."""
    try:
        modules = json.loads(read_plain(model / "modules.json"))
        for module in modules:
            if str(module["type"]).endswith(".LogitScore"):
                folder = (model / str(module["path"])).resolve()
                config = _read(folder / "config.json") if folder.is_relative_to(model.resolve()) else {}
                no, yes = config.get("false_token_id"), config.get("true_token_id")
                if isinstance(no, int) and isinstance(yes, int):
                    return no, yes
    except (OSError, ValueError, TypeError, KeyError, RecursionError, ModelLoadError):
        pass
    return None


def _classifier(model: Path, config: dict[str, object]) -> Classifier:
    head = Projection.read(model, "score")
    named = config.get("id2label")
    known = {str(key): str(value) for key, value in named.items()} if isinstance(named, dict) else {}
    default: Activation = "sigmoid" if head.size == 1 else "softmax"
    return Classifier(
        head=head,
        labels=tuple(known.get(str(number), f"LABEL_{number}") for number in range(head.size)),
        activation=_ACTIVATIONS.get(str(config.get("problem_type")), default),
    )


def _read(file: Path) -> dict[str, object]:
    try:
        value = json.loads(read_plain(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON: {error}") from error
    return value if isinstance(value, dict) else {}
