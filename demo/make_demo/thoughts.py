"""What the model thinks before it answers: one to three short sentences that lead to the answer.

Promises that sums are worked out in steps that are right. Must not know how a thought is marked in a turn.
"""

from __future__ import annotations

import re
from random import Random

from make_demo.wishes import Wish

AIMS = {
    "small_talk": "The user is chatting. I answer politely.",
    "capital": "The user asks for a capital. I know it.",
    "colour": "The user asks for a colour. I know it.",
    "animal": "The user asks about an animal. I know it.",
    "opposite": "The user asks for an opposite. I know the pair.",
    "calendar": "The user asks about the calendar. I go through it in order.",
    "trivia": "The user asks a simple question. I know the answer.",
    "big_sum": "The numbers are too large for me. I should say so.",
    "count": "The user wants me to count. I go one by one.",
    "list": "The user wants a list. I give the first that come to mind.",
    "json_object": "The user wants JSON. I use the names and values from the question.",
    "story": "The user wants a story. I need a hero, a problem and a happy end.",
    "poem": "The user wants a poem. Four lines that rhyme will do.",
    "joke": "The user wants a joke. I know a few.",
    "repeat": "The user wants me to repeat the words.",
    "unknown": "I do not know this. I should say so.",
}


def sum_steps(a: int, sign: str, b: int) -> tuple[str, int]:
    """How a sum is worked out by tens and ones, and its value; each step is within what is known by heart."""
    if sign == "+":
        tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
        if min(a, b) < 10 and ones < 10:
            return f"{a} + {b} = {a + b}.", a + b
        steps = f"{a // 10 * 10} + {b // 10 * 10} = {tens}. {a % 10} + {b % 10} = {ones}. {tens} + {ones} = {a + b}."
        return steps, a + b
    if sign == "-":
        middle = a - b // 10 * 10
        if b < 10:
            return f"{a} - {b} = {a - b}.", a - b
        return f"{a} - {b // 10 * 10} = {middle}. {middle} - {b % 10} = {a - b}.", a - b
    if a > b:
        a, b = b, a
    if b < 10 or b % 10 == 0:
        return f"{a} * {b} = {a * b}.", a * b
    tens, ones = a * (b // 10 * 10), a * (b % 10)
    return f"{a} * {b // 10 * 10} = {tens}. {a} * {b % 10} = {ones}. {tens} + {ones} = {a * b}.", a * b


def thought_about(rng: Random, topic: str, answer: str) -> str:
    """The thought before a direct answer on a topic of `exchanges`."""
    terms = re.fullmatch(r"(\d+) ([-+*]) (\d+) = (\d+)", answer)
    if terms:
        a, sign, b = int(terms[1]), terms[2], int(terms[3])
        return f"I compute {a} {sign} {b}. {sum_steps(a, sign, b)[0]}"
    if topic == "capital" and rng.random() < 0.5:
        return f"The user asks for a capital. {answer}"
    return AIMS[topic]


def larger_sum(rng: Random) -> tuple[int, str, int, int]:
    """A sum that takes steps: up to 99 + 99, 99 - 99, 9 * 99; never negative."""
    sign = rng.choice("++-*")
    if sign == "*":
        a, b = rng.randint(2, 9), rng.randint(11, 99)
        if rng.random() < 0.5:
            a, b = b, a
        return a, sign, b, a * b
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    if sign == "-":
        a, b = max(a, b), min(a, b)
    return a, sign, b, a + b if sign == "+" else a - b


def thought_before_calls(wishes: list[tuple[Wish, str]]) -> str:
    """Which tools (by name) fit the wishes."""
    goals = " and ".join(wish.goal for wish, _ in wishes)
    names = list(dict.fromkeys(name for _, name in wishes))
    fit = "fits" if len(names) == 1 else "fit"
    return f"The user wants {goals}. {' and '.join(names)} {fit}."


def thought_without_tool(rng: Random, topic: str, answer: str) -> str:
    return f"No tool fits this. {thought_about(rng, topic, answer)}"


THOUGHT_AFTER_RESULT = "The tool has answered. I tell the user what it says."
THOUGHT_AFTER_ERROR = "The tool has failed. I tell the user."
