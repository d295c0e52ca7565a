"""Unchanged client libraries against a server: text, streams, tools, structured output.

`tests/clients/run.sh PYTHON CLIENTS_PYTHON tests/clients/check.py [PACKAGE...]`, where CLIENTS_PYTHON has the
libraries of tests/requirements/clients.txt; prints a table, and fails if any check does.
"""

import asyncio
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

MODEL = "org/tiny"
KEY = "none"
ASKED = "Weather in Paris?"
ANSWER = "It is sunny."
NUM_CALLS = 2
URL = os.environ.get("URL", "")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHECKS: list[tuple[str, str, Callable[[], None]]] = []


def check(package: str, what: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a check of `package`."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS.append((package, what, function))
        return function

    return register


def get_weather(city: str) -> str:
    """The weather of a city."""
    assert city in ("Paris", '北京 "x"'), city
    return "20 °C"


# openai


def openai_client() -> Any:
    import openai

    return openai.OpenAI(base_url=URL, api_key=KEY)


@check("openai", "chat, stream, tools")
def openai_chat() -> None:
    client = openai_client()
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=[TOOL]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert len(message.tool_calls) == NUM_CALLS
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    messages += [{"role": "tool", "tool_call_id": c.id, "content": "20 °C"} for c in message.tool_calls]
    reply = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
    assert reply.choices[0].message.content == ANSWER


@check("openai", "responses, stream, tools, previous_response_id, input_tokens")
def openai_responses() -> None:
    client = openai_client()
    tool = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    with client.responses.stream(model=MODEL, input=ASKED, tools=[tool]) as stream:
        first = stream.until_done().get_final_response()
    calls = [item for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "20 °C"} for call in calls]
    last = client.responses.create(model=MODEL, input=results, previous_response_id=first.id, tools=[tool])
    assert len(calls) == NUM_CALLS and last.output_text == ANSWER
    counted = client.responses.input_tokens.count(
        model=MODEL, input=results, previous_response_id=first.id, tools=[tool]
    )
    assert counted.input_tokens == last.usage.input_tokens


@check("anthropic", "messages, stream, tools, count_tokens")
def anthropic_messages() -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=KEY)
    function: Any = TOOL["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    with client.messages.stream(model=MODEL, max_tokens=500, messages=messages, tools=[tool]) as stream:
        first = stream.get_final_message()
    calls = [block for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "20 °C"} for call in calls]
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    last = client.messages.create(model=MODEL, max_tokens=500, messages=messages, tools=[tool])
    assert len(calls) == NUM_CALLS and last.content[0].text == ANSWER
    assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens > 0


# openai-agents


def run_agent(make_model: Callable[[Any], Any], streams: bool) -> None:
    import agents
    import openai

    async def run() -> Any:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=URL, api_key=KEY) as client:
            tool = agents.function_tool(get_weather)
            agent = agents.Agent(name="a", instructions="Help.", model=make_model(client), tools=[tool])
            if not streams:
                return await agents.Runner.run(agent, ASKED)
            result = agents.Runner.run_streamed(agent, ASKED)
            async for _ in result.stream_events():
                pass
            return result

    assert asyncio.run(run()).final_output == ANSWER


@check("openai-agents", "an agent with a tool, over responses")
def agents_responses() -> None:
    import agents

    run_agent(lambda client: agents.OpenAIResponsesModel(MODEL, client), streams=False)


@check("openai-agents", "the same, as a stream")
def agents_responses_stream() -> None:
    import agents

    run_agent(lambda client: agents.OpenAIResponsesModel(MODEL, client), streams=True)


@check("openai-agents", "the same, over chat")
def agents_chat() -> None:
    import agents

    run_agent(lambda client: agents.OpenAIChatCompletionsModel(MODEL, client), streams=True)


# LangChain


def run_langchain(model: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(ASKED)]
    whole: Any = None
    for chunk in bound.stream(messages):
        whole = chunk if whole is None else whole + chunk
    assert [call["name"] for call in whole.tool_calls] == ["get_weather"] * NUM_CALLS
    messages.append(whole)
    messages += [ToolMessage(get_weather(**c["args"]), tool_call_id=c["id"]) for c in whole.tool_calls]
    text = bound.invoke(messages).text
    assert (text if isinstance(text, str) else text()) == ANSWER


