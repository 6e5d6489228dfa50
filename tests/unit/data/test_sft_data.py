"""Examples to imitate: exactly the model's own tokens carry weight."""

import json

import pytest
import torch
from sections import data_source

from pentad.core.errors import UserError
from pentad.data.sft import open_sft
from pentad.data.tokenizer import load_tokenizer

CHAT = {"messages_key": "messages"}
TALK = [
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture
def open_data(plain, write_jsonl):
    def make(rows, tokenizer=plain, **settings):
        settings = {"shuffle": False, **settings}
        return open_sft(data_source(path=write_jsonl(rows), **settings), tokenizer)

    return make


def pieces(row, tokenizer):
    """(text trained, text not trained) as people read them."""
    weights = row.columns["weights"]
    assert row.ids.dtype == torch.int64 and weights.dtype == torch.float32
    assert set(weights.tolist()) <= {0.0, 1.0} and weights[0] == 0
    assert row.count == weights.sum().item()
    trained, context = row.ids[weights == 1].tolist(), row.ids[weights == 0].tolist()
    decode = tokenizer.decode
    return decode(trained, keep_special=True), decode(context, keep_special=True)


def test_a_response_is_trained_with_its_end_and_the_prompt_is_not(open_data, plain):
    row = open_data([{"prompt": "52341>", "response": "12345"}]).batch(0, 1)[0]
    assert pieces(row, plain) == ("12345<|im_end|>", "52341>")
    assert row.ids.tolist() == [*plain.encode("52341>12345"), plain.eos_id]


def test_a_begin_id_is_context(open_data, tokenizer_folder, tmp_path):
    from pentad.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder(tmp_path / "m", bos=True))
    row = open_data([{"prompt": "", "response": "a"}], tokenizer).batch(0, 1)[0]
    assert pieces(row, tokenizer) == ("a<|im_end|>", "<bos>")


