"""Tokenizers of GGUF files: the tokens of the models' own, and of llama.cpp's ways to split and to merge."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from quire_engine.contract.errors import ModelLoadError
from quire_engine.demo import demo_model_path
from quire_engine.gguf import Metadata
from quire_server.checkpoint.gguf_tokenizer import GgufVocabulary
from quire_server.text.tokenizer import TextTokenizer
from support.checkpoints import write_tokenizer
from support.covering import few
from support.gguf_files import Typed
from support.gguf_models import tokenizer_metadata
from support.gguf_vocabularies import unigrams
from support.llama_splits import SPLITS

WORDS = (
    *("the", " The", "DON'T", "don't", "I'LL", "x's", "naïve", "ÜBER", "Straße", "日本語", "Привет", "한국어", "ไทย"),
    *("हिन्दी", "😀", "👩‍👧", "1", "12", "123", "12345", "٣٤", "½", "Ⅷ", " ", "  ", "   ", "\t", "\n", "\n\n", "\r\n"),
    *(" \n ", "!", "...", "/", "://", "_", "--", "“q”", "(a)", "e\u0301", "\u00a0", "\u200b", "ǅ", "ªº", "foo_bar"),
    *("CamelCase", "HTTPServer", "a1b2"),
)  # fmt: skip


def texts(count: int, seed: int = 0, words: tuple[str, ...] = WORDS) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(words, k=chance.randrange(1, 12))) for _ in range(count)]


def metadata(values: dict[str, Any]) -> Metadata:
    plain = {key: value.value if isinstance(value, Typed) else value for key, value in values.items()}
    return Metadata(Path("x.gguf"), plain)


def made(values: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(GgufVocabulary(metadata(values)).tokenizer()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


def test_tokens_are_those_of_the_tokenizer_that_was_converted(folder: Path) -> None:
    ours, own = made(tokenizer_metadata(folder)), Tokenizer.from_file(str(folder / "tokenizer.json"))
    strings = [*texts(10_000), "<|im_start|>user\nhi<|im_end|>", "<|im_start|", ""]
    for found, wanted in zip(ours.encode_batch(strings), own.encode_batch(strings), strict=True):
        assert found.ids == wanted.ids
    assert ours.get_vocab() == own.get_vocab()
    ids = [random.Random(seed).choices(range(431), k=20) for seed in range(200)]
    assert ours.decode_batch(ids, skip_special_tokens=False) == own.decode_batch(ids, skip_special_tokens=False)


@pytest.mark.parametrize("pre", few(SPLITS, *list(SPLITS)[::4]))
def test_text_is_split_as_llama_cpp_splits_it(pre: str, folder: Path) -> None:
    ours = made(tokenizer_metadata(folder, pre))
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    theirs = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    # Of words in cases its expressions know ASCII alone.
    words = tuple(word for word in WORDS if word.isascii()) if pre in {"tekken", "gpt-4o"} else WORDS
    for text in texts(3000, 1, words):
        composed = normalizers.NFC().normalize_str(text) if pre in {"qwen2", "qwen35"} else text
        found, wanted = ours.pre_tokenizer.pre_tokenize_str(composed), theirs.pre_tokenize_str(composed)
        assert [word for word, _ in found] == [word for word, _ in wanted], text


def test_qwens_text_is_composed_first(folder: Path) -> None:
    ours, plain = made(tokenizer_metadata(folder, "qwen2")), made(tokenizer_metadata(folder, "deepseek-r1-qwen"))
    assert ours.encode("cafe\u0301").ids == ours.encode("caf\u00e9").ids == plain.encode("caf\u00e9").ids
    assert plain.encode("cafe\u0301").ids != plain.encode("caf\u00e9").ids


def test_words_that_are_tokens_are_not_made_of_merges_where_llama_3_is_so(folder: Path) -> None:
    values = tokenizer_metadata(folder, "llama-bpe")
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "xqzv"]
    values["tokenizer.ggml.token_type"] = [*values["tokenizer.ggml.token_type"], 1]
    assert made(values).encode("xqzv").tokens == ["xqzv"]
    assert made(values | {"tokenizer.ggml.pre": "dbrx"}).encode("xqzv").tokens != ["xqzv"]


def test_glms_words_that_are_tokens_are_not_made_of_merges_either(folder: Path) -> None:
    values = tokenizer_metadata(folder, "glm4")
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "xqzv"]
    values["tokenizer.ggml.token_type"] = [*values["tokenizer.ggml.token_type"], 1]
    assert made(values).encode("xqzv").tokens == ["xqzv"]


# -- The sentencepiece style

_SPACE, _TOKENS = "\u2581", "tokenizer.ggml.tokens"
_SPM_TEXT = ["the quick brown fox jumps over the lazy dog", "a quire is four sheets of paper", "foo  bar   baz", "日本"]


def sentencepiece(**change: Any) -> dict[str, Any]:
    """A vocabulary as sentencepiece's BPE trains them: pieces by falling scores, bytes, control tokens."""
    tokenizer = Tokenizer(models.BPE())
    lines = [_SPACE + line.replace(" ", _SPACE) for line in _SPM_TEXT] * 3
    trainer = trainers.BpeTrainer(vocab_size=120, min_frequency=1, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    vocabulary = tokenizer.get_vocab()
    pieces = [piece for piece in sorted(vocabulary, key=lambda piece: vocabulary[piece]) if len(piece) > 1]
    letters = sorted(piece for piece in vocabulary if len(piece) == 1)
    heads = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    user = ["<start_of_turn>", "\n\n"]
    tokens = [*heads, *bytes_, *user, *pieces, *letters]
    count = len(tokens) - len(pieces) - len(letters)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * count + [-float(place) for place in range(len(pieces) + len(letters))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [3, 4] + [1] * (len(pieces) + len(letters)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **change,
    }


def merged(values: dict[str, Any], text: str) -> list[int]:
    """The ids of a text by llama.cpp's llm_tokenizer_spm: the pair with the best score first, of equals the left."""
    ids = {token: place for place, token in enumerate(values["tokenizer.ggml.tokens"])}
    scores = values["tokenizer.ggml.scores"]
    symbols = list(text.replace(" ", _SPACE))
    while True:
        pairs = [
            (-scores[ids[left + right]], place)
            for place, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in ids
        ]
        if not pairs:
            break
        _, place = min(pairs)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


SPM_WORDS = (
    "the",
    "quick",
    " ",
    "  ",
    "fox",
    "jump",
    "s",
    "over",
    "paper",
    "日",
    "本語",
    "é",
    "😀",
    "z",
    "\n",
    "a",
    " four",
)


def test_pieces_are_merged_by_their_scores() -> None:
    values = sentencepiece()
    ours = made(values)
    bare = made(sentencepiece(**{"tokenizer.ggml.add_space_prefix": False}))
    for text in texts(3000, 2, SPM_WORDS):
        if "\n\n" in text:
            continue
        assert ours.encode(text, add_special_tokens=False).ids == merged(values, " " + text), text
        assert bare.encode(text, add_special_tokens=False).ids == merged(values, text), text
        assert ours.decode(ours.encode(text).ids) == text
        assert bare.decode(bare.encode(text).ids) == text


def test_special_tokens_are_found_before_text_is_split() -> None:
    values = sentencepiece(**{"tokenizer.ggml.add_space_prefix": False})
    ids = {token: place for place, token in enumerate(values["tokenizer.ggml.tokens"])}
    found = made(values).encode("<start_of_turn>the\n\nfox</s>").ids
    turn, gap = ids["<start_of_turn>"], ids["\n\n"]
    assert found == [1, turn, *merged(values, "the"), gap, *merged(values, "fox"), 2]


def test_phi_3s_tokens_take_the_white_space_behind_them() -> None:
    values = sentencepiece(**{"general.architecture": "phi3"})
    ids = {token: place for place, token in enumerate(values["tokenizer.ggml.tokens"])}
    turn, fox = ids["<start_of_turn>"], merged(values, " fox")
    assert made(values).encode("<start_of_turn> \n fox").ids == [1, turn, *fox]
    assert made(values).encode("<s> fox").ids == [1, 1, *merged(values, "  fox")]  # but for its first ones
    assert made(sentencepiece()).encode("<start_of_turn> fox").ids == [1, turn, *merged(values, "  fox")]


# -- Unigrams


def best(values: dict[str, Any], text: str) -> float:
    """The highest sum of scores of the ways to cut a text, as llama.cpp's llm_tokenizer_ugm has it."""
    scores, kinds = values["tokenizer.ggml.scores"], values["tokenizer.ggml.token_type"]
    known = {token: score for token, score, kind in zip(values[_TOKENS], scores, kinds, strict=True) if kind == 1}
    ways = [0.0]
    for end in range(1, len(text) + 1):
        cuts = [ways[start] + known[text[start:end]] for start in range(end) if text[start:end] in known]
        if text[end - 1] not in known:
            cuts.append(ways[end - 1] + min(known.values()) - 10.0)
        ways.append(max(cuts))
    return ways[-1]


def test_unigrams_are_those_with_the_highest_sum_of_scores() -> None:
    values = unigrams([text for text in texts(400, 5, SPM_WORDS) if "\n" not in text], 120)
    ours, scores = made(values), values["tokenizer.ggml.scores"]
    unknown = values["tokenizer.ggml.unknown_token_id"]
    for text in texts(1000, 6, SPM_WORDS):
        if "\n" in text:
            continue
        spaced = "".join(_SPACE + word for word in text.split(" ") if word)
        found = ours.encode(text, add_special_tokens=False)
        assert "".join(found.tokens) == spaced
        assert sum(scores[each] for each in found.ids) == pytest.approx(best(values, spaced), abs=1e-9), text
    user = values[_TOKENS].index("<|user|>")
    ids = ours.encode(" the  <|user|>fox \u2603\u2603").ids
    assert ids[-2:] == [unknown, 1]  # unknown ones are one, behind which the text ends
    assert ids[ids.index(user) + 1] == ours.token_to_id(_SPACE + "fox")
    assert ours.decode(ours.encode("the quick fox").ids) == "the quick fox"


def test_unigrams_that_keep_all_spaces_or_lack_scores_are_refused() -> None:
    values = unigrams(["a b", "b a", "ab"], 40)
    with pytest.raises(ModelLoadError, match="remove_extra_whitespaces: unigrams that keep all spaces are not read"):
        made(values | {"tokenizer.ggml.remove_extra_whitespaces": False})
    with pytest.raises(ModelLoadError, match="scores: 1 values for"):
        made(values | {"tokenizer.ggml.scores": [0.0]})


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, (True, False)),
        ({"tokenizer.ggml.add_bos_token": False}, (False, False)),
        ({"tokenizer.ggml.add_eos_token": True}, (True, True)),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None}, (True, False)),  # 1 and 2 of old
    ],
)
def test_a_text_begins_and_ends_as_the_file_says(change: dict[str, Any], wanted: tuple[bool, bool]) -> None:
    values = {key: value for key, value in sentencepiece(**change).items() if value is not None}
    found = made(values).encode("the fox", "the dog").ids
    assert (found.count(1), found.count(2)) == (2 * wanted[0], 2 * wanted[1])
    assert (found[0] == 1) is wanted[0]


