"""Examples to imitate: exactly the model's own tokens carry weight."""

import pytest
import torch

from pentad.core.errors import UserError
from pentad.data.render import Columns, DataSettings
from pentad.data.sft import open_sft

CHAT = Columns(messages_key="messages")
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
        return open_sft(DataSettings(path=write_jsonl(rows), **settings), tokenizer)

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
    row = open_data([{"prompt": "52341>", "response": "12345"}]).row(0)
    assert pieces(row, plain) == ("12345<|im_end|>", "52341>")
    assert row.ids.tolist() == [*plain.encode("52341>12345"), plain.eos_id]


def test_a_begin_id_is_context(open_data, tokenizer_folder, tmp_path):
    from pentad.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder(tmp_path / "m", bos=True))
    row = open_data([{"prompt": "", "response": "a"}], tokenizer).row(0)
    assert pieces(row, tokenizer) == ("a<|im_end|>", "<bos>")


def test_every_assistant_turn_is_trained_up_to_its_end(open_data, chat):
    row = open_data([{"messages": TALK}], chat, columns=CHAT).row(0)
    assert pieces(row, chat)[0] == "2<|im_end|>4<|im_end|>"
    assert chat.decode(row.ids.tolist(), keep_special=True) == (
        "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    )


def test_prompt_and_response_through_the_template(open_data, chat):
    columns = Columns(chat_template=True)
    row = open_data([{"prompt": "hi", "response": "yo"}], chat, columns=columns).row(0)
    assert pieces(row, chat) == (
        "yo<|im_end|>",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    )


def test_the_context_is_what_sampling_would_see(open_data, chat, write_jsonl):
    """The ids before the answer are those the prompt stream gives for the same conversation."""
    from pentad.data.prompts import open_prompts

    row = open_data([{"messages": TALK[:2]}], chat, columns=CHAT).row(0)
    path = write_jsonl([{"messages": TALK[:1]}], "prompts.jsonl")
    prompt = open_prompts(DataSettings(path=path, columns=CHAT), chat).prompt(0)
    assert tuple(row.ids[: len(prompt.ids)].tolist()) == prompt.ids
    assert row.columns["weights"][len(prompt.ids) :].all()


def test_a_template_without_an_end_gets_one(open_data, tokenizer_folder, tmp_path):
    from pentad.data.tokenizer import load_tokenizer

    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path / "m", template=template))
    row = open_data([{"messages": TALK[:2]}], tokenizer, columns=CHAT).row(0)
    assert pieces(row, tokenizer) == ("2<|im_end|>", "[user]1+1[assistant]")


def test_a_template_that_rewrites_history_is_refused_for_all_turns(
    open_data, tokenizer_folder, tmp_path
):
    from pentad.data.tokenizer import load_tokenizer

    template = (
        "{% for m in messages %}[{{ m['role'] }}]{% if loop.last and m['role'] == 'assistant' %}"
        "<think></think>{% endif %}{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = load_tokenizer(tokenizer_folder(tmp_path / "m", template=template))
    with pytest.raises(
        UserError, match="writes earlier turns differently.*one assistant turn each"
    ):
        open_data([{"messages": TALK}], tokenizer, columns=CHAT)
    row = open_data([{"messages": TALK[:2]}], tokenizer, columns=CHAT).row(0)
    assert pieces(row, tokenizer)[0] == "<think></think>2<|im_end|>"


def test_long_examples_are_dropped_and_counted(open_data):
    rows = [{"prompt": "ab", "response": "c" * n} for n in (1, 5, 9)]
    dropped = open_data(rows, max_tokens=8)
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
            r"the response goes on after <\|im_end\|>, which ends it",
        ),
    ],
)
def test_bad_examples_are_named_with_their_line(open_data, row, rule):
    with pytest.raises(UserError, match=rf"train.jsonl:2: {rule}"):
        open_data([{"prompt": "a", "response": "b"}, row])


def test_a_conversation_without_answer_is_refused(open_data, chat):
    with pytest.raises(UserError, match="train.jsonl:1: the conversation has no assistant turn"):
        open_data([{"messages": TALK[:1]}], chat, columns=CHAT)


def test_batches_cover_an_epoch_and_any_step_can_be_found_again(open_data, plain):
    rows = [{"prompt": "a", "response": "b" * (i + 1)} for i in range(10)]
    data = open_data(rows, shuffle=True, seed=4)
    assert data.steps_per_epoch(4) == 3
    drawn = [row.count for step in range(5) for row in data.batch(step, 4)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == [float(i + 2) for i in range(10)]
    again = [row.count for row in open_data(rows, shuffle=True, seed=4).batch(3, 4)]
    assert again == drawn[12:16]
