"""Scores a quire-demo checkpoint: greedy answers to documents that it was not trained on, and to requests as SDKs send.

Promises that an answer counts only if it is right to the letter, or for calls and JSON to the value.
Must not be imported by anything that serves, nor by the training.

    python -m make_demo.judge engine/quire_engine/demo/quire-demo --record
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from make_demo.client_requests import CLIENT_REQUESTS, ClientRequest
from make_demo.corpus import documents
from make_demo.model_card import model_card
from make_demo.turns import Call, Document, Message, reply_text, spans
from quire import LLM, SamplingParams
from quire_server.text.template_worker import environment

SEED = 21  # the training's is another
FIXED_ANSWERS = ["The capital of", "The opposite of", "After ", "Before ", " is called a ", " says: ", " legs."]
MAX_TOKENS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt, and whether what follows it is right."""

    kind: str
    prompt: str
    expected: str
    is_right: Callable[[str], bool]


def calls_in(reply: str) -> list[Call] | None:
    """The calls of a reply that is nothing but calls; None where it is not, or one does not parse."""
    calls = []
    for part in reply.split("<tool_call>")[1:]:
        try:
            body = json.loads(part.split("</tool_call>")[0])
            calls.append(Call(name=body["name"], arguments=body["arguments"]))
        except (ValueError, KeyError, TypeError):
            return None
    return calls if calls and reply.startswith("<tool_call>") else None


def json_in(reply: str) -> object:
    """The value, or None where the reply does not parse."""
    try:
        return json.loads(reply)
    except ValueError:
        return None


def cases_of(doc: Document) -> Iterator[Case]:
    """Each turn of the model in a document whose answer is determined by what comes before it."""
    for index, message in enumerate(doc.messages):
        if message.role != "assistant":
            continue
        before = replace(doc, messages=(*doc.messages[:index], replace(message, calls=(), content="", num_given=0)))
        prompt = "".join(text for text, _ in spans(before)).rsplit("<|im_start|>assistant\n", 1)[0]
        kind = kind_of(doc, message, doc.messages[index - 1].role)
        if kind:
            yield _case(kind, prompt + "<|im_start|>assistant\n", message)


def kind_of(doc: Document, message: Message, asked_by: str) -> str:
    """What the turn shows that the model can do; empty where many answers would be right."""
    short = len(message.content) < 60
    if message.thought is not None:
        kind = "thinking with tools" if doc.tools else "thinking"
        return kind if short and not message.num_given else ""
    if doc.kind == "record":
        return "records by a forced call"
    if doc.kind == "json":
        return "JSON without a schema" if message.num_given else "JSON, asked for"
    if doc.kind == "tools":
        answer = "answers from results" if asked_by == "tool" else "no tool fits" if short else ""
        return answer if not message.calls else "one call" if len(message.calls) == 1 else "two calls at once"
    return _plain_kind(message.content) if short else ""


def _plain_kind(answer: str) -> str:
    if re.fullmatch(r"\d+ [-+*] \d+ = \d+", answer):
        return "small sums"
    return "simple facts" if any(part in answer for part in FIXED_ANSWERS) else ""


def _case(kind: str, prompt: str, message: Message) -> Case:
    expected = reply_text(message)
    if message.thought is not None:
        return Case(kind=kind, prompt=f"{prompt}<think>\n", expected=expected, is_right=_after_thought(message))
    given = expected[: message.num_given]
    if message.calls:
        calls = list(message.calls)
        return Case(
            kind=kind, prompt=prompt + given, expected=expected, is_right=lambda text: calls_in(given + text) == calls
        )
    if "JSON" in kind:
        value = json.loads(expected)
        same = _holds_only(prompt, value) if given else lambda found: found == value
        return Case(
            kind=kind, prompt=prompt + given, expected=expected, is_right=lambda text: same(json_in(given + text))
        )
    return Case(kind=kind, prompt=prompt, expected=expected, is_right=lambda text: text == expected)


