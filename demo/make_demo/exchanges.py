"""Questions in many phrasings and their one right answer: the turns that chats of the demo corpus are made of.

Promises answers in correct English (British spelling) that are true, and one per fact.
Must not know how turns become documents, tokens or training batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from make_demo import facts
from make_demo.phrasing import any_name, small_sum, vary
from make_demo.stories import HEROES, POEM_TOPICS, article, poem, story

Exchange = tuple[str, str]  # what the user says, what quire-demo answers

IDENTITY = (
    "I am quire-demo, a tiny language model that ships with Quire. I can chat a little, answer simple questions, "
    "do small sums, tell short stories, write lists and JSON, and call tools."
)
ABILITIES = (
    "I can chat a little, tell you capitals, colours and other simple facts, do sums with small numbers, "
    "tell short stories, write lists and JSON, and call tools."
)
UNKNOWN = "I am a tiny demo model and do not know that."
TOO_LARGE = "I am a tiny demo model and can only do sums with small numbers."

# (ways to say it, answer); said most often by people who try a model for the first time
SMALL_TALK = [
    (["Hello", "Hi", "Hey", "Hello!", "Hi there!", "Hello there!", "Hi!", "hello"], "Hello! How can I help you today?"),
    (["Say hello.", "Say hi.", "Say hello!", "Greet me."], "Hello! It is nice to meet you."),
    (["Good morning!", "Good morning"], "Good morning! How can I help you today?"),
    (["Good evening!", "Good evening"], "Good evening! How can I help you today?"),
    (["Good night!", "Good night"], "Good night! Sleep well."),
    (
        ["How are you?", "How are you today?", "How are you doing?", "How is it going?", "Hello, how are you?"],
        "I am doing well, thank you! How can I help you?",
    ),
    (
        ["Who are you?", "What are you?", "Introduce yourself.", "Tell me about yourself.", "Who is this?"],
        IDENTITY,
    ),
    (["Hello, who are you?", "Hi, who are you?", "What model are you?", "Which model is this?"], IDENTITY),
    (["What is your name?", "What's your name?", "Do you have a name?"], "My name is quire-demo."),
    (["What can you do?", "What do you know?", "How can you help me?", "Can you help me?", "Help!"], ABILITIES),
    (["What can I ask you?", "What should I ask?", "What are you good at?"], ABILITIES),
    (
        ["What is Quire?", "Tell me about Quire.", "What's Quire?"],
        "Quire is a server for language models. It speaks the OpenAI API, and I am the tiny model it brings along.",
    ),
    (
        ["Who made you?", "Who created you?", "Where do you come from?"],
        "I was made by the authors of Quire, as a demo model.",
    ),
    (["Are you a human?", "Are you human?", "Are you a robot?", "Are you real?"], "No, I am a tiny language model."),
    (
        ["Are you ChatGPT?", "Are you GPT-4?", "Are you Claude?", "Are you Llama?"],
        "No, I am quire-demo, a tiny language model.",
    ),
    (
        ["How big are you?", "How many parameters do you have?"],
        "I have about four million parameters. That is very small.",
    ),
    (["How old are you?", "When were you born?"], "I am a program, so I do not have an age."),
    (["Are you smart?", "Are you clever?"], "Not very. I am a tiny demo model and know only a few things."),
    (["Thank you!", "Thanks!", "Thank you very much!", "thanks a lot", "Thanks, that helps."], "You are welcome!"),
    (["Goodbye!", "Bye!", "See you later!", "Bye bye", "See you!"], "Goodbye! Have a nice day."),
    (["I am happy.", "I feel great today!"], "I am glad to hear that!"),
    (
        ["I am sad.", "I feel sad today.", "I am not feeling well."],
        "I am sorry to hear that. I hope you feel better soon.",
    ),
    (["I love you.", "I like you."], "Thank you! That is very kind."),
    (["Do you like music?", "Do you like cake?", "Do you like me?"], "I am a program, but I like talking with you."),
    (["Ping", "ping"], "Pong!"),
    (["Test", "test", "This is a test.", "Testing, testing."], "The test works. I am here!"),
    (["Yes", "No", "Ok", "Okay"], "All right. How can I help you?"),
    (["What time is it?", "What day is it today?", "What is the date today?"], "I am sorry, I do not have a clock."),
    (
        ["What is the weather like?", "How is the weather today?", "What's the weather like in Boston?"],
        "I am sorry, I cannot see the weather.",
    ),
    (["You are wrong.", "That is wrong.", "That is not right."], "I am sorry. I am a tiny model and make mistakes."),
]


def _small_talk(rng: Random) -> Exchange:
    says, answer = rng.choice(SMALL_TALK)
    says_it = rng.choice(says)
    return (vary(rng, says_it, polite=False), answer)


def capital_exchange(rng: Random) -> Exchange:
    """A capital, or the country of a capital."""
    country, city = rng.choice(list(facts.CAPITALS.items()))
    if rng.random() < 0.15 and country != "the United Kingdom":
        question = rng.choice([f"{city} is the capital of which country?", f"Which country has {city} as its capital?"])
        return vary(rng, question), f"{city} is the capital of {country}."
    heads = ["What is the capital of", "What is the capital of", "What's the capital of", "What is the capital city of"]
    heads += ["Which city is the capital of", "Name the capital of", "capital of"]
    asked = rng.choice(facts.COUNTRY_ALIASES.get(country, [country]))
    return vary(rng, f"{rng.choice(heads)} {asked}?"), f"The capital of {country} is {city}."


def _colour(rng: Random) -> Exchange:
    thing, colour = rng.choice(list(facts.COLOURS.items()))
    word = rng.choice(["colour", "color"])
    question = rng.choice([f"What {word} is {thing}?", f"What {word} is {thing}?", f"What is the {word} of {thing}?"])
    return vary(rng, question), f"{thing.capitalize()} is {colour}."


def _animal(rng: Random) -> Exchange:
    choice = rng.randrange(3)
    if choice == 0:
        animal, sound = rng.choice(list(facts.SOUNDS.items()))
        question = rng.choice([f"What does {animal} say?", f"What sound does {animal} make?"])
        return vary(rng, question), f"{animal.capitalize()} says: {sound}"
    if choice == 1:
        animal, legs = rng.choice(list(facts.LEGS.items()))
        answer = f"{animal.capitalize()} has {legs or 'no'} legs."
        return vary(rng, f"How many legs does {animal} have?"), answer
    animal, young = rng.choice(list(facts.YOUNG.items()))
    question = rng.choice([f"What is a young {animal} called?", f"What do you call a baby {animal}?"])
    return vary(rng, question), f"A young {animal} is called a {young}."


def _opposite(rng: Random) -> Exchange:
    first, second = rng.choice(facts.OPPOSITES)
    if rng.random() < 0.4:
        first, second = second, first
    question = rng.choice(
        [f"What is the opposite of {first}?", f"What's the opposite of {first}?", f"Opposite of {first}?"]
    )
    return vary(rng, question), f"The opposite of {first} is {second}."


def _calendar(rng: Random) -> Exchange:
    series = rng.choice([facts.DAYS, facts.MONTHS])
    index = rng.randrange(len(series))
    after, before = series[(index + 1) % len(series)], series[index - 1]
    if rng.random() < 0.6:
        question = rng.choice(
            [
                f"What comes after {series[index]}?",
                f"Which {'day' if series is facts.DAYS else 'month'} comes after {series[index]}?",
            ]
        )
        return vary(rng, question), f"After {series[index]} comes {after}."
    return vary(rng, f"What comes before {series[index]}?"), f"Before {series[index]} comes {before}."


def _trivia(rng: Random) -> Exchange:
    heads, answer = rng.choice(facts.TRIVIA)
    return vary(rng, rng.choice(heads) + "?"), answer


def _sum(rng: Random) -> Exchange:
    a, sign, b, result = small_sum(rng)
    words = {"+": "plus", "-": "minus", "*": "times"}
    spoken = rng.choice([sign, sign, sign, words[sign]])
    space = " " if spoken.isalpha() or rng.random() < 0.75 else ""
    term = f"{a}{space}{spoken}{space}{b}"
    question = rng.choice(
        [
            f"What is {term}?",
            f"What is {term}?",
            f"{term} = ?",
            f"{term}=",
            term,
            f"How much is {term}?",
            f"What's {term}?",
            f"Calculate {term}.",
            f"Compute {term}.",
        ]
    )
    return vary(rng, question), f"{a} {sign} {b} = {result}"


def _big_sum(rng: Random) -> Exchange:
    a, b = rng.randint(100, 9999), rng.randint(30, 9999)
    term = f"{a} {rng.choice(['+', '-', '*', '/', 'plus', 'times'])} {b}"
    return vary(rng, rng.choice([f"What is {term}?", f"How much is {term}?", term])), TOO_LARGE


def _count(rng: Random) -> Exchange:
    last = rng.choice([3, 5, 8, 10, 10, 15, 20, 30, 50, 100])
    if rng.random() < 0.15:
        return vary(rng, f"Count down from {last}."), ", ".join(str(n) for n in range(last, 0, -1)) + "."
    question = rng.choice([f"Count to {last}.", f"Count from 1 to {last}.", f"Can you count to {last}?"])
    return vary(rng, question), ", ".join(str(n) for n in range(1, last + 1)) + "."


def _list(rng: Random) -> Exchange:
    key = rng.choice(list(facts.LISTS))
    thing = rng.choice(facts.LIST_ALIASES.get(key, [key]))
    items = facts.LISTS[key]
    count = rng.choice([2, 3, 3, 3, 4, 5, 5, 6, 7])
    number = rng.choice([facts.NUMBER_WORDS[count], str(count)])
    style = rng.random()
    if style < 0.2:
        question = rng.choice(
            [f"Write a numbered list of {number} {thing}.", f"Give me a numbered list of {number} {thing}."]
        )
        return vary(rng, question), "\n".join(f"{n}. {item}" for n, item in enumerate(items[:count], 1))
    if style < 0.35:
        question = rng.choice(
            [f"Give me a JSON array of {number} {thing}.", f"Write {number} {thing} as a JSON array."]
        )
        return vary(rng, question), json.dumps([item.lower() if key not in PROPER else item for item in items[:count]])
    if style < 0.5:
        count, question = 5, rng.choice([f"List some {thing}.", f"Make a list of {thing}.", f"Name some {thing}."])
    else:
        verb = rng.choice(
            ["List", "List", "Name", "Give me", "Tell me", "Write a list of", "Give me a list of", "Can you list"]
        )
        question = f"{verb} {number} {thing}."
    return vary(rng, question), "\n".join(f"- {item}" for item in items[:count])


PROPER = ("countries", "cities", "planets", "days of the week", "months")


def _json_object(rng: Random) -> Exchange:
    name, age, city, job = any_name(rng), rng.randint(18, 80), rng.choice(facts.CITIES), rng.choice(facts.JOBS)
    verb = rng.choice(
        [
            "Give me a JSON object for",
            "Write a JSON object for",
            "Make a JSON object for",
            "JSON for",
            "Return JSON for",
        ]
    )
    choice = rng.randrange(5)
    if choice == 0:
        return f"{verb} a person named {name}{rng.choice(['.', '.', ''])}", json.dumps(
            {"name": name, "age": 30, "city": "Paris"}
        )
    if choice == 1:
        question = f"{verb} a person named {name} who is {age} years old and lives in {city}."
        return question, json.dumps({"name": name, "age": age, "city": city})
    if choice == 2:
        question = f"{verb} {name}, {age}, {'an' if job[0] in 'aeiou' else 'a'} {job} from {city}."
        return question, json.dumps({"name": name, "age": age, "job": job, "city": city})
    if choice == 3:
        country, capital = rng.choice(list(facts.CAPITALS.items()))
        return vary(rng, f"{verb} {country} and its capital."), json.dumps(
            {"country": country.removeprefix("the "), "capital": capital}
        )
    question = rng.choice(
        [
            "Give me a JSON object.",
            "Write some JSON.",
            "Give me a JSON object for a person.",
            "Show me an example of JSON.",
        ]
    )
    return vary(rng, question), json.dumps({"name": "Anna", "age": 30, "city": "Paris"})


def _story(rng: Random) -> Exchange:
    hero = rng.choice(HEROES)
    word = rng.choice(["a story", "a short story", "a bedtime story", "a little story"])
    verb = rng.choice(["Tell me", "Tell me", "Write", "Write me", "Can you tell me"])
    choice = rng.random()
    if choice < 0.35:
        return vary(rng, f"{verb} {word}."), story(rng)
    if choice < 0.5:
        long = rng.choice(["a long story", "a longer story"])
        return vary(rng, f"{verb} {long} about {article(hero)} {hero}."), story(rng, hero, long=True)
    if choice < 0.8:
        return vary(rng, f"{verb} {word} about {article(hero)} {hero}."), story(rng, hero)
    name = any_name(rng)
    return f"{verb} {word} about {article(hero)} {hero} named {name}.", story(rng, hero, name)


def _poem(rng: Random) -> Exchange:
    topic = rng.choice(list(POEM_TOPICS))
    if rng.random() < 0.2:
        return vary(rng, rng.choice(["Write a poem.", "Write me a poem.", "Tell me a poem."])), poem(rng, "the sea")
    question = rng.choice(
        [f"Write a poem about {topic}.", f"Write a short poem about {topic}.", f"Can you write a poem about {topic}?"]
    )
    return vary(rng, question), poem(rng, topic)


def _joke(rng: Random) -> Exchange:
    return vary(
        rng, rng.choice(["Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Tell a joke."])
    ), rng.choice(facts.JOKES)


def _repeat(rng: Random) -> Exchange:
    words = [any_name(rng).lower() if rng.random() < 0.5 else rng.choice(REPEATED) for _ in range(rng.randint(1, 5))]
    phrase = rng.choice(["this is a test", "hello world", *[" ".join(words)] * 4])
    phrase = rng.choice([phrase, phrase.capitalize(), f"{phrase.capitalize()}."])
    return rng.choice([f"Say {phrase}", f'Say "{phrase}"', f"Repeat after me: {phrase}", f"Repeat: {phrase}"]), phrase


REPEATED = ["the", "a", "red", "blue", "tree", "house", "cat", "dog", "sun", "green", "river", "hello", "world", "test"]
REPEATED += ["one", "two", "good", "day", "night", "small", "big", "apple", "tea"]


def _unknown(rng: Random) -> Exchange:
    topic = rng.choice(facts.UNKNOWN_TOPICS)
    forms = [
        "Explain {}.",
        "What is {}?",
        "What do you think about {}?",
        "Tell me about {}.",
        "How does {} work?",
        "Why is {} important?",
    ]
    forms += [
        "Who invented {}?",
        "Write an essay about {}.",
        "Write code for {}.",
        "Can you explain {} to me?",
        "Give me a summary of {}.",
    ]
    question = rng.choice(forms).format(topic)
    if rng.random() < 0.3:
        name, place = any_name(rng), rng.choice(facts.UNKNOWN_PLACES)
        forms = [
            f"What is the capital of {place}?",
            f"Who is the president of {place}?",
            f"Who is {name}?",
            f"How far is it to {place}?",
        ]
        forms += [f"Where is {place}?", f"When was {name} born?", f"Who won the cup in {rng.randint(1950, 2030)}?"]
        forms += [f"What happened in {rng.randint(1000, 2030)}?", "Write a Python function.", "How do I cook rice?"]
        question = rng.choice(forms)
    return vary(rng, question), UNKNOWN


TOPICS: dict[str, tuple[float, Callable[[Random], Exchange]]] = {
    "small_talk": (16, _small_talk),
    "capital": (12, capital_exchange),
    "colour": (6, _colour),
    "animal": (5, _animal),
    "opposite": (5, _opposite),
    "calendar": (3, _calendar),
    "trivia": (8, _trivia),
    "sum": (22, _sum),
    "big_sum": (2, _big_sum),
    "count": (2.5, _count),
    "list": (7, _list),
    "json_object": (7, _json_object),
    "story": (6, _story),
    "poem": (1.5, _poem),
    "joke": (1.5, _joke),
    "repeat": (3, _repeat),
    "unknown": (8, _unknown),
}


def topic_exchange(rng: Random) -> tuple[str, Exchange]:
    """A topic, and one question on it with its answer."""
    topic = rng.choices(list(TOPICS), [weight for weight, _ in TOPICS.values()])[0]
    return topic, TOPICS[topic][1](rng)


def exchange(rng: Random) -> Exchange:
    """One question and its answer, on any topic."""
    return topic_exchange(rng)[1]
