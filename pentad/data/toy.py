"""Generates tiny models and data, so that a first run needs no download.

The task of the demo is to sort five digits: its tokenizer has only digits, and a hash of each digit
string assigns it to the training, warm-up or held-out set, so that no string is in two sets. For
other texts there is a model with bytes as tokens.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from pentad.core.seeds import derive_seed

NUM_DIGITS = 5
PAD, EOS = "<pad>", "<eos>"
SYMBOLS = [*"0123456789", ">"]
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML as in the Qwen models, without tools."""
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(', ') }}) {% endfor %}<|im_end|>\n{% endif %}"
)
"""Part of a template that lists tools and their parameters, in few bytes."""
BYTE_MODEL_POSITIONS = 1024

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

MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def write_model(folder: Path) -> None:
    """Writes the demo's model folder for `actor.init_from_scratch: true`: a digit is a token."""
    vocab = {symbol: index for index, symbol in enumerate([PAD, EOS, *SYMBOLS])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    _write_config(folder, vocab, eos=EOS)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS
    ).save_pretrained(folder)


def write_byte_model(folder: Path, *, num_experts: int = 0, with_tools: bool = False) -> None:
    """Writes a small model folder for any text, also for `actor.init_from_scratch: true`: each byte
    is a token, and the chat template shows tools if `with_tools`. With `num_experts`, a mixture
    with two experts per token."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate([PAD, TURN_END, TURN_START, *symbols])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    more = MIXTURE | {"num_experts": num_experts} if num_experts else {}
    more["max_position_embeddings"] = BYTE_MODEL_POSITIONS
    _write_config(folder, vocab, eos=TURN_END, **more)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        chat_template=(TOOLS_TEMPLATE if with_tools else "") + CHAT_TEMPLATE,
    ).save_pretrained(folder)


def _write_config(folder: Path, vocab: dict[str, int], *, eos: str, **changes: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **MODEL,
        **changes,
        "vocab_size": len(vocab),
        "pad_token_id": vocab[PAD],
        "eos_token_id": vocab[eos],
        "bos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def split_of(digits: str) -> str:
    """The set of a digit string: about one in ten is held out, two are for SFT, seven for RL."""
    bucket = derive_seed("sort-digits", digits) % 10
    return "valid" if bucket == 0 else "sft" if bucket <= 2 else "train"


def write_task(folder: Path, *, seed: int, num_train: int, num_sft: int, num_valid: int) -> None:
    """Writes train.jsonl and valid.jsonl with prompts and answers, sft.jsonl with responses."""
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