def test_surfaces_are_known_to_the_server(folder: Path, tmp_path: Path) -> None:
    for name, lead, values in (("bytes", "", tokenizer_metadata(folder)), ("pieces", " ", sentencepiece())):
        path = tmp_path / name
        path.mkdir()
        vocabulary = GgufVocabulary(metadata(values))
        (path / "tokenizer.json").write_text(json.dumps(vocabulary.tokenizer()))
        (path / "tokenizer_config.json").write_text(json.dumps(vocabulary.special().config(512)))
        loaded = TextTokenizer.load(path)
        assert loaded.joins_bytes
        assert loaded.vocab_size == len(values["tokenizer.ggml.tokens"])
        for text in texts(200, 3):
            if "\n\n" in text:  # a token of its own here, behind which a space is put as well
                continue
            ids = loaded.encode(text, add_special_tokens=False)
            assert b"".join(map(loaded.token_bytes, ids)).decode() == lead + text
    assert loaded.bos_token == "<s>"
    assert loaded.drops_first_space


def test_the_tokens_that_end_a_text(folder: Path) -> None:
    values = sentencepiece()
    assert GgufVocabulary(metadata(values)).special().end_ids == (2,)
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    more = ["<end_of_turn>", "<|eot_id|>", "<|end|>"]
    grown = values | {
        "tokenizer.ggml.tokens": [*tokens, *more],
        "tokenizer.ggml.scores": [*values["tokenizer.ggml.scores"], 0.0, 0.0, 0.0],
        "tokenizer.ggml.token_type": [*types, 3, 4, 3],
    }
    first = len(tokens)
    assert GgufVocabulary(metadata(grown)).special().end_ids == (2, first, first + 1, first + 2)
    named = grown | {"tokenizer.ggml.eot_token_id": first + 1, "tokenizer.ggml.eom_token_id": 3}
    assert GgufVocabulary(metadata(named)).special().end_ids == (2, first + 1, 3, first, first + 2)
    nothing = named | {"tokenizer.ggml.eot_token_id": (1 << 32) - 1}  # as converters write -1
    assert GgufVocabulary(metadata(nothing)).special().end_ids == (2, 3, first, first + 1, first + 2)
    plain = GgufVocabulary(metadata(tokenizer_metadata(folder))).special()
    assert set(plain.end_ids) == {0, 2}  # <|endoftext|> and <|im_end|>
    assert plain.texts == {"eos_token": "<|im_end|>"}
    assert plain.chat_templates.keys() == {"default"}


