"""The exercises beside the page /learn, each found done by what the engine's own log says that it did.

Promises: nothing is done by saying so; what counts is a step, a decision or a block of the engine that serves, and the
evidence is named. The memory of a server's past is bounded. Must not know: HTTP, the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import median
from typing import Any

Step = Mapping[str, Any]  # the fields of a `StepRecord`
Answer = Mapping[str, Any]  # the engine's answer to the question `view`

SHARED_BLOCKS = 4
HIT_TOKENS = 64
CHUNKS = 3
SLOWER = 2.0  # how many times a step of decodes alone a step with a chunk may take
TOLERANCE = 1.6  # how far an answer may be from what was measured, either way: steps of one size differ as much
FEWEST_DECODES, FEWEST_MIXED = 20, 8  # measured steps before an answer is looked at
_NEXT = (1, 2)  # steps after an end; the second where steps are planned ahead of results
_MOST_CONTENTS, _MOST_REQUESTS, _MOST_STEPS = 1024, 1024, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Exercise:
    """A task, and the lesson that it belongs to. `asks`: for a number; empty: what happens is enough."""

    name: str
    lesson: str
    title: str
    task: str
    asks: str = ""


EXERCISES = (
    Exercise(
        name="scattered",
        lesson="Paged KV",
        title="A table of no neighbours",
        task="Bring a request to hold four blocks or more that are not one behind the other in the pool.",
    ),
    Exercise(
        name="share",
        lesson="Paged KV",
        title=f"{SHARED_BLOCKS} blocks for two",
        task=f"Make two requests share {SHARED_BLOCKS} blocks at the same time.",
    ),
    Exercise(
        name="copy",
        lesson="Paged KV",
        title="Copy on write",
        task="Make the engine copy a block because several sequences share it and one of them is about to write to it.",
    ),
    Exercise(
        name="mixed",
        lesson="Continuous batching",
        title="One step, two phases",
        task="Get a step that computes a part of one request's prompt and an output token of another request.",
    ),
    Exercise(
        name="seat",
        lesson="Continuous batching",
        title="The place of who has ended",
        task="Let a request wait for a slot, and enter in the step after another one ends, while a third goes on.",
    ),
    Exercise(
        name="preemption",
        lesson="Continuous batching",
        title="Preempted, and the same tokens",
        task="Provoke a preemption of a request, and get the same tokens from the same prompt without one.",
    ),
    Exercise(
        name="chunks",
        lesson="Chunked prefill",
        title=f"A prompt in {CHUNKS} pieces",
        task=f"Get one prompt computed in {CHUNKS} steps or more, in each of which another request gets a token.",
    ),
    Exercise(
        name="itl",
        lesson="Chunked prefill",
        title="The chunk that bounds the ITL",
        task=f"With which chunk, in prompt tokens, does a step take {SLOWER:g} times as long as one with output tokens"
        " alone? Bring about enough steps of both kinds, look at their times, and answer with a number.",
        asks="prompt tokens",
    ),
    Exercise(
        name="hit",
        lesson="Prefix cache",
        title="Computed once",
        task=f"Let a request enter with {HIT_TOKENS} tokens or more that are cached.",
    ),
    Exercise(
        name="wait",
        lesson="Prefix cache",
        title="Worth waiting for",
        task="Let a request wait for a prefix that another one is computing, and enter with it.",
    ),
    Exercise(
        name="evicted",
        lesson="Prefix cache",
        title="Computed again",
        task=f"Send a prompt that begins with {HIT_TOKENS} tokens of an earlier one, none of them cached any more.",
    ),
)
BY_NAME = {each.name: each for each in EXERCISES}


@dataclass(slots=True)
class _Request:
    """A request, as far as exercises depend on it."""

    shared: int = 0  # tokens of its prompt that begin an earlier content
    preempted: bool = False
    waits: str = ""  # the reason, while it waits
    waited_for_prefix: bool = False
    mixed_chunks: list[int] = field(default_factory=list)  # of its prompt, in steps with tokens of others


class Progress:
    """The steps and blocks that were seen, and the exercises done by them. Takes the engine's answers in order."""

    def __init__(self) -> None:
        self.done: dict[str, str] = {}  # the evidence by exercise
        self.said: dict[str, str] = {}  # to the last answer, by exercise
        self._last = 0  # the last step
        self._ordinal = 0  # of the last event
        self._requests: dict[str, _Request] = {}
        self._contents: dict[int, tuple[str, int, int]] = {}  # by ordinal: request, tokens, the first equal content
        self._times: deque[tuple[int, int, float]] = deque(maxlen=_MOST_STEPS)  # prompt, output tokens, seconds
        self._ended: tuple[int, frozenset[str]] = 0, frozenset()  # the last step with an end, and who goes on

    def begin_again(self) -> None:
        """Forget what is done and what was seen; what happens from now on counts."""
        self.done.clear()
        self.said.clear()
        self._times.clear()
        self._forget()

    def begin_anew(self) -> None:
        """Another engine process: its steps and events count from the first one. What is done stays done."""
        self._last = self._ordinal = 0
        self._forget()

    def _forget(self) -> None:
        self._requests.clear()
        self._contents.clear()
        self._ended = 0, frozenset()

    def take(self, answer: Answer, steps: Sequence[Step]) -> None:
        """Look at an answer, and at those of its steps that were not seen before and have results."""
        for event in answer["events"]:
            if event["ordinal"] > self._ordinal:
                self._ordinal = event["ordinal"]
                self._take_event(event)
        for step in steps:
            if step["step_id"] > self._last:
                self._last = step["step_id"]
                self._take_step(step)
        self._take_tables(answer["pool"]["tables"])
        while len(self._requests) > _MOST_REQUESTS:
            del self._requests[next(iter(self._requests))]
        while len(self._contents) > _MOST_CONTENTS:
            del self._contents[next(iter(self._contents))]

    def answer(self, name: str, number: float) -> str:
        """Grade an answer to an exercise that asks for a number; returns what is to be said of it.

        Raises KeyError where no such exercise asks for one.
        """
        if not BY_NAME[name].asks:
            raise KeyError(name)
        self.said[name] = _GRADERS[name](self, number)
        return self.said[name]

    def states(self) -> list[dict[str, object]]:
        """Each exercise in order: its name, whether it is done, and the evidence or what is to be said."""
        return [
            {
                "name": each.name,
                "done": each.name in self.done,
                "said": self.done.get(each.name, self.said.get(each.name, "")),
            }
            for each in EXERCISES
        ]

    def _find(self, name: str, evidence: str) -> None:
        self.done.setdefault(name, evidence)

    def _of(self, request_id: str) -> _Request:
        return self._requests.setdefault(request_id, _Request())

    def _take_event(self, event: Mapping[str, Any]) -> None:
        request_id, (other, common) = event["request_id"], event["shared"]
        if event["kind"] == "submit":
            self._requests[request_id] = _Request(shared=common)
        elif event["kind"] == "end" and event["num_tokens"]:
            size = event["num_tokens"]
            known = self._contents.get(other)
            is_equal = known is not None and known[1] == size == common
            first = known[2] if known is not None and is_equal else event["ordinal"]
            self._contents[event["ordinal"]] = request_id, size, first
            equal = {each for each, _, its_first in self._contents.values() if its_first == first}
            hit = [each for each in equal if self._of(each).preempted]
            spared = [each for each in equal if not self._of(each).preempted]
            if hit and spared:
                self._find("preemption", f"{hit[0]} was preempted and {spared[0]} was not: the same {size} tokens")

    def _take_step(self, step: Step) -> None:
        number, before = step["step_id"], {each for each, one in self._requests.items() if one.waits == "slots"}
        ended_at, stayed = self._ended
        running = {request_id for request_id, *_ in step["slices"]}
        for decision in step["decisions"]:
            one = self._of(decision["request_id"])
            match decision["kind"]:
                case "waits":
                    one.waits = decision["reason"]
                    one.waited_for_prefix = one.waited_for_prefix or one.waits == "prefix"
                case "preempted":
                    one.preempted, one.waits = True, "kv"
                case "enters":
                    self._take_entry(number, decision, one)
                    if decision["request_id"] in before and number - ended_at in _NEXT and stayed & running:
                        self._find("seat", f"step {number}: {decision['request_id']} has the place of who has ended")
                    one.waits = ""
        self._take_slices(step)
        if step["copies"]:
            source, target = step["copies"][0]
            self._find("copy", f"step {number}: block {source} was copied to {target}")
        if step["ends"]:
            ended = {request_id for request_id, *_ in step["ends"]}
            self._ended = number, frozenset(running - ended)
        if step["seconds"] and not any(step["swaps"]):
            self._times.append((step["prefill_tokens"], step["decode_tokens"], step["seconds"]))

    def _take_entry(self, number: int, decision: Mapping[str, Any], one: _Request) -> None:
        request_id, cached = decision["request_id"], decision["num_tokens"]
        if one.preempted:  # what it has computed itself is no hit
            return
        if cached >= HIT_TOKENS:
            self._find("hit", f"step {number}: {request_id} has {cached} tokens from the cache")
        if one.waited_for_prefix and cached:
            self._find("wait", f"step {number}: {request_id} waited, and has {cached} tokens that another has computed")
        if one.shared >= HIT_TOKENS and not cached:
            self._find(
                "evicted",
                f"step {number}: {request_id} begins with {one.shared} tokens of before and computes them again",
            )

    def _take_slices(self, step: Step) -> None:
        if not (step["prefill_tokens"] and step["decode_tokens"]):
            return
        self._find(
            "mixed",
            f"step {step['step_id']}: {step['prefill_tokens']} prompt tokens and {step['decode_tokens']} output tokens",
        )
        for request_id, _, _, size in step["slices"]:
            if size > 1 and not self._of(request_id).preempted:
                chunks = self._of(request_id).mixed_chunks
                chunks.append(size)
                if len(chunks) >= CHUNKS:
                    sizes = ", ".join(map(str, chunks[:8]))
                    self._find("chunks", f"the prompt of {request_id} was computed in pieces of {sizes} tokens")

    def _take_tables(self, tables: Sequence[Mapping[str, Any]]) -> None:
        for table in tables:
            blocks = table["blocks"]
            if len(blocks) >= SHARED_BLOCKS and any(b - a != 1 for a, b in pairwise(blocks)):
                self._find("scattered", f"{table['request_id']} has the blocks {', '.join(map(str, blocks[:12]))}")
        if "share" in self.done:
            return
        for one, other in combinations(tables, 2):
            common = set(one["blocks"]) & set(other["blocks"])
            if one["request_id"] != other["request_id"] and len(common) >= SHARED_BLOCKS:
                named = ", ".join(map(str, sorted(common)[:12]))
                self._find("share", f"{one['request_id']} and {other['request_id']} share the blocks {named}")

    def _grade_itl(self, number: float) -> str:
        """The chunk whose step takes `SLOWER` times as long, by the times of this server's own steps."""
        alone = [seconds for prompt, output, seconds in self._times if output and not prompt]
        mixed = [(prompt, seconds) for prompt, output, seconds in self._times if output and prompt >= FEWEST_MIXED]
        if len(alone) < FEWEST_DECODES or len(mixed) < FEWEST_MIXED:
            return (
                f"so far {len(alone)} steps had output tokens alone and {len(mixed)} a chunk of a prompt beside them:"
                f" {FEWEST_DECODES} and {FEWEST_MIXED} are needed"
            )
        base = median(alone)
        each = median([(seconds - base) / prompt for prompt, seconds in mixed])
        if each <= 0.0:
            return "here chunks take no time that could be measured: let others have the machine less, and try again"
        right = (SLOWER - 1.0) * base / each
        measured = f"a step of output tokens takes {1e3 * base:.2f} ms here, a prompt token {1e3 * each:.3f} ms more"
        if right / TOLERANCE <= number <= right * TOLERANCE:
            self._find("itl", f"{number:g} is right: {measured}, so {right:.0f} tokens double it")
            return self.done["itl"]
        return f"{number:g} is too {'many' if number > right else 'few'}: {measured}"


_GRADERS: dict[str, Callable[[Progress, float], str]] = {"itl": Progress._grade_itl}


def described() -> Iterator[dict[str, str]]:
    """The exercises for the page."""
    for each in EXERCISES:
        yield {"name": each.name, "lesson": each.lesson, "title": each.title, "task": each.task, "asks": each.asks}