def test_every_assistant_turn_is_trained_up_to_its_end(open_data, chat):
    row = open_data([{"messages": TALK}], chat, **CHAT).batch(0, 1)[0]
    assert pieces(row, chat)[0] == "2<|im_end|>4<|im_end|>"
    assert chat.decode(row.ids.tolist(), keep_special=True) == (
        "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    )


GLM = (
    "[gMASK]<sop>{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>{% else %}<|{{ m.role }}|>{% endif %}"
    "{{ '\\n' + m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""GLM-4's: a turn is ended by the token of the next role, which generation stops at."""
GLM_TOKENS = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>")
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA3_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@pytest.fixture
def made(tokenizer_folder, tmp_path):
    """A tokenizer of this template, with these tokens to stop at besides its own end."""

    def make(template, special, stops, **settings):
        folder = tokenizer_folder(tmp_path / "m", template=template, special=special, **settings)
        vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
        config = {"eos_token_id": [vocab[stop] for stop in stops]}
        (folder / "generation_config.json").write_text(json.dumps(config))
        return load_tokenizer(folder)

    return make


def test_where_the_next_role_ends_a_turn_every_turn_is_trained_with_it(open_data, made):
    """What GLM samples at the end of an answer is the role that comes next: a user's, or a tool's
    after a call; after the last answer, too, it is the user's and not the end of a text."""
    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")
    tokenizer = made(GLM, GLM_TOKENS, stops, eos="<|endoftext|>")
    row = open_data([{"messages": TALK}], tokenizer, **CHAT).batch(0, 1)[0]
    trained, _ = pieces(row, tokenizer)
    assert trained == "\n2<|user|>\n4<|user|>"
    assert tokenizer.decode(row.ids.tolist(), keep_special=True) == (
        "[gMASK]<sop><|user|>\n1+1<|assistant|>\n2<|user|>\n2+2<|assistant|>\n4<|user|>"
    )
    called = [*TALK[:2], {"role": "tool", "content": "3"}, *TALK[1:2]]
    row = open_data([{"messages": called}], tokenizer, **CHAT).batch(0, 1)[0]
    assert pieces(row, tokenizer)[0] == "\n2<|observation|>\n2<|user|>"


def test_llama_turns_end_with_their_own_id(open_data, made):
    tokenizer = made(LLAMA3, LLAMA3_TOKENS, ["<|endoftext|>", "<|eot_id|>"], eos="<|eot_id|>")
    row = open_data([{"messages": TALK}], tokenizer, **CHAT).batch(0, 1)[0]
    assert pieces(row, tokenizer)[0] == "2<|eot_id|>4<|eot_id|>"


def test_turns_that_nothing_ends_are_counted(open_data, made):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    data = open_data([{"messages": TALK}], made(template, (), ()), **CHAT)
    assert pieces(data.batch(0, 1)[0], data.texts.tokenizer)[0] == "24<|im_end|>"
    assert "1 turns without a stop id" in data.summary()


def test_a_text_that_brings_its_begin_id_gets_no_second_one(open_data, made, write_jsonl):
    """Rendered Llama-3 text given as a plain prompt."""
    from pentad.data.prompts import open_prompts

    tokenizer = made(LLAMA3, LLAMA3_TOKENS, ["<|eot_id|>"], eos="<|eot_id|>", bos=True)
    [bos] = tokenizer.prefix_ids
    texts = ["<bos><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>", "<bos>ho", "plain"]
    data = open_data([{"prompt": text, "response": "yo"} for text in texts], tokenizer)
    path = write_jsonl([{"prompt": text} for text in texts], "prompts.jsonl")
    stream = open_prompts(data_source(path=path, shuffle=False), tokenizer)
    for i in range(3):
        for ids in (data.batch(i, 1)[0].ids.tolist(), list(stream.prompt(i).ids)):
            assert ids[0] == bos and ids.count(bos) == 1
    said = "train_dataset.prompt: texts begin with <bos>, which the tokenizer adds; it is not added"
    for warnings in (data.warnings, stream.warnings):
        [warning] = warnings
        assert warning.startswith(said)


def test_prompt_and_response_through_the_template(open_data, chat):
    row = open_data([{"prompt": "hi", "response": "yo"}], chat, chat_template=True).batch(0, 1)[0]
    assert pieces(row, chat) == (
        "yo<|im_end|>",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    )


def test_the_context_is_what_sampling_would_see(open_data, chat, write_jsonl):
    """The ids before the answer are those the prompt stream gives for the same conversation."""
    from pentad.data.prompts import open_prompts

    row = open_data([{"messages": TALK[:2]}], chat, **CHAT).batch(0, 1)[0]
    path = write_jsonl([{"messages": TALK[:1]}], "prompts.jsonl")
    prompt = open_prompts(data_source(path=path, **CHAT), chat).prompt(0)
    assert tuple(row.ids[: len(prompt.ids)].tolist()) == prompt.ids
    assert row.columns["weights"][len(prompt.ids) :].all()


def test_a_template_without_an_end_gets_one(open_data, tokenizer_folder, tmp_path):
    from pentad.data.tokenizer import load_tokenizer

    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path / "m", template=template))
    row = open_data([{"messages": TALK[:2]}], tokenizer, **CHAT).batch(0, 1)[0]
    assert pieces(row, tokenizer) == ("2<|im_end|>", "[user]1+1[assistant]")


THINKING = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['role'] == 'assistant' and not loop.last "
    "and messages[loop.index0 + 1].role == 'user' %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
"""Leaves the thinking of answers before a user's turn out, as Qwen3 does."""
THOUGHT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "<think>x</think>b"},
    {"role": "tool", "content": "c"},
    {"role": "assistant", "content": "<think>y</think>d"},
    {"role": "user", "content": "e"},
    {"role": "assistant", "content": "<think></think>f"},
]


@pytest.fixture
def thinking(tokenizer_folder, tmp_path):
    return tokenizer_folder(tmp_path / "thinking", template=THINKING)


