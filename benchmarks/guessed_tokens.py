"""Tokens a second with guessed tokens over those without, where the answers are real text.

    python benchmarks/guessed_tokens.py MODEL_DIRECTORY [--quantization int4] [--streams 1,32] [--rounds 5] ...

Two engines in this process take turns at the same prompts, one with the drafter, one without; ratios are of one round.
The weights may be random: each draw is replaced by the text's next token, after the model has computed its row, so that
steps cost what they cost and drafts are accepted as often as for a model that writes this text. The texts are Python's
own library and its documentation, cut by a tokenizer that is trained on the other half of them:

    rewrite   a function of the prompt with one name replaced
    json      an array of objects of one schema, filled from a list in the prompt
    quotes    sentences of another text, in turns with sentences of the prompt
    chat      a text that the prompt names and does not contain

A run before the first round fills the prefix cache, so that the rounds measure decoding.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from quire_engine.build import BuiltEngine, build, resolve
from quire_engine.contract.batch import Batch, SampledToken, StepResult
from quire_engine.contract.config import EngineConfig
from quire_engine.contract.limits import SchedulerLimits
from quire_engine.contract.types import GenerationRequest, SamplingParams, StepOutput, StopParams
from quire_engine.engine import Engine, StepExecutor

VOCABULARY = 32_000
LIBRARY = Path(ast.__file__).parent
MOST_PROMPT = 700  # tokens of a prompt that are kept, its last


class Task(NamedTuple):
    """A prompt and the text that answers it."""

    prompt: str
    answer: str


class Ids(NamedTuple):
    """The same in tokens."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Texts:
    """Python's library in two halves, one for the tokenizer and one for the tasks."""

    def __init__(self) -> None:
        sources = [path.read_text(errors="replace") for path in sorted(LIBRARY.glob("*.py"))]
        names = sorted(topics)
        self.tokenizer = _tokenizer([*sources[::2], *(topics[name] for name in names[::2])])
        self._sources = [(source, ast.parse(source)) for source in sources[1::2]]
        self._prose = [topics[name] for name in names[1::2]]
        self._dice = random.Random(5)

    def rewrites(self) -> Iterator[Task]:
        """Functions of some length, with the name that they use most replaced."""
        for source, tree in self._sources:
            for node in tree.body:
                text = ast.get_source_segment(source, node) or ""
                if not isinstance(node, ast.FunctionDef) or not 1500 < len(text) < 6000:
                    continue
                used = [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and len(each.id) > 2]
                name = max(sorted(set(used)), key=used.count)
                new = f"the_{name}"
                yield Task(f"Rename {name} to {new} here:\n\n{text}\n\n", re.sub(rf"\b{name}\b", new, text))

    def arrays(self) -> Iterator[Task]:
        """Functions as objects of one schema: name, arguments, line, whether documented, and its first words."""
        for source, tree in self._sources:
            nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)][:40]
            if len(nodes) < 8:
                continue
            lines = [f"{ast.get_source_segment(source, node) or ''}".split("\n", 1)[0] for node in nodes]
            objects = [
                {
                    "name": node.name,
                    "line": node.lineno,
                    "arguments": [each.arg for each in node.args.args],
                    "documented": ast.get_docstring(node) is not None,
                    "summary": (ast.get_docstring(node) or "").split("\n", 1)[0],
                }
                for node in nodes
            ]
            yield Task("The functions as JSON:\n\n" + "\n".join(lines) + "\n\n", json.dumps(objects, indent=2))

    def quotes(self) -> Iterator[Task]:
        """Two sentences of another text, then one of the prompt's, and so on."""
        for text in self._prose:
            said, own = _sentences(text)[:20], _sentences(self._dice.choice(self._prose))
            if len(said) < 12 or len(own) < 12 or said[0] == own[0]:
                continue
            quoted = self._dice.sample(said, 6)
            parts = [f'{own[2 * i]} {own[2 * i + 1]} "{quote}"' for i, quote in enumerate(quoted)]
            yield Task(f"Sum this up with quotes:\n\n{' '.join(said)}\n\n", " ".join(parts))

    def chats(self) -> Iterator[Task]:
        """Prose that the prompt does not have."""
        for text in self._prose:
            title, _, body = text.partition("\n")
            if len(body) > 2500:
                yield Task(f"What is {title}? Explain it at length.\n\n", body)

    def tasks(self, kind: str, count: int, most_tokens: int) -> list[Ids]:
        """As many tasks, each answer as long."""
        made: dict[str, Callable[[], Iterator[Task]]] = {
            "rewrite": self.rewrites, "json": self.arrays, "quotes": self.quotes, "chat": self.chats,
        }  # fmt: skip
        found = []
        for task in made[kind]():
            prompt, answer = (tuple(self.tokenizer.encode(text).ids) for text in task)
            if len(answer) >= most_tokens:
                found.append(Ids(prompt[-MOST_PROMPT:], answer[:most_tokens]))
        if not found:
            raise SystemExit(f"no text of {most_tokens} tokens for {kind}")
        self._dice.shuffle(found)
        # What is left over is asked for twice: another prompt makes it a sequence with blocks of its own.
        return [Ids((i % 256, *found[i % len(found)].prompt), found[i % len(found)].answer) for i in range(count)]


def _sentences(text: str) -> list[str]:
    return [" ".join(each.split()) for each in re.split(r"(?<=[.:])\s+", text) if 40 < len(each) < 300]


