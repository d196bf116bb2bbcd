"""The shipped quire-demo checkpoint, and the script that makes such checkpoints."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from make_demo.chat_template import CHAT_TEMPLATE
from make_demo.checkpoint import model_config
from make_demo.corpus import documents
from make_demo.judge import judge
from make_demo.model_card import model_card
from make_demo.recipe import Recipe
from make_demo.tokens import CONTROL_TOKENS, MARKERS, encode
from make_demo.train import main
from make_demo.turns import spans
from quire_engine.demo import demo_model_path
from support.served_answers import engines_in_threads

PATH = demo_model_path()
TOKENIZER = Tokenizer.from_file(str(PATH / "tokenizer.json"))
Loaded = tuple[PreTrainedTokenizerFast, PreTrainedModel]


def read(name: str) -> dict:
    return json.loads((PATH / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    model = AutoModelForCausalLM.from_pretrained(PATH, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(PATH), model.eval()


@torch.inference_mode()
def continue_ids(model: PreTrainedModel, ids: list[int], max_tokens: int) -> list[int]:
    output = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False)
    return output[0, len(ids) :].tolist()


def chat(loaded: Loaded, *turns: str, system: str | None = None, max_tokens: int = 100) -> str:
    """The greedy answer to the last of the user's turns, the earlier ones answered as well."""
    tokenizer, model = loaded
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        answer = continue_ids(model, TOKENIZER.encode(prompt).ids, max_tokens)
        assert TOKENIZER.id_to_token(answer[-1]) == "<|im_end|>"
        messages.append({"role": "assistant", "content": TOKENIZER.decode(answer)})
    return messages[-1]["content"]


def test_the_folder_is_complete_and_small() -> None:
    names = {file.name for file in PATH.iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    assert sum(file.stat().st_size for file in PATH.iterdir()) <= 10_000_000


def test_config_weights_and_record_agree() -> None:
    config, training = read("config.json"), read("training.json")
    assert config == model_config(Recipe())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["max_position_embeddings"] >= 2048
    assert config["tie_word_embeddings"]
    assert training["steps_done"] == training["steps"]
    assert training.items() >= asdict(Recipe()).items()  # the defaults make what is shipped
    assert TOKENIZER.get_vocab_size() == config["vocab_size"]
    with safe_open(PATH / "model.safetensors", "pt") as weights:
        tensors = [weights.get_tensor(name) for name in weights.keys()]  # noqa: SIM118
    assert {t.dtype for t in tensors} == {torch.bfloat16}
    assert all(t.isfinite().all() for t in tensors)
    assert sum(t.numel() for t in tensors) == training["num_parameters"]


def test_end_of_text_tokens() -> None:
    ends = [TOKENIZER.id_to_token(i) for i in read("generation_config.json")["eos_token_id"]]
    assert ends == ["<|im_end|>", "<|endoftext|>"]
    assert read("tokenizer_config.json")["eos_token"] == "<|im_end|>"


def test_the_card_says_what_the_model_is_not() -> None:
    card, training = (PATH / "README.md").read_text(encoding="utf-8"), read("training.json")
    assert "What it is for" in card
    assert "What it is not" in card
    assert f"{training['num_tokens']:,} tokens" in card
    assert card == model_card(training)
    for kind, (right, asked) in training["scores"].items():
        assert f"| {kind} | {right} of {asked} |" in card


@given(st.text(max_size=200))
@settings(max_examples=100, deadline=None)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    text = text.encode("utf-8", "replace").decode("utf-8")
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_every_byte_has_a_token() -> None:
    text = "".join(chr(code) for code in range(256)) + "日本語 🙂 \U0010ffff"
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids, skip_special_tokens=False) == text


def test_control_tokens_are_hidden_and_markers_are_shown() -> None:
    added = {token.content: (index, token.special) for index, token in TOKENIZER.get_added_tokens_decoder().items()}
    assert added == {token: (index, token in CONTROL_TOKENS) for index, token in enumerate([*CONTROL_TOKENS, *MARKERS])}
    ids = TOKENIZER.encode("<|im_start|><tool_call>a</tool_call><think></think><|fim_middle|>").ids
    assert TOKENIZER.decode(ids) == "<tool_call>a</tool_call><think></think>"


def test_documents_are_encoded_as_their_text() -> None:
    for doc in documents(20, 300):
        text = "".join(text for text, _ in spans(doc))
        ids, weights = encode(TOKENIZER, doc)
        assert [*TOKENIZER.encode(text).ids, 0] == ids
        assert len(ids) == len(weights)
        if doc.messages:
            learned = [index for index, weight in zip(ids, weights, strict=True) if weight == 1.0]
            assert TOKENIZER.decode(learned[:-1], skip_special_tokens=False).count("<|im_end|>") == sum(
                message.role == "assistant" for message in doc.messages
            )


