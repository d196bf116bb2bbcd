"""The fixed tables behind the demo corpus: everything quire-demo can be said to know.

Promises plain, small, true facts and word lists; entries keep their order, since lists are learned in that order.
Must not know how the facts are phrased, tokenized or trained on.
"""

from __future__ import annotations

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "England": "London",
    "the United Kingdom": "London",
    "Ireland": "Dublin",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Switzerland": "Bern",
    "Belgium": "Brussels",
    "the Netherlands": "Amsterdam",
    "Greece": "Athens",
    "Turkey": "Ankara",
    "Hungary": "Budapest",
    "the Czech Republic": "Prague",
    "Romania": "Bucharest",
    "Russia": "Moscow",
    "Ukraine": "Kyiv",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "South Korea": "Seoul",
    "Thailand": "Bangkok",
    "Australia": "Canberra",
    "New Zealand": "Wellington",
    "Canada": "Ottawa",
    "the United States": "Washington",
    "Mexico": "Mexico City",
    "Brazil": "Brasilia",
    "Argentina": "Buenos Aires",
    "Chile": "Santiago",
    "Peru": "Lima",
    "Cuba": "Havana",
}

COUNTRY_ALIASES = {
    "the United Kingdom": ["the United Kingdom", "the UK", "Great Britain", "Britain"],
    "the United States": ["the United States", "the USA", "the US", "America"],
    "the Netherlands": ["the Netherlands", "Holland"],
}

COLOURS = {
    "the sky": "blue",
    "the sea": "blue",
    "grass": "green",
    "snow": "white",
    "milk": "white",
    "coal": "black",
    "a lemon": "yellow",
    "a banana": "yellow",
    "the sun": "yellow",
    "a tomato": "red",
    "blood": "red",
    "a strawberry": "red",
    "a carrot": "orange",
    "an orange": "orange",
    "chocolate": "brown",
    "a frog": "green",
    "a leaf": "green",
    "an elephant": "grey",
    "a flamingo": "pink",
    "a crow": "black",
}

SOUNDS = {
    "a dog": "Woof!",
    "a cat": "Meow!",
    "a cow": "Moo!",
    "a duck": "Quack!",
    "a sheep": "Baa!",
    "a pig": "Oink!",
    "a lion": "Roar!",
    "a bee": "Buzz!",
    "an owl": "Hoot!",
    "a mouse": "Squeak!",
    "a snake": "Hiss!",
    "a frog": "Croak!",
}

LEGS = {
    "a dog": 4,
    "a cat": 4,
    "a cow": 4,
    "a horse": 4,
    "a bird": 2,
    "a chicken": 2,
    "a person": 2,
    "a spider": 8,
    "an ant": 6,
    "a bee": 6,
    "a snake": 0,
    "a fish": 0,
}

YOUNG = {
    "dog": "puppy",
    "cat": "kitten",
    "cow": "calf",
    "horse": "foal",
    "sheep": "lamb",
    "bear": "cub",
    "duck": "duckling",
    "frog": "tadpole",
    "goat": "kid",
    "hen": "chick",
}

OPPOSITES = [
    ("hot", "cold"),
    ("big", "small"),
    ("up", "down"),
    ("left", "right"),
    ("day", "night"),
    ("good", "bad"),
    ("happy", "sad"),
    ("fast", "slow"),
    ("old", "young"),
    ("open", "closed"),
    ("black", "white"),
    ("light", "dark"),
    ("high", "low"),
    ("early", "late"),
    ("full", "empty"),
    ("hard", "soft"),
    ("strong", "weak"),
    ("rich", "poor"),
    ("wet", "dry"),
    ("yes", "no"),
    ("in", "out"),
    ("long", "short"),
    ("loud", "quiet"),
    ("clean", "dirty"),
]

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
SEASONS = ["spring", "summer", "autumn", "winter"]
PLANETS = ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"]
NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