@check("langchain-openai", "chat: stream, bind_tools")
def langchain_chat() -> None:
    from langchain_openai import ChatOpenAI

    run_langchain(ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL))


@check("langchain-openai", "responses: stream, bind_tools")
def langchain_responses() -> None:
    from langchain_openai import ChatOpenAI

    run_langchain(ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, use_responses_api=True))


@check("langchain-openai", "with_structured_output")
def langchain_structured() -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    model = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL)
    for method in ("json_schema", "json_mode"):
        assert model.with_structured_output(City, method=method).invoke("JSON, please").city == "Paris"


@check("langchain-anthropic", "messages: stream, bind_tools")
def langchain_messages() -> None:
    from langchain_anthropic import ChatAnthropic

    run_langchain(ChatAnthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, model=MODEL, max_tokens=500))


# LiteLLM


@check("litellm", "chat, stream, tools")
def litellm_chat() -> None:
    import litellm

    asked: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": KEY}
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    chunks = list(litellm.completion(**asked, messages=messages, tools=[TOOL], stream=True))
    message = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
    assert len(message.tool_calls) == NUM_CALLS
    messages.append(message.model_dump())
    messages += [{"role": "tool", "tool_call_id": c.id, "content": "20 °C"} for c in message.tool_calls]
    reply = litellm.completion(**asked, messages=messages, tools=[TOOL])
    assert reply.choices[0].message.content == ANSWER


@check("litellm", "responses")
def litellm_responses() -> None:
    import litellm

    reply = litellm.responses(model=f"openai/{MODEL}", api_base=URL, api_key=KEY, input=ASKED)
    assert reply.output[-1].content[0].text == ANSWER


@check("litellm", "anthropic messages")
def litellm_messages() -> None:
    import litellm

    messages = [{"role": "user", "content": ASKED}]
    base = URL.removesuffix("/v1")
    reply = litellm.completion(model=f"anthropic/{MODEL}", api_base=base, api_key=KEY, messages=messages)
    assert reply.choices[0].message.content == ANSWER


# instructor


@check("instructor", "JSON and JSON_SCHEMA modes")
def instructor_json() -> None:
    import instructor
    from pydantic import BaseModel

    class City(BaseModel):
        city: str

    for mode in (instructor.Mode.JSON, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai_client(), mode=mode)
        messages = [{"role": "user", "content": "JSON, please"}]
        found = client.chat.completions.create(model=MODEL, response_model=City, messages=messages)
        assert found.city == "Paris"


# pydantic-ai


def run_pydantic(model: Any, **options: Any) -> Any:
    from pydantic_ai import Agent

    agent = Agent(model, **options)
    return agent.run_sync("JSON, please" if "output_type" in options else ASKED).output


def pydantic_provider() -> Any:
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIProvider(base_url=URL, api_key=KEY)


@check("pydantic-ai-slim", "chat with a tool")
def pydantic_chat() -> None:
    from pydantic_ai.models.openai import OpenAIChatModel

    model = OpenAIChatModel(MODEL, provider=pydantic_provider())
    assert run_pydantic(model, tools=[get_weather]) == ANSWER


@check("pydantic-ai-slim", "responses with a tool")
def pydantic_responses() -> None:
    from pydantic_ai.models.openai import OpenAIResponsesModel

    model = OpenAIResponsesModel(MODEL, provider=pydantic_provider())
    assert run_pydantic(model, tools=[get_weather]) == ANSWER


@check("pydantic-ai-slim", "PromptedOutput, NativeOutput")
def pydantic_output() -> None:
    from pydantic import BaseModel
    from pydantic_ai import NativeOutput, PromptedOutput
    from pydantic_ai.models.openai import OpenAIChatModel

    class City(BaseModel):
        city: str

    model = OpenAIChatModel(MODEL, provider=pydantic_provider())
    for output_type in (PromptedOutput(City), NativeOutput(City)):
        assert run_pydantic(model, output_type=output_type).city == "Paris"


def main() -> None:
    """Run all checks."""
    names = sys.argv[1:]
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it asks the internet
    failed = 0
    print("| client | version | what | |\n|---|---|---|---|")
    for package, what, function in CHECKS:
        if names and package not in names:
            continue
        try:
            function()
            result = "works"
        except Exception:
            failed += 1
            result = "FAILS"
            traceback.print_exc()
        print(f"| {package} | {importlib.metadata.version(package)} | {what} | {result} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
