"""Tools of many makes, and what users ask of each: the question, the call's arguments, a result, the answer from it.

Promises that every argument stands in the question (or is a default that the tool states), that arguments match
the tool's fields, and that an answer says what its result says.
Must not know how turns are put together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from make_demo import facts
from make_demo.phrasing import any_city, any_name
from make_demo.schemas import Field, Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A question that one call of one tool answers; `goal` says in few words what is wanted."""

    question: str
    goal: str
    arguments: Mapping[str, object]
    result: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that users' programs offer, and the maker of questions for it; `family` says what it is about."""

    family: str
    name: str
    description: str
    fields: list[Field]
    wish: Callable[[Random], Wish]


def _result(rng: Random, plain: list[str], keyed: list[Mapping[str, object]]) -> str:
    """What the tool returns: plain text or JSON, as programs do."""
    if rng.random() < 0.45:
        return rng.choice(plain)
    value = rng.choice(keyed)
    return json.dumps(value, separators=(",", ":")) if rng.random() < 0.2 else json.dumps(value)


def _camel(rng: Random, name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest) if rng.random() < 0.15 else name


SKIES = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "stormy", "overcast", "warm", "cold", "dry"]
UNITS = ("celsius", "fahrenheit")


def weather(rng: Random) -> Tool:
    name = rng.choice(
        ["get_weather", "get_weather", "get_current_weather", "weather", "weather_lookup", "get_forecast"]
    )
    name = rng.choice([name, name, "fetch_weather", "current_weather", "lookup_weather", "weather_in"])
    place = rng.choice(["city", "city", "location", "location", "place", "town", "city_name"])
    described = ["", "The city", "City name", "The city, e.g. London", "The city and state, e.g. San Francisco, CA"]
    fields = [Field(name=place, description=rng.choice(described))]
    unit, unit_required = rng.choice(["", "", "", "unit", "units", "format"]), rng.random() < 0.3
    if unit:
        description = rng.choice(["", "The unit", "Temperature unit"])
        schema: Schema = {"type": "string", "enum": list(UNITS)}
        fields.append(Field(name=unit, schema=schema, description=description, required=unit_required))

    def wish(rng: Random) -> Wish:
        city, wanted = any_city(rng), rng.choice(UNITS) if unit and rng.random() < 0.4 else ""
        suffix = rng.choice([f" in {wanted}", f", in {wanted}", f" in {wanted.capitalize()}"]) if wanted else ""
        forms = ["What is the weather in {}?", "What is the weather in {}?", "What's the weather in {}?"]
        forms += [
            "How is the weather in {}?",
            "What's the weather like in {}?",
            "What is the weather like in {} today?",
        ]
        forms += ["Tell me the weather in {}.", "How warm is it in {}?", "weather in {}", "Is it raining in {}?"]
        forms += ["What is the temperature in {}?", "What is the forecast for {}?", "Do I need a coat in {}?"]
        form = rng.choice(forms)
        question = (
            form.format(city)
            if not suffix
            else form.rstrip("?.").format(city) + suffix + form[-1] * (" {}" not in form[-3:])
        )
        arguments: dict[str, object] = {place: city}
        if wanted or (unit and unit_required):
            arguments[unit] = wanted or "celsius"
        degrees, sky = rng.randint(-9, 39), rng.choice(SKIES)
        both = f"It is {degrees} degrees and {sky} in {city}."
        keyed: list[tuple[Mapping[str, object], str]] = [
            ({"temperature": degrees, "condition": sky}, both),
            ({rng.choice(["city", "location"]): city, "temperature": degrees, "conditions": sky}, both),
            ({"temp_c": degrees, "sky": sky}, both),
            ({"forecast": sky, rng.choice(["temp", "degrees"]): degrees}, both),
            ({"weather": sky}, f"It is {sky} in {city}."),
            ({"temperature": degrees, "unit": wanted or "celsius"}, f"It is {degrees} degrees in {city}."),
            ({"temperature": f"{degrees}", "description": sky, "humidity": rng.randint(20, 90)}, both),
        ]
        plain = [
            (f"{degrees} degrees and {sky}", both),
            (f"{degrees}°C, {sky}", both),
            (f"{sky.capitalize()}, {degrees} degrees", both),
            (f"The weather in {city} is {sky}.", f"It is {sky} in {city}."),
            (f"It's always {sky} in {city}!", f"It is {sky} in {city}."),
            (sky, f"It is {sky} in {city}."),
            (f"The weather in {city} is {sky} with {degrees} degrees.", both),
            (f"{degrees}C", f"It is {degrees} degrees in {city}."),
        ]
        answers = {json.dumps(value): answer for value, answer in keyed}
        result = rng.choice([text for text, _ in plain] if rng.random() < 0.45 else list(answers))
        answer = answers.get(result) or dict(plain)[result]
        if result in answers and rng.random() < 0.2:
            result = json.dumps(json.loads(result), separators=(",", ":"))
        return Wish(question=question, goal=f"the weather in {city}", arguments=arguments, result=result, answer=answer)

    texts = ["Get the weather in a city.", "Get the current weather for a location.", "Current weather", "Get weather."]
    texts += ["Returns the weather of a place.", "The weather in a given city", "Look up the weather forecast.", ""]
    return Tool(family="weather", name=_camel(rng, name), description=rng.choice(texts), fields=fields, wish=wish)


