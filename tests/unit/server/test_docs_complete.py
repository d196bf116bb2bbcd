"""The documents name every setting, metric, error, route and limit, as they are, each in one place."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families

from quire_server import errors
from quire_server.app import ROUTERS
from quire_server.dialects import common
from quire_server.flags import option_default, parse_flags
from quire_server.metrics.metrics import Metrics
from quire_server.settings import ENV_PREFIX, Settings, spelled
from quire_server.text.parsing.formats import TOOL_FORMATS
from quire_server.text.parsing.reasoning import REASONING_FORMATS
from support.documents import PAGES, ROOT, section, text

TEXT = "\n".join(text(name) for name in PAGES)
SAID = "\n".join([TEXT, text("README.md"), text("SERVING.md")])
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in TEXT.splitlines() if line.startswith("| `")]


def row(name: str) -> list[str]:
    """The one table row that begins with a name."""
    found = [cells for cells in ROWS if cells[0].strip("| ") == f"`{name}`"]
    assert len(found) == 1, f"{name} has {len(found)} rows in docs/"
    return found[0]


@pytest.mark.parametrize("name", Settings.model_fields)
def test_settings(name: str):
    field = Settings.model_fields[name]
    _, default, meaning = row(spelled(name))
    assert default == (option_default(field) or "none")
    assert meaning.startswith(str(field.description))


def test_no_setting_that_is_gone():
    flags = {cells[0].strip("`") for cells in ROWS if cells[0].startswith("`--")}
    assert flags == {spelled(name) for name in Settings.model_fields}
    for mentioned in re.findall(r"`(--(?!set )[a-z-]+|--set [a-z_]+)`", SAID):
        assert mentioned in {*flags, "--set help"}, mentioned


def test_metrics():
    metrics = Metrics("tiny")
    exported = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        name = family.name + ("_total" if family.type == "counter" else "")
        if name.startswith("quire_"):
            cells = row(name)
            assert cells[1] == family.type, name
            assert cells[-1] == family.documentation, name
        elif name.startswith("vllm:"):
            assert f"`{name}`" in TEXT, name
        exported[name] = family
    for mentioned in re.findall(r"`((?:quire_|vllm:)[a-z0-9_:]+)`", SAID):
        assert mentioned in exported, mentioned


def api_errors() -> list[type[errors.ApiError]]:
    classes = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.ApiError)]
    assert len(classes) > 10
    return [kind for kind in classes if kind is not errors.ClientError]  # a base that is never raised


@pytest.mark.parametrize("kind", api_errors())
def test_errors(kind: type[errors.ApiError]):
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in TEXT.splitlines()
        if line.startswith(f"| {kind.status} | `{kind.default_code}` |")
    ]
    assert len(rows) == 1
    assert rows[0][2] == kind.type


def test_error_codes_in_the_source():
    for path in (ROOT / "server").rglob("*.py"):
        for code in re.findall(r'\bcode="([a-z_]+)"', path.read_text()):
            assert f"`{code}`" in TEXT, f"{path.name}: {code}"


def test_routes():
    documented = set(re.findall(r"^\| `([A-Z]+ /\S*)` \|", TEXT, re.MULTILINE))
    served = {"GET /openapi.json"}
    for router in ROUTERS:
        for route in router.routes:
            assert isinstance(route, APIRoute)
            path = re.sub(r":path}", "}", route.path)
            served |= {f"{method} {path}" for method in route.methods - {"HEAD"}}
    assert documented == served


# Where docs/api.md says each bound of the wire: its row, and what stands around the number there.
BOUNDS = {
    "MAX_CHOICES": r"choices \(`n`\), beams \(`beam_width`\) \| {}, and",
    "MAX_PROMPTS": r"prompts of one completion \| {}, prompts times choices",
    "MAX_SEQUENCES": r"prompts of one completion \| [0-9]+, prompts times choices {} ",
    "MAX_LOGPROBS": r"`logprobs`, `top_logprobs`, `prompt_logprobs` \| {}, and",
    "MAX_STOPS": r"`stop` \| {} strings",
    "MAX_STOP_CHARS": r"`stop` \| [0-9]+ strings of {} characters",
    "MAX_BIASED_TOKENS": r"`logit_bias`, `stop_token_ids` \| {} tokens",
    "MAX_ALLOWED_TOKENS": r"`allowed_token_ids` \| {} tokens",
    "MAX_BAD_WORDS": r"`bad_words` \| {} words",
    "MAX_LOGPROB_IDS": r"`logprob_token_ids` \| {} tokens",
    "MAX_CACHE_TTL": r"`cache_ttl` \| {} seconds",
    "MAX_PARTS_IN_ALL": r"parts, tool calls and blocks of all messages or items together \| {} ",
}


def test_limits():
    assert set(BOUNDS) == {name for name in vars(common) if name.startswith("MAX_")}
    for name, place in BOUNDS.items():
        said = place.format(getattr(common, name))
        assert re.search(rf"^\| {said}", section("docs/api.md", "Limits"), re.MULTILINE), (
            f"{name} = {getattr(common, name)} is not in its row"
        )


def test_exit_codes():
    source = (ROOT / "server/quire_server/programs/launch.py").read_text()
    codes = re.search(r"^DONE, FAILED, BAD_USAGE, CRASH_LOOP = (.*)$", source, re.MULTILINE)
    assert codes is not None
    for code in codes[1].split(", "):
        assert f"\n| {code} | " in TEXT


def reads(source: ast.Module) -> Counter[str]:
    """How often each attribute is read for something else than to be handed on under its own name."""
    nodes = list(ast.walk(source))
    handed_on = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Attribute) and node.arg == node.value.attr
    }
    return Counter(
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and id(node) not in handed_on
    )


# These list and check settings.
NOT_USE = {"flags.py", "limits.py", "engine_fields.py", "server_fields.py", "experiments.py"}


def sources() -> Iterator[tuple[str, Callable[[], ast.Module]]]:
    """What runs: of `settings` its properties alone, not what declares, checks, lists and hands on its fields."""
    fields = ROOT / "server/quire_server/settings/fields.py"
    for folder in ("server", "engine", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != fields and path.name not in NOT_USE:
                source = path.read_text()
                yield source, partial(ast.parse, source)
    yield fields.read_text(), partial(properties_of, fields)


def properties_of(path: Path) -> ast.Module:
    properties: list[ast.stmt] = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(
            isinstance(mark, ast.Name) and mark.id in {"property", "cached_property"} for mark in node.decorator_list
        )
    ]
    return ast.Module(body=properties, type_ignores=[])


def test_every_setting_is_used():
    """Nothing has a flag that does nothing: a setting that is only copied from record to record counts as not used."""
    unused = set(Settings.model_fields)
    for source, parsed in sources():
        if any(f".{name}" in source for name in unused):  # to parse all would take seconds
            unused -= reads(parsed()).keys()
    assert unused == set()


def test_a_copy_is_not_a_use():
    assert reads(ast.parse("bind(settings.port)"))["port"] == 1
    assert reads(ast.parse("Limits(port=settings.port)"))["port"] == 0
    assert reads(ast.parse("settings.port = 3"))["port"] == 0


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_example_configurations_work(path: Path):
    assert parse_flags(["--config", str(path)]).config == path


def test_the_image_sets_settings_that_exist():
    variables = re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", (ROOT / "Dockerfile").read_text())
    assert variables
    assert {name.removeprefix(ENV_PREFIX).lower() for name in variables} <= set(Settings.model_fields)


def test_every_format_of_calls_and_of_thoughts_has_its_row():
    tables = section("docs/api.md", "Tools and thinking")
    rows = re.sub(r"^\| field \|.*\n(?:\|.*\n)+", "", tables, flags=re.MULTILINE)  # of requests, not of models
    named = {
        name for row in re.findall(r"^\| (`[^|]*) \|", rows, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)
    }
    assert named == {*TOOL_FORMATS, *REASONING_FORMATS}
    for form in REASONING_FORMATS.values():
        assert f"`{form.start}`, `{form.end}`".replace("|", "\\|") in rows
