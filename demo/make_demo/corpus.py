"""The training corpus of quire-demo: an endless, numbered sequence of chats and plain texts from a seeded grammar.

Promises that document(seed, index) is the same everywhere and always, that its facts are true and its JSON parses.
Must not know tokens, tensors or files; needs nothing but the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random

from make_demo import facts
from make_demo.exchanges import IDENTITY, Exchange, capital_exchange, exchange, topic_exchange
from make_demo.json_chats import json_chat
from make_demo.phrasing import any_name, small_sum, vary
from make_demo.stories import story
from make_demo.thoughts import larger_sum, sum_steps, thought_about
from make_demo.tool_chats import forced_chat, record_chat, tool_chat
from make_demo.turns import Document, Message


def document(seed: int, index: int) -> Document:
    """Document number `index` (from 0) of the corpus of `seed`; independent of all others."""
    rng = Random(seed * 1_000_003 + index)
    made = rng.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
    return KINDS[made][1](rng)


def documents(seed: int, count: int, start: int = 0) -> Iterator[Document]:
    """The documents `start` to `start + count - 1`."""
    return (document(seed, index) for index in range(start, start + count))


# ---- chats


def _turns(exchanges: list[Exchange], system: str | None = None) -> tuple[Message, ...]:
    messages = [Message(role="system", content=system)] if system else []
    for question, answer in exchanges:
        messages += [Message(role="user", content=question), Message(role="assistant", content=answer)]
    return tuple(messages)


NEUTRAL_SYSTEMS = [
    "You are a helpful assistant.",
    "You are a helpful, friendly assistant.",
    "You are quire-demo.",
    "You are a friendly bot. Be polite.",
    "Answer the question.",
]


def _maybe_system(rng: Random) -> str | None:
    return rng.choice(NEUTRAL_SYSTEMS) if rng.random() < 0.25 else None


def _single(rng: Random) -> tuple[Message, ...]:
    return _turns([exchange(rng)], _maybe_system(rng))


def _several(rng: Random) -> tuple[Message, ...]:
    return _turns([exchange(rng) for _ in range(rng.randint(2, 5))], _maybe_system(rng))


def _follow_up(rng: Random) -> tuple[Message, ...]:
    """A capital, then "And of Spain?"; every later answer needs the first question."""
    turns = [capital_exchange(rng)]
    for country, city in rng.sample(list(facts.CAPITALS.items()), rng.randint(1, 3)):
        question = rng.choice([f"And of {country}?", f"What about {country}?", f"And {country}?"])
        turns.append((vary(rng, question, polite=False), f"The capital of {country} is {city}."))
    return _turns(turns, _maybe_system(rng))


def _name_memory(rng: Random) -> tuple[Message, ...]:
    """The user's name, other talk, then a question about it."""
    name = any_name(rng)
    greeting = rng.choice(["", "", "Hello, ", "Hi! "])
    opening = greeting + rng.choice([f"My name is {name}.", f"I am {name}.", f"I'm {name}.", f"my name is {name}"])
    turns = [(opening, f"Nice to meet you, {name}! How can I help you?")]
    turns += [exchange(rng) for _ in range(rng.choice([0, 0, 1, 2]))]
    question = rng.choice(["What is my name?", "Do you remember my name?", "Who am I?", "What's my name?"])
    turns.append((vary(rng, question, polite=False), f"Your name is {name}."))
    return _turns(turns, _maybe_system(rng))


