"""Chats with tools: the call that fits, two at once, none, the answer from a result, and calls that are forced.

Promises that each call names a tool of the list with arguments by its schema, and that an answer repeats its result.
Must not know how turns are rendered or tokenized.
"""

from __future__ import annotations

import json
from random import Random

from make_demo.errands import any_tools
from make_demo.exchanges import topic_exchange
from make_demo.phrasing import vary
from make_demo.records import record
from make_demo.schemas import STYLES, Schema, heading, object_schema
from make_demo.thoughts import (
    THOUGHT_AFTER_ERROR,
    THOUGHT_AFTER_RESULT,
    thought_before_calls,
    thought_without_tool,
)
from make_demo.turns import Call, Document, Message
from make_demo.wishes import Tool, Wish

SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful assistant. Use the tools when they help.",
    "Use the tools to answer.",
    "You are a friendly agent.",
    "You can call tools.",
    "Be concise.",
]
ERRORS = [
    "not found",
    "timeout",
    "no connection",
    "access denied",
    "invalid input",
    "service is down",
    "too many requests",
]


def declare(rng: Random, style: str, tool: Tool) -> Schema:
    """The tool as a request lists it, in the order that the template writes."""
    declared: Schema = {"name": tool.name}
    if tool.description:
        declared["description"] = tool.description
    title = rng.choice([tool.name, f"{tool.name}_args", heading(tool.name).replace(" ", "")])
    declared["parameters"] = object_schema(style, title, tool.fields)
    return declared


def _call(style: str, wish: Wish, tool: Tool) -> Call:
    """The wish as a call, its arguments in the order of the schema; strict schemas want null for what is not said."""
    order = [field.name for field in tool.fields if style == "strict" or field.name in wish.arguments]
    return Call(name=tool.name, arguments={name: wish.arguments.get(name) for name in order})


def _error(rng: Random) -> tuple[str, str]:
    """What a failed tool returns, and the answer."""
    error = rng.choice(ERRORS)
    returned = rng.choice([f"Error: {error}", json.dumps({"error": error}), f"error: {error}", f"Tool failed: {error}"])
    return returned, f"I am sorry, the tool failed: {error}."


def _asked_together(rng: Random, wishes: list[Wish]) -> str:
    questions = [wish.question.rstrip("?. ") for wish in wishes]
    if rng.random() < 0.6 or questions[0][0].islower():
        rest = [question[0].lower() + question[1:] for question in questions[1:]]
        return " and ".join([questions[0], *rest]) + rng.choice(["?", "?", ".", ""])
    return rng.choice(["? ", ". "]).join(questions) + rng.choice(["?", "."])


def _wishes(rng: Random, tools: list[Tool]) -> tuple[str, list[tuple[Wish, Tool]]]:
    """What the user says, and the one or two wishes in it."""
    tool = rng.choice(tools)
    first = tool.wish(rng)
    if rng.random() > 0.2:
        plain = rng.random() < 0.7 or any(ch.isupper() for value in first.arguments.values() for ch in str(value))
        return first.question if plain else vary(rng, first.question), [(first, tool)]
    other = tool if rng.random() < 0.6 and tool.fields else rng.choice(tools)
    second = other.wish(rng)
    for value, again in zip(first.arguments.values(), second.arguments.values(), strict=False):
        cities = tool is other and tool.family in ("weather", "clock") and len(first.arguments) == 1
        if cities and len(second.arguments) == 1 and value != again and rng.random() < 0.7:
            said = first.question.rstrip("?. ") + rng.choice(
                [f" and in {again}?", f" and {again}?", f" and in {again}"]
            )
            return said, [(first, tool), (second, tool)]
    if (other is tool and first.arguments == second.arguments) or first.goal == second.goal:
        return first.question, [(first, tool)]
    return _asked_together(rng, [first, second]), [(first, tool), (second, other)]


def _covered(families: set[str], topic: str, question: str) -> bool:
    """Whether a tool of the list would answer a question that is meant to need none."""
    talk = question.lower()
    if any("arithmetic" in family or family == "calculator" for family in families) and topic in ("sum", "big_sum"):
        return True
    if "clock" in families and ("time" in talk or "date" in talk or "day is it" in talk):
        return True
    if "weather" in families and "weather" in talk:
        return True
    return topic == "unknown" and "search" in families


