"""Preferences as rows: every form that datasets have them in, and what is wrong with others."""

import json

import numpy as np
import pytest

from pentad.core.errors import UserError
from pentad.data.preferences import LabelDataset, PairDataset, open_preferences
from pentad.data.render import DataSource
from pentad.data.section import DatasetConfig
from pentad.data.tokenizer import load_tokenizer
from pentad.data.toy import write_byte_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_byte_model(folder)
    return load_tokenizer(folder)


@pytest.fixture
def opened(tmp_path, tokenizer):
    def open_rows(*rows, paired=True, **keys):
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DatasetConfig(path=str(path), shuffle=False, **keys)
        kind = PairDataset if paired else LabelDataset
        return open_preferences(DataSource(data=data, room=200), tokenizer, kind)

    return open_rows


def parts(row, tokenizer):
    """The text that is given, and the text that is trained."""
    mask = row.columns["weights"].bool()
    texts = (tokenizer.decode(row.ids[m].tolist(), keep_special=True) for m in (~mask, mask))
    return tuple(texts)


USER = {"role": "user", "content": "2+2?"}
GIVEN = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


def said(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "row, keys",
    [
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5"}, {"chat_template": True}),
        ({"prompt": [USER], "chosen": [said("4")], "rejected": [said("5")]}, {}),
        ({"chosen": [USER, said("4")], "rejected": [USER, said("5")]}, {}),
        ({"m": [USER], "chosen": "4", "rejected": "5"}, {"messages_key": "m"}),
        (
            {"q": "2+2?", "good": "4", "bad": "5"},
            {"prompt_key": "q", "chosen_key": "good", "rejected_key": "bad", "chat_template": True},
        ),
    ],
)
def test_pairs_in_every_form_are_the_same_rows(opened, tokenizer, row, keys):
    data = opened(row, **keys)
    found = [parts(one, tokenizer) for one in data.example(0)]
    assert found == [(GIVEN, "4<|im_end|>"), (GIVEN, "5<|im_end|>")]
    assert data.summary().endswith("4 of 50 tokens trained")


def test_plain_pairs_are_texts_and_an_end(opened, tokenizer):
    data = opened({"prompt": "2+2=", "chosen": "4", "rejected": "5"})
    found = [parts(one, tokenizer) for one in data.example(0)]
    assert found == [("2+2=", "4<|im_end|>"), ("2+2=", "5<|im_end|>")]


def test_answers_of_the_prompt_are_not_trained(opened, tokenizer):
    prompt = [USER, said("3"), {"role": "user", "content": "Sure?"}]
    data = opened({"prompt": prompt, "chosen": [said("4")], "rejected": [said("5")]})
    given, trained = parts(data.example(0)[0], tokenizer)
    assert trained == "4<|im_end|>" and "3<|im_end|>" in given


def test_labelled_answers(opened, tokenizer):
    rows = [{"prompt": "a", "response": text, "label": text == "b"} for text in "bcb"]
    data = opened(*rows, paired=False)
    assert data.is_desired.tolist() == [True, False, True]
    assert [parts(data.example(i)[0], tokenizer)[1] for i in range(3)] == [
        f"{text}<|im_end|>" for text in "bcb"
    ]
    assert data.summary().endswith("2 good and 1 bad answers")


def test_labels_stay_with_their_answers_where_rows_are_dropped(opened):
    rows = [{"prompt": "a", "response": "b" * n, "label": n > 300} for n in (1, 400, 2)]
    data = opened(*rows, paired=False)
    assert len(data) == 2 and not np.any(data.is_desired)


@pytest.mark.parametrize(
    "row, paired, sentence",
    [
        ({"prompt": "a", "chosen": "b"}, True, 'there is no "rejected"'),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, True, "are the same answer"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, True, "the response is empty"),
        ({"prompt": "a", "response": "b", "label": 1}, False, '"label" holds 1'),
        ({"prompt": "a", "response": "b"}, False, 'there is no "label"'),
        ({"chosen": [said("4")], "rejected": [said("5")]}, True, "no first message in common"),
    ],
)
def test_what_is_no_preference_is_named(opened, row, paired, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        opened(row, paired=paired)
    assert "data.jsonl:1" in str(caught.value)