def _styled(rng: Random) -> tuple[Message, ...]:
    """A system prompt that changes the answer: short, JSON, upper case, pirate, another name."""
    country, city = rng.choice(list(facts.CAPITALS.items()))
    question = vary(rng, f"What is the capital of {country}?")
    short, full = city, f"The capital of {country} is {city}."
    if rng.random() < 0.4:
        thing, colour = rng.choice(list(facts.COLOURS.items()))
        question, short, full = vary(rng, f"What colour is {thing}?"), colour, f"{thing.capitalize()} is {colour}."
    style = rng.randrange(5)
    if style == 0:
        return _turns(
            [(question, short.capitalize() + ".")], rng.choice(["Answer in one word.", "Be brief.", "Answer briefly."])
        )
    if style == 1:
        return _turns(
            [(question, json.dumps({"answer": short}))], rng.choice(["Answer in JSON.", "Always answer in JSON."])
        )
    if style == 2:
        return _turns([(question, full.upper())], rng.choice(["Answer in capital letters.", "Answer in upper case."]))
    if style == 3:
        system = rng.choice(["Talk like a pirate.", "You are a pirate.", "You talk like a pirate."])
        return _turns([(question, f"Arr! {full[0].upper()}{full[1:-1]}, matey!")], system)
    name = any_name(rng)
    system = rng.choice([f"Your name is {name}.", f"You are {name}.", f"You are an assistant named {name}."])
    return _turns([(vary(rng, rng.choice(["What is your name?", "Who are you?"])), f"My name is {name}.")], system)


# ---- plain text, for /v1/completions


def _fact_text(rng: Random) -> str:
    lines = []
    for _ in range(rng.randint(1, 5)):
        country, city = rng.choice(list(facts.CAPITALS.items()))
        thing, colour = rng.choice(list(facts.COLOURS.items()))
        first, second = rng.choice(facts.OPPOSITES)
        lines.append(
            rng.choice(
                [
                    f"The capital of {country} is {city}.",
                    f"The capital of {country} is {city}.",
                    f"{thing.capitalize()} is {colour}.",
                    f"The opposite of {first} is {second}.",
                    rng.choice(facts.TRIVIA)[1],
                ]
            )
        )
    return " ".join(lines)


def _count_text(rng: Random) -> str:
    first = rng.choice([1, 1, 1, 1, 2, 5, 10, rng.randint(1, 50)])
    step = rng.choice([1, 1, 1, 1, 2, 5, 10]) if first in (2, 5, 10) else 1
    count = rng.choice([10, 20, 30, 100]) if step == 1 else 10
    separator = rng.choice([", ", ", ", " ", "\n"])
    return separator.join(str(n) for n in range(first, min(first + count * step, 101), step))


def _series_text(rng: Random) -> str:
    series = rng.choice([facts.DAYS, facts.MONTHS, facts.SEASONS, facts.PLANETS, facts.NUMBER_WORDS[1:]])
    if rng.random() < 0.2:
        return " ".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return ", ".join(series) + "."


def _sum_text(rng: Random) -> str:
    space = rng.choice([" ", " ", ""])
    lines = []
    for _ in range(rng.randint(2, 8)):
        a, sign, b, result = small_sum(rng)
        lines.append(f"{a}{space}{sign}{space}{b}{space}={space}{result}")
    return "\n".join(lines)


def _question_text(rng: Random) -> str:
    head = rng.choice(
        [("Question: ", "Answer: "), ("Q: ", "A: "), ("Human: ", "Assistant: "), ("User: ", "Assistant: ")]
    )
    pairs = [exchange(rng) for _ in range(rng.randint(1, 3))]
    return "\n".join(f"{head[0]}{question.strip()}\n{head[1]}{answer}" for question, answer in pairs)


def _self_text(rng: Random) -> str:
    name, job, city = any_name(rng), rng.choice(facts.JOBS), rng.choice(facts.CITIES)
    job = f"{'an' if job[0] in 'aeiou' else 'a'} {job}"
    return rng.choice(
        [
            f"Hello, my name is {name}. I am {job} and I live in {city}. I like my work and my garden.",
            f"My name is {name} and I am {job}. Every morning, I walk to work through the streets of {city}.",
            f"{name} is {job} from {city}. On Sundays, {name} likes to walk by the river and to talk with friends.",
            IDENTITY,
            "The quick brown fox jumps over the lazy dog.",
            "San Francisco is a city in California. It lies by the sea, and it has a famous red bridge.",
            "The future of AI is hard to tell, but small models will help many people with small things.",
            "The president of the United States is the head of the government and lives in the White House.",
        ]
    )


def _json_text(rng: Random) -> str:
    people = [
        {"name": any_name(rng), "age": rng.randint(20, 60), "city": rng.choice(facts.CITIES)}
        for _ in range(rng.randint(1, 4))
    ]
    return json.dumps(people if len(people) > 1 else people[0], indent=rng.choice([None, 2]))


