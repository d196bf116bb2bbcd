"""The recipes of CONTRIBUTING.md name at most three places each, and following them is enough.

Where a recipe can be followed in a process, it is: what it says to declare is declared, and found where it should show.
Where it cannot, since files must be compiled, the lists that it names are compared.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, make_dataclass, replace
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pytest
import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response

from architecture.source import ROOT
from architecture.test_contributing import LOOKS_LIKE_A_PATH, section
from quire_engine.contract import config
from quire_engine.contract.limits import LIMIT_NAMES, PolicyName, SchedulerConfig, SchedulerLimits, VictimName
from quire_engine.contract.types import EngineStats, SamplingParams
from quire_engine.execution.drafting.suffix import SuffixDrafter
from quire_engine.execution.models import families
from quire_engine.execution.models.config import load_model_config
from quire_engine.scheduling import scheduler
from quire_engine.scheduling.log import books
from quire_engine.scheduling.policies import VICTIMS, Policies, policies_for
from quire_engine.scheduling.roster import Roster
from quire_engine.scheduling.speculation import Speculation
from quire_kernels import kernel_set
from quire_kernels.activations import DEFINITIONS, Activation, gated
from quire_kernels.cpu.linear import GATES
from quire_kernels.cpu.packing import KINDS
from quire_kernels.cpu.stored import STACKED, STORED_KINDS
from quire_kernels.cpu.variants import VARIANTS
from quire_kernels.kernel_set import KernelSet
from quire_kernels.reference import REFERENCE
from quire_kernels.select import PROVIDERS
from quire_server import app, flags
from quire_server.answering.answer import answer
from quire_server.answering.options import GenerationOptions, PromptOptions, SamplingNumbers, SamplingOptions
from quire_server.answering.sampling import ModelLimits, resolve_sampling
from quire_server.dialects.chat.wire import ChatCompletionRequest
from quire_server.dialects.common import SamplingFields
from quire_server.dialects.completions.wire import CompletionRequest
from quire_server.dialects.infill.rendering import InfillRenderer
from quire_server.dialects.messages.request import MessageRequest
from quire_server.dialects.responses.request import ResponseRequest
from quire_server.http.body import json_body
from quire_server.metrics import metrics
from quire_server.metrics.metric_catalog import RequestMetrics
from quire_server.metrics.metric_values import Values
from quire_server.settings import REMOVED, Settings, plain_fields
from quire_server.settings import fields as settings_fields
from quire_server.settings.values import PositiveSeconds, option
from quire_server.state import state_of
from quire_server.text.parsing import formats
from support.exposition import Scrape
from support.fake_tokenizer import load_tokenizer
from support.fakes import connect, make_app, make_plan

MOST_PLACES = 3
RECIPES = [line for line in section("Recipes").splitlines() if line.startswith("| a")]
IN_A_FOLDER = re.compile(r"`([\w/]+\.(?:py|h))`")
CSRC = ROOT / "kernels" / "csrc"


def name_of(recipe: str) -> str:
    return recipe.split("|")[1].strip()


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_a_recipe_names_at_most_three_places_that_exist(recipe: str):
    paths = LOOKS_LIKE_A_PATH.findall(recipe)
    assert 2 <= len(paths) <= MOST_PLACES
    assert len(set(paths)) == len(paths)
    assert not [path for path in paths if not (ROOT / path).exists()]


@pytest.mark.parametrize("recipe", RECIPES, ids=name_of)
def test_files_in_a_folder_of_a_recipe_exist(recipe: str):
    """Those that are named without their folder lie in the one that is named before them or behind them."""
    for clause in recipe.split(";"):
        paths = LOOKS_LIKE_A_PATH.findall(clause)
        named = [name for name in IN_A_FOLDER.findall(clause) if name not in paths]
        assert not [name for name in named if not any((ROOT / path / name).exists() for path in paths)]


def test_no_recipe_counts_tests_or_documents_as_its_last_sentence_does_it_for_all():
    assert not [line for line in RECIPES if "`tests" in line or ".md`" in line or "default.yaml" in line]
    last = section("Recipes").strip().split("\n\n")[-1]
    assert {"`tests`", "`docs/`", "`configs/default.yaml`"} <= set(re.findall(r"`[^`]+`", last))


def test_there_is_a_recipe_for_everything_that_is_often_added():
    assert {name_of(line) for line in RECIPES} >= {
        *("a sampling parameter", "a metric", "an alert", "a setting", "a limit of the scheduler", "a dialect"),
        *("a format of tool calls", "an order of the queue", "a model family", "an op", "a kernel set"),
        *("an instruction set", "a kind of weight", "an activation", "a plain route", "a metric of the engine"),
        "a victim of preemption",
    }


REQUESTS: dict[str, Callable[[dict[str, Any]], GenerationOptions]] = {
    "completions": lambda given: CompletionRequest.model_validate({"prompt": "a", **given}).options(),
    "chat": lambda given: ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "a"}], **given}
    ).options(),
    "messages": lambda given: MessageRequest.model_validate(
        {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}], **given}
    ).options(),
    "responses": lambda given: _response_options({"input": "a", **given}),
}


def _response_options(body: dict[str, Any]) -> GenerationOptions:
    request = ResponseRequest.model_validate(body)
    return request.options(request.input)


@pytest.mark.parametrize("dialect", REQUESTS)
@pytest.mark.parametrize("number", [field.name for field in fields(SamplingNumbers)])
def test_a_sampling_parameter_passes_from_the_wire_to_the_engine(dialect: str, number: str):
    """Whatever number is declared: no dialect has a list of its own."""
    given: float = {"top_k": 3, "temperature": 0.5, "top_p": 0.5, "min_p": 0.5}.get(number, 1.5)
    sampling = resolve_sampling(
        REQUESTS[dialect]({number: given}),
        tokenizer=load_tokenizer(),
        limits=ModelLimits.of(make_plan(), load_tokenizer(), 20),
    )
    assert getattr(sampling, number) == given
    assert replace(sampling, **{number: getattr(SamplingParams(), number)}) == SamplingParams()


def test_a_sampling_parameter_has_one_name_and_one_default():
    names = {field.name for field in fields(SamplingNumbers)}
    assert names == SamplingFields.model_fields.keys() - {"seed"}
    engine = {field.name: field.default for field in fields(SamplingParams)}
    assert {field.name: field.default for field in fields(SamplingNumbers)} == {name: engine[name] for name in names}


def test_a_metric_is_a_declaration(monkeypatch: pytest.MonkeyPatch):
    class WithNaps(RequestMetrics):
        def __init__(self, values: Values, max_model_len: int) -> None:
            super().__init__(values, max_model_len)
            values.counter("quire_naps", "Naps.", alias="vllm:naps").inc(3)

    monkeypatch.setattr(metrics, "RequestMetrics", WithNaps)
    scrape = Scrape(metrics.Metrics("tiny"))
    assert scrape("quire_naps_total") == scrape("vllm:naps_total") == 3


def test_a_metric_of_the_engine_is_a_field_an_attribute_of_its_name_and_a_declaration(monkeypatch: pytest.MonkeyPatch):
    class NappingRoster(Roster):
        total_naps = 3

    class WithNaps(RequestMetrics):
        def __init__(self, values: Values, max_model_len: int) -> None:
            super().__init__(values, max_model_len)
            values.counter("quire_naps", "Naps.", field="total_naps")

    stats = make_dataclass("StatsWithNaps", [("total_naps", int, 0)], bases=(EngineStats,), frozen=True, kw_only=True)
    monkeypatch.setattr(books, "EngineStats", stats)
    monkeypatch.setattr(scheduler, "Roster", NappingRoster)
    monkeypatch.setattr(metrics, "RequestMetrics", WithNaps)
    counted = metrics.Metrics("tiny")
    counted.observe_step(scheduler.Scheduler(SchedulerConfig(num_blocks=8, max_model_len=64)).stats())
    assert Scrape(counted)("quire_naps_total") == 3


def test_what_the_scheduler_counts_is_a_field_of_its_name():
    made = scheduler.Scheduler(SchedulerConfig(num_blocks=8, max_model_len=64))
    parts = made._kv, made._roster, made._planner.admission, Speculation(SuffixDrafter(), made._kv)
    counted = {name for part in parts for name in vars(part) if name.startswith("total_")}
    assert len(counted) > 10
    assert counted <= {field.name for field in fields(EngineStats)}


def test_a_setting_is_a_field(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    class WithNaps(Settings):
        nap_seconds: PositiveSeconds = option(2.0, "Lifetime", "how long to nap", "seconds")

    for module in (flags, settings_fields):
        monkeypatch.setattr(module, "Settings", WithNaps)
    monkeypatch.setattr(flags, "_FIELDS", plain_fields(WithNaps))

    def nap(*argv: str) -> object:
        return flags.parse_flags(argv).model_dump()["nap_seconds"]

    assert nap() == 2.0
    file = tmp_path / "quire.yaml"
    file.write_text("nap-seconds: 3\n")
    assert nap("--config", str(file)) == 3.0
    monkeypatch.setenv("QUIRE_NAP_SECONDS", "4")
    assert nap("--config", str(file)) == 4.0
    assert nap("--config", str(file), "--nap-seconds", "5") == 5.0
    with pytest.raises(SystemExit):
        nap("--help")
    assert "how long to nap" in capsys.readouterr().out


def test_a_setting_of_the_engine_is_a_field_of_the_same_name_there(monkeypatch: pytest.MonkeyPatch):
    config_with_naps = make_dataclass(
        "ConfigWithNaps", [("nap_seconds", float)], bases=(config.EngineConfig,), frozen=True, kw_only=True
    )
    monkeypatch.setattr(settings_fields, "EngineConfig", config_with_naps)

    class WithNaps(Settings):
        nap_seconds: PositiveSeconds = option(2.0, "Lifetime", "how long to nap", "seconds")

    assert WithNaps(nap_seconds=7.0).engine_config().nap_seconds == 7.0


def test_a_limit_of_the_scheduler_is_read_from_the_setting_of_its_name():
    assert {field.name for field in fields(SchedulerLimits)} == set(LIMIT_NAMES)
    settings = set(LIMIT_NAMES) & Settings.model_fields.keys()
    assert set(LIMIT_NAMES) - settings <= REMOVED.keys() | {"admission"}  # which simulations alone compare
    assert "max_num_seqs" in settings
    assert Settings(max_num_seqs=7).limits.max_num_seqs == 7


def test_a_format_of_tool_calls_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch):
    nap = replace(formats.HERMES, name="nap")
    monkeypatch.setitem(formats.TOOL_FORMATS, "nap", nap)
    assert formats.model_formats("nap", "none", load_tokenizer(), None).calls is nap


class NapRequest(SamplingFields):
    """The wire model of a dialect that is not there."""

    text: str

    def options(self) -> GenerationOptions:
        sampling = SamplingOptions(**self.given_numbers())
        return GenerationOptions(prompt=PromptOptions(source=[self.text], param="text"), sampling=sampling)


naps = APIRouter(tags=["generation"])


@naps.post("/v1/naps", response_model=None)
async def create_nap(body: Annotated[NapRequest, json_body(NapRequest)], request: Request) -> Response:
    return await answer(request, body.options(), InfillRenderer)


def test_a_dialect_is_a_folder_and_its_router(monkeypatch: pytest.MonkeyPatch):
    """Its wire model, renderer and route stand above; the router is all that the application has to know."""
    monkeypatch.setattr(app, "ROUTERS", (*app.ROUTERS, naps))

    async def ask() -> None:
        async with connect(make_app()) as client:
            good = await client.post("/v1/naps", json={"text": "a", "temperature": 0})
            assert (good.status_code, set(good.json()) >= {"content"}) == (200, True), good.text
            bad = await client.post("/v1/naps", json={"text": "a", "temperature": 9})
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "temperature")
            assert "/v1/naps" in (await client.get("/openapi.json")).json()["paths"]

    asyncio.run(ask())


@naps.get("/naps")
async def show_naps(request: Request) -> dict[str, int]:
    return {"naps": state_of(request).in_flight}


def test_a_plain_route_is_a_function_and_needs_a_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "ROUTERS", (*app.ROUTERS, naps))

    async def ask() -> None:
        async with connect(make_app(api_key=("k",))) as client:
            assert (await client.get("/naps")).status_code == 401
            reply = await client.get("/naps", headers={"x-api-key": "k"})
            assert (reply.status_code, reply.json()) == (200, {"naps": 0})

    asyncio.run(ask())


@pytest.mark.parametrize("name", get_args(VictimName))
def test_a_victim_is_chosen_by_its_name(name: VictimName):
    assert isinstance(policies_for(SchedulerLimits(preemption_victim=name)).victim, VICTIMS[name])
    assert flags.parse_flags(["--set", f"preemption_victim={name}"]).limits.preemption_victim == name


def test_an_activation_has_one_name_and_one_number():
    header = (CSRC / "gemm" / "activations.h").read_text("utf-8")
    names = get_args(Activation)
    assert tuple(re.findall(r'each\(k\w+Mul, "(\w+)", \w+\)', header)) == tuple(GATES) == tuple(DEFINITIONS) == names
    x = torch.linspace(-3.0, 3.0, 16)
    assert len({tuple(gated(x, x, name).tolist()) for name in names}) == len(names), "each has its definition"


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_an_order_of_the_queue_is_chosen_by_its_name(name: PolicyName):
    assert isinstance(policies_for(SchedulerLimits(scheduling_policy=name)), Policies)
    assert flags.parse_flags(["--scheduling-policy", name]).limits.scheduling_policy == name


def test_a_model_family_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    row = replace(families.FAMILIES["LlamaForCausalLM"], architecture="NapForCausalLM", qk_norm=True)
    monkeypatch.setitem(families.FAMILIES, row.architecture, row)
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    plain = {"architectures": [row.architecture], "num_attention_heads": 2, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    found = load_model_config(tmp_path)
    assert (found.architecture, found.qk_norm, found.max_position_embeddings) == (row.architecture, True, 2048)
    monkeypatch.undo()
    assert tuple(families.FAMILIES) == config.ARCHITECTURES


def test_an_op_is_a_field_with_a_contract_and_a_specification():
    """Nothing but `KernelSet` lists them: a set that has one more is a set like the others."""
    ops = {name for name, kind in get_annotations(KernelSet).items() if "Callable" in str(kind)}
    contracts = set(re.findall(r"^    (\w+)\(", KernelSet.__doc__ or "", re.MULTILINE))
    assert contracts == ops - {"packed_bytes"}  # what a set says of itself has a comment
    needed = {field.name for field in fields(KernelSet) if field.default is MISSING}
    more = make_dataclass("More", [("nap", Callable[[], str])], bases=(KernelSet,), frozen=True, kw_only=True)
    made = more(**{name: getattr(REFERENCE, name) for name in needed}, nap=lambda: "slept")
    assert made.nap() == "slept"
    assert all(callable(getattr(REFERENCE, name)) for name in needed & ops)


def test_a_kernel_set_has_one_name():
    assert {"auto", *(provider.name for provider in PROVIDERS)} == set(get_args(config.KernelChoice))


def test_an_instruction_set_has_one_name():
    text = (CSRC / "simd" / "instructions.h").read_text("utf-8")
    compiled = re.findall(r'kVariant = "(\w+)"', text)
    assert compiled == [variant.name for variant in VARIANTS] == list(get_args(config.CpuVariant))
    others: Sequence[Path] = [path for path in CSRC.rglob("*.[ch]*") if path.name != "instructions.h"]
    assert not [path for path in others for name in set(compiled) - {"portable"} if f'"{name}"' in path.read_text()]


def test_a_kind_of_weight_has_one_name_and_one_number():
    text = (CSRC / "weights" / "linear.h").read_text("utf-8")
    (listed,) = re.findall(r"enum class WeightKind : int32_t \{(.*?)\};", text, re.DOTALL)
    found = re.findall(r"k(\w+) = (\d)", listed)
    numbers = {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(): int(number) for name, number in found}
    kinds: Mapping[Literal["int8", "int4"] | None, Any] = KINDS
    own = {name or "bf16": kind.number for name, kind in kinds.items()}
    assert numbers == own | STORED_KINDS | {"stacked": STACKED}
    assert set(get_args(kernel_set.Quantization)) == set(get_args(config.Quantization)) == set(kinds) - {None}
    headers = {path.name for path in (CSRC / "weights").glob("*_weights.h")}
    assert headers == {f"{name or 'bf16'}_weights.h" for name in kinds} | {"stored_weights.h"}
    included = set(re.findall(r'"weights/(\w+\.h)"', (CSRC / "weights" / "kinds.h").read_text("utf-8")))
    assert included == headers
