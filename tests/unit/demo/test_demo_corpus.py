"""The demo corpus: the same for everyone, true, and well-formed."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from make_demo import facts
from make_demo.corpus import CHATS, KINDS, TEXTS, document, documents
from make_demo.exchanges import TOO_LARGE, TOPICS
from make_demo.turns import Document, Message, reply_text, spans

SAMPLE = list(documents(20, 4000))
TURNS = [
    (asked.content, answered.content)
    for doc in SAMPLE
    for asked, answered in zip(doc.messages, doc.messages[1:], strict=False)
    if asked.role == "user"
]


def digest(docs: list[Document]) -> str:
    return hashlib.sha256(json.dumps([[doc.kind, spans(doc)] for doc in docs]).encode()).hexdigest()


def test_the_first_documents_never_change() -> None:
    # The shipped weights were trained on exactly this text: a change here means that they must be made again.
    assert digest(SAMPLE[:1000]) == "da3a96aee1441b59dede0155c3b2d712591a0936de87f817e98df1f009735ce7"


def test_a_document_depends_on_seed_and_index_alone() -> None:
    assert document(20, 777) == SAMPLE[777]
    assert list(documents(20, 5, start=100)) == SAMPLE[100:105]
    assert digest(list(documents(21, 100))) != digest(SAMPLE[:100])


def test_every_kind_of_document_and_topic_occurs() -> None:
    assert {doc.kind for doc in SAMPLE} == {*CHATS, *TEXTS, "fim", "json", "thinking", "tools", "record", "forced"}
    assert all(weight > 0 for weight, _ in KINDS.values())
    assert all(weight > 0 for weight, _ in TOPICS.values())
    assert {bool(doc.text) != bool(doc.messages) for doc in SAMPLE} == {True}


def test_chats_alternate_and_end_with_an_answer() -> None:
    for doc in SAMPLE:
        roles = " ".join(m.role for m in doc.messages if m.role != "system")
        assert re.fullmatch(r"(user assistant( tool( tool)? assistant)? )*", f"{roles} ".lstrip())
        assert roles.endswith("assistant") or not roles
        assert all(m.content.strip() or m.calls for m in doc.messages)
        assert not any("<|" in m.content for m in doc.messages)
        assert doc.kind == "fim" or "<|" not in doc.text


def test_all_sums_are_right() -> None:
    checked = 0
    for doc in SAMPLE:
        plain = "" if doc.kind == "fim" else doc.text  # a hole may begin within a number
        for text in [plain, *(m.content for m in doc.messages if m.role == "assistant")]:
            for a, sign, b, result in re.findall(r"(\d+) ?([+*-]) ?(\d+) ?= ?(-?\d+)", text):
                x, y = int(a), int(b)
                assert int(result) == {"+": x + y, "-": x - y, "*": x * y}[sign]
                checked += 1
    assert checked > 1000


def test_large_sums_are_declined() -> None:
    declined = [question for question, answer in TURNS if answer == TOO_LARGE]
    assert declined
    assert all(any(int(n) >= 100 for n in re.findall(r"\d+", question)) for question in declined)


def test_json_answers_and_documents_parse() -> None:
    answers = [answer for _, answer in TURNS if answer and answer[0] in "{["]
    texts = [doc.text for doc in SAMPLE if doc.kind == "json_text"]
    assert len(answers) > 100
    assert len(texts) > 20
    for text in [*answers, *texts]:
        assert isinstance(json.loads(text), dict | list)


def test_asked_values_appear_in_the_json_object() -> None:
    asked = re.compile(r"a person named (\w+) who is (\d+) years old and lives in (\w+)")
    found = [(asked.search(question), answer) for question, answer in TURNS]
    matches = [(match, json.loads(answer)) for match, answer in found if match]
    assert matches
    for match, person in matches:
        assert person == {"name": match[1], "age": int(match[2]), "city": match[3]}


def test_lists_have_the_asked_length() -> None:
    words = "|".join(facts.NUMBER_WORDS)
    checked = 0
    for question, answer in TURNS:
        asked = re.search(rf"\b({words}|\d)\b", question.lower())
        if answer.startswith("- ") and asked:
            word = asked[1]
            count = facts.NUMBER_WORDS.index(word) if word in facts.NUMBER_WORDS else int(word)
            assert len(set(answer.splitlines())) == count
            checked += 1
    assert checked > 50


def test_a_name_is_remembered() -> None:
    chats = [doc.messages for doc in SAMPLE if doc.kind == "name_memory"]
    assert chats
    for messages in chats:
        said = next(m for m in messages if m.role == "user").content
        name = messages[-1].content.removeprefix("Your name is ").removesuffix(".")
        assert re.search(rf"\b{name}\b", said)


@pytest.mark.parametrize("she", [True, False])
def test_stories_keep_to_one_pronoun(she: bool) -> None:
    stories = [doc.text for doc in SAMPLE if doc.kind == "story_text"]
    own, other = ("she|her", "he|his|him") if she else ("he|his|him", "she|her")
    matching = [s for s in stories if re.search(rf"\b({own})\b", s)]
    assert matching
    for text in matching:
        assert not re.search(rf"\b({other})\b", text)


def called(doc: Document) -> Iterator[Message]:
    return (message for message in doc.messages if message.calls)


def fits(value: Any, schema: Any) -> bool:
    """As JSON schema has it, for the few words that the corpus uses."""
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if schema["type"] == "object":
        known = schema["properties"]
        present = set(schema.get("required", [])) <= set(value) <= set(known)
        return present and all(fits(item, known[key]) for key, item in value.items())
    if schema["type"] == "array":
        return all(fits(item, schema["items"]) for item in value)
    kinds = {"string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None)}
    right_kind = isinstance(value, kinds[schema["type"]]) and isinstance(value, bool) == (schema["type"] == "boolean")
    return right_kind and value in schema.get("enum", [value])


def test_calls_match_the_list_of_tools() -> None:
    checked = 0
    for doc in SAMPLE:
        schemas = {tool["name"]: tool["parameters"] for tool in doc.tools}
        assert len(schemas) == len(doc.tools)
        for message in called(doc):
            for call in message.calls:
                assert fits(call.arguments, schemas[call.name])
                checked += 1
    assert checked > 1000


def test_what_is_called_with_stands_in_the_question() -> None:
    checked = 0
    for doc in SAMPLE:
        if doc.kind != "tools":
            continue
        question = ""
        for message in doc.messages:
            question = message.content.lower() if message.role == "user" else question
            for call in message.calls:
                strings = [value for value in call.arguments.values() if isinstance(value, str)]
                for value in strings:
                    words = re.findall(r"[a-z0-9]+", value.lower())
                    signs = {"*": "times|multiply|\\*", "-": "minus|subtract|-", "+": "plus|add|\\+"}
                    assert value in ("celsius", "on", "off") or all(word in question for word in words), (
                        value,
                        question,
                    )
                    assert all(re.search(signs[sign], question) for sign in re.findall(r" ([-+*]) ", value))
                    checked += 1
    assert checked > 500


def test_replies_follow_their_results() -> None:
    for doc in SAMPLE:
        for before, message in zip(doc.messages, doc.messages[1:], strict=False):
            if before.role == "assistant" and before.calls:
                assert message.role == "tool"
            if before.role == "tool" and message.role == "assistant":
                numbers = re.findall(r"\d+", message.content)
                said = " ".join(m.content for m in doc.messages[: doc.messages.index(message)])
                assert all(number in said for number in numbers)


def test_only_the_answer_counts_in_the_loss() -> None:
    forced = [doc for doc in SAMPLE if doc.kind == "forced"]
    assert forced
    for doc in forced:
        learned = "".join(text for text, weight in spans(doc) if weight == 1.0)
        whole = reply_text(doc.messages[-1]) + "<|im_end|>"
        assert whole.endswith(learned)
        assert whole.removesuffix(learned).startswith('<tool_call>\n{"name": "')


def test_thoughts_about_sums_are_right_and_lead_to_the_answer() -> None:
    checked = 0
    for doc in SAMPLE:
        last = doc.messages[-1] if doc.messages else None
        if last is None or last.thought is None or last.num_given:
            continue
        sums = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", last.thought)
        for a, sign, b, value in sums:
            assert int(value) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        if sums and doc.kind == "thinking":
            assert last.content.endswith(f"= {sums[-1][3]}")
            checked += 1
        assert 1 <= last.thought.count(".") <= 6
    assert checked > 100


def test_holes_are_filled_with_what_was_there() -> None:
    for doc in SAMPLE:
        if doc.kind == "fim":
            prompt, hole = doc.text[: doc.num_given], doc.text[doc.num_given :]
            assert prompt.startswith("<|fim_prefix|>")
            assert prompt.endswith("<|fim_middle|>")
            assert "<|fim" not in hole
