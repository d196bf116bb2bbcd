"""Short stories and poems from a template grammar: named heroes, one thread, a beginning and an end.

Promises that a story keeps its hero, pronouns and place to the end, and depends only on the generator passed in.
Must not know about chat, tokens or training.
"""

from __future__ import annotations

from random import Random

from make_demo.facts import NAMES, NAMES_HE, NAMES_SHE

HEROES = ["fox", "rabbit", "bear", "mouse", "cat", "dog", "dragon", "bird", "owl", "duck", "frog", "lion", "elephant"]
HEROES += ["hedgehog", "squirrel", "horse", "unicorn", "robot", "wizard", "princess", "knight", "pirate", "girl", "boy"]
HEROES += ["turtle", "whale", "bee", "wolf", "king", "queen"]
FEMALE_HEROES, MALE_HEROES = ("girl", "princess", "queen"), ("boy", "king", "wizard")
SHE, HE = ("she", "her", "her"), ("he", "his", "him")
TRAITS = ["little", "brave", "kind", "clever", "curious", "shy", "cheerful", "small"]
PLACES = [
    "a green forest",
    "a quiet village",
    "an old castle",
    "a small house by the sea",
    "a sunny valley",
    "a garden full of flowers",
    "a town on a hill",
    "a cave near the river",
]
POEM_TOPICS = {
    "the sea": ("The sea is wide, the sea is blue,", "it sings a song for me and you."),
    "the moon": ("The moon is round, the moon is bright,", "it keeps us company at night."),
    "the sun": ("The sun comes up, the sky is red,", "and all the birds get out of bed."),
    "a cat": ("A cat lies down upon the mat,", "and dreams of milk, the happy cat."),
    "a dog": ("A dog runs fast along the lane,", "and barks at clouds and wind and rain."),
    "spring": ("The spring is here, the fields are green,", "the finest days that I have seen."),
    "winter": ("The winter comes with ice and snow,", "and all the chilly breezes blow."),
    "the rain": ("The rain falls softly on the town,", "and all the little drops come down."),
    "computers": ("A small machine can count and spell,", "and do what it is told quite well."),
    "love": ("A friendly word, a helping hand,", "are things that all can understand."),
}
POEM_ENDINGS = [
    ("And when the day is at an end,", "I gladly share it with a friend."),
    ("So let us walk a little way,", "and say hello to this new day."),
    ("I write these lines, they are not long,", "they are a very little song."),
]


def article(noun: str) -> str:
    return "an" if noun[0] in "aeio" else "a"


def story(rng: Random, hero: str | None = None, name: str | None = None, *, long: bool = False) -> str:
    """One story of about 100 words, or two chapters of it when `long`."""
    hero = hero or rng.choice(HEROES)
    known = NAMES_SHE if hero in FEMALE_HEROES else NAMES_HE if hero in MALE_HEROES else NAMES
    name = name or rng.choice(known)
    friend = rng.choice([n for n in NAMES if n != name])
    she = hero in FEMALE_HEROES or (hero not in MALE_HEROES and name in NAMES_SHE)
    he, his, him = SHE if she else HE
    words = {"hero": hero, "name": name, "friend": friend, "he": he, "He": he.capitalize(), "his": his, "him": him}
    trait, place = rng.choice(TRAITS), rng.choice(PLACES)
    opening = rng.choice(
        [
            f"Once upon a time, there was a {trait} {hero} named {name}. {{He}} lived in {place}.",
            f"Once upon a time, a {trait} {hero} named {name} lived in {place}.",
            f"There once was a {trait} {hero} named {name}, who lived in {place}.",
        ]
    )
    plots = rng.sample(PLOTS, 2 if long else 1)
    parts = [[opening, *plots[0](rng)]]
    if long:
        parts.append(
            [rng.choice(["A week later, something new happened.", "But that was not the end."]), *plots[1](rng)]
        )
    parts[-1].append(
        rng.choice(
            [
                "And they all lived happily ever after.",
                "From that day on, {name} and {friend} were the best of friends.",
                "That night, {name} slept very well. The end.",
            ]
        )
    )
    return "\n\n".join(" ".join(part) for part in parts).format(**words)


