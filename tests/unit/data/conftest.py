"""Tiny real tokenizers, made on the spot: a token a byte, with and without a chat template."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pentad.data.tokenizer import load_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_folder(folder, *, template=None, bos=False, eos="<|im_end|>", special=()):
    """Ids 0 to 4 are special, then those of `special`; byte symbols follow."""
    special = ["<pad>", "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<bos>", *special]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate([*special, *symbols])}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single="<bos> $A <|im_end|>",
            special_tokens=[("<bos>", vocab["<bos>"]), ("<|im_end|>", vocab["<|im_end|>"])],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token=eos,
        additional_special_tokens=special[2:],
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("chat"), template=CHATML)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    return folder


@pytest.fixture(scope="session")
def plain(plain_folder):
    return load_tokenizer(plain_folder)


@pytest.fixture(scope="session")
def chat(chat_folder):
    return load_tokenizer(chat_folder)


@pytest.fixture
def tokenizer_folder():
    return make_folder


@pytest.fixture
def write_jsonl(tmp_path):
    def write(rows, name="train.jsonl"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
