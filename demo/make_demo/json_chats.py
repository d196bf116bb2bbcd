"""Chats whose answer is JSON: by a schema in the prompt, by named keys, by a word in the system turn, or by force.

Promises that the answer parses and holds the values of the text under the keys that were asked for.
Must not know tokens, nor how turns are rendered.
"""

from __future__ import annotations

import json
from random import Random

from make_demo.records import Record, record
from make_demo.schemas import STYLES, object_schema
from make_demo.turns import Message

ASK_SCHEMA = [
    "Answer only with JSON that matches this schema:\n{}",
    "Answer in JSON by this schema:\n{}",
    "The answer must be a JSON object of this JSON schema:\n\n{}\n\nWrite the object, not the schema.",
    "Here is the schema of the answer:\n```json\n{}\n```\nReply with one JSON object and nothing else.",
    "Use this JSON schema: {}",
    "Extract the data as JSON. The schema is:\n{}",
    "Read the text and fill in an object of this json_schema:\n\n{}\n\nReturn JSON only.",
]
ASK_KEYS = [
    "Answer in JSON with the keys {}.",
    "Reply with a JSON object with {}.",
    "Return JSON with the fields {}.",
    "Extract {} as JSON.",
    "Give {} as JSON.",
]
ASK_PLAINLY = [
    "Answer in JSON.",
    "Always answer in JSON.",
    "Reply in JSON.",
    "Output JSON only.",
    "You answer with JSON.",
]
HEADS = ["", "", "", "Text: ", "Extract: ", "Extract the information: ", "Extract the event information. ", "Input: "]
TAILS = ["", "", "", " Answer in JSON.", " Return JSON.", " Reply with JSON."]
BEFORE = [
    "You are a helpful assistant.",
    "Extract the information.",
    "Extract the event information.",
    "You extract data.",
]


def answer_text(rng: Random, values: dict[str, object]) -> str:
    """Mostly as json.dumps writes it, sometimes on many lines."""
    if rng.random() < 0.06:
        return json.dumps(values, indent=2, ensure_ascii=False)
    return json.dumps(values, ensure_ascii=False)


def schema_text(rng: Random, item: Record) -> str:
    """The record's schema as clients paste it, now and then wrapped as in `response_format`."""
    schema: object = object_schema(rng.choice(STYLES), item.title, item.fields)
    if rng.random() < 0.1:
        schema = {"name": item.title, "schema": schema, "strict": True}
    return json.dumps(schema, indent=rng.choice([None, None, None, 2]))


def json_by_schema(rng: Random) -> tuple[Message, ...]:
    item = record(rng)
    ask = rng.choice(ASK_SCHEMA).format(schema_text(rng, item))
    said = rng.choice(HEADS) + item.text
    if rng.random() < 0.3:
        ask = f"{rng.choice(BEFORE)}\n\n{ask}"
    answer = Message(role="assistant", content=answer_text(rng, item.values))
    if rng.random() < 0.6:
        return (Message(role="system", content=ask), Message(role="user", content=said), answer)
    joined = f"{ask}\n\n{said}" if rng.random() < 0.5 else f"{said}\n\n{ask}"
    return (Message(role="user", content=joined), answer)


def json_by_keys(rng: Random) -> tuple[Message, ...]:
    item = record(rng)
    names = [rng.choice([f"{field.name}", f'"{field.name}"']) for field in item.fields]
    listed = ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
    ask = rng.choice(ASK_KEYS).format(listed)
    answer = Message(role="assistant", content=answer_text(rng, item.values))
    if rng.random() < 0.5:
        return (Message(role="system", content=ask), Message(role="user", content=item.text), answer)
    said = f"{item.text} {ask}" if rng.random() < 0.5 else f"{ask}\n{item.text}"
    return (Message(role="user", content=said), answer)


def json_by_force(rng: Random) -> tuple[Message, ...]:
    """No schema in sight: a grammar forces the answer to begin as an object, and the text gives the rest."""
    item = record(rng)
    answer = json.dumps(item.values, ensure_ascii=False)
    given, messages = answer.index(":") + 1, []
    chance = rng.random()
    if chance < 0.35:
        messages = [Message(role="system", content=rng.choice(ASK_PLAINLY))]
        given = answer.index('"') + 1
    elif chance < 0.6:
        messages = [Message(role="system", content=rng.choice(BEFORE))]
    said = rng.choice(HEADS) + item.text + rng.choice(TAILS)
    if said.endswith(("JSON.",)):
        given = answer.index('"') + 1
    reply = Message(role="assistant", content=answer, num_given=given)
    return (*messages, Message(role="user", content=said), reply)


JSON_CHATS = [(50, json_by_schema), (20, json_by_keys), (30, json_by_force)]


def json_chat(rng: Random) -> tuple[Message, ...]:
    """One question, answered in JSON."""
    return rng.choices([make for _, make in JSON_CHATS], [weight for weight, _ in JSON_CHATS])[0](rng)
