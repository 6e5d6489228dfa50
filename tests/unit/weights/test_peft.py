"""PEFT folders: round trips, peft as the judge, merging, and a sentence for each bad one."""

import json

import pytest
import torch
from megatron_models import hf_folder
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from pentad.cli.main import app
from pentad.core.errors import UserError
from pentad.weights.hf import HfFolder
from pentad.weights.merge import MergeLoss, merge_weight
from pentad.weights.peft import (
    CONFIG,
    FACTORS,
    Adapter,
    LoraSpec,
    fit_problems,
    read_adapter,
    spec_problems,
    without_number,
    word_of,
    write_adapter,
)

OUTER = {"gate_proj": "A", "up_proj": "A", "down_proj": "B"}


def made(base, targets, *, rank=4, alpha=8.0, experts="each", scale=0.1) -> Adapter:
    """Random factors for the modules of a folder that have these words."""
    generator = torch.Generator().manual_seed(7)
    factors: dict[str, torch.Tensor] = {}
    infos = HfFolder(base).infos
    for name in sorted(infos):
        module = name.removesuffix(".weight")
        if word_of(module) not in targets:
            continue
        out, width = infos[name].shape
        for kind, shape in (("A", (rank, width)), ("B", (out, rank))):
            is_outer = OUTER.get(module.rpartition(".")[2]) == kind
            place = without_number(module) if experts == "shared_outer" and is_outer else module
            drawn = torch.randn(shape, generator=generator) * scale
            factors.setdefault(f"{place}.lora_{kind}.weight", drawn)
    return Adapter(LoraSpec(rank, alpha, tuple(sorted(targets)), experts), factors, str(base))


def written(tmp_path, base, targets=("q", "v"), **settings):
    adapter = made(base, targets, **settings)
    write_adapter(tmp_path / "adapter", adapter, HfFolder(base).infos)
    return adapter, tmp_path / "adapter"


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


DENSE = ("q", "k", "v", "o", "gate", "up", "down")
MIXTURE = ("q", "k", "v", "o", "experts")


@pytest.mark.parametrize(
    ("kind", "targets", "experts"),
    [
        ("qwen3", DENSE, "each"),
        ("experts", MIXTURE, "each"),
        ("experts", MIXTURE, "shared_outer"),
    ],
)
def test_peft_gives_the_logits_of_the_merged_weights_and_writes_the_same_bytes(
    tmp_path, kind, targets, experts
):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = hf_folder(tmp_path / "base", kind)
    adapter, folder = written(tmp_path, base, targets, experts=experts)
    ids = torch.arange(1, 12)[None]
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    with torch.no_grad():
        found = theirs(input_ids=ids).logits
        with theirs.disable_adapter():
            without = theirs(input_ids=ids).logits
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "out"), "--merge"])
    assert result.exit_code == 0, result.output
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        ours = merged(input_ids=ids).logits
    assert (ours - without).abs().max() > 0.01  # the adapter does something
    # Two orders of float32 sums.
    torch.testing.assert_close(ours, found, rtol=1e-4, atol=1e-4)
    if kind == "qwen3":
        theirs.save_pretrained(tmp_path / "theirs")
        assert (tmp_path / "theirs" / FACTORS).read_bytes() == (folder / FACTORS).read_bytes()
        assert read_adapter(tmp_path / "theirs").spec == adapter.spec


@pytest.mark.parametrize("experts", ["each", "shared_outer"])
def test_a_folder_is_read_and_written_again_byte_for_byte(tmp_path, experts):
    base = hf_folder(tmp_path / "base", "experts")
    adapter, folder = written(tmp_path, base, ("q", "experts"), experts=experts)
    again = read_adapter(folder)
    assert again.spec == adapter.spec and again.base == str(base)
    assert {n: t.tolist() for n, t in again.factors.items()} == {
        n: t.tolist() for n, t in adapter.factors.items()
    }
    assert list(fit_problems(again, HfFolder(base).infos, "x", "base")) == []
    write_adapter(tmp_path / "again", again, HfFolder(base).infos)
    assert files_of(tmp_path / "again") == files_of(folder)


