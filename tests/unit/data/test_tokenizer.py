"""Tokenizers load from a folder with their end ids resolved, or say why not."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from pentad.core.errors import UserError
from pentad.data.tokenizer import DIRECT, decode_all, load_tokenizer, resolve_stop_ids


def test_encoding_adds_nothing_and_decoding_gives_the_text_back(plain):
    text = "6 * 7 = \u00e9\n"
    ids = plain.encode(text)
    assert len(ids) == len(text.encode())
    assert plain.decode(ids) == text
    assert plain.encode_all([text, "", "a"]) == [ids, [], plain.encode("a")]
    assert plain.encode_all([]) == []


@pytest.mark.parametrize("model_type", [*DIRECT["TokenizersBackend"], "qwen2", "mistral"])
@pytest.mark.parametrize("name", DIRECT)
def test_the_class_is_the_one_that_transformers_finds(plain_folder, tmp_path, name, model_type):
    shutil.copytree(plain_folder, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": name}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    mine, found = load_tokenizer(tmp_path).inner, AutoTokenizer.from_pretrained(tmp_path)
    assert type(mine) is type(found) and mine.get_vocab() == found.get_vocab()
    assert mine.special_tokens_map == found.special_tokens_map
    assert mine.encode("6 * 7 = a") == found.encode("6 * 7 = a")


def test_special_ids_are_hidden_from_people_unless_asked_for(plain):
    ids = [*plain.encode("42"), plain.eos_id]
    assert plain.decode(ids) == "42"
    assert plain.decode(ids, keep_special=True) == "42<|im_end|>"


class Shouting:
    """A tokenizer that is none of transformers' own."""

    def decode(self, ids, *, skip_special_tokens):
        return f"{ids}!"


def test_texts_decoded_together_are_those_of_one_by_one(plain):
    answers = [[*plain.encode("6 , 7 \u00e9"), plain.eos_id], [], plain.encode(" a .")[:2]]
    alone = [plain.inner.decode(ids, skip_special_tokens=True) for ids in answers]
    assert decode_all(plain.inner, answers) == alone == ["6 , 7 \u00e9", "", " a"]
    assert decode_all(Shouting(), [[1], [2, 3]]) == ["[1]!", "[2, 3]!"]


def test_stop_ids_join_tokenizer_and_generation_config(plain, chat):
    assert (plain.eos_id, plain.stop_ids) == (1, (1,))
    assert (chat.eos_id, chat.stop_ids) == (1, (1, 3))


def test_a_begin_id_is_found_and_an_end_id_behind_prompts_is_not_taken(tokenizer_folder, tmp_path):
    assert load_tokenizer(tokenizer_folder(tmp_path, bos=True)).prefix_ids == (4,)


def test_no_prefix_where_the_model_wants_none(plain):
    assert plain.prefix_ids == ()


def test_rendering_opens_the_answer_only_when_asked(chat):
    messages = [{"role": "user", "content": "hi"}]
    closed = "<|im_start|>user\nhi<|im_end|>\n"
    assert chat.render(messages, for_answer=False) == closed
    assert chat.render(messages, for_answer=True) == closed + "<|im_start|>assistant\n"


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match=r"^actor.path = .*/nowhere: no such folder; give a model"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_folder_without_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match="critic.path = .*: the folder has no tokenizer"):
        load_tokenizer(tmp_path, key="critic.path")


def test_a_broken_tokenizer_file_is_one_sentence(plain_folder, tmp_path):
    shutil.copytree(plain_folder, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(UserError, match="the tokenizer does not load: ") as caught:
        load_tokenizer(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_no_end_of_sequence_anywhere_is_refused(tokenizer_folder, tmp_path):
    with pytest.raises(UserError, match="neither the tokenizer nor generation_config.json names"):
        load_tokenizer(tokenizer_folder(tmp_path, eos=None))


def test_the_generation_config_alone_may_name_the_end(tokenizer_folder, tmp_path):
    tokenizer_folder(tmp_path, eos=None)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3, "pad_token_id": 2}')
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eos_id, loaded.stop_ids) == (3, (3,))


@pytest.mark.parametrize("bad", [9999, -1, "x"])
def test_an_end_id_of_another_model_is_refused(tokenizer_folder, tmp_path, bad):
    tokenizer_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": bad}))
    with pytest.raises(UserError, match=f"eos_token_id '?{bad}'? is not an id of the tokenizer"):
        load_tokenizer(tmp_path)


def test_a_broken_generation_config_is_named(tokenizer_folder, tmp_path):
    tokenizer_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation_config.json: is not JSON"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("listed", [[[1]], {"a": 1}, "1", [True, 9999], -1])
def test_ends_that_are_no_ids_are_refused(listed):
    with pytest.raises(UserError, match="is not an id of the tokenizer"):
        resolve_stop_ids(1, {"eos_token_id": listed}, 100, "folder")