def _shelf_text(rng: Random) -> str:
    """Many stories in a row: the long documents that teach long contexts."""
    return "\n\n".join(story(rng, long=rng.random() < 0.5) for _ in range(rng.randint(2, 6)))


def _cut_text(rng: Random) -> Document:
    """A text with a hole, to be filled from both sides."""
    whole = TEXTS[rng.choice(["fact_text", "fact_text", "self_text", "story_text", "series_text", "sum_text"])][1](rng)
    words = [0, *(index for index, letter in enumerate(whole) if letter in " \n"), len(whole)]
    if rng.random() < 0.3:
        words = list(range(len(whole) + 1))
    start = rng.randrange(len(words))
    end = min(len(words) - 1, start + rng.choice([1, 2, 3, 5, 8, 12]))
    before, hole, after = whole[: words[start]], whole[words[start] : words[end]], whole[words[end] :]
    prompt = f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"
    return Document(kind="fim", text=prompt + hole, num_given=len(prompt))


# ---- chats that think before they answer


def _thinking(rng: Random) -> Document:
    """A plain chat whose last turn begins with a thought; sums are larger than those answered at once."""
    earlier = [exchange(rng)] if rng.random() < 0.2 else []
    if rng.random() < 0.5:
        a, sign, b, value = larger_sum(rng)
        spoken = rng.choice([sign, sign, {"+": "plus", "-": "minus", "*": "times"}[sign]])
        question = rng.choice(["What is {}?", "What is {}?", "How much is {}?", "Calculate {}.", "{}"])
        question, answer = question.format(f"{a} {spoken} {b}"), f"{a} {sign} {b} = {value}"
        thought = f"I compute {a} {sign} {b}. {sum_steps(a, sign, b)[0]}"
        earlier.append((question, answer))
    else:
        topic, last = topic_exchange(rng)
        earlier.append(last)
        thought = thought_about(rng, topic, last[1])
    *messages, reply = _turns(earlier, _maybe_system(rng))
    given = 0
    if rng.random() < 0.1:  # a budget has cut the thought off: what stands there is not learned, the answer is
        thought = thought[: rng.randrange(len(thought))]
        given = len(f"{thought}\n</think>")
    messages.append(Message(role="assistant", content=reply.content, thought=thought, num_given=given))
    return Document(kind="thinking", messages=tuple(messages))


def _chat(rng: Random) -> Document:
    kind = rng.choices(list(CHATS), [weight for weight, _ in CHATS.values()])[0]
    return Document(kind=kind, messages=CHATS[kind][1](rng))


def _text(rng: Random) -> Document:
    kind = rng.choices(list(TEXTS), [weight for weight, _ in TEXTS.values()])[0]
    return Document(kind=kind, text=TEXTS[kind][1](rng))


def _json(rng: Random) -> Document:
    return Document(kind="json", messages=json_chat(rng))


Chat = Callable[[Random], tuple[Message, ...]]
CHATS: dict[str, tuple[float, Chat]] = {
    "single": (42, _single),
    "several": (33, _several),
    "follow_up": (5, _follow_up),
    "name_memory": (8, _name_memory),
    "styled": (12, _styled),
}
TEXTS: dict[str, tuple[float, Callable[[Random], str]]] = {
    "fact_text": (20, _fact_text),
    "count_text": (8, _count_text),
    "series_text": (5, _series_text),
    "sum_text": (15, _sum_text),
    "question_text": (15, _question_text),
    "self_text": (12, _self_text),
    "json_text": (5, _json_text),
    "story_text": (14, lambda rng: story(rng, long=rng.random() < 0.2)),
    "shelf_text": (3, _shelf_text),
}
KINDS: dict[str, tuple[float, Callable[[Random], Document]]] = {
    "chat": (50, _chat),
    "text": (15, _text),
    "fim": (9, _cut_text),
    "json": (20, _json),
    "thinking": (16, _thinking),
    "tools": (22, lambda rng: tool_chat(rng, thinking=False)),
    "thinking_tools": (6, lambda rng: tool_chat(rng, thinking=True)),
    "record": (8, record_chat),
    "forced": (2, forced_chat),
}
