"""The built-in task: sort five digits. Its tokenizer, its model config and its three data sets.

Everything is made here from a seed, so a first run needs no download. Digit strings are dealt to
training, warm-up and held-out sets by a hash of the string: no string is in two of them.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from pentad.core.seeds import derive_seed

NUM_DIGITS = 5
PAD, EOS = "<pad>", "<eos>"
SYMBOLS = [*"0123456789", ">"]

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_bias": False,
    "dtype": "float32",
}


def write_model(folder: Path) -> None:
    """A folder with config.json and a tokenizer, for `actor.init_from_scratch: true`."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {symbol: index for index, symbol in enumerate([PAD, EOS, *SYMBOLS])}
    config = {
        **MODEL,
        "vocab_size": len(vocab),
        "pad_token_id": vocab[PAD],
        "eos_token_id": vocab[EOS],
        "bos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS
    ).save_pretrained(folder)


def split_of(digits: str) -> str:
    """Which set a string belongs to: of ten, one is held out, two warm up, seven train."""
    bucket = derive_seed("sort-digits", digits) % 10
    return "valid" if bucket == 0 else "sft" if bucket <= 2 else "train"


def write_task(folder: Path, *, seed: int, num_train: int, num_sft: int, num_valid: int) -> None:
    """train.jsonl and valid.jsonl with prompts and answers, sft.jsonl with responses."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {"train": num_train, "sft": num_sft, "valid": num_valid}
    strings = [f"{number:0{NUM_DIGITS}d}" for number in range(10**NUM_DIGITS)]
    random.Random(derive_seed(seed, "sort-digits")).shuffle(strings)
    for name, count in wanted.items():
        chosen = [digits for digits in strings if split_of(digits) == name][:count]
        assert len(chosen) == count, f"only {len(chosen)} strings for {name}"
        key = "response" if name == "sft" else "answer"
        lines = [
            json.dumps({"prompt": f"{digits}>", key: "".join(sorted(digits))}) for digits in chosen
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