def tool_chat(rng: Random, *, thinking: bool) -> Document:
    """One to four exchanges over one list of tools; with `thinking` the last turn begins with a thought."""
    tools = any_tools(rng, rng.choice([1, 1, 1, 1, 2, 2, 2, 3, 3, 5]))
    style = rng.choice(STYLES)
    messages: list[Message] = []
    if rng.random() < 0.4:
        messages.append(Message(role="system", content=rng.choice(SYSTEMS)))
    thought = ""
    for _ in range(rng.choice([1, 1, 2, 2, 3, 3, 4])):
        if rng.random() < 0.22:
            topic, (question, answer) = topic_exchange(rng)
            while _covered({tool.family for tool in tools}, topic, question) or topic in ("story", "poem", "count"):
                topic, (question, answer) = topic_exchange(rng)
            messages += [Message(role="user", content=question), Message(role="assistant", content=answer)]
            thought = thought_without_tool(rng, topic, answer)
            continue
        said, wishes = _wishes(rng, tools)
        calls = tuple(_call(style, wish, tool) for wish, tool in wishes)
        messages += [Message(role="user", content=said), Message(role="assistant", calls=calls)]
        thought = thought_before_calls([(wish, tool.name) for wish, tool in wishes])
        if thinking and rng.random() < 0.3:
            break
        answers = []
        failed = rng.random() < 0.08
        for wish, _ in wishes:
            result, answer = _error(rng) if failed else (wish.result, wish.answer)
            messages.append(Message(role="tool", content=result))
            answers.append(answer)
        together = [answer if answer[-1] in ".!?" or len(answers) == 1 else f"{answer}." for answer in answers]
        messages.append(Message(role="assistant", content=" ".join(dict.fromkeys(together))))
        thought = THOUGHT_AFTER_ERROR if failed else THOUGHT_AFTER_RESULT
    if thinking:
        messages[-1] = Message(
            role="assistant", content=messages[-1].content, calls=messages[-1].calls, thought=thought
        )
    return Document(kind="tools", messages=tuple(messages), tools=tuple(declare(rng, style, tool) for tool in tools))


RECORD_NAMES = ["final_result", "final_result", "final_answer", "respond", "save", "extract"]
RECORD_TEXTS = ["The final response which ends this conversation", "Save the data.", "Extract the data.", ""]


def record_chat(rng: Random) -> Document:
    """A tool whose arguments are the data in a text, as clients do that ask for objects by way of tools."""
    item = record(rng)
    name = rng.choice([item.title, rng.choice(RECORD_NAMES), f"save_{item.title.lower()}"])
    text = rng.choice([*RECORD_TEXTS, f"Correctly extracted {item.title}", f"{an_object(item.title)}"])
    recorder = Tool(family="record", name=name, description=text, fields=item.fields, wish=_no_wish)
    others = any_tools(rng, rng.choice([0, 0, 0, 0, 1, 2]))
    listed = [tool for tool in [*others, recorder] if tool is recorder or tool.name != name]
    rng.shuffle(listed)
    style = rng.choice(STYLES)
    messages = [Message(role="user", content=rng.choice(["", "", "", "Extract: "]) + item.text)]
    if rng.random() < 0.4:
        ask = rng.choice([f"Call {name}.", "Extract the data.", "You extract data.", "You are a helpful assistant."])
        messages.insert(0, Message(role="system", content=ask))
    # The call is forced: that it is made, and of which tool, is not the model's doing.
    given = len(f'<tool_call>\n{{"name": "{name}')
    call = Call(name=name, arguments=item.values)
    messages.append(Message(role="assistant", calls=(call,), num_given=given))
    return Document(kind="record", messages=tuple(messages), tools=tuple(declare(rng, style, tool) for tool in listed))


def an_object(title: str) -> str:
    return f"Information about a {heading(title).lower()}."


def _no_wish(rng: Random) -> Wish:
    raise AssertionError(f"nobody asks for a record by a question ({rng})")


def forced_chat(rng: Random) -> Document:
    """A question that no tool fits, but a call is forced: of some tool, with something from the question."""
    tools = any_tools(rng, rng.choice([1, 1, 2, 3]))
    tool, style = rng.choice(tools), rng.choice(STYLES)
    question = topic_exchange(rng)[1][0]
    call = _call(style, tool.wish(rng), tool)
    given = len(f'<tool_call>\n{{"name": "{tool.name}')
    messages = (Message(role="user", content=question), Message(role="assistant", calls=(call,), num_given=given))
    return Document(kind="forced", messages=messages, tools=tuple(declare(rng, style, tool) for tool in tools))
