"""litellm, langchain-openai, instructor, pydantic-ai and openai-agents, each as its documents show it."""

from __future__ import annotations

import asyncio
import json

import pytest
from pydantic import BaseModel

from clients import weather
from clients.conftest import KEY, MODEL

ANNA = "JSON for a person named Anna who is 30 years old and lives in Rome."


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    city: str


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(base_url: str, provider: str) -> None:
    import litellm

    where: dict = {"model": f"{provider}/{MODEL}", "api_base": base_url, "api_key": KEY, "temperature": 0}
    messages = [{"role": "user", "content": weather.QUESTION}]
    reply = litellm.completion(messages=messages, tools=[weather.TOOL], **where)
    (call,) = reply.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    chunks = list(litellm.completion(messages=messages, stream=True, **where))
    whole = litellm.stream_chunk_builder(chunks, messages=messages)
    assert "Tokyo" in whole.choices[0].message.content


def test_langchain(base_url: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    get_weather = tool(weather.get_weather)
    model = ChatOpenAI(model=MODEL, base_url=base_url, api_key=KEY, temperature=0)  # type: ignore[arg-type]
    with_tools = model.bind_tools([get_weather])
    messages: list = [HumanMessage(weather.QUESTION)]
    messages.append(with_tools.invoke(messages))
    (call,) = messages[-1].tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    messages.append(ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]))
    assert "18" in with_tools.invoke(messages).content
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Person, method=method).invoke(ANNA)  # type: ignore[arg-type]
        assert isinstance(found, Person)
    assert "".join(str(chunk.content) for chunk in model.stream("What is the capital of Japan?")).count("Tokyo") == 1


def test_instructor(base_url: str) -> None:
    import instructor
    import openai

    with openai.OpenAI(base_url=base_url, api_key=KEY) as api:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            client = instructor.from_openai(api, mode=mode)
            messages: list = [{"role": "user", "content": ANNA}]
            found = client.chat.completions.create(
                model=MODEL, messages=messages, response_model=Person, temperature=0, max_retries=0
            )
            assert isinstance(found, Person)


def test_pydantic_ai(base_url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=base_url, api_key=KEY))
    agent = Agent(model, tools=[weather.get_weather], model_settings={"temperature": 0})
    assert "18" in agent.run_sync(weather.QUESTION).output
    typed = Agent(model, output_type=Person, model_settings={"temperature": 0})
    assert isinstance(typed.run_sync(ANNA).output, Person)


def test_openai_agents(base_url: str) -> None:
    """On /v1/responses, which it uses unless told otherwise."""
    import openai
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool

    async def run() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=KEY) as api:
            agent = Agent(
                name="Weather",
                instructions="You are a helpful assistant.",
                tools=[function_tool(weather.get_weather)],
                model=OpenAIResponsesModel(model=MODEL, openai_client=api),
                model_settings=ModelSettings(temperature=0),
            )
            whole = await Runner.run(agent, weather.QUESTION, max_turns=4)
            streamed = Runner.run_streamed(agent, weather.QUESTION, max_turns=4)
            kinds = [event.type async for event in streamed.stream_events()]
            assert streamed.final_output == whole.final_output
            return whole.final_output, kinds

    said, kinds = asyncio.run(run())
    assert "18" in said
    assert "raw_response_event" in kinds