def test_templates_of_names_are_read_beside_the_usual_one(folder: Path, tmp_path: Path) -> None:
    named = {"tokenizer.chat_template.tool_use": "tools", "tokenizer.chat_templates": ["tool_use"]}
    for name, usual in (("both", "usual"), ("one", None)):
        values = tokenizer_metadata(folder) | named | {"tokenizer.chat_template": usual}
        vocabulary = GgufVocabulary(metadata({key: value for key, value in values.items() if value is not None}))
        path = tmp_path / name
        path.mkdir()
        (path / "tokenizer.json").write_text(json.dumps(vocabulary.tokenizer()))
        (path / "tokenizer_config.json").write_text(json.dumps(vocabulary.special().config(512)))
        found = TextTokenizer.load(path).chat_templates
        assert found == {"tool_use": "tools"} | ({} if usual is None else {"default": usual})


def with_tokens(values: dict[str, Any], added: dict[str, int]) -> dict[str, Any]:
    """The vocabulary with further tokens, by their types."""
    count = len(values[_TOKENS])
    return values | {
        _TOKENS: [*values[_TOKENS], *added],
        "tokenizer.ggml.scores": [*values.get("tokenizer.ggml.scores", [0.0] * count), *[0.0] * len(added)],
        "tokenizer.ggml.token_type": [*values["tokenizer.ggml.token_type"], *added.values()],
    }


