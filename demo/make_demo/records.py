"""Small texts that state facts, and the objects that hold them: people, events, goods, reviews, sums, places.

Promises that an object's values stand in its text, or follow from it in one step, and match its fields' schemas.
Must not know who asks for the object, nor in which words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from make_demo import facts
from make_demo.phrasing import an, any_city, any_name, invented_word, small_sum
from make_demo.schemas import Field

HOBBIES = ["chess", "tennis", "music", "cooking", "running", "reading", "painting", "swimming", "dancing", "football"]
GOODS = ["lamp", "chair", "table", "book", "bike", "phone", "cup", "coat", "hat", "clock", "shoe", "bag", "pen", "kite"]
PAINTS = ["red", "blue", "green", "white", "black", "yellow", "brown", "grey"]
OCCASIONS = [
    "a science fair",
    "a party",
    "a concert",
    "a meeting",
    "a dinner",
    "a wedding",
    "a picnic",
    "a class",
    "lunch",
]
STREETS = ["Main Street", "Oak Road", "High Street", "Mill Lane", "Station Road", "Park Avenue", "Hill Street"]
GOOD = ["great", "wonderful", "very good", "lovely", "excellent"]
BAD = ["bad", "terrible", "awful", "broken", "very slow"]
PLAIN = ["okay", "average", "not special"]
NUMBER: dict[str, object] = {"type": "number"}
INTEGER: dict[str, object] = {"type": "integer"}
BOOLEAN: dict[str, object] = {"type": "boolean"}
TEXTS: dict[str, object] = {"type": "array", "items": {"type": "string"}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A text, what it is about (a class name), and the object that it states, with the fields' schemas."""

    title: str
    text: str
    fields: list[Field]
    values: dict[str, object]


Part = tuple[Field, object]


def _record(rng: Random, title: str, text: str, parts: list[Part]) -> Record:
    if rng.random() < 0.25:
        rng.shuffle(parts)
    fields = [field for field, _ in parts]
    return Record(title=title, text=text, fields=fields, values={field.name: value for field, value in parts})


def _some(rng: Random, parts: list[Part], least: int) -> list[Part]:
    """Some of the parts in their order: a schema seldom asks for everything that a text says."""
    kept = sorted(rng.sample(range(len(parts)), rng.randint(least, len(parts))))
    return [parts[index] for index in kept]


def person(rng: Random) -> Record:
    name, age, city, job = any_name(rng), rng.randint(1, 99), any_city(rng), rng.choice(facts.JOBS)
    if rng.random() < 0.25:
        name = f"{name} {rng.choice([invented_word(rng).capitalize(), 'Smith', 'Miller', 'Brown'])}"
    parts: list[Part] = [
        (Field(name=rng.choice(["name", "name", "name", "full_name", "user_name", "person"])), name),
        (Field(name=rng.choice(["age", "age", "age", "years", "age_years"]), schema=INTEGER), age),
    ]
    sentences = [
        rng.choice([f"{name} is {age} years old", f"{name} is {age}", f"{name} ({age})", f"{name}, aged {age},"]),
    ]
    city_field = Field(name=rng.choice(["city", "city", "city", "home", "location", "town"]))
    style = rng.randrange(6)
    if style == 0:
        text = f"{sentences[0]}."
    elif style == 1:
        text, parts = f"{sentences[0]} and lives in {city}.", [*parts, (city_field, city)]
    elif style == 2:
        text = f"{name} is {an(job)} from {city} and is {age} years old."
        parts += [(Field(name=rng.choice(["job", "job", "occupation", "profession"])), job), (city_field, city)]
    elif style == 3:
        hobbies = rng.sample(HOBBIES, rng.randint(2, 3))
        listed = ", ".join(hobbies[:-1]) + f" and {hobbies[-1]}"
        text = (
            f"{sentences[0]}, lives in {city} and likes {listed}."
            if rng.random() < 0.5
            else f"{name} is {age} and likes {listed}."
        )
        if city in text:
            parts.append((city_field, city))
        parts.append((Field(name=rng.choice(["hobbies", "interests", "likes"]), schema=TEXTS), hobbies))
    elif style == 4:
        number, street = rng.randint(1, 99), rng.choice(STREETS)
        text = f"{sentences[0]} and lives at {number} {street} in {city}."
        inner = [Field(name="street"), Field(name="city")]
        address = {"street": f"{number} {street}", "city": city}
        parts.append((Field(name="address", schema={"type": "object", "fields": inner}), address))
    else:
        married, key = rng.random() < 0.5, rng.choice(["married", "is_married"])
        text = f"{name} is {age} years old and {'married' if married else 'not married'}."
        parts.append((Field(name=key, schema=BOOLEAN), married))
    if rng.random() < 0.3:
        parts = _some(rng, parts, 1)
    title = rng.choice(["Person", "User", "UserInfo", "Person", "UserDetail", "person", "Customer", "Character"])
    return _record(rng, title, text, parts)