# Question heads (without the question mark) and one true sentence as the answer.
TRIVIA = [
    (["How many days are in a week", "How many days does a week have"], "There are 7 days in a week."),
    (["How many months are in a year", "How many months does a year have"], "There are 12 months in a year."),
    (["How many days are in a year", "How many days does a year have"], "There are 365 days in a year."),
    (["How many hours are in a day", "How many hours does a day have"], "There are 24 hours in a day."),
    (["How many minutes are in an hour", "How many minutes does an hour have"], "There are 60 minutes in an hour."),
    (["How many seconds are in a minute"], "There are 60 seconds in a minute."),
    (["How many letters are in the alphabet"], "There are 26 letters in the English alphabet."),
    (["How many seasons are there", "How many seasons are in a year"], "There are 4 seasons in a year."),
    (["How many planets are there", "How many planets are in the solar system"], "There are 8 planets."),
    (["What is the largest ocean", "What is the biggest ocean"], "The largest ocean is the Pacific Ocean."),
    (["What is the largest planet", "What is the biggest planet"], "The largest planet is Jupiter."),
    (["What is the smallest planet"], "The smallest planet is Mercury."),
    (["What is the largest animal", "What is the biggest animal"], "The largest animal is the blue whale."),
    (["What is the tallest animal"], "The tallest animal is the giraffe."),
    (["What is the fastest land animal", "What is the fastest animal"], "The fastest land animal is the cheetah."),
    (["What is the highest mountain", "What is the tallest mountain"], "The highest mountain is Mount Everest."),
    (["What do bees make"], "Bees make honey."),
    (["What do cows give us", "What do cows make"], "Cows give us milk."),
    (["What is ice made of", "What is ice"], "Ice is frozen water."),
    (["Where do fish live"], "Fish live in water."),
    (["Where does the sun rise"], "The sun rises in the east."),
    (["Where does the sun set"], "The sun sets in the west."),
    (["Who wrote Romeo and Juliet", "Who wrote Hamlet"], "William Shakespeare wrote it."),
    (["Who painted the Mona Lisa"], "Leonardo da Vinci painted the Mona Lisa."),
    (
        ["What is the boiling point of water", "At what temperature does water boil"],
        "Water boils at 100 degrees Celsius.",
    ),
    (
        ["What is the freezing point of water", "At what temperature does water freeze"],
        "Water freezes at 0 degrees Celsius.",
    ),
    (["Is the earth flat", "Is the Earth round"], "The Earth is round, like a ball."),
    (["What do you call frozen rain", "What is snow"], "Snow is frozen water that falls from clouds."),
    (["What is a dog"], "A dog is a friendly animal with four legs that likes to live with people."),
    (["What is a cat"], "A cat is a small animal with soft fur that likes to sleep and to catch mice."),
    (["What is the sun"], "The sun is a star. It gives us light and warmth."),
    (["What is the moon"], "The moon is a ball of rock that goes around the Earth."),
    (["What is water"], "Water is a clear liquid. All living things need it."),
    (["What is a computer"], "A computer is a machine that follows instructions very quickly."),
    (
        ["What is a language model", "What is an LLM"],
        "A language model is a program that predicts the next word of a text.",
    ),
    (["What is San Francisco", "Where is San Francisco"], "San Francisco is a city in California, by the sea."),
]

LISTS = {
    "fruits": ["Apples", "Bananas", "Oranges", "Grapes", "Pears", "Cherries", "Lemons", "Plums"],
    "vegetables": ["Carrots", "Potatoes", "Tomatoes", "Onions", "Peas", "Beans", "Cabbage", "Spinach"],
    "animals": ["Dogs", "Cats", "Horses", "Cows", "Lions", "Elephants", "Rabbits", "Foxes"],
    "birds": ["Owls", "Ducks", "Eagles", "Crows", "Swans", "Parrots", "Robins", "Penguins"],
    "colours": ["Red", "Blue", "Green", "Yellow", "Orange", "Purple", "Black", "White"],
    "countries": ["France", "Germany", "Italy", "Spain", "Japan", "Brazil", "Canada", "Egypt"],
    "cities": ["Paris", "London", "Rome", "Berlin", "Tokyo", "Madrid", "Cairo", "Lima"],
    "planets": PLANETS,
    "days of the week": DAYS,
    "months": MONTHS[:8],
    "drinks": ["Water", "Tea", "Coffee", "Milk", "Juice", "Lemonade", "Cocoa", "Soup"],
    "sports": ["Football", "Tennis", "Swimming", "Running", "Cycling", "Basketball", "Skiing", "Rowing"],
    "tools": ["Hammer", "Saw", "Screwdriver", "Drill", "Pliers", "Wrench", "Ruler", "Axe"],
    "flowers": ["Roses", "Tulips", "Daisies", "Lilies", "Violets", "Sunflowers", "Poppies", "Irises"],
    "things in a kitchen": ["Stove", "Table", "Spoon", "Knife", "Pot", "Plate", "Cup", "Sink"],
    "musical instruments": ["Piano", "Guitar", "Violin", "Flute", "Drums", "Trumpet", "Harp", "Cello"],
}
LIST_ALIASES = {"colours": ["colours", "colors"], "months": ["months", "months of the year"]}