_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


@pytest.mark.parametrize("kind", [_NORMAL, _CONTROL, _USER_DEFINED])
@pytest.mark.parametrize(
    "token", ["<end_of_turn>", "<|im_start|>x", "<|eot_id|>", "<|call|>", "<turn|>", "<|tool_response>", "[EOT]"]
)
def test_an_end_of_a_turn_is_one_whatever_type_its_file_gives_it(
    token: str, kind: int, folder: Path, tmp_path: Path
) -> None:
    for name, values in (("pieces", sentencepiece()), ("bytes", tokenizer_metadata(folder))):
        vocabulary = GgufVocabulary(metadata(with_tokens(values, {token: kind})))
        place = len(values[_TOKENS])
        is_end = token != "<|im_start|>x"
        assert (place in vocabulary.end_ids()) is is_end
        path = tmp_path / f"{name}-{kind}"
        path.mkdir()
        (path / "tokenizer.json").write_text(json.dumps(vocabulary.tokenizer()))
        loaded = TextTokenizer.load(path)
        if is_end:
            assert vocabulary.corrected == [token] * (kind != _CONTROL)
            assert place in loaded.special_ids
            assert loaded.encode(f"ab{token}c", add_special_tokens=False).count(place) == 1


@pytest.mark.parametrize(
    ("added", "ends"),
    [
        ({"<|end|>": _NORMAL}, {"<|end|>"}),
        ({"<|end|>": _CONTROL, "<|return|>": _CONTROL, "<|call|>": _CONTROL}, {"<|return|>", "<|call|>"}),
        ({"<|end|>": _CONTROL, "<|calls|>": _CONTROL, "<|flush|>": _CONTROL}, {"<|calls|>", "<|flush|>"}),
        ({"<|file_sep|>": _USER_DEFINED, "[PAD]": _NORMAL}, {"<|file_sep|>"}),  # the other one is text
        ({"<start_of_turns>": _CONTROL, "<think>": _USER_DEFINED}, set()),
    ],
)
def test_ends_depend_on_what_else_a_vocabulary_has(added: dict[str, int], ends: set[str]) -> None:
    vocabulary = GgufVocabulary(metadata(with_tokens(sentencepiece(), added)))
    assert {vocabulary.tokens[place] for place in vocabulary.end_ids()} == {"</s>"} | ends


