"""The `openai` package against the server: what it gets is what the engine draws."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from closeness import ROUNDING, assert_close, assert_logprobs, scale_of

PROMPT = "Once upon a time"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi \u20ac"}]


def ids_of(tokenizer, text=PROMPT):
    return tokenizer.encode(text)


def chat_ids(tokenizer, messages=CHAT):
    return tokenizer.encode(tokenizer.render(messages, for_answer=True))


def complete(client, prompt=PROMPT, **options):
    options = {"max_tokens": 24, "temperature": 0} | options
    extra = {"return_token_ids": True} | options.pop("extra", {})
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **options)


def converse(client, messages=CHAT, **options):
    options = {"max_tokens": 24, "temperature": 0} | options
    extra = {"return_token_ids": True} | options.pop("extra", {})
    return client.chat.completions.create(
        model="tiny", messages=messages, extra_body=extra, **options
    )


@pytest.mark.parametrize("stream", [False, True])
def test_other_dialects_get_what_a_chat_gets(server, client, stream):
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    said = converse(client).choices[0].message.content
    given = {"model": "tiny", "temperature": 0}
    asked = given | {"instructions": "Be brief.", "input": CHAT[1:], "max_output_tokens": 24}
    if stream:
        *_, last = client.responses.create(**asked, stream=True)
        assert last.type in ("response.completed", "response.incomplete")
        response = last.response
    else:
        response = client.responses.create(**asked)
    assert response.output_text == said
    other = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    asked = {"model": "tiny", "system": "Be brief.", "messages": CHAT[1:], "max_tokens": 24}
    extra = {"extra_body": {"temperature": 0}}
    if stream:
        with other.messages.stream(**asked, **extra) as events:
            message = events.get_final_message()
    else:
        message = other.messages.create(**asked, **extra)
    assert "".join(block.text for block in message.content) == said


def test_the_model_is_listed(client):
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve("tiny").id) == ("tiny", "tiny")
    with pytest.raises(openai.NotFoundError, match="model = other: this server has only tiny"):
        client.models.retrieve("other")


def test_completions_are_the_engines_greedy_text(client, byte_tokenizer, engine_answer):
    expected = engine_answer(ids_of(byte_tokenizer), 24)
    answer = complete(client)
    (choice,) = answer.choices
    assert choice.token_ids == expected.ids
    assert choice.prompt_token_ids == ids_of(byte_tokenizer)
    assert choice.text == byte_tokenizer.decode(expected.ids)
    assert choice.finish_reason == expected.finish
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (16, 24)
    assert answer.usage.total_tokens == 40

    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == choice.text
    assert sum((c.choices[0].token_ids for c in chunks[:-1]), []) == expected.ids
    assert chunks[0].choices[0].prompt_token_ids == ids_of(byte_tokenizer)
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * 24 + [expected.finish]
    assert chunks[-1].usage == answer.usage
    assert len({c.id for c in chunks}) == 1


def test_chat_is_the_engines_greedy_text_after_the_template(client, byte_tokenizer, engine_answer):
    expected = engine_answer(chat_ids(byte_tokenizer), 24)
    answer = converse(client)
    (choice,) = answer.choices
    assert answer.prompt_token_ids == chat_ids(byte_tokenizer)
    assert choice.token_ids == expected.ids
    assert (choice.message.role, choice.finish_reason) == ("assistant", expected.finish)
    assert choice.message.content == byte_tokenizer.decode(expected.ids)

    chunks = list(converse(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].prompt_token_ids == chat_ids(byte_tokenizer)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == choice.message.content
    assert chunks[-1].choices[0].finish_reason == expected.finish


def test_content_in_parts_is_the_same_prompt(client):
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "\u20ac"}]
    same = [CHAT[0], {"role": "user", "content": parts}]
    assert converse(client, same).prompt_token_ids == converse(client).prompt_token_ids


def test_a_chat_answer_may_fill_the_context(client):
    long = [{"role": "user", "content": "x" * 4000}]
    answer = converse(client, long, max_tokens=None, extra={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 4096


def test_every_form_of_prompt(client, byte_tokenizer):
    a, b = ids_of(byte_tokenizer), ids_of(byte_tokenizer, "zwei")
    texts = [choice.text for choice in complete(client, [PROMPT, "zwei"]).choices]
    assert [choice.text for choice in complete(client, [a, b]).choices] == texts
    assert complete(client, a).choices[0].text == texts[0]
    assert complete(client, "zwei").choices[0].text == texts[1]
    assert texts[0] != texts[1]
    assert [c.index for c in complete(client, [a, b], n=2).choices] == [0, 1, 2, 3]


DRAWN = {"temperature": 0.7, "top_p": 0.9, "seed": 17}  # special tokens between halves of letters


@pytest.mark.parametrize("options", [{"temperature": 0}, DRAWN])
def test_logprobs_are_those_of_a_teacher_forced_forward(client, byte_tokenizer, forced, options):
    def check(prompt, ids, logprobs):
        assert_logprobs(logprobs, forced(prompt, ids, options["temperature"] or 1.0), ids)

    prompt = ids_of(byte_tokenizer)
    (choice,) = complete(client, logprobs=0, **options).choices
    check(prompt, choice.token_ids, choice.logprobs.token_logprobs)
    assert choice.logprobs.tokens == [
        byte_tokenizer.decode([i], keep_special=True) for i in choice.token_ids
    ]
    before = ""
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        if token in byte_tokenizer.inner.all_special_tokens:
            continue
        if "\ufffd" not in before + token:  # else it is not known yet how much text that is
            assert choice.text[offset:].startswith(token)
        before = token
    answer = converse(client, logprobs=True, **options)
    (choice,) = answer.choices
    entries = choice.logprobs.content
    check(answer.prompt_token_ids, choice.token_ids, [entry.logprob for entry in entries])
    whole = b"".join(bytes(e.bytes) if e.bytes else b"" for e in entries if e.bytes)
    assert whole.decode() == "".join(e.token for e in entries if "\ufffd" not in e.token)


def test_streamed_logprobs_are_the_same(client):
    options = {"temperature": 1, "seed": 3}
    whole = complete(client, logprobs=0, **options).choices[0].logprobs
    chunks = [c.choices[0].logprobs for c in complete(client, logprobs=0, stream=True, **options)]
    found = [chunk for chunk in chunks if chunk is not None]
    assert sum((c.token_logprobs for c in found), []) == pytest.approx(whole.token_logprobs)
    assert sum((c.tokens for c in found), []) == whole.tokens
    assert sum((c.text_offset for c in found), []) == whole.text_offset
    chat = converse(client, logprobs=True, **options).choices[0].logprobs.content
    streamed = converse(client, logprobs=True, stream=True, **options)
    found = [e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.token for e in found] == [e.token for e in chat]
    assert [e.logprob for e in found] == pytest.approx([e.logprob for e in chat])


@pytest.mark.parametrize("options", [{"temperature": 0}, DRAWN | {"top_p": 0.5}])
def test_the_likeliest_tokens_are_those_of_a_teacher_forced_forward(
    client, byte_tokenizer, forced, options
):
    def check(prompt, ids, tops):
        """tops: of each place (text, log-prob), the likeliest first."""
        logits = forced(prompt, ids, options["temperature"] or 1.0)
        scale = scale_of(logits)
        for values, top in zip(logits.log_softmax(-1), tops, strict=True):
            found = torch.tensor([logprob for _, logprob in top])
            assert_close(found, values.topk(5).values, scale)
            for text, logprob in top:  # of tokens that are nearly as likely either may be first
                near = ((values - logprob).abs() < ROUNDING * scale).nonzero().flatten().tolist()
                assert text in [byte_tokenizer.decode([i], keep_special=True) for i in near]

    answer = converse(client, logprobs=True, top_logprobs=5, **options)
    (choice,) = answer.choices
    entries = choice.logprobs.content
    tops = [[(top.token, top.logprob) for top in entry.top_logprobs] for entry in entries]
    check(answer.prompt_token_ids, choice.token_ids, tops)
    if options["temperature"] == 0:  # the drawn token is the likeliest, with the same number
        assert [top[0] for top in tops] == [(e.token, e.logprob) for e in entries]

    seeded = options | {"seed": 5}
    (choice,) = complete(client, logprobs=5, **seeded).choices
    named = choice.logprobs.top_logprobs
    drawn = zip(choice.token_ids, choice.logprobs.token_logprobs, named, strict=True)
    for place, (token, logprob, top) in enumerate(drawn):
        prompt = [*choice.prompt_token_ids, *choice.token_ids[:place]]
        logits = forced(prompt, [token], options["temperature"] or 1.0)
        [wanted] = logits.log_softmax(-1)
        ids = {*wanted.topk(5).indices.tolist(), token}
        assert len(top) == len(ids) and logprob in top.values()
        likely = wanted[[*ids]].sort().values
        assert_close(torch.tensor(sorted(top.values())), likely, scale_of(logits))
    chunks = [c.choices[0].logprobs for c in complete(client, logprobs=5, stream=True, **seeded)]
    streamed = [top for chunk in chunks if chunk is not None for top in chunk.top_logprobs]
    for one, other in zip(streamed, named, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_requests_with_and_without_alternatives_share_a_batch(client):
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(complete, client, logprobs=k, n=2, seed=k) for k in (0, 1, 7, 20)]
        for k, answer in zip((0, 1, 7, 20), asked, strict=True):
            for choice in answer.result().choices:
                tops = choice.logprobs.top_logprobs
                assert tops is None if k == 0 else {len(top) for top in tops} == {k}


def test_a_seed_gives_the_same_choices_which_differ(client):
    first = [c.text for c in complete(client, temperature=1, n=4, seed=11).choices]
    assert [c.text for c in complete(client, temperature=1, n=4, seed=11).choices] == first
    assert len(set(first)) == 4
    assert [c.text for c in complete(client, temperature=1, n=4, seed=12).choices] != first
    unseeded = {complete(client, temperature=1).choices[0].text for _ in range(3)}
    assert len(unseeded) == 3
    streamed = [""] * 4
    for chunk in complete(client, temperature=1, n=4, seed=11, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == first


def ascii_run(text, size):
    """A stretch of the text that is not found before it."""
    for start in range(2, len(text) - size):
        run = text[start : start + size]
        if "\ufffd" not in run and text.find(run) == start:
            return start, run
    raise AssertionError(f"no run of {size} in {text!r}")


def test_stop_strings_end_the_text_before_them(client, byte_tokenizer):
    text = complete(client, max_tokens=60).choices[0].text
    start, stop = ascii_run(text, 3)
    (choice,) = complete(client, max_tokens=60, stop=[stop, "never there"]).choices
    assert (choice.text, choice.finish_reason) == (text[:start], "stop")
    assert byte_tokenizer.decode(choice.token_ids).endswith(stop)  # what was drawn is told
    streamed = list(complete(client, max_tokens=60, stop=stop, stream=True))
    assert "".join(c.choices[0].text for c in streamed) == text[:start]
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_stop_ids_end_the_text_before_them(client):
    ids = complete(client, max_tokens=60).choices[0].token_ids
    stop = next(i for place, i in enumerate(ids) if place > 3 and i not in ids[:place])
    (choice,) = complete(client, max_tokens=60, extra={"stop_token_ids": [stop]}).choices
    assert choice.token_ids == ids[: ids.index(stop) + 1]
    assert choice.finish_reason == "stop"
    whole = complete(client, max_tokens=ids.index(stop)).choices[0].text
    assert choice.text == whole


def test_requests_at_once_get_what_each_gets_alone(client):
    prompts = [f"prompt {i} " * (1 + i % 5) for i in range(16)]
    alone = [complete(client, prompt).choices[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda p: complete(client, p).choices[0].token_ids, prompts))
    assert together == alone


def test_errors_are_those_of_the_package(client):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "x" * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert "prompt of 5000 tokens and 24 new ones: do not fit the context of 4096" in str(
        caught.value
    )
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="x")
