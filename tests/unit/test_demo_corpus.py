"""The demo corpus: the same for everyone, true, and well-formed."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from make_demo import facts
from make_demo.corpus import CHATS, TEXTS, Document, document, documents
from make_demo.exchanges import TOO_LARGE, TOPICS

SAMPLE = list(documents(20, 4000))
TURNS = [
    (asked.content, answered.content)
    for doc in SAMPLE
    for asked, answered in zip(doc.messages, doc.messages[1:], strict=False)
    if asked.role == "user"
]


def digest(docs: list[Document]) -> str:
    rows = [[doc.kind, doc.text, [[m.role, m.content] for m in doc.messages]] for doc in docs]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def test_the_first_documents_never_change() -> None:
    # The shipped weights were trained on exactly this text: a change here means that they must be made again.
    assert digest(SAMPLE[:1000]) == "3bffbadbf7cc86a1ab18a8b93c29db03efd919e1843e7506dad2ed81e98a4ca5"


def test_a_document_depends_on_seed_and_index_alone() -> None:
    assert document(20, 777) == SAMPLE[777]
    assert list(documents(20, 5, start=100)) == SAMPLE[100:105]
    assert digest(list(documents(21, 100))) != digest(SAMPLE[:100])


def test_every_kind_of_document_and_topic_occurs() -> None:
    assert {doc.kind for doc in SAMPLE} == {*CHATS, *TEXTS}
    assert all(weight > 0 for weight, _ in TOPICS.values())
    assert {bool(doc.text) != bool(doc.messages) for doc in SAMPLE} == {True}


def test_chats_alternate_and_end_with_an_answer() -> None:
    for doc in SAMPLE:
        roles = [m.role for m in doc.messages if m.role != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(m.content.strip() for m in doc.messages)
        assert not any("<|" in text for text in [doc.text, *(m.content for m in doc.messages)])


def test_all_sums_are_right() -> None:
    checked = 0
    for doc in SAMPLE:
        for text in [doc.text, *(m.content for m in doc.messages if m.role == "assistant")]:
            for a, sign, b, result in re.findall(r"(\d+) ?([+*-]) ?(\d+) ?= ?(\d+)", text):
                x, y = int(a), int(b)
                assert int(result) == {"+": x + y, "-": x - y, "*": x * y}[sign]
                checked += 1
    assert checked > 1000


def test_large_sums_are_declined() -> None:
    declined = [question for question, answer in TURNS if answer == TOO_LARGE]
    assert declined
    assert all(any(int(n) >= 100 for n in re.findall(r"\d+", question)) for question in declined)


def test_json_answers_and_documents_parse() -> None:
    answers = [answer for _, answer in TURNS if answer[0] in "{["]
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