def test_target_modules_name_no_module_that_has_no_factors(tmp_path):
    base = hf_folder(tmp_path / "base", "experts")
    _, folder = written(tmp_path, base, ("q", "experts"))
    config = json.loads((folder / CONFIG).read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    part = made(base, ("q", "v"))
    first = {name: t for name, t in part.factors.items() if ".layers.0." in name}
    write_adapter(tmp_path / "part", Adapter(part.spec, first), HfFolder(base).infos)
    config = json.loads((tmp_path / "part" / CONFIG).read_text())
    assert config["target_modules"] == [
        f"model.layers.0.self_attn.{one}_proj" for one in ("q", "v")
    ]


def changed(folder, **keys):
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def with_factor(folder, change):
    factors = load_file(folder / FACTORS)
    change(factors)
    save_file(factors, folder / FACTORS, {"format": "pt"})


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

BAD = [
    (lambda f: (f / CONFIG).unlink(), "no adapter_config.json there"),
    (lambda f: (f / FACTORS).unlink(), "missing; only safetensors are read"),
    (lambda f: changed(f, peft_type="LOHA"), "peft_type = LOHA: only LORA is supported"),
    (lambda f: changed(f, r=0), "r = 0: must be a whole number"),
    (lambda f: changed(f, r=8), "is not of rank 8, which adapter_config.json names"),
    (lambda f: changed(f, lora_alpha="x"), "lora_alpha = x: must be a number above 0"),
    (lambda f: changed(f, use_rslora=True), "use_rslora = True: changes the meaning of factors"),
    (lambda f: changed(f, use_dora=True), "use_dora = True: changes the meaning of factors"),
    (lambda f: changed(f, modules_to_save=["lm_head"]), "modules_to_save = ['lm_head']: changes"),
    (lambda f: changed(f, rank_pattern={"q_proj": 2}), "rank_pattern = {'q_proj': 2}: changes"),
    (lambda f: changed(f, alpha_pattern={"q_proj": 2}), "alpha_pattern = {'q_proj': 2}: changes"),
    (lambda f: changed(f, bias="all"), "bias = all: the files have trained biases"),
    (lambda f: changed(f, init_lora_weights="pissa"), "init_lora_weights = pissa: its init"),
    (lambda f: (f / FACTORS).write_bytes((f / FACTORS).read_bytes()[:-9]), "its header says"),
    (lambda f: with_factor(f, lambda all: all[FIRST].fill_(torch.nan)), "NaN or infinite"),
    (lambda f: with_factor(f, lambda all: all.pop(FIRST)), "there is no model.layers.0.self_attn"),
    (lambda f: with_factor(f, dict.clear), "holds no factor"),
    (
        lambda f: with_factor(f, lambda all: all.update({"x.lora_A.weight": torch.zeros(4, 3)})),
        "no factor is named so",
    ),
    (
        lambda f: with_factor(
            f,
            lambda all: all.update(
                {
                    f"base_model.model.model.norm.lora_{k}.weight": torch.zeros(4, 4)
                    for k in ("A", "B")
                }
            ),
        ),
        "has factors for model.norm, which cannot have factors here; targets are q, k, v, o",
    ),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    return {kind: hf_folder(root / kind, kind) for kind in ("qwen3", "experts")}


@pytest.mark.parametrize(("spoil", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_what_cannot_be_used_as_it_is_is_refused(tmp_path, bases, spoil, sentence):
    _, folder = written(tmp_path, bases["qwen3"])
    spoil(folder)
    with pytest.raises(UserError) as refused:
        read_adapter(folder)
    assert sentence in str(refused.value)
    # A module without its other factor may be one of several problems; none is a traceback.
    assert all(str(problem).endswith(".") for problem in refused.value.problems)


def test_dropout_and_the_ways_to_train_are_harmless(tmp_path, bases):
    adapter, folder = written(tmp_path, bases["qwen3"])
    changed(folder, lora_dropout=0.1, inference_mode=False, use_dora=False, rank_pattern={})
    assert read_adapter(folder).spec == adapter.spec


def test_an_adapter_of_another_base_or_recipe_is_refused(tmp_path, bases):
    adapter, folder = written(tmp_path, bases["qwen3"], ("k", "down"))
    other = hf_folder(tmp_path / "few", "llama, few kv heads")
    (problem,) = fit_problems(adapter, HfFolder(other).infos, "a", "few")
    assert "its factors are those of a weight [24, 40], in few it is [12, 40]" in str(problem)
    (problem,) = fit_problems(adapter, HfFolder(bases["experts"]).infos, "a", "moe")
    assert f"moe has no such module; its own base is {bases['qwen3']}" in str(problem)
    first = {name: t for name, t in adapter.factors.items() if ".layers.0." in name}
    part = Adapter(adapter.spec, first)
    (problem,) = fit_problems(part, HfFolder(bases["qwen3"]).infos, "a", "base")
    assert "has no factors for" in str(problem)
    wanted = LoraSpec(8, 8.0, ("k",), "shared_outer")
    found = [str(problem) for problem in spec_problems(adapter, wanted, "init_path = a")]
    assert found == [
        "init_path = a: its rank: 4, that of actor.lora: 8; set actor.lora.rank to 4.",
        "init_path = a: its targets: down k, that of actor.lora: k; "
        "set actor.lora.targets to down k.",
    ]


def test_a_merge_says_what_rounding_took_away(tmp_path):
    base = hf_folder(tmp_path / "base", "qwen3", torch.bfloat16)
    _, folder = written(tmp_path, base, DENSE, scale=0.02)
    run = CliRunner()
    result = run.invoke(app, ["convert", str(folder), str(tmp_path / "out"), "--merge"])
    assert "merged in bfloat16: " in result.output and "was lost to rounding" in result.output
    assert "note: the folder is not the policy that was trained" in result.output
    words = ["convert", str(folder), str(tmp_path / "full"), "--merge", "--dtype", "float32"]
    result = run.invoke(app, words)
    assert "merged in float32: 0.0% of the update was lost" in result.output
    assert "note:" not in result.output
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    assert config["dtype"] == "float32" and "torch_dtype" not in config


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["{adapter}", "{out}"], "is an adapter, without full weights"),
        (["{base}", "{out}", "--merge"], "has no adapter_config.json"),
        (["{adapter}", "{out}", "--merge", "--to", "legacy"], "is merged into a HF folder"),
        (["{adapter}", "{out}", "--merge", "--base", "/no/such"], "is not a folder here"),
        (["{adapter}", "{adapter}/in", "--merge"], "is inside the source"),
        (["{adapter}", "{out}", "--merge", "--dtype", "int3"], "--dtype int3: is not one of"),
    ],
)
def test_words_that_name_no_merge_are_refused(tmp_path, bases, words, sentence):
    _, folder = written(tmp_path, bases["qwen3"])
    places = {"adapter": folder, "base": bases["qwen3"], "out": tmp_path / "out"}
    result = CliRunner().invoke(app, ["convert", *(word.format(**places) for word in words)])
    assert result.exit_code != 0 and sentence in " ".join(result.output.split())


def test_the_measure_of_a_merge_is_that_of_its_definition():
    weight = torch.tensor([[1.0, 1.0, 0.0]], dtype=torch.bfloat16)
    pair = torch.tensor([[0.001, 0.25, 0.001]]), torch.tensor([[1.0]])
    loss = MergeLoss("bfloat16")
    out = merge_weight(weight, pair, 1.0, torch.bfloat16, loss)
    assert out.tolist()[0][:2] == [1.0, 1.25]  # the first is rounded away
    assert (loss.num_weights, loss.num_changed) == (3, 2)
    assert loss.lost == pytest.approx(0.001 / (0.25**2 + 2e-6) ** 0.5, rel=1e-2)
