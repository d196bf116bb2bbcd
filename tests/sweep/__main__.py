"""Every architecture of transformers that generates text, tiny and random, through the loader and the fallback.

    python -m sweep                      all of them, into tests/sweep/models.json and docs/models.md; half an hour
    python -m sweep qwen3_moe gemma2     these alone, printed

Each is saved as a checkpoint, loaded as a user's would be, proof included, and held against transformers' own forward
pass in float32: logits of three sequences in mixed, chunked steps, then 48 greedy tokens. In bfloat16 its rows must
have the same bits in any batch and in any chunks.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire_engine.contract.errors import ModelLoadError
from quire_engine.execution.models.fallback.model_class import IMPLEMENTATION, ModelClass
from quire_engine.execution.models.fallback.proof import SIZES, TOLERANCE, shrunk
from support.fallback_steps import FallbackSteps
from support.model_steps import scheduled

HERE = Path(__file__).parent
RESULT, TABLE = HERE / "models.json", HERE.parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- begin of the table that `make model-sweep` writes -->", "<!-- end of the table -->"
SECONDS = 120  # for one architecture
LENGTHS = {0: 14, 1: 26, 2: 8}
SCHEDULE = [
    [(0, 7), (1, 23)],
    [(0, 4), (1, 1), (2, 5)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 1), (0, 1)],
    [(1, 1), (2, 1), (0, 1)],
]
NUM_GREEDY, NUM_PROMPT = 48, 11
MOST_PARAMETERS = 60_000_000
# Configurations whose defaults name no layers, or that a shrunken default cannot make.
OPTIONS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "phimoe": {"sliding_window": None},
    "llama4_text": {"attention_chunk_size": 512, "interleave_moe_layer_step": 2},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mamba", "moe"]},
    "nemotron": {"num_key_value_heads": 2},
    "phi3": {"original_max_position_embeddings": 256},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [96] * 4,
        "num_hidden_layers": 4,
    },
}


class TooSlow(Exception):
    """An architecture took longer than it may."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def end(*_: object) -> None:
        raise TooSlow(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tiny(model_type: str, **options: Any) -> ModelClass:
    """The class of a model type, with a few small layers of each kind."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    kind = getattr(transformers, name if isinstance(name, str) else name[0])
    made = shrunk(ModelClass(kind, CONFIG_MAPPING[model_type]()), max_model_len=1 << 30)
    values = made.config.to_dict()
    unset = {key: SIZES[key] for key, value in values.items() if value is None and key in SIZES}
    values = {**values, **unset, **OPTIONS.get(model_type, {}), **options}
    return ModelClass(kind, type(made.config).from_dict(values))


def save_random(made: ModelClass, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Write a checkpoint of random weights, norms, biases and sinks; returns the model."""
    model = made.with_random_parameters(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.named_parameters():
            random = torch.randn(value.shape, generator=generator)
            if value.dim() >= 2:
                table = "embed" in name or "wte" in name or "wpe" in name
                value.copy_(random * (1.0 if table else value.shape[-1] ** -0.5))
            elif "norm" in name.lower() or "ln" in name:
                value.add_(random * 0.1)
            else:
                value.copy_(random * 0.2)
    model.to(dtype).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("architectures", [made.name])
    (folder / "config.json").write_text(json.dumps(config))
    return model


@torch.inference_mode()
def held_against_plain(made: ModelClass, folder: Path) -> dict[str, Any]:
    """The relative difference of the logits, and how many greedy tokens are equal."""
    model = save_random(made, folder)
    ids, steps = prompts(), FallbackSteps(folder)
    got = steps.run(ids, SCHEDULE)
    wanted = {key: plain(model, tokens) for key, tokens in ids.items()}
    largest = max(logits.abs().max().item() for logits in wanted.values())
    difference = max((got[key] - wanted[key]).abs().max().item() for key in ids) / largest
    ours, theirs = list(ids[1][:NUM_PROMPT]), list(ids[1][:NUM_PROMPT])
    for _ in range(NUM_GREEDY):
        theirs.append(int(plain(model, theirs)[-1].argmax()))
    while len(ours) < NUM_PROMPT + NUM_GREEDY:
        start = 0 if len(ours) == NUM_PROMPT else len(ours) - 1
        ours.append(int(continued(steps, ours, start).argmax()))
    equal = sum(a == b for a, b in zip(ours[NUM_PROMPT:], theirs[NUM_PROMPT:], strict=True))
    facts = steps.resolved.model
    return {
        "difference": difference,
        "greedy": equal,
        "architecture": made.name,
        "layers": facts.num_layers,
        "recurrent": bool(getattr(facts, "mixers", ())),
    }


@torch.inference_mode()
def has_same_bits(folder: Path) -> bool:
    """Whether a row's bits in bfloat16 are those of its sequence alone: whole, token by token and by threes."""
    ids, steps = prompts(), FallbackSteps(folder, dtype="bfloat16")
    mixed = steps.run(ids, SCHEDULE)
    for key, tokens in ids.items():
        by_threes = [min(3, len(tokens) - start) for start in range(0, len(tokens), 3)]
        for counts in ([len(tokens)], [1] * len(tokens), by_threes):
            if not torch.equal(mixed[key], steps.run({key: tokens}, [[(key, count)] for count in counts])[key]):
                return False
    return True


def prompts() -> dict[int, list[int]]:
    source = torch.Generator().manual_seed(1)
    return {key: torch.randint(3, 120, (length,), generator=source).tolist() for key, length in LENGTHS.items()}


def continued(steps: FallbackSteps, tokens: list[int], start: int) -> torch.Tensor:
    """The logits behind the last of `tokens`, whose first `start` were computed before."""
    blocks = list(range(1, 1 + -(-(NUM_PROMPT + NUM_GREEDY) // steps.block_size)))
    item = scheduled(tokens, blocks, start, len(tokens) - start, all_logits=False)
    return steps.step(replace(item, sequence_id=7))[0][-1]


def plain(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0].float()


def result(model_type: str) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        with limited(SECONDS), tempfile.TemporaryDirectory() as folder:
            made = tiny(model_type)
            total = sum(value.numel() for value in made.on_meta(torch.float32).parameters())
            if total > MOST_PARAMETERS:
                raise ValueError(f"its configuration does not shrink: {total:,} parameters")
            found = held_against_plain(made, Path(folder))
            found["same_bits"] = has_same_bits(Path(folder))
        passed = found["difference"] <= TOLERANCE and found["greedy"] == NUM_GREEDY and found["same_bits"]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        refused = isinstance(error, ModelLoadError)
        text = re.sub(r"\S+/config\.json: ", "", " ".join(str(error).split()))
        found, passed = {"refused" if refused else "error": f"{type(error).__name__}: {text[:300]}"}, False
    took = round(time.perf_counter() - started, 1)
    print(f"{model_type}: {took} s", file=sys.stderr)
    return {"model": model_type, "passed": passed, **found}


def table(recorded: dict[str, Any]) -> str:
    """The architectures that passed, as the documents list them."""
    passed = [each for each in recorded["models"] if each["passed"]]
    attends = sorted({each["architecture"] for each in passed if not each["recurrent"]})
    recurs = sorted({each["architecture"] for each in passed if each["recurrent"]})
    worst = max(each["difference"] for each in passed)
    implementation, total = recorded["implementation"], len(recorded["models"])
    return (
        f"{len(passed)} of the {total} model types that {implementation} lists for text give its logits in float32,"
        f" at most\n{worst:.0e} of the largest apart, and {NUM_GREEDY} of {NUM_GREEDY} of its greedy tokens."
        " In bfloat16 their\nrows have the same bits alone, in any batch and in any chunks.\n\n"
        f"| layers | architectures |\n| --- | --- |\n| attention | {', '.join(attends)} |\n"
        f"| recurrent ones among them | {', '.join(recurs)} |\n"
    )


def written(page: str, recorded: dict[str, Any]) -> str:
    """The page with the present table."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(recorded)}{END}{after}"


def main(names: list[str]) -> int:
    warnings.filterwarnings("ignore")
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    results = []
    for model_type in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        found = result(model_type)
        results.append(found)
        print(json.dumps(found), flush=True)
    passed = [each for each in results if each["passed"]]
    print(f"{len(passed)} of {len(results)} are equal to {IMPLEMENTATION}")
    if not names:
        recorded = {"implementation": IMPLEMENTATION, "models": results}
        RESULT.write_text(json.dumps(recorded, indent=1) + "\n")
        TABLE.write_text(written(TABLE.read_text(), recorded))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