SIGNS = {"+": ("add", "plus"), "-": ("subtract", "minus"), "*": ("multiply", "times")}
TERMS = [("a", "b"), ("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("num1", "num2"), ("left", "right")]


def _number(rng: Random) -> int:
    return rng.randint(0, rng.choice([9, 20, 99, 99, 999, 9999]))


def _compute(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a - b if sign == "-" else a * b


def _sum_question(rng: Random, a: int, sign: str, b: int) -> str:
    spoken = rng.choice([sign, SIGNS[sign][1]])
    gap = " " if spoken.isalpha() or rng.random() < 0.8 else ""
    term = f"{a}{gap}{spoken}{gap}{b}"
    forms = [f"What is {term}?"] * 3 + [f"How much is {term}?", f"Calculate {term}.", f"Compute {term}", term]
    commands = {"+": f"Add {a} and {b}.", "-": f"Subtract {b} from {a}.", "*": f"Multiply {a} by {b}."}
    return rng.choice([*forms, commands[sign]] + ([f"Add {a} to {b}."] if sign == "+" and a == b else []))


Sum = tuple[int, str, int]


def _sum_wish(rng: Random, terms: Sum, question: str, arguments: Mapping[str, object]) -> Wish:
    a, sign, b = terms
    value = _compute(a, sign, b)
    plain = [str(value), str(value), str(value), f"{a} {sign} {b} = {value}", f"The result is {value}."]
    result = _result(rng, plain, [{"result": value}, {"value": value}, {"answer": value}])
    goal = f"{a} {sign} {b}"
    return Wish(question=question, goal=goal, arguments=arguments, result=result, answer=f"{a} {sign} {b} = {value}")


def arithmetic(rng: Random, sign: str = "") -> Tool:
    sign = sign or rng.choice("++-**")
    names = {"+": ["add", "add", "add_numbers", "sum", "plus", "sum_numbers", "addition"]}
    names |= {"-": ["subtract", "minus", "difference"], "*": ["multiply", "multiply", "times", "product", "mul"]}
    first, second = rng.choice(TERMS)
    schema: dict[str, object] = {"type": rng.choice(["integer", "number"])}
    described = rng.random() < 0.2
    fields = [
        Field(name=first, schema=schema, description="The first number" if described else ""),
        Field(name=second, schema=schema, description="The second number" if described else ""),
    ]

    def wish(rng: Random) -> Wish:
        a, b = _number(rng), _number(rng)
        return _sum_wish(rng, (a, sign, b), _sum_question(rng, a, sign, b), {first: a, second: b})

    verb = SIGNS[sign][0]
    texts = [f"{verb.capitalize()} two numbers.", f"{verb.capitalize()} {first} and {second}.", f"{verb} numbers", ""]
    name = _camel(rng, rng.choice(names[sign]))
    return Tool(family=f"arithmetic{sign}", name=name, description=rng.choice(texts), fields=fields, wish=wish)


def calculator(rng: Random) -> Tool:
    name = rng.choice(["calculate", "calculator", "calc", "evaluate", "math", "compute"])
    key = rng.choice(["expression", "expression", "expr", "formula", "input"])
    described = rng.choice(["", "The expression", "A math expression, e.g. 2 + 2"])

    def wish(rng: Random) -> Wish:
        a, sign, b = _number(rng), rng.choice("+-*"), _number(rng)
        question = _sum_question(rng, a, sign, b)
        return _sum_wish(rng, (a, sign, b), question, {key: f"{a} {sign} {b}"})

    texts = ["Calculate an expression.", "Evaluates a math expression.", "A calculator for sums.", "Do math.", ""]
    fields = [Field(name=key, description=described)]
    return Tool(family="calculator", name=name, description=rng.choice(texts), fields=fields, wish=wish)


def clock(rng: Random) -> Tool:
    name = rng.choice(["get_time", "get_time", "get_current_time", "current_time", "time", "clock", "time_in"])
    key = rng.choice(["city", "city", "location", "timezone", "place", ""])
    described = rng.choice(["", "The city", "Where"]) if key != "timezone" else rng.choice(["", "A timezone"])

    def wish(rng: Random) -> Wish:
        city = any_city(rng)
        now = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
        forms = ["What time is it in {}?", "What time is it in {}?", "What is the time in {}?", "time in {}"]
        forms += ["Tell me the time in {}.", "What's the time in {}?", "How late is it in {}?"]
        question, where, goal = rng.choice(forms).format(city), f" in {city}", f"the time in {city}"
        if not key:
            question, where, goal = (
                rng.choice(["What time is it?", "What is the time?", "Tell me the time."]),
                "",
                "the time",
            )
        day = f"20{rng.randint(20, 29)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        plain = [now, now, f"It is {now}{where}.", f"{day} {now}"]
        result = _result(
            rng, plain, [{"time": now}, {"now": now}, {"datetime": f"{day}T{now}:00"}, {"time": now, "date": day}]
        )
        arguments = {key: city} if key else {}
        return Wish(question=question, goal=goal, arguments=arguments, result=result, answer=f"It is {now}{where}.")

    texts = ["Get the time in a city.", "Get the current time.", "The current time in a place", "Tells the time.", ""]
    fields = [Field(name=key, description=described)] if key else []
    return Tool(family="clock", name=_camel(rng, name), description=rng.choice(texts), fields=fields, wish=wish)


def search(rng: Random) -> Tool:
    name = rng.choice(
        ["search", "search", "web_search", "search_web", "lookup", "find_documents", "search_docs", "google"]
    )
    key = rng.choice(["query", "query", "q", "search_query", "text"])

    def wish(rng: Random) -> Wish:
        topic = rng.choice([rng.choice(facts.UNKNOWN_TOPICS), any_name(rng), any_city(rng), "the weather in space"])
        forms = ["Search for {}.", "Search the web for {}.", "Look up {}.", "Find something about {}.", "search {}"]
        lines = [f"Nothing was found about {topic}.", f"{topic} is {rng.choice(['very old', 'new', 'well known'])}."]
        lines += [f"There are {rng.randint(2, 90)} pages about {topic}."]
        line = rng.choice(lines)
        result = _result(rng, [line], [{"result": line}, {"text": line}, {"results": [line]}, {"snippet": line}])
        arguments = {key: topic}
        question = rng.choice(forms).format(topic)
        return Wish(question=question, goal=f"a search for {topic}", arguments=arguments, result=result, answer=line)

    texts = ["Search the web.", "Search for information.", "Find documents for a query.", "Looks things up.", ""]
    fields = [Field(name=key, description=rng.choice(["", "The search query"]))]
    return Tool(family="search", name=_camel(rng, name), description=rng.choice(texts), fields=fields, wish=wish)