def event(rng: Random) -> Record:
    people, day = rng.sample(facts.NAMES, rng.randint(1, 3)), rng.choice(facts.DAYS)
    what, city = rng.choice(OCCASIONS), any_city(rng)
    who = people[0] if len(people) == 1 else ", ".join(people[:-1]) + f" and {people[-1]}"
    going = rng.choice(["going to", "invited to"])
    be = "is" if len(people) == 1 else "are"
    where = rng.random() < 0.4
    text = f"{who} {be} {going} {what} {f'in {city} ' if where else ''}on {day}."
    name = what.split(" ", 1)[-1]
    parts: list[Part] = [
        (Field(name=rng.choice(["name", "title", "event", "name"])), name),
        (Field(name=rng.choice(["date", "date", "day"])), day),
    ]
    if where:
        parts.append((Field(name=rng.choice(["location", "place", "city"])), city))
    parts.append((Field(name=rng.choice(["participants", "people", "attendees", "guests"]), schema=TEXTS), people))
    return _record(rng, rng.choice(["CalendarEvent", "Event", "calendar_event", "Meeting"]), text, _some(rng, parts, 2))


def product(rng: Random) -> Record:
    thing, paint, stock = rng.choice([*GOODS, invented_word(rng)]), rng.choice(PAINTS), rng.random() < 0.5
    cost = rng.choice([rng.randint(1, 400), rng.randint(100, 9999) / 100])
    money = rng.choice([f"{cost} dollars", f"${cost}", f"{cost} euros"])
    text = f"The {paint} {thing} costs {money} and is {'in' if stock else 'out of'} stock."
    parts: list[Part] = [
        (Field(name=rng.choice(["product", "name", "item", "name"])), thing),
        (Field(name=rng.choice(["color", "colour", "color"])), paint),
        (Field(name="price", schema=NUMBER), cost),
        (Field(name=rng.choice(["in_stock", "available"]), schema=BOOLEAN), stock),
    ]
    if parts[1][0].name == "color" and rng.random() < 0.4:
        parts[1] = (Field(name="color", schema={"type": "string", "enum": rng.sample(PAINTS, len(PAINTS))}), paint)
    return _record(rng, rng.choice(["Product", "Item", "product"]), text, _some(rng, parts, 1))


def review(rng: Random) -> Record:
    mood, words, stars = rng.choice([("positive", GOOD, (4, 5)), ("negative", BAD, (1, 2)), ("neutral", PLAIN, (3, 3))])
    thing, word, rating = (
        rng.choice(["film", "phone", "food", "hotel", "book", "service"]),
        rng.choice(words),
        rng.randint(*stars),
    )
    counted = rng.random() < 0.4
    text = f"The {thing} was {word}." + (f" I give it {rating} stars." if counted else "")
    names = ["positive", "negative", "neutral"]
    parts: list[Part] = [
        (Field(name=rng.choice(["sentiment", "mood", "label"]), schema={"type": "string", "enum": names}), mood)
    ]
    if counted:
        parts.append((Field(name=rng.choice(["rating", "stars"]), schema=INTEGER), rating))
    if rng.random() < 0.3:
        parts.append((Field(name=rng.choice(["topic", "subject"])), thing))
    return _record(rng, rng.choice(["Review", "Sentiment", "Classification"]), text, parts)


