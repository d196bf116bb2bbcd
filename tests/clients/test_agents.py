"""Claude Code, Codex CLI and opencode as programs: they start, stream, call a tool and find their prefix cached.

Their instructions and tools are longer than the embedded model's context, so the template shows it the one tool that
the tests are about, and the conversation.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import claude_agent_sdk
import pytest

from clients import page
from clients.conftest import KEY, MODEL
from clients.weather import DESCRIPTION, QUESTION, SCHEMA, get_weather
from e2e.served import Served

HERE = Path(__file__).parent
PROGRAMS = HERE / "node_modules" / ".bin"
WEATHER = str(HERE / "weather_mcp.mjs")
MOST_OF_A_TURN = 100  # tokens; the three programs' prompts have fewer in common


@pytest.fixture(scope="module")
def short() -> Iterator[Served]:
    template = str(HERE / "agents.jinja")
    with Served("--api-key", KEY, "--max-model-len", "2048", "--seed", "1", "--chat-template", template) as served:
        yield served


def run(folder: Path, program: str, *args: str, **variables: str) -> list[dict[str, Any]]:
    """The lines of JSON that a program prints, which sees nothing of this machine's user."""
    home = {"HOME": str(folder), "CODEX_HOME": str(folder), "PWD": str(folder), "XDG_CONFIG_HOME": str(folder)}
    done = subprocess.run(
        [str(PROGRAMS / program), *args],
        cwd=folder,
        env={**os.environ, **home, "XDG_DATA_HOME": str(folder), "XDG_CACHE_HOME": str(folder), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_codex(short: Served, tmp_path: Path) -> None:
    """The tool is one of a namespace, and apply_patch a custom tool with a grammar, which binds all names."""
    catalog = subprocess.run(
        [str(PROGRAMS / "codex"), "debug", "models"],
        env={**os.environ, "HOME": str(tmp_path), "CODEX_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    models = json.loads(catalog)["models"]
    like = next(
        each for each in models if each["apply_patch_tool_type"] == "freeform" and not each["use_responses_lite"]
    )
    own = {
        "slug": MODEL,
        "supports_search_tool": False,
        "default_reasoning_level": None,
        "supported_reasoning_levels": [],
    }
    (tmp_path / "models.json").write_text(json.dumps({"models": [like | own]}))
    provider = f'{{name="quire", base_url="{short.url}/v1", wire_api="responses", env_key="OPENAI_API_KEY"}}'
    settings = {
        "model_catalog_json": json.dumps(str(tmp_path / "models.json")),
        "model_provider": '"quire"',
        "model_providers.quire": provider,
        "mcp_servers.weather": f'{{command="node", args=[{json.dumps(WEATHER)}]}}',
    }
    others = (
        "goals",
        "shell_tool",
        "unified_exec",
        "multi_agent",
        "view_image",
    )  # the model may call any that is there
    events = run(
        tmp_path,
        "codex",
        *("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", MODEL),
        *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")),
        *(word for name in others for word in ("--disable", name)),
        QUESTION,
    )
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    (call,) = (item for item in items if item["type"] == "mcp_tool_call")
    assert (call["server"], call["tool"], call["arguments"]) == ("weather", "get_weather", {"city": "Paris"})
    assert call["status"] == "completed"
    assert items[-1]["type"] == "agent_message"
    assert events[-1]["type"] == "turn.completed"
    assert events[-1]["usage"]["cached_input_tokens"] > MOST_OF_A_TURN


def test_claude_code(short: Served, tmp_path: Path) -> None:
    """By its SDK, which can leave out the prefix that Claude Code puts before names that the model knows."""
    tool = claude_agent_sdk.tool("get_weather", DESCRIPTION, SCHEMA)(_weather)
    options = claude_agent_sdk.ClaudeAgentOptions(
        model=MODEL,
        mcp_servers={"weather": claude_agent_sdk.create_sdk_mcp_server("weather", tools=[tool])},
        allowed_tools=["get_weather", "mcp__weather__get_weather"],
        cwd=tmp_path,
        cli_path=PROGRAMS / "claude",
        include_partial_messages=True,
        env=claude_variables(short, tmp_path) | {"CLAUDE_AGENT_SDK_MCP_NO_PREFIX": "1"},
    )

    async def said() -> list[Any]:
        return [message async for message in claude_agent_sdk.query(prompt=QUESTION, options=options)]

    messages = asyncio.run(said())
    parts = [part for message in messages if hasattr(message, "content") for part in message.content]
    call, outcome, answer = parts
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    assert (outcome.tool_use_id, outcome.is_error) == (call.id, None)
    assert "18" in answer.text
    assert sum(isinstance(message, claude_agent_sdk.StreamEvent) for message in messages) > 10
    assert messages[-1].usage["cache_read_input_tokens"] > MOST_OF_A_TURN


async def _weather(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": get_weather(arguments["city"])}]}


def claude_variables(server: Served, folder: Path) -> dict[str, str]:
    return {
        "HOME": str(folder),
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def test_claude_code_alone(short: Served, tmp_path: Path) -> None:
    """The model says `get_weather` where the tool is `mcp__weather__get_weather`: the program answers that itself."""
    servers = {"mcpServers": {"weather": {"command": "node", "args": [WEATHER]}}}
    (tmp_path / "mcp.json").write_text(json.dumps(servers))
    events = run(
        tmp_path,
        "claude",
        *("-p", QUESTION, "--output-format", "stream-json", "--include-partial-messages", "--verbose"),
        *("--model", MODEL, "--mcp-config", "mcp.json", "--strict-mcp-config"),
        *("--allowedTools", "mcp__weather__get_weather"),
        **claude_variables(short, tmp_path),
    )
    said = [part for event in events if event["type"] == "assistant" for part in event["message"]["content"]]
    results = [part for event in events if event["type"] == "user" for part in event["message"]["content"]]
    assert [part["type"] for part in said] == ["tool_use", "text"]
    assert said[0]["input"] == {"city": "Paris"}
    assert [part["tool_use_id"] for part in results] == [said[0]["id"]]
    assert sum(event["type"] == "stream_event" for event in events) > 10
    assert (events[-1]["type"], events[-1]["subtype"], events[-1]["num_turns"]) == ("result", "success", 2)
    assert events[-1]["usage"]["cache_read_input_tokens"] > MOST_OF_A_TURN


def test_opencode(short: Served, tmp_path: Path) -> None:
    """With the page's configuration. Of a server `get` and its tool `weather` it makes `get_weather`."""
    config = page.configuration("opencode", short)
    config["mcp"] = {"get": {"type": "local", "command": ["node", WEATHER, "weather"], "enabled": True}}
    (tmp_path / "own.json").write_text(json.dumps(config))
    events = run(
        tmp_path,
        "opencode",
        *("run", "--format", "json", "-m", f"quire/{MODEL}", QUESTION),
        OPENCODE_CONFIG=str(tmp_path / "own.json"),
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
    )
    (call,) = (event["part"] for event in events if event["type"] == "tool_use")
    assert (call["tool"], call["state"]["status"], call["state"]["input"]) == (
        "get_weather",
        "completed",
        {"city": "Paris"},
    )
    (text,) = (event["part"]["text"] for event in events if event["type"] == "text")
    assert "18" in text
    *_, last = (event["part"] for event in events if event["type"] == "step_finish")
    assert last["tokens"]["cache"]["read"] > MOST_OF_A_TURN