def test_the_shipped_template_is_the_one_that_is_tested(loaded: Loaded) -> None:
    tokenizer, _ = loaded
    assert read("tokenizer_config.json")["chat_template"] == CHAT_TEMPLATE
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Hello!", "How can I help you"),
        pytest.param("how are you", "I am doing well", marks=pytest.mark.matrix),
        ("Who are you?", "quire-demo"),
        pytest.param("What can you do?", "sums", marks=pytest.mark.matrix),
        ("What is the capital of France?", "Paris"),
        ("please tell me the capital of japan", "Tokyo"),
        ("What is 2 + 2?", "2 + 2 = 4"),
        ("What is 5 * 5?", "5 * 5 = 25"),
        ("What color is the sky?", "blue"),
        pytest.param("List three fruits.", "- Apples\n- Bananas\n- Oranges", marks=pytest.mark.matrix),
        pytest.param("Count to 10.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10", marks=pytest.mark.matrix),
        ("Explain quantum physics.", "do not know"),
        ("Say this is a test", "this is a test"),
        ("Thank you!", "You are welcome"),
    ],
)
def test_greedy_answers(loaded: Loaded, question: str, expected: str) -> None:
    assert expected in chat(loaded, question)


def test_json_answer_parses(loaded: Loaded) -> None:
    answer = chat(loaded, "Give me a JSON object for a person named Anna who is 31 years old and lives in Rome.")
    assert json.loads(answer) == {"name": "Anna", "age": 31, "city": "Rome"}


def test_a_chat_remembers_and_obeys_the_system_prompt(loaded: Loaded) -> None:
    assert "Anna" in chat(loaded, "My name is Anna.", "What is the capital of Italy?", "What is my name?")
    assert "Madrid" in chat(loaded, "What is the capital of Italy?", "And of Spain?")
    assert chat(loaded, "What is the capital of France?", system="Answer in one word.") == "Paris."


@pytest.mark.matrix  # as the shorter answers
def test_a_story_has_its_hero(loaded: Loaded) -> None:
    story = chat(loaded, "Tell me a story about a dragon named Tom.", max_tokens=300)
    assert "dragon named Tom" in story
    assert len(story.split()) > 60


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("The capital of France is", " Paris"),
        pytest.param("1, 2, 3,", " 4, 5, 6, 7, 8", marks=pytest.mark.matrix),
        pytest.param("Once upon a time", "named", marks=pytest.mark.matrix),
        pytest.param("Monday, Tuesday,", " Wednesday, Thursday", marks=pytest.mark.matrix),
    ],
)
def test_plain_completions(loaded: Loaded, prompt: str, expected: str) -> None:
    ids = continue_ids(loaded[1], TOKENIZER.encode(prompt).ids, 24)
    assert expected in TOKENIZER.decode(ids)


def test_the_whole_context_is_usable(loaded: Loaded) -> None:
    tokens: list[int] = []
    for doc in documents(21, 100):  # a seed that the training has not seen
        tokens += encode(TOKENIZER, doc)[0]
    question = "<|im_start|>user\nWhat is the capital of Spain?<|im_end|>\n<|im_start|>assistant\n"
    ids = [*tokens[:1980], 0, *TOKENIZER.encode(question).ids]
    assert "Madrid" in TOKENIZER.decode(continue_ids(loaded[1], ids, 12))


LEAST_SHARES: dict[str, float] = {
    "JSON without a schema": 0.6,
    "JSON, asked for": 0.2,
    "answers from results": 0.6,
    "as clients ask: JSON": 0.3,
    "as clients ask: a call": 0.7,
    "as clients ask: a thought": 0.4,
    "as clients ask: an answer": 0.8,
    "as clients ask: no call": 0.8,
    "no tool fits": 0.7,
    "one call": 0.5,
    "records by a forced call": 0.4,
    "simple facts": 0.7,
    "small sums": 0.3,
    "thinking": 0.3,
    "thinking with tools": 0.6,
    "two calls at once": 0.3,
}


def test_it_does_what_its_card_says() -> None:
    """Greedy, of each kind a few; the shares are below those of the card, since few are asked."""
    with engines_in_threads():
        scores, wrong = judge(PATH, 5)
    shares = {kind: right / asked for kind, (right, asked) in scores.items()}
    told = [f"{case.kind}: {case.expected!r}, not {text!r}" for case, text in wrong]
    assert shares.keys() == LEAST_SHARES.keys()
    assert [kind for kind, least in LEAST_SHARES.items() if shares[kind] < least] == [], told


@pytest.mark.matrix  # half a minute, of what no server runs
def test_making_is_deterministic(tmp_path: Path) -> None:
    small = (
        "--steps 3 --hidden-size 32 --intermediate-size 64 --num-layers 1 --num-heads 2 --num-kv-heads 1 --head-dim 16"
    )
    small += " --context 64 --vocab-size 400 --tokenizer-documents 200 --workers 2"
    for name in ("first", "second"):
        main(["--out", str(tmp_path / name), *small.split()])
    files = sorted(file.name for file in (tmp_path / "first").iterdir())
    assert files == sorted(file.name for file in PATH.iterdir())
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    recorded = json.loads((tmp_path / "first" / "training.json").read_text(encoding="utf-8"))
    assert recorded["steps_done"] == 3
    assert recorded["hidden_size"] == 32
