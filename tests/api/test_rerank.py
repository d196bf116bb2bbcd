"""/v1/rerank, /v1/score and /classify: the shapes of Cohere, Jina and vLLM, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire_server.dialects.vectors.wire import ClassificationResponse, RerankResponse
from quire_server.text.matrices import Projection
from quire_server.text.scoring_method import Classifier, ScoringMethod, question, sigmoid
from support.fake_engine import HIDDEN_SIZE, FakeEngine
from support.fake_tokenizer import CHAT_TEMPLATE, load_tokenizer
from support.fakes import connect, make_app, make_state

pytestmark = pytest.mark.anyio
DOCUMENTS = ["world", "hello", "held"]
WEIGHT = np.linspace(-1, 1, 2 * HIDDEN_SIZE).reshape(2, HIDDEN_SIZE)
ONE = ScoringMethod(classifier=Classifier(head=Projection(weight=WEIGHT[:1]), labels=("x",), activation="sigmoid"))
TWO = ScoringMethod(classifier=Classifier(head=Projection(weight=WEIGHT), labels=("no", "yes"), activation="softmax"))
ANSWERS = ScoringMethod(answers=(ord("n"), ord("y")))


async def post(path: str, status: int = 200, *, scoring: ScoringMethod | None = None, **fields: Any) -> dict[str, Any]:
    reply, _ = await posted(path, status, scoring=scoring, **fields)
    return reply


async def posted(
    path: str, status: int = 200, *, scoring: ScoringMethod | None = None, template: str = CHAT_TEMPLATE, **fields: Any
) -> tuple[dict[str, Any], list[str]]:
    """The reply, and the prompts that the engine got."""
    engine = FakeEngine()
    state = make_state(engine=engine, pooling="mean" if scoring is None else "last", template=template)
    state.model_text = replace(state.model_text, scoring=scoring or state.model_text.scoring)
    async with connect(make_app(state)) as client:
        reply = await client.post(path, json=fields)
    assert reply.status_code == status, reply.text
    prompts = [load_tokenizer().decode(each.prompt_token_ids, skip_special_tokens=False) for each in engine.submitted]
    return reply.json(), prompts


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_come_back_by_their_relevance(path: str) -> None:
    reply = await post(path, query="hello", documents=DOCUMENTS, model="fake")
    RerankResponse.model_validate(reply, strict=True)
    scores = [entry["score"] for entry in (await post("/score", text_1="hello", text_2=DOCUMENTS))["data"]]
    order = sorted(range(3), key=lambda i: -scores[i])
    assert [(each["index"], each["relevance_score"]) for each in reply["results"]] == [(i, scores[i]) for i in order]
    shown = [each.get("document") for each in reply["results"]]
    assert shown == ([None] * 3 if path == "/v2/rerank" else [{"text": DOCUMENTS[i]} for i in order])
    assert reply["id"].startswith("rerank-")
    assert (reply["model"], reply["usage"]["total_tokens"]) == ("fake", 5 + 14)


async def test_what_a_client_may_ask_of_a_rank() -> None:
    objects = [{"text": text, "id": 7} for text in DOCUMENTS]
    wanted = await post("/v1/rerank", query="hello", documents=DOCUMENTS)
    assert (await post("/v1/rerank", query="hello", documents=objects))["results"] == wanted["results"]
    assert (await post("/v1/rerank", query="hello", documents=DOCUMENTS, top_n=1))["results"] == wanted["results"][:1]
    assert (await post("/v1/rerank", query="hello", documents=DOCUMENTS, top_n=0))["results"] == wanted["results"]
    bare = await post("/v1/rerank", query="hello", documents=DOCUMENTS, return_documents=False)
    assert all("document" not in each for each in bare["results"])
    full = await post("/v2/rerank", query="hello", documents=DOCUMENTS, return_documents=True)
    assert full["results"] == wanted["results"]
    cut = await post("/v1/rerank", query="hello", documents=["hello world"], max_tokens_per_doc=5)
    assert cut["results"][0]["relevance_score"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b", ""]}, "documents[1]"),
        ("/v1/rerank", {"query": "", "documents": ["b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2048}, "documents"),
        ("/classify", {}, "input"),
        ("/classify", {"input": []}, "input"),
    ],
)
@pytest.mark.parametrize("scoring", [None, ONE, ANSWERS], ids=["cosine", "classifier", "answers"])
async def test_what_is_wrong_is_named(
    path: str, fields: dict[str, Any], param: str, scoring: ScoringMethod | None
) -> None:
    error = (await post(path, 400, scoring=scoring, **fields))["error"]
    assert error["param"] == param, error


async def test_a_classifier_reads_a_pair_as_one_text() -> None:
    reply, prompts = await posted("/score", scoring=ONE, text_1="ab", text_2=["cd", "e"])
    assert prompts == ["abcd", "abe"]
    logits = await post("/score", scoring=ONE, text_1="ab", text_2=["cd", "e"], use_activation=False)
    for entry, logit in zip(reply["data"], logits["data"], strict=True):
        assert entry["score"] == sigmoid(logit["score"])


async def test_a_classifier_tells_classes() -> None:
    reply = await post("/classify", scoring=TWO, input=["ab", "c"])
    ClassificationResponse.model_validate(reply, strict=True)
    logits = await post("/classify", scoring=TWO, input=["ab", "c"], use_activation=False)
    for entry, raw in zip(reply["data"], logits["data"], strict=True):
        no, yes = raw["probs"]
        assert entry["probs"] == pytest.approx([sigmoid(no - yes), sigmoid(yes - no)])
        assert (entry["label"], entry["num_classes"]) == ("yes" if yes > no else "no", 2)
    assert reply["usage"]["prompt_tokens"] == 3
    error = (await post("/score", 400, scoring=TWO, text_1="a", text_2="b"))["error"]
    assert "2 classes" in error["message"]
    error = (await post("/classify", 400, input="a"))["error"]
    assert error["code"] == "classification_not_supported"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
async def test_a_classifier_writes_nothing(path: str, body: dict[str, Any]) -> None:
    error = (await post(path, 400, scoring=ONE, **body))["error"]
    assert error["code"] == "generation_not_supported"


async def test_answers_of_yes_and_no_are_asked_for_in_the_reranker_s_words() -> None:
    reply, prompts = await posted("/v1/rerank", scoring=ANSWERS, query="q", documents=["d", "e"], instruction="Find.")
    assert prompts == [question("q", "d", "Find."), question("q", "e", "Find.")]
    expected = sigmoid((ord("n") - ord("y")) / 8)
    assert [each["relevance_score"] for each in reply["results"]] == pytest.approx([expected] * 2)
    assert reply["results"][0]["index"] == 0  # equal scores keep the order
    assert math.isclose(expected, 1 / (1 + math.exp((ord("y") - ord("n")) / 8)))


async def test_a_chat_template_with_a_place_for_both_texts_makes_the_prompt() -> None:
    template = (
        "{{ instruction | default('') }}{% for role in ('query', 'document') %}"
        "{{ messages | selectattr('role', 'eq', role) | map(attribute='content') | first }}|{% endfor %}"
    )
    _, prompts = await posted("/score", scoring=ONE, template=template, text_1="q", text_2="d", instruction="Find: ")
    assert prompts == ["Find: q|d|"]


async def test_all_pairs_together_have_a_bound() -> None:
    fields: dict[str, Any] = {"query": "q" * 4000, "documents": ["d"] * 400}
    error = (await post("/rerank", 400, scoring=ONE, **fields))["error"]
    assert "1048576 tokens in all pairs" in error["message"]


async def test_a_long_document_is_cut_and_the_prompt_stays_whole() -> None:
    most = len(load_tokenizer().encode(question("q", "", None), add_special_tokens=False)) + 10
    _, prompts = await posted(
        "/rerank", scoring=ANSWERS, query="q", documents=["0123456789abcdef"], truncate_prompt_tokens=most
    )
    assert prompts == [question("q", "0123456789", None)]
    error = await post("/rerank", 400, scoring=ANSWERS, query="q", documents=["x"], truncate_prompt_tokens=20)
    assert "other tokens" in error["error"]["message"]
    error = await post("/rerank", 400, scoring=ANSWERS, query="q", documents=["x" * 600])
    assert error["error"]["code"] == "context_length_exceeded"
