"""Tools beside weather, sums and time: messages, prices, orders, lights, and invented ones whose names say nothing.

Promises what `wishes` promises of its tools: arguments that stand in the question, answers that say the result.
Must not know how turns are put together.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from make_demo import facts
from make_demo.phrasing import an, any_city, any_name, invented_word
from make_demo.schemas import Field
from make_demo.wishes import Tool, Wish, arithmetic, calculator, clock, search, weather

WORDS = [
    "lunch is ready",
    "the train is late",
    "see you at noon",
    "happy birthday",
    "call me back",
    "the report is done",
]
WORDS += ["good luck", "I am on my way", "the meeting is at nine", "dinner is at eight", "thank you for the cake"]
ROOMS = ["kitchen", "bedroom", "office", "garage", "bathroom", "hall", "living room", "garden"]
CHORES = ["water the plants", "call the doctor", "buy milk", "feed the cat", "clean the car", "read the book"]
LANGUAGES = ["French", "German", "Spanish", "Italian", "Japanese", "Greek", "Dutch", "Polish"]
CURRENCIES = ["EUR", "USD", "GBP", "JPY", "CHF"]


def _done(rng: Random) -> str:
    return rng.choice(["ok", "done", "success", '{"ok": true}', '{"status": "ok"}', '{"success": true}', "true", "OK"])


def message(rng: Random) -> Tool:
    name = rng.choice(["send_message", "send_email", "send_text", "message", "notify"])
    to, text = rng.choice(["to", "recipient", "name"]), rng.choice(["text", "body", "message", "content"])

    def wish(rng: Random) -> Wish:
        person, words = any_name(rng), rng.choice([*WORDS, f"{invented_word(rng)} {invented_word(rng)}"])
        forms = [f"Send {person} the message: {words}", f'Send "{words}" to {person}.', f"Tell {person}: {words}"]
        forms += [f"Write to {person}: {words}"]
        arguments = {to: person, text: words}
        answer = f"I have sent the message to {person}."
        goal = f"a message to {person}"
        return Wish(question=rng.choice(forms), goal=goal, arguments=arguments, result=_done(rng), answer=answer)

    texts = ["Send a message to a person.", "Sends a message.", "Send an email.", ""]
    fields = [Field(name=to), Field(name=text)]
    return Tool(family="message", name=name, description=rng.choice(texts), fields=fields, wish=wish)


def price(rng: Random) -> Tool:
    name = rng.choice(["get_stock_price", "stock_price", "get_price", "price_of", "quote"])
    key = rng.choice(["symbol", "ticker", "stock"])

    def wish(rng: Random) -> Wish:
        known = ["AAPL", "MSFT", "GOOG", "NVDA", "TSLA", "AMZN"]
        symbol = rng.choice([*known, "".join(rng.choice("ABCDEFGHIKLMNOPRSTUVXYZ") for _ in range(rng.randint(3, 4)))])
        value = rng.choice([rng.randint(5, 900), rng.randint(500, 90000) / 100])
        forms = [f"What is the price of {symbol}?", f"What does {symbol} cost?", f"Get the stock price of {symbol}."]
        keyed = json.dumps({rng.choice(["price", "value", "last"]): value})
        result = rng.choice([str(value), keyed, keyed, f"{value} USD", json.dumps({"symbol": symbol, "price": value})])
        goal, answer = f"the price of {symbol}", f"The price of {symbol} is {value}."
        return Wish(question=rng.choice(forms), goal=goal, arguments={key: symbol}, result=result, answer=answer)

    texts = ["Get the price of a stock.", "Returns the latest stock price.", ""]
    return Tool(family="price", name=name, description=rng.choice(texts), fields=[Field(name=key)], wish=wish)


def order(rng: Random) -> Tool:
    thing = rng.choice(["order", "order", "ticket", "parcel", "invoice", "flight"])
    name = rng.choice([f"get_{thing}_status", f"get_{thing}", f"{thing}_status", f"lookup_{thing}", f"track_{thing}"])
    key = rng.choice([f"{thing}_id", "id", f"{thing}_number"])
    numeric = rng.random() < 0.3

    def wish(rng: Random) -> Wish:
        number: int | str = rng.randint(10, 99999)
        if not numeric:
            number = rng.choice([f"{number}", f"{rng.choice('ABKXZ')}{number}", f"{rng.choice('ABKXZ')}-{number}"])
        state = rng.choice(["shipped", "paid", "late", "open", "closed", "on its way", "delivered", "waiting"])
        forms = [f"Where is {thing} {number}?", f"What is the status of {thing} {number}?", f"Track {thing} {number}."]
        forms += [f"Look up {thing} {number}."]
        keyed = [
            json.dumps({"status": state}),
            json.dumps({key: number, "state": state}),
            json.dumps({"result": state}),
        ]
        result = rng.choice([state, f"{thing} {number}: {state}", *keyed])
        goal, answer = f"the status of {thing} {number}", f"The status of {thing} {number} is: {state}."
        return Wish(question=rng.choice(forms), goal=goal, arguments={key: number}, result=result, answer=answer)

    fields = [Field(name=key, schema={"type": "integer" if numeric else "string"})]
    texts = [f"Get the status of {an(thing)}.", f"Look up {an(thing)} by its number.", ""]
    return Tool(family=thing, name=name, description=rng.choice(texts), fields=fields, wish=wish)


def light(rng: Random) -> Tool:
    name = rng.choice(["set_light", "switch_light", "light", "control_light", "toggle_light"])
    key, on = rng.choice(["room", "location", "name"]), rng.choice(["on", "is_on", "state", "state"])
    as_text = on == "state"
    schema: dict[str, object] = {"type": "string", "enum": ["on", "off"]} if as_text else {"type": "boolean"}

    def wish(rng: Random) -> Wish:
        room, state = rng.choice(ROOMS), rng.choice(["on", "off"])
        forms = [
            f"Turn {state} the light in the {room}.",
            f"Turn the {room} light {state}.",
            f"Switch the {room} light {state}",
        ]
        arguments = {key: room, on: state if as_text else state == "on"}
        goal, answer = f"the light in the {room} {state}", f"The light in the {room} is {state}."
        return Wish(question=rng.choice(forms), goal=goal, arguments=arguments, result=_done(rng), answer=answer)

    fields = [Field(name=key), Field(name=on, schema=schema)]
    texts = ["Turn a light on or off.", "Switch the light in a room.", ""]
    return Tool(family="light", name=name, description=rng.choice(texts), fields=fields, wish=wish)


def reminder(rng: Random) -> Tool:
    name = rng.choice(["set_reminder", "remind", "add_reminder", "create_task", "add_todo"])
    key, when = rng.choice(["text", "title", "task"]), rng.choice(["time", "at", "when"])

    def wish(rng: Random) -> Wish:
        chore, hour = rng.choice(CHORES), f"{rng.randint(0, 23)}:{rng.choice(['00', '15', '30', '45'])}"
        forms = [
            f"Remind me to {chore} at {hour}.",
            f"Set a reminder for {hour}: {chore}",
            f"At {hour} I must {chore}.",
        ]
        goal, answer = "a reminder", f"I will remind you to {chore} at {hour}."
        arguments = {key: chore, when: hour}
        return Wish(question=rng.choice(forms), goal=goal, arguments=arguments, result=_done(rng), answer=answer)

    texts = ["Set a reminder.", "Remind the user of something at a time.", ""]
    fields = [Field(name=key), Field(name=when)]
    return Tool(family="reminder", name=name, description=rng.choice(texts), fields=fields, wish=wish)


def translation(rng: Random) -> Tool:
    name, key = rng.choice(["translate", "translate_text"]), rng.choice(["language", "target", "to", "target_language"])

    def wish(rng: Random) -> Wish:
        words, language = rng.choice(WORDS), rng.choice(LANGUAGES)
        forms = [
            f'Translate "{words}" to {language}.',
            f"Translate to {language}: {words}",
            f"How do you say {words} in {language}?",
        ]
        out = " ".join(invented_word(rng) for _ in range(rng.randint(1, 3)))
        result = rng.choice([out, json.dumps({"translation": out}), json.dumps({"text": out})])
        goal, arguments = f"a translation to {language}", {"text": words, key: language}
        return Wish(
            question=rng.choice(forms), goal=goal, arguments=arguments, result=result, answer=f"In {language}: {out}"
        )

    fields = [Field(name="text"), Field(name=key)]
    texts = ["Translate a text.", "Translates text to another language.", ""]
    return Tool(family="translation", name=name, description=rng.choice(texts), fields=fields, wish=wish)


def currency(rng: Random) -> Tool:
    name = rng.choice(["convert_currency", "convert", "exchange"])
    source, target = rng.choice([("from_currency", "to_currency"), ("source", "target"), ("base", "quote")])

    def wish(rng: Random) -> Wish:
        amount, (first, second) = rng.randint(1, 900), rng.sample(CURRENCIES, 2)
        value = rng.randint(100, 90000) / 100
        forms = [f"Convert {amount} {first} to {second}.", f"How much is {amount} {first} in {second}?"]
        result = rng.choice(
            [str(value), f"{value} {second}", json.dumps({"result": value}), json.dumps({"amount": value})]
        )
        arguments = {"amount": amount, source: first, target: second}
        goal, answer = f"{amount} {first} in {second}", f"{amount} {first} are {value} {second}."
        return Wish(question=rng.choice(forms), goal=goal, arguments=arguments, result=result, answer=answer)

    fields = [Field(name="amount", schema={"type": "number"}), Field(name=source), Field(name=target)]
    texts = ["Convert an amount of money.", "Converts currencies.", ""]
    return Tool(family="currency", name=name, description=rng.choice(texts), fields=fields, wish=wish)


VERBS = [
    "book",
    "open",
    "close",
    "delete",
    "find",
    "create",
    "update",
    "check",
    "start",
    "stop",
    "play",
    "print",
    "read",
]
VERBS += ["count", "move", "rename", "show", "get", "list", "fetch", "load", "save", "buy", "plan", "cancel"]
NOUNS = [
    "room",
    "file",
    "door",
    "song",
    "table",
    "car",
    "task",
    "user",
    "page",
    "train",
    "book",
    "movie",
    "note",
    "bus",
]
NOUNS += ["account", "project", "recipe", "game", "device", "server", "photo", "folder", "team", "hotel", "restaurant"]
KEYS = [
    "name",
    "title",
    "id",
    "date",
    "color",
    "size",
    "user",
    "city",
    "day",
    "number",
    "count",
    "path",
    "owner",
    "kind",
]


def _value(rng: Random, key: str) -> object:
    if key in ("number", "count", "size"):
        return rng.randint(1, 500)
    if key == "color":
        return rng.choice(["red", "blue", "green", "yellow", "black", "white"])
    if key in ("day", "date"):
        return rng.choice(facts.DAYS)
    if key == "city":
        return any_city(rng)
    if key in ("user", "owner", "name"):
        return any_name(rng)
    return rng.choice([invented_word(rng), f"{invented_word(rng)}{rng.randint(1, 99)}", str(rng.randint(1, 9999))])


def invented(rng: Random) -> Tool:
    verb, noun = rng.choice(VERBS), rng.choice([*NOUNS, invented_word(rng)])
    keys = rng.sample(KEYS, rng.choice([0, 1, 1, 1, 2, 2, 3]))
    name = rng.choice(
        [f"{verb}_{noun}", f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}", f"{noun}.{verb}"]
    )
    name = name.replace(".", "-")

    def wish(rng: Random) -> Wish:
        arguments = {key: _value(rng, key) for key in keys}
        named = [f"{rng.choice(['', 'the '])}{key} {value}" for key, value in arguments.items()]
        listed = " and ".join(named) if len(named) < 3 else f"{named[0]}, {named[1]} and {named[2]}"
        head = f"{verb.capitalize()} {rng.choice(['the', 'a', 'my'])} {noun}"
        question = f"{head} {rng.choice(['with', 'for', 'with'])} {listed}." if named else f"{head}."
        out = rng.choice([invented_word(rng), str(rng.randint(0, 999)), "ready", "not there", "free"])
        result = rng.choice([out, json.dumps({noun: out}), json.dumps({"result": out}), json.dumps({"value": out})])
        answer, goal = f"The {noun}: {out}.", f"to {verb} {an(noun)}"
        return Wish(question=question, goal=goal, arguments=arguments, result=result, answer=answer)

    numbers = ("number", "count", "size")
    fields = [Field(name=key, schema={"type": "integer" if key in numbers else "string"}) for key in keys]
    texts = [f"{verb.capitalize()} {an(noun)}.", f"{verb.capitalize()} the {noun}", "", ""]
    return Tool(family=f"{verb} {noun}", name=name, description=rng.choice(texts), fields=fields, wish=wish)


def handoff(rng: Random) -> Tool:
    who = rng.choice(["spanish", "billing", "math", "support", "sales", "history", "weather", invented_word(rng)])
    name = f"transfer_to_{who}{rng.choice(['_agent', '', '_team'])}"

    def wish(rng: Random) -> Wish:
        forms = [f"I want to talk to {who}.", f"Connect me with {who}, please.", f"Transfer me to {who}."]
        goal, result = f"the {who} agent", rng.choice([f"Transferred to {who}.", '{"assistant": "' + who + '"}'])
        return Wish(
            question=rng.choice(forms), goal=goal, arguments={}, result=result, answer=f"You are now with {who}."
        )

    texts = [f"Handoff to the {who} agent.", f"Transfer to {who}.", ""]
    return Tool(family=f"handoff {who}", name=name, description=rng.choice(texts), fields=[], wish=wish)


FAMILIES: list[tuple[float, Callable[[Random], Tool]]] = [
    (26, weather),
    (15, arithmetic),
    (8, calculator),
    (12, clock),
    (5, search),
    (3, message),
    (3, price),
    (3, order),
    (3, light),
    (2, reminder),
    (2, translation),
    (2, currency),
    (14, invented),
    (2, handoff),
]


def any_tools(rng: Random, count: int) -> list[Tool]:
    """Tools of different families and names, so that one at most fits a question."""
    tools: list[Tool] = []
    while len(tools) < count:
        tool = rng.choices([make for _, make in FAMILIES], [weight for weight, _ in FAMILIES])[0](rng)
        families = {other.family for other in tools}
        sums = any("arithmetic" in family for family in families)
        clash = (tool.family == "calculator" and sums) or ("arithmetic" in tool.family and "calculator" in families)
        clash |= {tool.family, *families} >= {"weather", "handoff weather"}
        if tool.family not in families and tool.name not in {other.name for other in tools} and not clash:
            tools.append(tool)
    return tools
