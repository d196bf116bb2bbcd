"""Tokenizer files in, ids, bytes and texts out."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from quire_engine.contract.errors import ModelLoadError
from quire_server.errors import BadRequest
from quire_server.text.tokenizer import TextTokenizer
from support import sample_tokenizers

HARD = "naïve 日本 😀 \u202e\x00 e\u0301 two words\n"


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> TextTokenizer:
    return TextTokenizer.load(sample_tokenizers.save(getattr(sample_tokenizers, request.param)(), tmp_path))


def test_round_trip(tokenizer: TextTokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(HARD, add_special_tokens=True)) == HARD


def test_bytes_of_the_tokens_join_to_the_text(tokenizer: TextTokenizer) -> None:
    ids = tokenizer.encode(HARD, add_special_tokens=False)
    assert any(not _is_utf8(tokenizer.token_bytes(i)) for i in ids)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == HARD


def test_every_byte_is_some_token(tokenizer: TextTokenizer) -> None:
    assert {bytes([b]) for b in range(256)} <= {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}


def test_special_tokens(tokenizer: TextTokenizer) -> None:
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert tokenizer.token_bytes(bos) == b"<s>"
    assert tokenizer.encode("hello", add_special_tokens=True)[0] == bos
    assert bos not in tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("a</s>", add_special_tokens=False)[-1] == tokenizer.eos_token_ids[0]
    assert tokenizer.decode([bos], skip_special_tokens=True) == ""
    assert tokenizer.decode([bos], skip_special_tokens=False) == "<s>"
    assert tokenizer.token_id("<s>") == bos
    assert tokenizer.token_id("<think>") is None


def test_ids_that_are_no_tokens_have_no_text(tokenizer: TextTokenizer) -> None:
    size = tokenizer.vocab_size
    for bad in (-1, size, 2**31, 2**32, 2**64):
        assert tokenizer.token_bytes(bad) == b""
        assert tokenizer.token_text(bad) == ""
        assert tokenizer.decode([bad]) == ""


def test_token_text_shows_a_piece_of_a_character() -> None:
    tokenizer = TextTokenizer(sample_tokenizers.byte_level(), config={}, special_tokens={})
    assert "\ufffd" in {tokenizer.token_text(i) for i in range(tokenizer.vocab_size)}


def test_lone_surrogates_are_a_bad_request(tokenizer: TextTokenizer) -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        tokenizer.encode("a\ud800b", add_special_tokens=True)


def test_many_threads_encode_alike(tokenizer: TextTokenizer) -> None:
    expected = tokenizer.encode(HARD * 20, add_special_tokens=True)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: tokenizer.encode(HARD * 20, add_special_tokens=True), range(64)))
    assert all(result == expected for result in results)


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path: Path) -> None:
    saved = sample_tokenizers.byte_level()
    saved.enable_truncation(4)
    saved.enable_padding(length=64)
    tokenizer = TextTokenizer.load(sample_tokenizers.save(saved, tmp_path))
    assert tokenizer.decode(tokenizer.encode("hello world " * 9, add_special_tokens=False)) == "hello world " * 9
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


def test_a_gap_in_the_vocabulary_has_no_bytes() -> None:
    gappy = Tokenizer(models.BPE({"a": 0, "b": 5}, []))
    gappy.decoder = decoders.ByteLevel()
    tokenizer = TextTokenizer(gappy, config={}, special_tokens={})
    assert tokenizer.vocab_size == 6
    assert [tokenizer.token_bytes(i) for i in (0, 3, 5)] == [b"a", b"", b"b"]
    assert tokenizer.decode([0, 3, 5]) == "ab"


def test_other_decoders_show_tokens_by_decoding_them() -> None:
    tokenizer = TextTokenizer(sample_tokenizers.words(), config={}, special_tokens={})
    assert not tokenizer.joins_bytes
    assert tokenizer.token_bytes(2) == b"hello"


def test_end_of_text_ids_are_the_union_of_all_files(tmp_path: Path) -> None:
    folder = sample_tokenizers.save(sample_tokenizers.byte_level(), tmp_path)
    end, other = _id(folder, "</s>"), _id(folder, "<|im_end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, end, 10**6, -1]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert TextTokenizer.load(folder).eos_token_ids == (end, other, 7)
    (tmp_path / "another.json").write_text(json.dumps({"eos_token_id": 9}))
    assert TextTokenizer.load(folder, tmp_path / "another.json").eos_token_ids == (end, 9, 7)


def test_tokens_named_or_declared_special_are_skipped(tmp_path: Path) -> None:
    folder = sample_tokenizers.save(sample_tokenizers.byte_level(), tmp_path)
    hello, two = _id(folder, "hello"), _id(folder, "two words")
    sample_tokenizers.save(
        sample_tokenizers.byte_level(),
        tmp_path,
        pad_token={"content": "two words"},
        added_tokens_decoder={str(hello): {"content": "hello", "special": True}},
    )
    tokenizer = TextTokenizer.load(folder)
    assert {hello, two} <= tokenizer.special_ids
    assert tokenizer.decode([hello, two]) == ""


@pytest.mark.parametrize("value", ["x", 1.5, True, ["a"], {"a": 1}])
def test_malformed_end_of_text_ids_name_the_file(tmp_path: Path, value: object) -> None:
    folder = sample_tokenizers.save(sample_tokenizers.byte_level(), tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        TextTokenizer.load(folder)


_NAMED = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]


@pytest.mark.parametrize(
    ("template", "files", "expected"),
    [
        (None, {}, {}),
        ("one", {}, {"default": "one"}),
        (_NAMED, {}, {"default": "d", "tool_use": "t"}),
        ("one", {"chat_template.jinja": "two"}, {"default": "two"}),
        ("one", {"additional_chat_templates/tool_use.jinja": "t"}, {"default": "one", "tool_use": "t"}),
        (
            _NAMED,
            {"chat_template.jinja": "two", "additional_chat_templates/rag.jinja": "r"},
            {"default": "two", "tool_use": "t", "rag": "r"},
        ),
    ],
)
def test_chat_template_sources(
    tmp_path: Path, template: object, files: dict[str, str], expected: dict[str, str]
) -> None:
    config = {} if template is None else {"chat_template": template}
    folder = sample_tokenizers.save(sample_tokenizers.byte_level(), tmp_path, **config)
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    loaded = TextTokenizer.load(folder)
    assert loaded.chat_templates == expected
    assert loaded.chat_template == expected.get("default")


@pytest.mark.parametrize("template", [7, [{"name": "default"}], ["one"], [{"name": 1, "template": "x"}]])
def test_chat_templates_that_are_no_texts_name_the_file(tmp_path: Path, template: object) -> None:
    folder = sample_tokenizers.save(sample_tokenizers.byte_level(), tmp_path, chat_template=template)
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: chat_template must be text or a list of named"):
        TextTokenizer.load(folder)


def test_a_missing_tokenizer_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: the file is missing"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"sentencepiece tokenizer\.model"):
        TextTokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_broken_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    folder = sample_tokenizers.save(sample_tokenizers.byte_level(), tmp_path)
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=name.replace(".", r"\.")):
        TextTokenizer.load(folder)


def test_an_eos_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    sample_tokenizers.save(sample_tokenizers.byte_level(), tmp_path, eos_token="<nowhere>")
    with pytest.raises(ModelLoadError, match="<nowhere>"):
        TextTokenizer.load(tmp_path)


def test_info_is_json_with_what_evaluations_ask_for(tmp_path: Path) -> None:
    folder = sample_tokenizers.save(
        sample_tokenizers.byte_level(), tmp_path, chat_template="x", tokenizer_class="Qwen2Tokenizer"
    )
    info = json.loads(json.dumps(TextTokenizer.load(folder).info()))
    assert info["eos_token"] == "</s>"
    assert info["bos_token"] == "<s>"
    assert info["pad_token"] is None
    assert info["chat_template"] == "x"
    assert info["tokenizer_class"] == "Qwen2Tokenizer"


def _id(folder: Path, token: str) -> int:
    found = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)
    assert found is not None
    return int(found)


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True
