"""Whole runs that train an adapter beside the text tower of a multimodal folder."""

import asyncio
import json
import signal

import pytest
import torch
from closeness import assert_close
from run_lab import FLOAT32, steps_of, values_of
from safetensors.torch import load_file, save_file
from sections import sampler_settings
from tower_toys import others_of, read_whole, tensors_of, write_whole
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.core.errors import RunError, UserError
from pentad.core.types import Request, SamplingParams
from pentad.engine.section import LoraConfig
from pentad.infer.sampler import EmbeddedSampler
from pentad.models.decoder import causal_attend
from pentad.models.lora import apply_lora, blank_factors, fill_factors
from pentad.models.registry import load_model
from pentad.telemetry.recorder import Recorder
from pentad.weights.peft import CONFIG, FACTORS, read_adapter
from pentad.weights.transfer import PairsReader

IDS = torch.tensor([5, 4, 3, 9, 2, 7, 7, 10, 3])
LORA = ("actor.lora.rank=4", "actor.lora.alpha=16", "actor.optimizer.lr=2e-2")
KINDS = ("gemma3", "gemma4", "qwen2_5_vl")
"""Each spelling of the names, and vision layers called like those of the text."""


@pytest.fixture(scope="module")
def wholes(task, tmp_path_factory):
    root = tmp_path_factory.mktemp("wholes")
    for kind in KINDS:
        write_whole(root / kind, kind)
    return root


def begun(source, *words):
    return (f"actor.path={source}", "actor.init_from_scratch=false", "total_train_steps=2", *words)


@torch.no_grad()
def logits_of(model):
    return model.logits(model(IDS, torch.arange(len(IDS)), causal_attend))


@torch.no_grad()
def their_logits(model):
    return model(input_ids=IDS[None]).logits[0]


def beside(source, adapter):
    """The tower with the factors of a PEFT folder."""
    found, model = read_adapter(adapter), load_model(source)
    spec = found.spec
    apply_lora(
        model,
        LoraConfig(
            rank=spec.rank, alpha=spec.alpha, targets=list(spec.targets), experts=spec.experts
        ),
    )
    blank_factors(model, torch.device("cpu"))
    fill_factors(model, 0, PairsReader(found.factors.items()))
    return model


def check_in_peft(source, adapter):
    """peft puts the factors beside the layers of the whole model, and the logits are ours."""
    peft = pytest.importorskip("peft")
    base = read_whole(source)
    without = their_logits(base)
    model = peft.PeftModel.from_pretrained(base, adapter)
    mine = {name.removesuffix(".weight") for name in read_adapter(adapter).factors}
    held = {
        name.removeprefix("base_model.model.").removesuffix(".default.weight")
        for name, _ in model.named_parameters()
        if ".lora_" in name
    }
    assert held == mine
    wanted = their_logits(model)
    assert (wanted - without).abs().max() > 0.01
    assert_close(logits_of(beside(source, adapter)), wanted)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_a_tower_is_one_of_the_whole_model(lab, wholes, tmp_path, kind):
    source = wholes / kind
    rl = lab.train(*begun(source, *LORA))
    for record in steps_of(rl):
        assert record["rl"]["logprob_diff_max"] < FLOAT32
    theirs = check_in_peft(source, rl.model)

    # What peft saves is where another run starts.
    theirs.save_pretrained(tmp_path / "theirs")
    more = lab.sft(*begun(source, *LORA), f"actor.lora.init_path={tmp_path / 'theirs'}")
    check_in_peft(source, more.model)
    assert (more.model / FACTORS).read_bytes() != (rl.model / FACTORS).read_bytes()

    words = ["convert", str(more.model), str(tmp_path / "merged"), "--merge"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    before, after = tensors_of(source), tensors_of(tmp_path / "merged")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in others_of(source))
    assert_close(
        their_logits(read_whole(tmp_path / "merged")), logits_of(beside(source, more.model))
    )
    assert drawn(source, more.model) == drawn(tmp_path / "merged")


def drawn(folder, adapter=None):
    """As `pentad serve` and `pentad eval` sample, with `--adapter`."""

    async def main():
        settings = sampler_settings(max_running=4, kv_cache_tokens=512)
        found = None if adapter is None else read_adapter(adapter)
        sampler = EmbeddedSampler.from_folder(folder, settings, adapter=found)
        params = SamplingParams(max_new_tokens=12, temperature=0.0)
        request = Request(id="a", prompt_ids=(5, 6, 7), params=params, seeds=(1,))
        try:
            return (await sampler.generate(request))[0].ids
        finally:
            await sampler.close()

    return asyncio.run(main())


def test_a_stopped_run_resumes_with_its_factors(lab, wholes, monkeypatch):
    words = begun(wholes / "gemma3", *LORA, "recover.mode=auto", "recover.freq_steps=1")
    whole = lab.train(*words, trial="whole")
    step = Recorder.step

    def stop_after_1(self, *args, **keys):
        line = step(self, *args, **keys)
        signal.raise_signal(signal.SIGTERM)
        return line

    monkeypatch.setattr(Recorder, "step", stop_after_1)
    with pytest.raises(RunError, match="after 1 of 2 steps"):
        lab.train(*words, trial="stopped")
    monkeypatch.undo()
    again = lab.train(*words, trial="stopped")
    assert values_of(again) == values_of(whole)
    assert (again.model / FACTORS).read_bytes() == (whole.model / FACTORS).read_bytes()


def test_a_merge_in_another_dtype_leaves_the_other_towers_as_they_are(lab, wholes, tmp_path):
    wide, source = wholes / "qwen2_5_vl", tmp_path / "half"
    read_whole(wide).to(torch.bfloat16).save_pretrained(source)
    trained = lab.sft(*begun(wide, *LORA)).model
    words = ["convert", str(trained), str(tmp_path / "out"), "--merge", "--base", str(source)]
    result = CliRunner().invoke(app, [*words, "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    before, others = tensors_of(source), others_of(source)
    for name, tensor in tensors_of(tmp_path / "out").items():
        assert tensor.dtype == (torch.bfloat16 if name in others else torch.float32)
        assert name not in others or torch.equal(tensor, before[name])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "float32"


def test_an_adapter_of_the_text_model_alone_is_rejected(lab, wholes, tmp_path):
    source = wholes / "gemma3"
    trained = lab.sft(*begun(source, *LORA)).model
    factors = {
        name.replace("model.language_model.", "model."): tensor
        for name, tensor in load_file(trained / FACTORS).items()
    }
    (tmp_path / CONFIG).write_text((trained / CONFIG).read_text())
    save_file(factors, tmp_path / FACTORS, {"format": "pt"})
    with pytest.raises(UserError, match="has no such module"):
        lab.sft(*begun(source, *LORA), f"actor.lora.init_path={tmp_path}")
