"""The prompt stream: every gid has one prompt for ever, and bad rows get a sentence."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sections import data_source

from pentad.core.errors import UserError
from pentad.core.seeds import derive_seed
from pentad.data.examples import epoch_order
from pentad.data.prompts import RejectedPrompt, open_prompts

ROWS = [{"prompt": "x" * (i + 1), "answer": str(i)} for i in range(20)]


@pytest.fixture
def open_stream(plain, write_jsonl):
    def make(rows=ROWS, tokenizer=plain, columns=None, **settings):
        given = settings | (columns or {})
        return open_prompts(data_source(path=write_jsonl(rows), **given), tokenizer)

    return make


def answers(stream, gids):
    return [stream.prompt(gid).fields["answer"] for gid in gids]


def test_an_epoch_draws_every_prompt_once_in_an_order_of_its_own(open_stream):
    stream = open_stream(seed=3)
    first, second = answers(stream, range(20)), answers(stream, range(20, 40))
    assert sorted(first, key=int) == sorted(second, key=int) == [str(i) for i in range(20)]
    assert first != second and first != [str(i) for i in range(20)]
    assert [stream.prompt(gid).epoch for gid in (0, 19, 20, 45)] == [0, 0, 1, 2]


def test_a_column_that_no_row_has_is_one_line(open_stream):
    with pytest.raises(UserError) as caught:
        open_stream(columns={"prompt_key": "question"})
    (problem,) = caught.value.problems
    assert "question" in problem.rule and "(and 19 more rows alike)" in problem.rule


def test_a_prompt_depends_on_seed_and_gid_alone(open_stream):
    whole = [open_stream(seed=5).prompt(gid) for gid in range(60)]
    resumed = open_stream(seed=5)
    assert [resumed.prompt(gid) for gid in reversed(range(60))] == whole[::-1]
    assert open_stream(seed=5, streaming=True).prompt(33) == whole[33]
    assert answers(open_stream(seed=6), range(20)) != answers(open_stream(seed=5), range(20))


def test_without_shuffling_rows_come_as_in_the_file(open_stream):
    stream = open_stream(shuffle=False)
    assert answers(stream, range(22)) == [str(i % 20) for i in range(22)]
    prompt = stream.prompt(2)
    assert (prompt.gid, prompt.text, prompt.fields) == (2, "xxx", {"prompt": "xxx", "answer": "2"})
    assert list(prompt.ids) == stream.tokenizer.encode("xxx")


def test_a_reward_that_writes_into_a_row_does_not_change_the_data(open_stream):
    stream = open_stream(shuffle=False)
    stream.prompt(0).fields["answer"] = "spoilt"
    assert stream.prompt(0).fields["answer"] == "0"


def test_long_prompts_are_left_out_and_counted(open_stream):
    stream = open_stream(max_length=8)
    assert len(stream) == 8 and stream.dropped == {"too_long": 12}
    assert max(len(stream.prompt(gid).ids) for gid in range(8)) == 8
    assert stream.summary().endswith(
        "20 rows, 8 prompts of 1 to 8 tokens (mean 4), 12 left out: too_long"
    )


def test_streaming_rejects_long_prompts_when_they_come_up(open_stream):
    stream = open_stream(max_length=8, streaming=True, shuffle=False)
    assert len(stream) == 20 and len(stream.prompt(7).ids) == 8
    with pytest.raises(
        RejectedPrompt, match=r"train.jsonl:9: the prompt has 9 tokens, more than 8"
    ) as caught:
        stream.prompt(8)
    assert (caught.value.reason, caught.value.gid) == ("too_long", 8)


def test_streaming_rejects_broken_rows_with_their_line(open_stream, tmp_path):
    stream = open_stream([{"prompt": "a"}, {"question": "b"}], streaming=True, shuffle=False)
    with pytest.raises(RejectedPrompt, match=r'train.jsonl:2: there is no "prompt"') as caught:
        stream.prompt(1)
    assert caught.value.reason == "bad_row"
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n{oops\n')
    settings = data_source(path=str(tmp_path / "b.jsonl"), streaming=True, shuffle=False)
    with pytest.raises(RejectedPrompt, match=r"b.jsonl:2: not JSON"):
        open_prompts(settings, stream.tokenizer).prompt(1)


def test_all_prompts_too_long_is_refused(open_stream):
    with pytest.raises(UserError, match="all 20 prompts are longer than 0 tokens"):
        open_stream(room=0)


def test_the_limit_reads_the_first_rows_only(open_stream):
    stream = open_stream(limit=5)
    assert sorted(answers(stream, range(5))) == ["0", "1", "2", "3", "4"]
    assert len(stream) == 5


@pytest.mark.parametrize(("batch", "steps"), [(1, 20), (6, 4), (20, 1), (64, 1)])
def test_steps_per_epoch_draw_every_prompt(open_stream, batch, steps):
    assert open_stream().steps_per_epoch(batch) == steps == math.ceil(20 / batch)


def test_all_bad_rows_are_reported_together(open_stream):
    rows = [
        {"prompt": "fine"},
        {"question": "a", "answer": "b"},
        {"prompt": 17},
        {"prompt": ""},
        {"prompt": [{"role": "user", "content": "hi"}]},
        {"prompt": None},
    ]
    with pytest.raises(UserError) as caught:
        open_stream(rows)
    sentences = [str(problem).split("train.jsonl:")[1] for problem in caught.value.problems]
    assert sentences == [
        '2: there is no "prompt"; the row has answer, question; set '
        "train_dataset.prompt_key to a column it has.",
        '3: "prompt" holds a int, not text.',
        "4: the prompt is empty.",
        '5: "prompt" holds a list, not text; set train_dataset.messages_key: prompt.',
        '6: "prompt" holds a NoneType, not text.',
    ]


def test_messages_go_through_the_template_once(open_stream, chat):
    rows = [{"chat": [{"role": "system", "content": "be brief", "name": None}]}]
    rows[0]["chat"].append({"role": "user", "content": "hi"})
    stream = open_stream(rows, chat, {"messages_key": "chat"})
    prompt = stream.prompt(0)
    assert prompt.text == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert chat.decode(prompt.ids, keep_special=True) == prompt.text
    assert prompt.ids.count(2) == 3, "the template's special ids are ids, not letters"


def test_a_text_prompt_is_plain_unless_the_template_is_asked_for(open_stream, chat):
    rows = [{"prompt": "hi"}]
    assert open_stream(rows, chat).prompt(0).text == "hi"
    templated = open_stream(rows, chat, {"chat_template": True}).prompt(0)
    assert templated.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("columns", "is_said"),
    [
        ({}, True),
        ({"key": "valid_dataset", "prompt_key": "prompt"}, True),
        ({"chat_template": True}, False),
        ({"chat_template": False}, False),
    ],
)
def test_a_chat_model_that_gets_plain_text_is_noted(open_stream, chat, plain, columns, is_said):
    stream = open_stream([{"prompt": "hi"}], chat, columns)
    key = columns.get("key", "train_dataset")
    said = (
        f"{key}.chat_template = auto: texts of prompt are used as they are, without the "
        f"tokenizer's chat template; {key}.chat_template=true applies it"
    )
    assert stream.notes == ([said] if is_said else [])
    assert open_stream([{"prompt": "hi"}], plain, {}).notes == [], "there is none to apply"


def test_plain_prompts_get_the_begin_id_and_templates_do_not(
    open_stream, tokenizer_folder, tmp_path
):
    from pentad.data.tokenizer import load_tokenizer

    folder = tokenizer_folder(tmp_path / "m", bos=True, template="{{ messages[0]['content'] }}")
    tokenizer = load_tokenizer(folder)
    rows = [{"prompt": "hi"}]
    assert open_stream(rows, tokenizer).prompt(0).ids == (4, *tokenizer.encode("hi"))
    templated = open_stream(rows, tokenizer, {"chat_template": True})
    assert templated.prompt(0).ids == tuple(tokenizer.encode("hi"))


def test_a_template_that_is_missing_or_unwanted_is_refused(open_stream, plain, chat):
    rows = [{"prompt": "hi", "chat": [{"role": "user", "content": "hi"}]}]
    with pytest.raises(UserError, match="chat_template = true: the tokenizer in .* has no chat"):
        open_stream(rows, plain, {"chat_template": True})
    with pytest.raises(UserError, match="chat_template = auto: the tokenizer in .* has no chat"):
        open_stream(rows, plain, {"messages_key": "chat"})
    with pytest.raises(UserError, match="chat_template = false: messages .* need a template"):
        open_stream(rows, chat, {"messages_key": "chat", "chat_template": False})


@pytest.mark.parametrize(
    ("messages", "rule"),
    [
        ("hi", '"chat" is not a list of messages'),
        ([], '"chat" is not a list of messages'),
        ([{"content": "hi"}], 'message 1 of "chat" is not an object with "role"'),
        ([{"role": "user"}], 'message 1 of "chat" has no "content"'),
        (
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],
            "the last message is the assistant's",
        ),
    ],
)
def test_bad_messages_are_named(open_stream, chat, messages, rule):
    with pytest.raises(UserError, match=r"train.jsonl:1: ") as caught:
        open_stream([{"chat": messages}], chat, {"messages_key": "chat"})
    assert rule in str(caught.value)


def test_a_template_that_refuses_a_row_is_quoted(open_stream, tokenizer_folder, tmp_path):
    from pentad.data.tokenizer import load_tokenizer

    template = "{{ raise_exception('no system role') }}"
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path / "m", template=template))
    rows = [{"chat": [{"role": "user", "content": "hi"}]}]
    with pytest.raises(UserError, match="the chat template rejects it: no system role"):
        open_stream(rows, tokenizer, {"messages_key": "chat"})


FAILING = {
    "counts too far": "{% for i in range(10**9) %}{% endfor %}",
    "divides by zero": "{{ 1 / (messages | length - 1) }}",
    "recurses": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "calls what is none": "{{ messages[0]() }}",
    "has no such attribute": "{{ nothing.at.all }}",
}


@pytest.mark.parametrize("template", FAILING.values(), ids=FAILING)
def test_a_template_that_fails_in_any_way_is_a_sentence(
    open_stream, tokenizer_folder, tmp_path, template
):
    from pentad.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder(tmp_path / "m", template=template))
    rows = [{"chat": [{"role": "user", "content": "hi"}]}]
    with pytest.raises(UserError, match="train.jsonl:1: the chat template rejects it: "):
        open_stream(rows, tokenizer, {"messages_key": "chat"})


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ messages | nosuch }}"])
def test_a_broken_template_is_no_fault_of_a_row(open_stream, tokenizer_folder, tmp_path, template):
    from pentad.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder(tmp_path / "m", template=template))
    rows = [{"chat": [{"role": "user", "content": "hi"}]}]
    with pytest.raises(UserError, match="its chat template does not compile: ") as caught:
        open_stream(rows, tokenizer, {"messages_key": "chat"})
    assert "train.jsonl" not in str(caught.value) and str(tmp_path / "m") in str(caught.value)
    assert open_stream([{"prompt": "hi"}], tokenizer, {}) is not None, "it is not read"


@given(size=st.integers(1, 500), seed=st.integers(0, 2**63), epoch=st.integers(0, 9))
def test_an_epoch_order_is_a_permutation(size, seed, epoch):
    assert sorted(epoch_order(size, seed, epoch)) == list(range(size))


def reference_order(size, seed, epoch):
    """splitmix64 as its author writes it, in whole numbers."""
    values, state = [], derive_seed(seed, "epoch", epoch)
    for _ in range(size):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        values.append(z ^ (z >> 31))
    return sorted(range(size), key=values.__getitem__)


def test_epoch_orders_are_uniform_and_never_change_between_releases():
    assert epoch_order(8, 1, 0).tolist() == [2, 1, 5, 6, 7, 4, 0, 3] == reference_order(8, 1, 0)
    counts = np.zeros((5, 5))
    for seed in range(4000):
        counts[np.arange(5), epoch_order(5, seed, 0)] += 1
    # 25 cells of 800 expected, standard deviation about 25: six of them is a sure bound.
    assert np.abs(counts - 800).max() < 150


def test_half_a_surrogate_pair_is_a_bad_row(open_stream):
    with pytest.raises(UserError, match=r"train.jsonl:2: character 2 is half of a surrogate pair"):
        open_stream([{"prompt": "fine"}, {"prompt": "a\ud800b"}])


def test_the_first_prompts_pass_over_rejected_rows(open_stream):
    rows = [{"oops": 1}, {"prompt": "a"}, {"prompt": 5}, {"prompt": "b"}]
    stream = open_stream(rows, streaming=True, shuffle=False)
    assert [prompt.text for prompt in stream.first(3)] == ["a", "b"]
    assert [prompt.text for prompt in stream.first(1)] == ["a"]
    with pytest.raises(UserError, match=r"no row of it can be a prompt: .*train.jsonl:1"):
        open_stream([{"oops": 1}], streaming=True).first(3)


def test_a_resumed_run_sees_that_its_data_changed(open_stream, chat):
    state = json.loads(json.dumps(open_stream(seed=1).state()))
    open_stream(seed=1).check_state(state)
    with pytest.raises(UserError, match="not the data that the run began with: seed was 1, is 2"):
        open_stream(seed=2).check_state(state)
    with pytest.raises(UserError, match="digest was .* is .*start over with --fresh"):
        open_stream([*ROWS[:-1], {"prompt": "x" * 20, "answer": "20"}], seed=1).check_state(state)
    with pytest.raises(UserError, match="prompts was 20, is 5; tokens was .* is "):
        open_stream(seed=1, max_length=5).check_state(state)
