"""Agents that speak Responses or Messages: real clients, and one transcript for what was said."""

import asyncio
import copy

import openai
import pytest
from dialect_clients import CALL, by_messages, by_responses
from test_agents import TOOLS, lab  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def anthropic():
    """Imported by the process that runs these tests alone: it takes a second."""
    return pytest.importorskip("anthropic", reason="the anthropic package is not installed")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("talk", [by_messages, by_responses])
def test_a_conversation_with_tools_is_one_transcript(lab, talk, stream):  # noqa: F811
    lab.tokenizer = copy.deepcopy(lab.tokenizer)
    lab.tokenizer.chat_template = TOOLS
    lab.turns = [CALL, "two"]

    async def agent(base_url, api_key, model):
        return float(await talk(base_url, api_key, model, stream))

    [sample] = lab.run(agent)
    assert sample.reward == 1.0
    said = (("assistant", CALL), ("tool", "2"), ("assistant", "two"))
    assert sample.turns == said
    drawn = [*lab.ids(CALL), lab.end, *lab.ids("two"), lab.end]
    assert sample.ids[sample.mask].tolist() == drawn, "id for id"


def test_what_is_not_built_is_refused_with_a_sentence(lab, anthropic):  # noqa: F811
    refused = []

    async def agent(base_url, api_key, model):
        asked = {"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": "go"}]}
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
            for more in (
                {"thinking": {"type": "enabled", "budget_tokens": 2000}},
                {"tool_choice": {"type": "any"}},
                {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            ):
                with pytest.raises(anthropic.BadRequestError) as caught:
                    await client.messages.create(**(asked | more))
                refused.append(str(caught.value))
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                await client.responses.create(model=model, input="go", previous_response_id="r")
            cut = await client.responses.create(model=model, input="go", max_output_tokens=2)
            assert (cut.status, cut.output_text) == ("incomplete", "ab")
        return 1.0

    lab.run(agent)
    assert "thinking" in refused[0] and "tool_choice" in refused[1] and "image" in refused[2]


def test_a_wrong_key_is_refused(lab, anthropic):  # noqa: F811
    async def agent(base_url, api_key, model):
        client = anthropic.AsyncAnthropic(base_url=base_url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model=model, max_tokens=1, messages=[])
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        await client.responses.create(model=model, input="go")
        await asyncio.gather(client.close())
        return 1.0

    lab.run(agent)
