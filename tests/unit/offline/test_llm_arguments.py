"""What the offline API accepts: arguments of LLM, SamplingParams, the forms of prompts and conversations."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, fields

import pytest

from quire import LLM, BeamSearchParams, GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from quire.llm import ARGUMENTS, engine_settings
from quire.prompts import completions, conversation_list, params_for, prompt_list
from quire_server.answering.options import BeamOptions, SamplingNumbers, SamplingOptions
from quire_server.dialects.completions.wire import CompletionRequest
from quire_server.settings import Settings

USER = {"role": "user", "content": "Hello"}


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.max_tokens) == (1, 1.0, 1.0, 0, 16)
    options = params.options()
    assert options.sampling == SamplingOptions(given=frozenset(field.name for field in fields(SamplingNumbers)))
    assert (options.stop.max_tokens, options.stop.default_max_tokens) == (16, None)
    assert SamplingParams(max_tokens=None).options().stop.max_tokens is None


def test_every_parameter_is_a_field_of_a_request() -> None:
    """One that were not would pass through the request model unseen."""
    assert {field.name for field in fields(SamplingParams)} - {"guided_decoding"} <= set(CompletionRequest.model_fields)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": -0.1}, "temperature: .* greater than or equal to 0"),
        ({"temperature": "warm"}, "temperature: "),
        ({"top_p": 0.0}, "top_p: "),
        ({"top_k": -2}, "top_k: .* greater than or equal to -1"),
        ({"n": 0}, "n: "),
        ({"n": 17}, "n: .* less than or equal to 16"),
        ({"max_tokens": 0}, "'max_tokens' must be at least 1"),
        ({"stop": ["a", ""]}, r"stop\[1\]: "),
        ({"logprobs": 257}, "logprobs: .* less than or equal to 256"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: "),
        ({"logit_bias": {"the": 1.0}}, "token ids"),
        ({"logit_bias": {5: 101.0}}, "less than or equal to 100"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: "),
    ],
)
def test_values_that_are_not_supported_are_named(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SamplingParams(**values)


def test_unknown_parameters_are_type_errors() -> None:
    with pytest.raises(TypeError, match="best_off"):
        SamplingParams(best_off=2)
    with pytest.raises(FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_parameters_reach_the_neutral_request() -> None:
    options = SamplingParams(
        top_k=-1, logit_bias={7: -2.5}, stop="x", stop_token_ids=(3,), bad_words=["no"], truncate_prompt_tokens=5
    ).options()
    assert options.sampling.top_k == 0
    assert options.sampling.logit_bias == ((7, -2.5),)
    assert (options.stop.strings, options.stop.token_ids) == (("x",), (3,))
    assert options.sampling.bad_words == ("no",)
    (request,) = completions(["text"], [SamplingParams(truncate_prompt_tokens=5)])
    assert request.prompt.keep_tokens == 5


@pytest.mark.parametrize(
    ("prompts", "plain"),
    [
        ("a", ["a"]),
        ([], []),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ({"prompt": "a"}, ["a"]),
        (["a", [1, 2], {"prompt_token_ids": (3,)}, {"prompt": "b"}], ["a", [1, 2], [3], "b"]),
        ([{"prompt": "a", "prompt_token_ids": [1]}], [[1]]),
    ],
)
def test_forms_of_prompts(prompts: object, plain: list[object]) -> None:
    assert prompt_list(prompts) == plain


@pytest.mark.parametrize(
    ("prompts", "error", "text"),
    [
        (3, TypeError, "not int"),
        ([None], TypeError, "not NoneType"),
        (b"ab", TypeError, "not bytes"),
        ([[1, 2.0]], TypeError, "token ids are integers"),
        ([[True]], TypeError, "token ids are integers"),
        ([[]], ValueError, "at least one token"),
        ([{"prompt": "a", "multi_modal_data": {}}], ValueError, "'multi_modal_data' is not supported"),
        ([{}], TypeError, "not NoneType"),
    ],
)
def test_other_forms_are_refused(prompts: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        prompt_list(prompts)


def test_one_conversation_or_several() -> None:
    assert conversation_list([USER]) == [[USER]]
    assert conversation_list([[USER], [USER, USER]]) == [[USER], [USER, USER]]
    assert conversation_list([]) == []
    for wrong in ("Hello", USER, [USER, [USER]], ["Hello"], None):
        with pytest.raises(TypeError, match="role"):
            conversation_list(wrong)


def test_parameters_for_all_or_for_each() -> None:
    one, other = SamplingParams(n=1), SamplingParams(n=2)
    default = SamplingParams(temperature=0.6)
    assert params_for(2, None, default) == [default, default]
    assert params_for(2, other, default) == [other, other]
    assert params_for(2, [one, other], default) == [one, other]
    with pytest.raises(ValueError, match="3 prompts and 2 sampling_params"):
        params_for(3, [one, other], default)
    with pytest.raises(TypeError, match="SamplingParams"):
        params_for(1, {"temperature": 0}, default)


def test_arguments_are_settings() -> None:
    settings = engine_settings("quire-demo", {"max_model_len": 100, "kv_memory": "8MiB", "seed": 3})
    assert (settings.max_model_len, settings.kv_memory, settings.seed) == (100, 8 << 20, 3)
    assert {"dtype", "quantization", "gpu_memory_utilization", "max_num_seqs", "block_size"} <= ARGUMENTS
    assert not {"host", "port", "model", "drain_timeout", "max_num_queued_tokens"} & ARGUMENTS


def test_what_refuses_requests_of_a_server_does_not_refuse_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_MAX_NUM_QUEUED_TOKENS", "5")
    monkeypatch.setenv("QUIRE_NUM_THREADS", "1")
    assert Settings().max_num_queued_tokens == 5
    settings = engine_settings("quire-demo", {})
    assert (settings.max_num_queued_tokens, settings.num_threads) == (None, 1)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"model": "/nowhere/Llama-3.2-1B"}, ValueError, "model /nowhere/Llama-3.2-1B: there is no such directory"),
        ({"model": "nowhere/model.gguf"}, ValueError, "there is no such GGUF file"),
        ({"tensor_parallel_size": 0}, ValueError, "^tensor_parallel_size: .*greater than or equal to 1"),
        ({"max_modle_len": 5}, TypeError, "no argument 'max_modle_len'; did you mean max_model_len?"),
        ({"trust_remote_code": True}, TypeError, "no argument 'trust_remote_code'; it has async_scheduling, attention"),
        ({"port": 80}, TypeError, "no argument 'port'"),
        ({"dtype": "int3"}, ValueError, "^dtype: .*'bfloat16'"),
        ({"quantization": "awq"}, ValueError, "^quantization: .*'int8' or 'int4'"),
        ({"gpu_memory_utilization": 2}, ValueError, "^gpu_memory_utilization: "),
        ({"max_num_seqs": 600}, ValueError, "set max_num_batched_tokens 616 or more"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        LLM(**{"model": "quire-demo", **arguments})
    assert "\n" not in str(caught.value)


def test_the_import_is_light() -> None:
    """Neither torch nor what a bar needs is loaded with the package."""
    check = "import quire, sys; print({'torch', 'rich', 'uvicorn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("asked", "kind", "value"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json": "{}"}, "json_schema", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ("a", "b")}, "choice", '["a", "b"]'),
        ({"grammar": "start: /a/"}, "grammar", "start: /a/"),
        ({"json_object": True, "disable_any_whitespace": True}, "json_object", ""),
    ],
)
@pytest.mark.parametrize("name", ["structured_outputs", "guided_decoding"])
def test_structured_outputs(name, asked, kind, value):
    structure = SamplingParams(**{name: StructuredOutputsParams(**asked)}).options().structure
    assert structure is not None
    assert (structure.kind, structure.value) == (kind, value)
    assert structure.compact == ("disable_any_whitespace" in asked)


def test_structured_outputs_are_checked():
    with pytest.raises(ValueError, match="exactly one"):
        SamplingParams(structured_outputs=StructuredOutputsParams())
    with pytest.raises(ValueError, match="exactly one"):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", choice=["a"]))
    with pytest.raises(ValueError, match="older name"):
        SamplingParams(
            structured_outputs=StructuredOutputsParams(regex="a"), guided_decoding=GuidedDecodingParams(regex="a")
        )


def test_a_search_asks_for_all_of_its_beams() -> None:
    options = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5, early_stopping="never").options()
    assert (options.beam, options.sampling.n) == (
        BeamOptions(width=3, length_penalty=0.5, early_stopping="never"),
        3,
    )
    assert (options.stop.max_tokens, options.stop.ignore_eos, options.sampling.num_logprobs) == (5, False, 0)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"beam_width": 17}, "n: .* less than or equal to 16"),
        ({"max_tokens": 0}, "'max_tokens' must be at least 1"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"length_penalty": 11.0}, "length_penalty"),
    ],
)
def test_values_of_a_search_that_are_not_supported_are_named(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **values})