def _lost_thing(rng: Random) -> list[str]:
    thing = rng.choice(["red ball", "golden key", "blue hat", "silver ring", "old map", "favourite book"])
    spot = rng.choice(["under a tree", "behind a stone", "near the river", "inside a box", "on top of a hill"])
    return [
        f"One day, {{name}} could not find {{his}} {thing}.",
        f"{{He}} looked everywhere, but the {thing} was gone.",
        "{name} was sad and sat down to think.",
        'Then {friend} came along and asked, "Why are you so sad?"',
        f'"I have lost my {thing}," said {{name}}.',
        '"Do not worry, I will help you," said {friend}.',
        f"They searched together until they found the {thing} {spot}.",
        '"Thank you, {friend}!" said {name} with a big smile.',
    ]


def _storm(rng: Random) -> list[str]:
    weather = rng.choice(["a great storm", "heavy rain", "a cold wind", "deep snow"])
    shelter = rng.choice(["a warm cave", "an old barn", "a hollow tree", "a little hut"])
    return [
        f"One evening, {{name}} was walking home when {weather} came.",
        "{He} could not see the path and was afraid.",
        f"After a while, {{he}} saw a light. It came from {shelter}.",
        "Inside was {friend}, who was making hot soup.",
        '"Come in and get warm," said {friend}.',
        "They ate the soup and told each other stories.",
        "In the morning, the sky was clear and the sun was shining.",
        "{name} thanked {friend} and went home.",
    ]


def _race(rng: Random) -> list[str]:
    goal = rng.choice(["the big oak tree", "the old bridge", "the top of the hill", "the lake"])
    prize = rng.choice(["a golden cup", "a basket of apples", "a honey cake", "a shiny medal"])
    return [
        f"One morning, there was a race to {goal}. The prize was {prize}.",
        "{name} wanted to win, but {friend} was very fast.",
        "They ran side by side for a long time.",
        "Then {friend} fell and hurt a foot.",
        "{name} stopped and went back to help.",
        f"They walked to {goal} together, and everybody cheered.",
        f"They both won, and they shared {prize}.",
        '"Being kind is better than being first," said {name}.',
    ]


def _garden(rng: Random) -> list[str]:
    plant = rng.choice(["a sunflower", "an apple tree", "a pumpkin", "a rose bush", "a carrot"])
    return [
        f"One spring day, {{name}} planted a seed, because {{he}} wanted to grow {plant}.",
        "Every morning, {he} gave it water and waited.",
        "For many days, nothing happened, and {name} wanted to give up.",
        '"Be patient," said {friend}. "Good things take time."',
        "So {name} waited a little longer.",
        "At last, a small green leaf came out of the ground.",
        f"By the end of the summer, it had become {plant}, the finest in the land.",
        "{name} was very proud and showed it to {friend}.",
    ]


def _journey(rng: Random) -> list[str]:
    goal = rng.choice(["the sea", "the high mountains", "the big city", "the end of the rainbow"])
    animal = rng.choice(["an old turtle", "a wise owl", "a friendly goat", "a tiny ant"])
    return [
        f"{{name}} had always wanted to see {goal}.",
        "One day, {he} packed {his} bag and set out.",
        f"On the way, {{he}} met {animal} named {{friend}}.",
        '"Where are you going?" asked {friend}.',
        f'"I am going to see {goal}," said {{name}}. "Do you want to come with me?"',
        "They walked for three days and three nights.",
        f"When they saw {goal}, they could not believe their eyes.",
        '"It was worth every step," said {name}.',
    ]


def _birthday(rng: Random) -> list[str]:
    gift = rng.choice(["a kite", "a drum", "a warm scarf", "a paper boat", "a music box"])
    return [
        "It was {name}'s birthday, but nobody seemed to remember it.",
        "{name} walked around and felt lonely.",
        "In the afternoon, {friend} came and said that there was a problem at home.",
        "They ran back as fast as they could.",
        '{name} opened the door, and all {his} friends shouted, "Happy birthday!"',
        f"There was a big cake, and {{friend}} gave {{him}} {gift}.",
        "{name} laughed and danced until it was dark.",
        '"This is the best day of my life," said {name}.',
    ]


PLOTS = [_lost_thing, _storm, _race, _garden, _journey, _birthday]


def poem(rng: Random, topic: str) -> str:
    """Four lines about one of `POEM_TOPICS`."""
    return "\n".join([*POEM_TOPICS[topic], *rng.choice(POEM_ENDINGS)])
