"""What we write, loaded by megatron-core's own GPTModel; what it writes, read by us.

Needs the package that `make test-megatron` builds; skipped without it. Megatron runs on CPU
ranks with its local layer spec: Transformer Engine needs a GPU.
"""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import transformers

from pentad.core.errors import UserError
from pentad.models.conversion import Conversion, convert
from pentad.models.families import dims_of
from pentad.weights.megatron.arguments import build_args
from pentad.weights.megatron.layout import build_layout

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / ".megatron-core"
WORKER = Path(__file__).with_name("megatron_core_worker.py")
pytestmark = [
    pytest.mark.optional,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PACKAGE / "megatron").exists(), reason="no megatron-core; run make test-megatron"
    ),
]
TOLERANCE = 1e-5
"""Of the largest logit: float32 rounding over four layers, in another order of sums."""
SIZES = dict(
    vocab_size=211,
    hidden_size=60,
    intermediate_size=84,
    num_hidden_layers=4,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=14,
    max_position_embeddings=64,
)
LLAMA3 = dict(rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", rope_theta=10000.0, original_max_position_embeddings=16)
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=28)
MODELS = {
    "qwen3": ("qwen3", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                **LLAMA3,
                "rope_theta": 1e6,
                "factor": 32.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}},
    ),
    "yarn": ("qwen2", {"rope_parameters": {**YARN, "factor": 4.0}}),
    "yarn, scaled": (
        "qwen2",
        {
            "rope_parameters": {
                **YARN,
                "factor": 8.0,
                "beta_fast": 4.0,
                "truncate": False,
                "attention_factor": 1.7,
            }
        },
    ),
    "windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "all experts": ("qwen3_moe", EXPERTS),
    "shared expert": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 36}),
    "mixed": ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True}),
}
ONE_RANK = [("torch_dist", {}), ("legacy", {})]
TWO_RANKS = [
    ("torch_dist", {"tp": 2}),
    ("legacy", {"tp": 2}),
    ("legacy", {"pp": 2}),
    ("legacy", {"pp": 2, "vpp": 2}),
]
EXPERT_RANKS = [("torch_dist", {"ep": 2}), ("legacy", {"ep": 2})]
IDS = torch.randint(211, (23,), generator=torch.Generator().manual_seed(5))


def theirs(kind):
    family, extra = MODELS[kind]
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **extra})
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@torch.no_grad()
def randomise(model):
    generator = torch.Generator().manual_seed(0)
    for tensor in model.state_dict().values():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(0.15 * noise if tensor.dim() > 1 else 0.7 + 0.3 * noise)


def megatron(out: Path, num_ranks: int, jobs: list[dict]) -> dict[str, torch.Tensor]:
    """The logits of megatron-core for every job, on so many CPU ranks."""
    out.mkdir()
    (out / "ids.json").write_text(json.dumps(IDS.tolist()))
    (out / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, str(num_ranks), WORKER, out],
        capture_output=True,
        text=True,
        timeout=280,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONPATH": str(PACKAGE),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out / "logits.pt")


def layouts_of(kind: str, num_ranks: int) -> list[tuple[str, dict[str, int]]]:
    settings = MODELS[kind][1]
    if num_ranks == 1:
        return ONE_RANK
    if "rope_parameters" in settings:  # the same tensors and another table of angles
        return TWO_RANKS[:1]
    return TWO_RANKS + (EXPERT_RANKS if "num_experts" in settings else [])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_megatron_computes_transformers_logits_from_our_folders(tmp_path, num_ranks):
    jobs, expected = [], {}
    for kind in MODELS:
        model = theirs(kind)
        randomise(model)
        model.save_pretrained(tmp_path / kind / "hf")
        logits = model(IDS[None]).logits[0].detach()
        for to, sizes in layouts_of(kind, num_ranks):
            name = f"{kind} {to} {sizes}"
            source, target = str(tmp_path / kind / "hf"), str(tmp_path / name)
            made = Conversion(
                source=source, target=target, to=to, spec="local", vocab_divisor=8, **sizes
            )
            convert(made)
            jobs.append({"name": name, "action": "load", "folder": f"{target}/release"})
            expected[name] = logits
    found = megatron(tmp_path / "out", num_ranks, jobs)
    assert found.keys() == expected.keys()
    errors = {
        name: float((found[name][:, :211] - logits).abs().max() / logits.abs().max())
        for name, logits in expected.items()
    }
    assert not {name: error for name, error in errors.items() if not error < TOLERANCE}


def saved_args(kind: str, sizes: dict) -> dict:
    """Arguments for a model that Megatron is to make, in JSON."""
    dims = dims_of(theirs(kind).config)
    args: Namespace = build_args(
        dims,
        build_layout(dims, **sizes),
        vocab_rows=224,
        vocab_divisor=8,
        file_format="torch_dist",
        spelling="local",
        dtype=torch.float32,
    )
    return {name: value for name, value in vars(args).items() if name != "params_dtype"}


def test_we_read_what_megatron_saves(tmp_path):
    layouts = {
        "qwen3": {"tp": 2},
        "qwen2, tied": {"pp": 2},
        "mixed": {"ep": 2},
        "all experts": {"tp": 2},
    }
    jobs = [
        {
            "name": kind,
            "action": "save",
            "folder": str(tmp_path / kind / "iter_0000007"),
            "args": saved_args(kind, sizes),
        }
        for kind, sizes in layouts.items()
    ]
    found = megatron(tmp_path / "out", 2, jobs)
    for kind in layouts:
        theirs(kind).config.save_pretrained(tmp_path / kind)
        source, target = str(tmp_path / kind), str(tmp_path / f"{kind} hf")
        convert(Conversion(source=source, target=target, to="hf"))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            target, attn_implementation="eager", experts_implementation="eager"
        )
        logits = model.eval()(IDS[None]).logits[0]
        error = (found[kind][:, :211] - logits).abs().max() / logits.abs().max()
        assert error < TOLERANCE, f"{kind}: {error}"


def test_a_config_of_another_model_is_refused(tmp_path):
    job = {
        "name": "qwen3",
        "action": "save",
        "folder": str(tmp_path / "saved" / "iter_0000007"),
        "args": saved_args("qwen3", {}),
    }
    megatron(tmp_path / "out", 1, [job])
    config = theirs("qwen3").config
    config.intermediate_size = 96
    config.save_pretrained(tmp_path / "saved")
    other = Conversion(source=str(tmp_path / "saved"), target=str(tmp_path / "hf"), to="hf")
    with pytest.raises(UserError, match="args.ffn_hidden_size = 84, but config.json makes it 96"):
        convert(other)
    assert not (tmp_path / "hf").exists()
