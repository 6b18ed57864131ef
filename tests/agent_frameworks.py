"""The same agent in several frameworks: it may look once, and answers with what it has seen."""

from __future__ import annotations

from typing import Any

QUESTION, SEEN = "Which word is hidden?", "zebra"


def langchain_openai(task: Any, base_url: str, api_key: str) -> float:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def look(place: str) -> str:
        """Look at a place."""
        return SEEN

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, temperature=0.7).bind_tools([look])
    messages: list[Any] = [("user", QUESTION)]
    while (answer := model.invoke(messages)).tool_calls:
        messages += [answer, *(look.invoke(call) for call in answer.tool_calls)]
    return float(answer.content == SEEN)


def smolagents(task: Any, base_url: str, api_key: str) -> float:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    @tool
    def look(place: str) -> str:
        """Look at a place.

        Args:
            place: where
        """
        return SEEN

    model = OpenAIModel("policy", api_base=base_url, api_key=api_key, tool_choice="auto")
    agent = ToolCallingAgent(tools=[look], model=model, max_steps=3, verbosity_level=0)
    return float(str(agent.run(QUESTION)) == SEEN)


async def agents(task: Any, base_url: str, api_key: str) -> float:
    from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

    @function_tool
    def look(place: str) -> str:
        """Look at a place."""
        return SEEN

    set_default_openai_api("chat_completions")
    set_tracing_disabled(True)
    answer = await Runner.run(Agent(name="looker", model="policy", tools=[look]), QUESTION)
    return float(answer.final_output == SEEN)


async def pydantic_ai(task: Any, base_url: str, api_key: str) -> float:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key=api_key)))

    @agent.tool_plain
    def look(place: str) -> str:
        """Look at a place."""
        return SEEN

    return float((await agent.run(QUESTION)).output == SEEN)


def openai(task: Any, base_url: str, api_key: str) -> float:
    """Streamed, with the tool's result in a second turn."""
    from openai import OpenAI

    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    look: Any = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    client, messages = OpenAI(base_url=base_url, api_key=api_key), [{"role": "user", "content": QUESTION}]
    while True:
        with client.chat.completions.stream(model="policy", messages=messages, tools=[look]) as events:
            answer = events.get_final_completion().choices[0].message
        if not answer.tool_calls:
            return float(answer.content == SEEN)
        messages.append(answer.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": SEEN} for call in answer.tool_calls]
