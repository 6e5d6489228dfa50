"""The tiny model for any text: its tokens are bytes, its template is ChatML, it can be trained."""

import pytest

from pentad.data.tokenizer import load_tokenizer
from pentad.data.toy import BYTE_MODEL_POSITIONS, TURN_END, write_byte_model
from pentad.models.families import dims_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "deeper"
    write_byte_model(folder)
    return folder


@pytest.mark.parametrize(
    "text", ["2 + 3 = 5", "  \n\ttabs  ", "\u00fc\u4f60\U0001f600", "\x00\x7f"]
)
def test_any_text_comes_back_and_costs_one_token_a_byte(folder, text):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_template_is_chatml_and_its_marks_are_single_tokens(folder):
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.render(messages, for_answer=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert len(tokenizer.encode(text)) == len("user\nhi\nassistant\n") + 3
    assert tokenizer.render(messages, for_answer=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_turn_ends_where_the_model_stops(folder):
    tokenizer = load_tokenizer(folder)
    assert [tokenizer.decode([i], keep_special=True) for i in tokenizer.stop_ids] == [TURN_END]


def test_the_config_fits_the_tokenizer(folder):
    dims = dims_of(str(folder))
    assert dims.vocab_size == load_tokenizer(folder).vocab_size == 256 + 3
    assert dims.max_position == BYTE_MODEL_POSITIONS
