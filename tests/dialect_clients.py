"""A conversation with a tool through the real clients of Responses and Messages."""

import openai

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>{"name": "f"}</tool_call>'


async def by_messages(base_url, api_key, model, stream):
    import anthropic  # a second of every process that collects

    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": "user", "content": "go"}]
        tools = [{"name": "f", "description": "", "input_schema": SCHEMA}]
        reasons = []
        while True:
            asked = dict(model=model, messages=messages, tools=tools, max_tokens=99)
            if stream:
                async with client.messages.stream(**asked) as events:
                    answer = await events.get_final_message()
            else:
                answer = await client.messages.create(**asked)
            assert answer.usage.input_tokens > 4 and answer.usage.output_tokens > 3
            reasons.append(answer.stop_reason)
            content = [block.model_dump(exclude_none=True) for block in answer.content]
            messages.append({"role": "assistant", "content": content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                assert [block.text for block in answer.content] == ["two"]
                return reasons == ["tool_use", "end_turn"]
            assert (calls[0].name, calls[0].input) == ("f", {})
            result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": "2"}
            messages.append({"role": "user", "content": [result]})


async def by_responses(base_url, api_key, model, stream):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        items = [{"role": "user", "content": "go"}]
        tools = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": False}]
        while True:
            asked = dict(model=model, input=items, tools=tools, store=False)
            if stream:
                async with client.responses.stream(**asked) as events:
                    answer = await events.get_final_response()
            else:
                answer = await client.responses.create(**asked)
            assert answer.status == "completed" and answer.usage.output_tokens > 3
            items += [item.model_dump(exclude_none=True) for item in answer.output]
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text == "two"
            assert (calls[0].name, calls[0].arguments) == ("f", "{}")
            output = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "2"}
            items.append(output)
