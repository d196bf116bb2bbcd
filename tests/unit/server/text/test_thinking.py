"""Where thoughts end and the answer begins, with marks that are tokens and marks that are text."""

from __future__ import annotations

import pytest

from quire_engine.contract.errors import ConfigError
from quire_server.text.parsing.reasoning import (
    REASONING_FORMATS,
    ThinkingMarks,
    detect_reasoning,
    reasoning_format,
)
from quire_server.text.parsing.reply_parser import ReplyParser
from support.parsed import NO_TOKEN, Parsed, cut, parse

START, END = 1, 2
TOKENS = ThinkingMarks(start="<think>", end="</think>", start_id=START, end_id=END)
TEXTS = ThinkingMarks(start="<think>", end="</think>")

# Text, whether the prompt has opened the block, thoughts, answer.
CASES = [
    ("<think>\nI add.\nOne.\n</think>\n\nIt is 4.\n", False, "I add.\nOne.", "It is 4.\n"),
    ("\nI add.\n</think>\n\nIt is 4.", True, "I add.", "It is 4."),
    ("\n <think>I add.</think>4", False, "I add.", "4"),
    ("<think>\n\n</think>\n\n4", False, "", "4"),
    ("I add.", True, "I add.", ""),
    ("<think> I add. \n", False, "I add.", ""),
    ("No thought.", False, "", "No thought."),
    (" \n No thought. \n", False, "", " \n No thought. \n"),
    (" \n", False, "", " \n"),
    (" \n", True, "", ""),
    ("", True, "", ""),
    ("<think>\nOpened twice.</think>4", True, "Opened twice.", "4"),
    ("<thin", False, "", "<thin"),
    ("It is </thin", True, "It is </thin", ""),
]


def as_tokens(pieces: list[str]) -> list[tuple[int, str]]:
    """The marks as tokens of their own, whatever the pieces."""
    text = "".join(pieces)
    tokens = []
    for part in text.replace("<think>", "\0<think>\0").replace("</think>", "\0</think>\0").split("\0"):
        mark = {"<think>": START, "</think>": END}.get(part)
        tokens += [(mark, part)] if mark is not None else [(NO_TOKEN, char) for char in part]
    return tokens


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), CASES)
def test_thoughts_and_answer(text: str, is_open: bool, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text), *(cut(text, [place]) for place in range(1, len(text)))):
        parsed = parse(pieces, marks=TEXTS, is_open=is_open)
        assert (parsed.reasoning, parsed.content) == (reasoning, content), pieces
    parsed = parse(as_tokens([text]), marks=TOKENS, is_open=is_open)
    assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_marks_that_are_tokens_count_only_as_tokens() -> None:
    spelled = [(NO_TOKEN, "<"), (NO_TOKEN, "think>"), (NO_TOKEN, " is a tag, </think> too")]
    assert parse(spelled, marks=TOKENS) == Parsed(content="<think> is a tag, </think> too")
    thought = parse([(START, "<think>"), *spelled, (END, "</think>"), (NO_TOKEN, "So.")], marks=TOKENS)
    assert (thought.reasoning, thought.content) == ("<think> is a tag, </think> too", "So.")


def test_only_the_first_block_is_thoughts_and_no_mark_is_shown() -> None:
    block = [(START, "<think>"), (NO_TOKEN, "a"), (END, "</think>"), (NO_TOKEN, "b")]
    assert parse([*block, *block], marks=TOKENS) == Parsed(reasoning="a", content="bab", num_reasoning_tokens=1)
    late = parse([(NO_TOKEN, "x"), *block], marks=TOKENS)
    assert (late.reasoning, late.content) == ("", "xab")


@pytest.mark.parametrize("shown", [True, False])
def test_marks_may_be_special_tokens_that_are_skipped(shown: bool) -> None:
    tokens = [(START, "<think>" * shown), (NO_TOKEN, "a"), (END, "\ufffd" + "</think>" * shown), (NO_TOKEN, "b")]
    parsed = parse(tokens, marks=TOKENS)
    assert (parsed.reasoning, parsed.content) == ("a\ufffd", "b")