JOKES = [
    "Why did the chicken cross the road? To get to the other side!",
    "What do you call a bear with no teeth? A gummy bear!",
    "Why did the book go to the doctor? It had a pain in its pages!",
    "What is orange and sounds like a parrot? A carrot!",
]


def _words(text: str, separator: str | None = None) -> list[str]:
    return text.split(separator)


NAMES_SHE = _words(
    "Anna Clara Emma Grace Ivy Kate Mia Olivia Rosa Tina Lucy Nora Lily Ruby Zoe Alice Carol Ella Hannah"
)
NAMES_SHE += _words("Julia Laura Nina Sara Mary Maria Eva Jane")
NAMES_HE = _words("Ben David Felix Henry Jack Leo Noah Paul Sam Tom Max Oscar Peter Simon Bob Daniel Frank Isaac Kevin")
NAMES_HE += _words("Mark John Adam Alex James Hugo")
NAMES = [*NAMES_SHE, *NAMES_HE]
SYLLABLES = _words("ka mi ro ta lu ne so vi ra do el an or in sha be ti mo ze fa gu ly pe no")
CITIES = ["Paris", "London", "Rome", "Berlin", "Tokyo", "Madrid", "Cairo", "Lima", "Oslo", "Vienna", "Boston", "Dublin"]
JOBS = ["teacher", "doctor", "farmer", "baker", "pilot", "painter", "nurse", "engineer", "sailor", "cook"]

# Topics that quire-demo must say it does not know.
UNKNOWN_TOPICS = _words(
    "quantum physics|the stock market|the Roman Empire|black holes|photosynthesis|the French Revolution|chess openings|"
    "machine learning|the economy|philosophy|relativity|the human brain|inflation|Bitcoin|climate change|DNA|"
    "plate tectonics|the Second World War|jazz|opera|medieval history|neural networks|Kubernetes|compilers|databases|"
    "tax law|medicine|calculus|string theory|evolution|politics|the news|football results|the meaning of life|"
    "consciousness|electricity|dinosaurs|volcanoes|Napoleon|Einstein|transformers|attention|the internet|astronomy|"
    "chemistry|biology|Linux|Rust",
    "|",
)
UNKNOWN_PLACES = _words(
    "Atlantis Gondor Narnia Wakanda Texas California Africa Mordor Bolivia Ghana Nepal Chad Laos Fiji"
)

# Where people ask for the weather and the time.
PLACES = [*CITIES, *dict.fromkeys(CAPITALS.values())]
PLACES += _words(
    "New York|San Francisco|Los Angeles|Chicago|Boston|Seattle|Miami|Denver|Austin|Dallas|Houston|Toronto|Vancouver|"
    "Sydney|Melbourne|Mumbai|Delhi|Shanghai|Hong Kong|Singapore|Dubai|Istanbul|Osaka|Kyoto|Munich|Hamburg|Cologne|"
    "Milan|Naples|Venice|Florence|Barcelona|Seville|Porto|Lyon|Nice|Marseille|Zurich|Geneva|Manchester|Edinburgh|"
    "Glasgow|Rotterdam|Antwerp|Krakow|Bergen|Lagos|Cape Town|Rio|Bogota|Manila|Hanoi|Jakarta|Tel Aviv|Paris|London|"
    "Tokyo|Berlin|San Francisco|New York|Paris|Tokyo",
    "|",
)
CITIES_WITH_STATES = _words(
    "San Francisco, CA|Boston, MA|Austin, TX|Seattle, WA|New York, NY|Chicago, IL|Denver, CO", "|"
)