def test_a_template_that_rewrites_history_gives_sequences_as_sampling_sees_them(
    open_data, thinking
):
    tokenizer = load_tokenizer(thinking)
    data = open_data([{"messages": THOUGHT}], tokenizer, **CHAT)
    first, second = data.batch(0, 1)
    assert pieces(first, tokenizer) == (
        "<think>x</think>b<|im_end|><think>y</think>d<|im_end|>",
        "[user]a<|im_end|>[assistant][tool]c<|im_end|>[assistant]",
    )
    assert pieces(second, tokenizer)[0] == "<think></think>f<|im_end|>"
    seen = tokenizer.render(THOUGHT[:-1], for_answer=True)
    said = int(second.columns["weights"].argmax())
    assert second.ids[:said].tolist() == tokenizer.encode(seen) and "y" not in seen
    assert "1 examples of" in data.summary() and "in 2 sequences, since" in data.summary()


def test_template_args_reach_what_is_learned(open_data, thinking):
    tokenizer = load_tokenizer(thinking, template_args={"enable_thinking": False})
    row = open_data([{"messages": THOUGHT[-2:]}], tokenizer, **CHAT).batch(0, 1)[0]
    assert pieces(row, tokenizer) == ("f<|im_end|>", "[user]e<|im_end|>[assistant]<think></think>")
    with pytest.raises(UserError, match="opens the assistant's turn differently than it writes it"):
        open_data([{"messages": THOUGHT[:2]}], tokenizer, **CHAT)


def test_template_args_that_would_change_nothing_are_refused(thinking):
    with pytest.raises(UserError) as error:
        load_tokenizer(thinking, template_args={"thinking": False, "tools": "x"})
    assert [str(problem).partition(" in ")[0] for problem in error.value.problems] == [
        "template_args.thinking = false: the chat template",
        "template_args.tools = x: is given to the template by the run itself.",
    ]


def test_long_examples_are_dropped_and_counted(open_data):
    rows = [{"prompt": "ab", "response": "c" * n} for n in (1, 5, 9)]
    dropped = open_data(rows, max_length=8)
    assert (len(dropped), dropped.counts) == (2, {"dropped too_long": 1})
    assert dropped.summary().endswith(
        "2 examples of 4 to 8 tokens, 8 of 12 tokens trained, 1 dropped too_long"
    )


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "a"}, 'there is no "response"; the row has prompt'),
        ({"prompt": "a", "response": ""}, "the response is empty"),
        ({"prompt": "", "response": "b"}, "the prompt is empty"),
        ({"prompt": "a", "response": 3}, '"response" holds a int, not text'),
        (
            {"prompt": "a", "response": "b<|im_end|>c"},
            r"the response continues after <\|im_end\|>, which ends it",
        ),
    ],
)
def test_bad_examples_are_named_with_their_line(open_data, row, rule):
    with pytest.raises(UserError, match=rf"train.jsonl:2: {rule}"):
        open_data([{"prompt": "a", "response": "b"}, row])


def test_a_conversation_without_answer_is_refused(open_data, chat):
    with pytest.raises(UserError, match="train.jsonl:1: the conversation has no assistant turn"):
        open_data([{"messages": TALK[:1]}], chat, **CHAT)


def test_batches_cover_an_epoch_and_any_step_can_be_found_again(open_data, plain):
    rows = [{"prompt": "a", "response": "b" * (i + 1)} for i in range(10)]
    data = open_data(rows, shuffle=True, seed=4)
    assert data.steps_per_epoch(4) == 3
    drawn = [row.count for step in range(5) for row in data.batch(step, 4)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == [float(i + 2) for i in range(10)]
    again = [row.count for row in open_data(rows, shuffle=True, seed=4).batch(3, 4)]
    assert again == drawn[12:16]


def test_a_resumed_run_sees_that_its_examples_changed(open_data):
    rows = [{"prompt": "1>", "response": str(i)} for i in range(4)]
    state = json.loads(json.dumps(open_data(rows).state()))
    open_data(rows).check_state(state)
    with pytest.raises(UserError, match=r"train_dataset\.path = .*tokens was .* is .*--fresh"):
        open_data([*rows[:3], {"prompt": "1>", "response": "5"}]).check_state(state)