def leaves(value: object) -> list[object]:
    """The texts, numbers and booleans in a JSON value."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if inner is None else [leaf for each in inner for leaf in leaves(each)]


def _holds_only(prompt: str, expected: object) -> Callable[[object], bool]:
    """Without a schema any keys are right: an object is, whose values are expected or stand in the prompt."""
    known = leaves(expected)

    def is_right(found: object) -> bool:
        texts = [leaf for leaf in leaves(found) if leaf not in known]
        return isinstance(found, dict) and bool(found) and all(f"{text}" in prompt for text in texts)

    return is_right


def _after_thought(message: Message) -> Callable[[str], bool]:
    """The block must close before the answer; the words of the thought are free."""

    def is_right(text: str) -> bool:
        thought, closing, reply = text.partition("\n</think>\n\n")
        right = calls_in(reply) == list(message.calls) if message.calls else reply == message.content
        return bool(thought and closing) and right

    return is_right


def client_case(request: ClientRequest, template: str) -> Case:
    """A request as a client sends it, through the checkpoint's own chat template."""
    prompt = (
        environment()
        .from_string(template)
        .render(
            messages=request.messages,
            tools=request.tools or None,
            add_generation_prompt=True,
            enable_thinking=request.thinking,
        )
    )

    def is_right(text: str) -> bool:
        reply = text.partition("</think>\n\n")[2] if request.thinking else text
        calls = [[call.name, dict(call.arguments)] for call in calls_in(reply) or []]
        found = calls if request.calls else json_in(reply) if request.value is not None else reply
        wanted = request.calls or (request.value if request.value is not None else None)
        return found == wanted if wanted is not None else "<tool_call>" not in reply and request.words in reply

    wanted = request.calls or request.value or request.words
    return Case(kind=f"as clients ask: {request.kind}", prompt=prompt, expected=str(wanted), is_right=is_right)


def cases(path: Path, each: int) -> list[Case]:
    """Up to `each` cases of every kind from the corpus, and all requests of clients."""
    counts: Counter[str] = Counter()
    chosen: list[Case] = []
    for doc in documents(SEED, 60 * each):
        for case in cases_of(doc):
            counts[case.kind] += 1
            if counts[case.kind] <= each:
                chosen.append(case)
    template = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    return [*chosen, *(client_case(request, template) for request in CLIENT_REQUESTS)]


Scores = dict[str, list[int]]  # of each kind: how many were right, how many were asked


def judge(path: Path, each: int) -> tuple[Scores, list[tuple[Case, str]]]:
    """The scores of a checkpoint, and the answers that were wrong."""
    asked = cases(path, each)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    with LLM(str(path), max_model_len=2048) as llm:
        outputs = llm.generate([case.prompt for case in asked], params, use_tqdm=False)
    scores: Scores = {}
    wrong = []
    for case, output in zip(asked, outputs, strict=True):
        text = output.outputs[0].text
        right = case.is_right(text)
        score = scores.setdefault(case.kind, [0, 0])
        score[0] += right
        score[1] += 1
        if not right:
            wrong.append((case, text))
    return dict(sorted(scores.items())), wrong


def main(arguments: list[str] | None = None) -> None:
    """Prints the scores; writes them into the folder's training.json and README.md with --record."""
    parser = argparse.ArgumentParser(description="Score a quire-demo checkpoint.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--each", type=int, default=50, help="cases of each kind from the corpus")
    parser.add_argument("--show", action="store_true", help="print what was wrong")
    parser.add_argument("--record", action="store_true", help="write the scores into the folder")
    chosen = parser.parse_args(arguments)
    scores, wrong = judge(chosen.path, chosen.each)
    if chosen.show:
        for case, text in wrong:
            print(f"---- {case.kind}\n{case.prompt[-400:]}\nexpected: {case.expected!r}\nwritten:  {text!r}")
    for kind, (right, asked) in scores.items():
        print(f"{kind:32} {right:3} of {asked}")
    if chosen.record:
        record = chosen.path / "training.json"
        training = {**json.loads(record.read_text(encoding="utf-8")), "scores": scores}
        record.write_text(json.dumps(training, indent=2) + "\n", encoding="utf-8")
        (chosen.path / "README.md").write_text(model_card(training), encoding="utf-8")


if __name__ == "__main__":
    main()