def _tokenizer(texts: Sequence[str]) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Written:
    """An executor whose draws are replaced by what the texts say, with the drafts accepted that agree."""

    def __init__(self, executor: StepExecutor) -> None:
        self.max_in_flight, self.forget_host_blocks = executor.max_in_flight, executor.forget_host_blocks
        self.prepare = executor.prepare
        self.wholes: dict[tuple[int, ...], tuple[int, ...]] = {}  # by prompt: prompt and answer
        self._executor = executor
        self._launched: deque[Batch] = deque()

    def launch(self, batch: Batch) -> None:
        """Compute the batch as it is."""
        self._launched.append(batch)
        self._executor.launch(batch)

    def collect(self) -> StepResult:
        """The result, with the texts' tokens for those drawn."""
        result, batch = self._executor.collect(), self._launched.popleft()
        for item in batch.items:
            if not item.wants_sample:
                continue
            whole, at = self.wholes[item.prompt_token_ids], item.end - item.num_drafts
            drafts = item.token_ids[len(item.token_ids) - item.num_drafts :]
            right = next((i for i, token in enumerate(drafts) if whole[at + i : at + i + 1] != (token,)), len(drafts))
            told = (*whole[at : at + right + 1], 0)[: right + 1]  # a token behind the end is never kept
            result.samples[item.sequence_id] = tuple(SampledToken(token_id=token) for token in told)
        return result


class Side:
    """An engine, with or without a drafter."""

    def __init__(self, asked: EngineConfig) -> None:
        self.built: BuiltEngine = build(asked)
        self.executor = Written(self.built.executor)
        self.engine = Engine(self.built.scheduler, self.executor)
        self.engine.on_step = self._take
        self.num_tokens = 0

    def _take(self, step: StepOutput) -> None:
        for output in step.outputs:
            if output.error is not None:
                raise SystemExit(output.error)
            self.num_tokens += len(output.token_ids)

    def run(self, tasks: Sequence[Ids], most: int) -> tuple[float, float]:
        """Tokens a second, and tokens a decode, of answers with `most` tokens at once."""
        self.executor.wholes = {task.prompt: (*task.prompt, *task.answer) for task in tasks}
        for number, task in enumerate(tasks):
            self.engine.submit(
                GenerationRequest(
                    request_id=f"r{number}",
                    prompt_token_ids=task.prompt,
                    sampling=SamplingParams(temperature=0.0),
                    stop=StopParams(max_new_tokens=most),
                )
            )
        before = self.built.scheduler.stats()
        self.num_tokens, decodes, began = 0, 0, time.perf_counter()
        while self.engine.has_work:
            self.engine.step()
            decodes += self.built.scheduler.stats().decode_tokens
        seconds = time.perf_counter() - began
        accepted = self.built.scheduler.stats().total_accepted_tokens - before.total_accepted_tokens
        return self.num_tokens / seconds, 1.0 + accepted / max(decodes, 1)


def measure(sides: dict[str, Side], tasks: Sequence[Ids], rounds: int) -> list[tuple[float, float, float]]:
    """(tokens a second without, with, tokens a decode) of each round."""
    length = len(tasks[0].answer)
    for side in sides.values():
        side.run(tasks, 1)
    found = []
    for number in range(rounds + 1):
        order = ("off", "on") if number % 2 else ("on", "off")
        said = {name: sides[name].run(tasks, length) for name in order}
        if number:  # in the first round costs are learnt, and pages touched
            found.append((said["off"][0], *said["on"]))
    return found


def sides(asked: argparse.Namespace, choice: str) -> dict[str, Side]:
    """The two engines, with blocks for all streams."""
    streams = max(asked.streams)
    config = EngineConfig(
        model=asked.model,
        device="cpu",
        quantization=asked.quantization,
        max_model_len=2048,
        limits=SchedulerLimits(max_num_seqs=max(streams, 8)),
    )
    blocks = (streams + 1) * (MOST_PROMPT + 2 + asked.tokens + 32) // config.limits.block_size + 64
    config = replace(config, kv_memory=blocks * resolve(config).bytes_per_block)
    return {"off": Side(config), "on": Side(replace(config, speculation=choice))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="directory of a checkpoint with at least 32,000 tokens")
    parser.add_argument("--quantization", choices=("int8", "int4"), help="of the weights (none)")
    parser.add_argument("--speculation", default="suffix", help="the drafter (suffix)")
    parser.add_argument("--kinds", default="rewrite,json,quotes,chat", help="of answers")
    parser.add_argument("--streams", default="1,32", help="numbers of streams (1,32)")
    parser.add_argument("--tokens", type=int, default=192, help="of an answer (192)")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    asked.streams = [int(each) for each in asked.streams.split(",")]
    texts, both = Texts(), sides(asked, asked.speculation)
    table = Table(title=f"{asked.model}, {asked.quantization or 'bf16'}, --speculation {asked.speculation}")
    for column in ("answers", "streams", "tokens/s off", "on", "tokens a decode", "on / off", "range"):
        table.add_column(column, justify="left" if column == "answers" else "right")
    for streams in asked.streams:
        for kind in asked.kinds.split(","):
            found = measure(both, texts.tasks(kind, streams, asked.tokens), asked.rounds)
            off, on, tokens = (statistics.median(column) for column in zip(*found, strict=True))
            ratios = sorted(b / a for a, b, _ in found)
            cells = (kind, str(streams), f"{off:.1f}", f"{on:.1f}", f"{tokens:.2f}")
            table.add_row(*cells, f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f}-{ratios[-1]:.2f}")
            print(*cells, *(f"{each:.2f}" for each in ratios), flush=True)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
