"""The fixed texts for comparing a quantised model with the same model in bf16.

Promises: the texts never change, so that results of different days and models are comparable.
"""

from __future__ import annotations

from quire_server.text.prompt import ChatTemplate
from quire_server.text.tokenizer import TextTokenizer

TEXTS = (
    "The lighthouse stood at the end of a long spit of rock, and twice a day the sea cut it off from the village. Old"
    " Martha had kept the lamp for thirty-one years. She knew the ships by the sound of their engines, and the captains"
    " by the way they blew their horns when they passed. In winter, when the storms came up from the south, nobody"
    " could reach her for a week at a time, and she lived on potatoes, salted fish and tea. One evening in November,"
    " just as the wind began to turn, she saw a small boat without a light drifting towards the rocks. She put down her"
    " cup, took the lantern from its hook, and",
    "Water boils when the pressure of its vapour equals the pressure of the air above it. At sea level this happens at"
    " one hundred degrees Celsius; on a high mountain, where the air is thinner, it happens at a lower temperature, and"
    " an egg takes longer to cook. Salt raises the boiling point a little, but far less than most people believe. The"
    " energy that is needed to turn one kilogram of boiling water into steam is more than five times the energy that is"
    " needed to heat it from the freezing point. This is why steam burns are so dangerous, and why sweating cools the"
    " body so well: every gram of water that evaporates from the skin takes with it",
    "The town council met on Tuesday to discuss the new bridge. Supporters said that the old one, built in 1887, could"
    " no longer carry the traffic of a growing town; opponents answered that the cost of 4.2 million had never been"
    " explained, and that a second bridge would only bring more lorries through the narrow streets. After three hours"
    " of debate the mayor proposed a compromise: the old bridge would be repaired and closed to heavy vehicles, while"
    " engineers would study a route around the town. The proposal was accepted by nine votes to",
    "Once upon a time a fox and a crow lived on the two sides of the same hill. The fox was proud of his red coat and"
    " the crow was proud of her voice, although nobody else cared for it. One morning the crow found a piece of cheese"
    ' and flew with it to the top of a tall tree. The fox came by and looked up. "Good morning, dear neighbour," he'
    ' said. "I have been telling everyone how beautifully you sing.',
    '# A small store of words and how often they were seen.\n\nfrom collections import Counter\n\n\nclass WordCount:\n'
    '    """Counts the words of the texts that it is given."""\n\n    def __init__(self) -> None:\n'
    "        self._counts: Counter[str] = Counter()\n\n    def add(self, text: str) -> None:\n"
    "        for word in text.lower().split():\n            self._counts[word.strip('.,;:!?')] += 1\n\n"
    "    def most_common(self, n: int) -> list[tuple[str, int]]:\n        return self._counts.most_common(n)\n\n"
    "    def __len__(self) -> int:\n        return len(self._counts)\n\n\ndef main() -> None:\n"
    '    count = WordCount()\n    with open("words.txt") as file:\n        for line in file:\n            count.',
    'SELECT city, COUNT(*) AS orders, SUM(price) AS total FROM orders WHERE year = 2019 GROUP BY city;\n\n'
    '{"name": "Anna", "age": 31, "city": "Rome", "languages": ["Italian", "English"], "active": true}\n'
    '{"name": "Ben", "age": 27, "city": "Oslo", "languages": ["Norwegian"], "active": false}\n'
    '{"name": "Clara", "age": 44, "city": "Lyon", "languages": ["French", "German"], "active":',
    "12 + 7 = 19\n45 - 18 = 27\n6 * 9 = 54\n81 / 9 = 9\n128 + 256 = 384\n1000 - 333 = 667\n25 * 4 = 100\n\n"
    "2, 4, 8, 16, 32, 64, 128, 256, 512, 1024\n1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144\n\n"
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday\n\nThe rent is 850 a month, so for one year it is"
    " 850 * 12 =",
    "In the year 1492 Columbus sailed from Spain. The capital of France is Paris, the capital of Japan is Tokyo, and"
    " the capital of Egypt is Cairo. Le chat dort sur la chaise. Der Hund schläft unter dem Tisch. El sol sale por el"
    " este y se pone por el oeste. The colours of the rainbow are red, orange, yellow, green, blue, indigo and",
)  # fmt: skip

# Alternating messages of user and assistant; the first and the last are the user's.
CHATS = (
    ("What is the capital of Japan?",),
    (
        "Hello! Can you help me with my homework?",
        "Of course! What is it about?",
        "I have to explain in three sentences why the sky is blue.",
    ),
    (
        "My name is Anna and I live in Rome. What is 7 * 8?",
        "7 * 8 = 56.",
        "Thank you! Now tell me a short story about a dragon, and give it my name.",
    ),
    ("Write a Python function that returns the largest number of a list, and say how it works.",),
)


def prompt_ids(tokenizer: TextTokenizer) -> list[list[int]]:
    """All prompts as token ids; chats with the model's template if there is one. Raises ModelLoadError, BadRequest."""
    ids = [tokenizer.encode(text, add_special_tokens=True) for text in TEXTS]
    if tokenizer.chat_template is None:
        return ids + [tokenizer.encode(_plain(chat), add_special_tokens=True) for chat in CHATS]
    template = ChatTemplate(tokenizer.chat_template, tokenizer)
    try:
        rendered = [template.render(_messages(chat)) for chat in CHATS]
    finally:
        template.close()
    return ids + [tokenizer.encode(text, add_special_tokens=False) for text in rendered]


def _messages(chat: tuple[str, ...]) -> list[dict[str, object]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": text} for at, text in enumerate(chat)]


def _plain(chat: tuple[str, ...]) -> str:
    names = ("Question", "Answer")
    turns = [f"{names[at % 2]}: {text}" for at, text in enumerate(chat)]
    return "\n".join([*turns, "Answer:"])