def test_tokens_of_thoughts_are_counted_without_the_marks() -> None:
    tokens = [(START, "<think>"), (5, "\n"), (6, "a"), (7, ""), (8, "b\n"), (END, "</think>"), (9, "c")]
    assert parse(tokens, marks=TOKENS).num_reasoning_tokens == 4
    assert parse(tokens[1:], marks=TOKENS, is_open=True).num_reasoning_tokens == 4
    assert parse(tokens[1:4], marks=TOKENS, is_open=True).num_reasoning_tokens == 3
    assert parse([(9, "c")], marks=TOKENS).num_reasoning_tokens == 0


def test_thoughts_come_as_they_are_written() -> None:
    parser = ReplyParser(marks=TOKENS, is_open=True)
    seen = []
    for token in [(5, "\nOne"), (6, " two"), (7, "\n"), (END, "</think>"), (8, "\n"), (9, "\nSo")]:
        seen.append((parser.push(*token), parser.reasoning))
        parser.reasoning = ""
    assert seen == [("", "One"), ("", " two"), ("", ""), ("", ""), ("", ""), ("So", "")]


def test_what_is_left_of_a_character_belongs_to_the_part_that_it_ends() -> None:
    for marks in (TOKENS, TEXTS):
        parser = ReplyParser(marks=marks, is_open=True)
        parser.push(5, "a")
        assert parser.finish("\ufffd") == ""
        assert parser.reasoning == "a\ufffd"


def test_a_call_within_thoughts_is_none() -> None:
    call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    text = f"<think>\nI could {call}.\n</think>\n\n{call}"
    for pieces in ([text], list(text)):
        parsed = parse(pieces, "hermes", marks=TEXTS)
        assert (parsed.reasoning, parsed.content) == (f"I could {call}.", "")
        assert parsed.calls == (("get_time", "{}"),)


def test_without_a_format_everything_is_content() -> None:
    assert parse(["\n<think>", " [TOOL_CALLS]\n"]) == Parsed(content="\n<think> [TOOL_CALLS]\n")


def test_marks_in_words_are_read_as_well() -> None:
    marks = reasoning_format("granite").marks(lambda text: None)
    parsed = parse(["Here is my thought", " process: I add. Here is my response:", " 4"], marks=marks)
    assert (parsed.reasoning, parsed.content) == ("I add.", "4")


def test_marks_of_several_tokens_are_read_as_text_and_each_of_their_tokens_is_needed() -> None:
    marks = reasoning_format("gemma4").marks({"<|channel>": 1, "<channel|>": 2}.get)
    assert marks.markers == ("<|channel>", "<channel|>")
    tokens = [(1, "<|channel>"), (5, "thought"), (6, "\nHm.\n"), (2, "<channel|>"), (7, "4")]
    parsed = parse(tokens, marks=marks)
    assert (parsed.reasoning, parsed.content) == ("Hm.", "4")


def test_formats_by_name() -> None:
    assert reasoning_format("deepseek_r1") == reasoning_format("qwen3")
    with pytest.raises(ConfigError, match=r"'gpt_oss' is unknown; known are cohere, cohere_command3,"):
        reasoning_format("gpt_oss")


@pytest.mark.parametrize(
    ("template", "vocabulary", "name"),
    [
        ("{{ content.split('</think>')[-1] }}", {}, "qwen3"),
        ("", {"<think>": 1, "</think>": 2}, "qwen3"),
        ("[THINK]{{ thoughts }}[/THINK]", {"<think>": 1, "</think>": 2}, "magistral"),
        ("", {"<seed:think>": 1, "</seed:think>": 2}, "seed_oss"),
        ("", {"<think>": 1}, None),
        ("<|channel>thought{{ thoughts }}<channel|>", {}, "gemma4"),
        ("<|start|>assistant<|channel|>analysis<|message|>", {"<think>": 1, "</think>": 2}, "openai_gptoss"),
        ("<|assistant|>{{ content }}<|end|>", {}, None),
        ("You may <think> first.", {}, None),
        ("", {}, None),
    ],
)
def test_the_format_that_a_models_files_show(template: str, vocabulary: dict[str, int], name: str | None) -> None:
    assert detect_reasoning(template, vocabulary.get) == (REASONING_FORMATS[name] if name is not None else None)


def test_only_marks_that_are_both_tokens_are_looked_for_as_tokens() -> None:
    form = reasoning_format("qwen3")
    assert form.marks({"<think>": 1, "</think>": 2}.get).are_tokens
    assert not form.marks({"<think>": 1}.get).are_tokens