def test_html_is_no_end_of_a_text() -> None:
    values = sentencepiece(**{"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.token_type": None})
    values["tokenizer.ggml.token_type"] = [2, 3, _USER_DEFINED] + [1] * (len(values[_TOKENS]) - 3)
    assert GgufVocabulary(metadata(values)).end_ids() == (1,)


def test_the_start_of_a_turn_that_is_stored_as_text_is_found_in_prompts() -> None:
    values = with_tokens(sentencepiece(), {"<end_of_turn>": _NORMAL})
    start = values[_TOKENS].index("<start_of_turn>")
    values["tokenizer.ggml.token_type"][start] = _NORMAL
    assert start in made(values).encode("<start_of_turn>the").ids


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another split": ({"tokenizer.ggml.pre": "kimi-k2"}, "pre: the way of splitting text 'kimi-k2' is not known; put"),
    "no split": (
        {"tokenizer.ggml.pre": None},
        "'default' is not known; put the model's tokenizer.json beside the file",
    ),
    "another model": (
        {"tokenizer.ggml.model": "rwkv"},
        "model: 'rwkv' is not read; put the model's tokenizer.json beside",
    ),
    "no model": ({"tokenizer.ggml.model": None}, "model: 'none' is not read"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokens: there are no tokens"),
    "numbers for tokens": ({"tokenizer.ggml.tokens": [1, 2]}, "tokens must be a list of strings"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "tokens: 'a' is there twice"),
    "few types": ({"tokenizer.ggml.token_type": [1]}, "token_type: 1 values for 431 tokens"),
    "no merges": ({"tokenizer.ggml.merges": None}, "merges: there are none"),
    "a merge of one": ({"tokenizer.ggml.merges": ["ab"]}, "merges: number 0, 'ab', is not made of tokens"),
    "a merge of others": ({"tokenizer.ggml.merges": ["h qqq"]}, "merges: number 0, 'h qqq', is not made of tokens"),
    "an end beyond": ({"tokenizer.ggml.eos_token_id": 431}, "eos_token_id: 431 is none of 431 tokens"),
    "an end in words": ({"tokenizer.ggml.eos_token_id": "</s>"}, "eos_token_id: '</s>' is none of 431 tokens"),
    "a template of numbers": ({"tokenizer.chat_template": 7}, "tokenizer.chat_template must be a string, not 7"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_line_that_names_the_key(name: str, folder: Path) -> None:
    change, reason = WRONG[name]
    values = {key: value for key, value in (tokenizer_metadata(folder) | change).items() if value is not None}

    def read() -> None:
        vocabulary = GgufVocabulary(metadata(values))
        vocabulary.special()
        vocabulary.tokenizer()

    with pytest.raises(ModelLoadError) as caught:
        read()
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_scores_that_do_not_fit_and_pieces_without_end_are_refused() -> None:
    for change, reason in (
        ({"tokenizer.ggml.scores": [0.0]}, "scores: 1 values for"),
        ({"tokenizer.ggml.scores": None}, "scores: 0 values for"),
        ({"tokenizer.ggml.tokens": ["x" * (1 << 16), "y"], "tokenizer.ggml.scores": [0.0, 0.0],
          "tokenizer.ggml.token_type": [1, 1], "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 0},
         "too long for their merges"),
    ):  # fmt: skip
        values = {key: value for key, value in sentencepiece(**change).items() if value is not None}
        with pytest.raises(ModelLoadError, match=reason):
            GgufVocabulary(metadata(values)).tokenizer()


def test_empty_tokens_have_names_as_in_llama_cpp(folder: Path) -> None:
    values = tokenizer_metadata(folder)
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"], "", ""]
    values["tokenizer.ggml.token_type"] = [*values["tokenizer.ggml.token_type"], 5, 5]
    assert made(values).id_to_token(432) == "[EMPTY_432]"


def test_the_embedded_models_vocabulary_goes_there_and_back() -> None:
    own = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    found = made(tokenizer_metadata(demo_model_path()))
    assert found.get_vocab() == own.get_vocab()
    assert {token.content for token in found.get_added_tokens_decoder().values()} == {
        token.content for token in own.get_added_tokens_decoder().values()
    }
