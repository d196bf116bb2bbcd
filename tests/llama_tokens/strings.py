"""Texts for tokenizers: of many scripts and kinds, each kind alone and mixed with others.

Promises: the same texts for the same seed; every one is valid Unicode.
"""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Callable, Sequence

PROSE = (
    "The quick brown fox jumps over the lazy dog, doesn't it? I'll say: we've SEEN it; they'd agree, I'M sure.",
    "Größe, Straße, Ärger: das kostet 1.234,56 € – „ganz“ schön viel… ÜBERMUT TUT SELTEN GUT.",
    "L'été dernier, nous étions à l'hôtel « Le Cœur » : c'était bien. Où est-ce qu'on va ?",
    "¿Qué tal, señor Núñez? ¡Muy bien! El pingüino vivió 3 años en Asunción.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю. Объём: 5 м³.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Ο Σίσυφος κι ο Ὀδυσσεύς.",
    "いろはにほへと ちりぬるを。東京タワーは333メートルです。ガギグゲゴ、ﾊﾝｶｸ。",
    "天地玄黄,宇宙洪荒。这是一个测试:价格是12345元!“引号”、书名《论语》。",
    "다람쥐 헌 쳇바퀴에 타고파. 한국어 문장입니다, 2024년 5월.",
    "هذا نص عربي، وفيه أرقام ١٢٣٤٥٦ وعلامات؟ السَّلَامُ عَلَيْكُمْ.",
    "זהו משפט בעברית, עם ניקוד: שָׁלוֹם.",
    "यह हिन्दी का एक वाक्य है। क्षत्रिय, १२३४ रुपये।",
    "বাংলা ভাষায় একটি বাক্য। தமிழ் ஒரு மொழி. తెలుగు. ಕನ್ನಡ. മലയാളം.",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ ๑๒๓ กิโลกรัม",
    "Tiếng Việt có nhiều dấu: Nguyễn, Đặng, phở, được.",
    "Հայերեն. ქართული ენა. አማርኛ ቋንቋ። ᏣᎳᎩ. ខ្មែរ។ မြန်မာ။ བོད་སྐད།",
    "𝓂𝒶𝓉𝒽 𝔣𝔯𝔞𝔨𝔱𝔲𝔯 𝟙𝟚𝟛 𐐀𐐨 𒀀𒁀 𓀀𓁀 Ⅷ ½ ² ㊿ ﬁ ǅ ª º",
)
CODE = (
    'def f(x: int = 0) -> str:\n\treturn f"{x!r:>10}"  # it\'s 100%\n',
    "for (int i = 0; i < n; ++i) { a[i] += b[i] * 0x1F; }\r\n",
    "SELECT COUNT(*) FROM t WHERE name LIKE '%o''Brien%' AND id != 42;\n\n",
    "<div class=\"a b\" id='x'>&nbsp;&#128512;</div>\n<!-- comment -->",
    "https://example.com/a/b?c=d&e=%20f#g user@host.org /usr/bin/env --flag=value $HOME ~/.bashrc",
    "const camelCaseName = snake_case_name ?? HTTPServer2.parseJSON(`${a}\\n`);",
    '{"k": [1, 2.50, -3e-10, null, true], "\\u00e9": ""}',
    "\\frac{a}{b} \\sum_{i=0}^{\\infty} x_i^2 $$E=mc^2$$ **bold** _it_ `code`\n```py\n",
    "@decorator\n    if not a:\n        pass\n\n\n    # end\n",
)
_NUMBERS = (
    *("0", "7", "12", "123", "1234", "12345", "1234567", "1,234,567.89", "3.14159", "-1e+10", "0xDEADBEEF", "1_000"),
    *("٣٤٥٦", "१२३", "１２３４", "ⅫⅣ", "½¼¾", "①②③", "2024-05-01T12:00:00Z", "+49 (0)30 123-456", "100%", "1st", "B2B"),
)
_SPACES = (
    *(" ", "  ", "   ", "    ", " " * 8, " " * 17, " " * 40, "\t", "\t\t", " \t ", "\n", "\n\n", "\n\n\n", "\r\n"),
    *("\r\n\r\n", "\r", " \n", "\n ", "  \n  ", "\n\t", "\v", "\f", "\u00a0", "\u00a0 ", "\u2003", "\u2028", "\u2029"),
    *("\u3000", "\u3000\u3000", "\u0085", "\u1680", "\u202f", "\u205f", "\u180e", "\n" * 9, " \r \n "),
)
_EMOJI = (
    *("😀", "👍🏽", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "1️⃣", "👨🏿‍💻", "🫠", "☺", "✈︎", "\U0001f9d1\u200d\U0001f680"),
    *("🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "‍", "️", "♥♦", "→⇒", "™©®", "▁", "▁▁a", "█▓"),
)
_ODD = (
    *("\x00", "\x01", "\x07", "\x1b[0m", "\x7f", "\x80", "\x9f", "\ufeff", "\ufffd", "\ufffe", "\uffff", "\U0010ffff"),
    *("\u200b", "\u200c", "\u200d", "\u2060", "\u00ad", "\u202e", "\ue000", "\U000f0000", "\ufdd0", "\u0378", "\u0301"),
    *(
        "e\u0301",
        "a\u0308\u0323",
        "\u1100\u1161\u11a8",
        "\u212b",
        "\u0958",
        "Z̸̡̢͔͓A̴L̶G̷O̵",
        "\u034f",
        "\u17b4",
        "\U000e0001",
        "<0x0A>",
    ),
    *(
        "ĠĠ",
        "Ċ",
        "[UNK]",
        "<unk>",
        "<s>",
        "</s>",
        "<|endoftext|",
        "|im_end|>",
        "<|",
        "|>",
        "'S",
        "'ſ",
        "’s",
        "'rE",
        "K",
    ),
)


def strings(count: int, *, specials: Sequence[str] = (), seed: int = 0) -> list[str]:
    """`specials`: the texts of a vocabulary's own tokens, which are put among the others."""
    chance = random.Random(seed)
    kinds: list[Callable[[], str]] = [
        lambda: _piece(chance, chance.choice(PROSE)),
        lambda: _piece(chance, chance.choice(PROSE)),
        lambda: _piece(chance, chance.choice(CODE)),
        lambda: chance.choice(_NUMBERS),
        lambda: chance.choice(_SPACES),
        lambda: chance.choice(_EMOJI),
        lambda: chance.choice(_ODD),
        lambda: _any_character(chance),
    ]
    if specials:
        kinds.append(lambda: chance.choice(specials))
    found = ["", " ", *PROSE, *CODE, *_NUMBERS, *_SPACES, *_EMOJI, *_ODD, *specials][:count]
    while len(found) < count:
        few = chance.sample(kinds, k=chance.randrange(1, 5))
        parts = [chance.choice(few)() for _ in range(chance.randrange(1, 10))]
        found.append(chance.choice(("", "", " ", "\n")).join(parts))
    return found


def _piece(chance: random.Random, text: str) -> str:
    """A part of a text, now and then in other cases."""
    start = chance.randrange(len(text))
    part = text[start : start + chance.randrange(1, 40)]
    return chance.choice((str, str, str, str.upper, str.lower, str.title))(part)


def _any_character(chance: random.Random) -> str:
    """A run of characters of one block of Unicode; no surrogates, which no text has."""
    while True:
        start = chance.choice((0, 0x300, 0x2000, 0xA000, 0xF000, 0x1F300)) if chance.random() < 0.5 else 0
        at = chance.randrange(start, min(start + 0x3000, sys.maxunicode))
        run = [chr(at + chance.randrange(16)) for _ in range(chance.randrange(1, 4))]
        if not any(unicodedata.category(each) == "Cs" for each in run):
            return "".join(run)
