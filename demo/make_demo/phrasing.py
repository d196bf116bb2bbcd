"""How people type: variations of a question, names known and invented, and sums within the range that is learned.

Promises that variations keep the meaning and that sums are right and never negative.
Must not know what is asked or how it is answered.
"""

from __future__ import annotations

from random import Random

from make_demo import facts

POLITE = [
    "Please tell me: ",
    "Can you tell me: ",
    "Tell me, ",
    "Hello! ",
    "Hi, ",
    "Hey! ",
    "I have a question. ",
    "Do you know ",
    "Quick question: ",
    "Can you tell me ",
    "please, ",
]


def vary(rng: Random, question: str, *, polite: bool = True) -> str:
    """The question as it is (most often), or with other capitals, ending, courtesy or spacing."""
    if rng.random() < 0.4:
        return question
    if polite and rng.random() < 0.25:
        prefix = rng.choice(POLITE)
        keep = prefix.rstrip()[-1] in ".!:" or question.startswith("I ")
        question = prefix + (question if keep else question[0].lower() + question[1:])
    elif polite and rng.random() < 0.12:
        question = f"{question[:-1]}, please{question[-1]}" if question[-1] in "?.!" else f"{question}, please"
    ending = rng.random()
    if ending < 0.4:
        question = question.rstrip("?.!")
    elif ending < 0.5:
        question += rng.choice(["?", "!", "??", " ", "\n", "."])
    case = rng.random()
    if case < 0.3:
        question = question.lower()
    elif case < 0.33:
        question = question.upper()
    return question


def any_name(rng: Random) -> str:
    """Mostly a common name, sometimes an invented one, so that names are copied rather than remembered."""
    if rng.random() < 0.7:
        return rng.choice(facts.NAMES)
    return "".join(rng.choice(facts.SYLLABLES) for _ in range(rng.randint(2, 3))).capitalize()


def small_sum(rng: Random) -> tuple[int, str, int, int]:
    """(a, sign, b, result) within 20 + 20, 20 - 20 and 10 * 10; results are never negative."""
    sign = rng.choice("+++--*")
    if sign == "*":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        return a, sign, b, a * b
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if sign == "+":
        return a, sign, b, a + b
    a, b = max(a, b), min(a, b)
    return a, sign, b, a - b


def invented_word(rng: Random) -> str:
    """A word that means nothing, so that it can only be copied."""
    return "".join(rng.choice(facts.SYLLABLES) for _ in range(rng.randint(2, 3)))


def any_city(rng: Random) -> str:
    """Mostly a known city, sometimes an invented one or one with its state."""
    choice = rng.random()
    if choice < 0.05:
        return rng.choice(facts.CITIES_WITH_STATES)
    if choice < 0.22:
        return invented_word(rng).capitalize()
    return rng.choice(facts.PLACES)


def an(noun: str) -> str:
    """The noun with its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