def arithmetic(rng: Random) -> Record:
    a, sign, b, value = small_sum(rng)
    text = rng.choice([f"What is {a} {sign} {b}?", f"Calculate {a} {sign} {b}.", f"{a} {sign} {b}"])
    if rng.random() < 0.4:
        inner = [Field(name="explanation"), Field(name="output")]
        items: dict[str, object] = {"type": "object", "fields": inner}
        steps = [{"explanation": f"I compute {a} {sign} {b}.", "output": f"{a} {sign} {b} = {value}"}]
        parts: list[Part] = [
            (Field(name="steps", schema={"type": "array", "items": items}), steps),
            (Field(name="final_answer"), str(value)),
        ]
        return Record(
            title="MathReasoning", text=text, fields=[f for f, _ in parts], values={f.name: v for f, v in parts}
        )
    key = rng.choice(["answer", "result", "value", "sum"])
    schema: dict[str, object] = rng.choice([INTEGER, NUMBER])
    return _record(rng, rng.choice(["Answer", "Result", "Sum"]), text, [(Field(name=key, schema=schema), value)])


def capital(rng: Random) -> Record:
    country, city = rng.choice(list(facts.CAPITALS.items()))
    text = f"What is the capital of {country}?"
    if rng.random() < 0.4:
        return _record(rng, "Answer", text, [(Field(name=rng.choice(["answer", "capital", "city"])), city)])
    parts: list[Part] = [
        (Field(name="country"), country.removeprefix("the ")),
        (Field(name=rng.choice(["capital", "city"])), city),
    ]
    return _record(rng, rng.choice(["Capital", "City", "Country", "CityLocation"]), text, parts)


def sky(rng: Random) -> Record:
    city, degrees, condition = (
        any_city(rng),
        rng.randint(-9, 39),
        rng.choice(["sunny", "cloudy", "rainy", "windy", "snowy"]),
    )
    text = f"It is {degrees} degrees and {condition} in {city}."
    parts: list[Part] = [
        (Field(name=rng.choice(["city", "location"])), city),
        (Field(name=rng.choice(["temperature", "degrees"]), schema=rng.choice([INTEGER, NUMBER])), degrees),
        (Field(name=rng.choice(["condition", "sky", "weather"])), condition),
    ]
    return _record(rng, rng.choice(["Weather", "WeatherReport", "Forecast"]), text, _some(rng, parts, 2))


def labelled(rng: Random) -> Record:
    """Invented keys and values, listed in the text: what is copied rather than understood."""
    keys = rng.sample(["id", "code", "title", "owner", "status", "count", "size", "kind", "note", "email", "phone"], 2)
    keys += [invented_word(rng)] * (rng.random() < 0.5)
    parts: list[Part] = []
    for key in keys:
        if key in ("count", "size"):
            parts.append((Field(name=key, schema=INTEGER), rng.randint(0, 999)))
        else:
            parts.append((Field(name=key), f"{invented_word(rng)}{rng.choice(['', '', rng.randint(1, 99)])}"))
    said = ", ".join(f"{field.name} {value}" for field, value in parts)
    text = rng.choice([f"{said[0].upper()}{said[1:]}.", f"The item has {said}.", said])
    return _record(rng, rng.choice(["Entry", "Item", "Record", invented_word(rng).capitalize()]), text, parts)


KINDS: list[tuple[float, Callable[[Random], Record]]] = [
    (40, person),
    (15, event),
    (12, product),
    (9, review),
    (10, arithmetic),
    (9, capital),
    (6, sky),
    (10, labelled),
]


def record(rng: Random) -> Record:
    """One text and its object."""
    return rng.choices([make for _, make in KINDS], [weight for weight, _ in KINDS])[0](rng)
