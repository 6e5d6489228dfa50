"""Training benchmarks for `pentad bench`: steps of Pentad's engine and of transformers.

Every implementation gets a model of the same config with random weights, the same tokens, AdamW
with clipping at norm 1 and the same dtypes. Microbatches are part of a case, and shown.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pentad.core.types import Row
from pentad.engine.engine import build_engine
from pentad.engine.flops import detect_peak_tflops, measure_throughput
from pentad.engine.section import EngineSettings, ModelConfig
from pentad.models.catalog import known_config
from pentad.models.families import dims_of
from pentad.rl.losses import SftLoss

LONG = {"head_dim": 128, "max_position_embeddings": 40960}
QWEN3_0_6B: dict[str, Any] = {**(known_config("Qwen3-0.6B") or {}), **LONG}
QWEN3_4B: dict[str, Any] = {**(known_config("Qwen3-4B") or {}), **LONG}
QWEN3_MOE_SLICE = QWEN3_0_6B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
TOY = QWEN3_0_6B | {
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
TOY_MOE = TOY | {
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
LR = 1e-5
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
Who = Literal["pentad", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCase:
    """One implementation at one model size."""

    model: str
    config: dict[str, Any]
    length: int
    """Tokens of every sequence; about the mean if lengths differ."""
    num_tokens: int
    """Tokens of an optimizer step."""
    who: Who
    microbatch: int
    """Tokens of one forward pass."""
    masters: str = "bfloat16"
    """Dtype of the stored weights and of the optimizer's state; products are in bfloat16."""
    compiled: bool = True
    ac_mode: Literal["none", "selective", "full"] = "none"
    """What the engine recomputes; transformers recomputes nothing."""
    is_ragged: bool = False

    @property
    def name(self) -> str:
        parts = [self.who, "compiled" if self.compiled else "eager"]
        parts += [] if self.ac_mode == "none" else [f"ac {self.ac_mode}"]
        return ", ".join([*parts, "ragged"] if self.is_ragged else parts)

    @property
    def lengths(self) -> list[int]:
        """Sequence lengths of one step."""
        if not self.is_ragged:
            return [self.length] * (self.num_tokens // self.length)
        shares = itertools.cycle((0.47, 1.0, 0.31, 1.73, 0.9, 1.59))
        found: list[int] = []
        while (rest := self.num_tokens - sum(found)) > 0:
            found.append(min(rest, int(next(shares) * self.length)))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMeasurement:
    """Results of a case."""

    case: TrainCase
    ms: float
    """One optimizer step, the median."""
    tokens_per_s: float
    mfu_causal: float | None
    mfu_full: float | None
    peak_gib: float | None
    warm_up_s: float
    loss: float
    """Loss of the first step: near ln(vocabulary) for random weights."""

    @property
    def key(self) -> str:
        """Key of the case in baseline files."""
        return f"train {self.case.model}, {self.case.name}, {self.case.masters} weights"


def gpu_cases() -> list[TrainCase]:
    """Cases for GPUs with 80 GiB or more."""

    def sized(model: str, config: dict[str, Any], length: int, num_tokens: int) -> dict[str, Any]:
        return {"model": model, "config": config, "length": length, "num_tokens": num_tokens}

    small = sized("Qwen3-0.6B", QWEN3_0_6B, 2048, 16384)
    mixture = sized("Qwen3-30B-A3B, 8 layers", QWEN3_MOE_SLICE, 2048, 32768)
    middle = sized("Qwen3-4B", QWEN3_4B, 4096, 32768)
    return [
        TrainCase(**small, who="transformers", microbatch=16384, compiled=False),
        TrainCase(**small, who="transformers", microbatch=16384),
        TrainCase(**small, who="pentad", microbatch=16384),
        TrainCase(**small, who="transformers", microbatch=16384, masters="float32"),
        TrainCase(**small, who="pentad", microbatch=16384, masters="float32"),
        TrainCase(**small, who="pentad", microbatch=16384, masters="float32", is_ragged=True),
        TrainCase(**small, who="pentad", microbatch=16384, masters="float32", ac_mode="selective"),
        TrainCase(**mixture, who="transformers", microbatch=8192, compiled=False),
        TrainCase(**mixture, who="pentad", microbatch=32768),
        TrainCase(**middle, who="pentad", microbatch=8192, masters="float32"),
    ]


def cpu_cases() -> list[TrainCase]:
    """Cases for CPUs: small sizes, float32, without torch.compile."""
    shape: dict[str, Any] = {"length": 256, "num_tokens": 2048, "microbatch": 2048}
    options: dict[str, Any] = {"masters": "float32", "compiled": False}
    models = {"toy dense": TOY, "toy mixture": TOY_MOE}
    sides: tuple[Who, ...] = ("transformers", "pentad")
    return [
        TrainCase(model=model, config=config, who=who, **shape, **options)
        for model, config in models.items()
        for who in sides
    ]


def measure(
    case: TrainCase, device: torch.device, num_steps: int, num_warm: int = 3
) -> TrainMeasurement:
    free_memory(device)
    torch.manual_seed(0)
    build = build_ours if case.who == "pentad" else build_theirs
    start = time.perf_counter()
    step = build(case, device)
    losses = [step() for _ in range(num_warm)]
    synchronize(device)
    warm_up_s = time.perf_counter() - start
    times = []
    for _ in range(num_steps):
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    seconds = sorted(times)[len(times) // 2]
    lengths = case.lengths
    peak = detect_peak_tflops(device)
    speed = measure_throughput(dims_of(case.config), lengths, seconds, peak_tflops=peak)
    is_gpu = device.type == "cuda"
    return TrainMeasurement(
        case=case,
        ms=seconds * 1e3,
        tokens_per_s=speed.tokens_per_s,
        mfu_causal=speed.mfu_causal,
        mfu_full=speed.mfu_full,
        peak_gib=torch.cuda.max_memory_allocated(device) / 2**30 if is_gpu else None,
        warm_up_s=warm_up_s,
        loss=losses[0],
    )


def check_losses(found: list[TrainMeasurement]) -> list[str]:
    """Messages about implementations whose losses differ."""
    problems = []
    for one in found:
        wanted = math.log(one.case.config["vocab_size"])
        if not abs(one.loss / wanted - 1) < 0.1:
            problems.append(
                f"{one.key}: the first loss is {one.loss:.3f}; random weights give {wanted:.3f}"
            )
    return problems


def free_memory(device: torch.device) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_ids(case: TrainCase) -> Tensor:
    gen = torch.Generator().manual_seed(0)
    return torch.randint(0, case.config["vocab_size"], (case.num_tokens,), generator=gen)


def make_row(ids: Tensor) -> Row:
    weights = torch.ones(len(ids))
    weights[0] = 0  # the first token is not predicted
    return Row(ids, {"weights": weights}, float(len(ids) - 1))


def build_ours(case: TrainCase, device: torch.device) -> Callable[[], float]:
    keys = {
        "param_dtype": case.masters,
        "reduce_dtype": case.masters,
        "mb_spec": {"max_tokens_per_mb": case.microbatch},
        "optimizer": {"lr": LR, "weight_decay": 0.01},
        "archon": {
            "ac_mode": case.ac_mode,
            "keep_logits": device.type == "cuda" and case.ac_mode == "none",
            "enable_compile": case.compiled,
            "reshard_after_forward_policy": "never",
        },
    }
    settings = EngineSettings(model=ModelConfig.model_validate(keys), total_steps=1)
    engine = build_engine(case.config, settings, device=device, init_from_scratch=True, seed=1)
    rows = [make_row(ids) for ids in make_ids(case).split(case.lengths)]

    def step() -> float:
        engine.begin_step()
        engine.accumulate(rows, SftLoss())
        result = engine.end_step()
        assert not result.skipped, result.reason
        return result.loss

    return step


def build_theirs(case: TrainCase, device: torch.device) -> Callable[[], float]:
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {key: value for key, value in case.config.items() if key != "model_type"}
    config = AutoConfig.for_model(case.config["model_type"], **options)
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if case.masters == "bfloat16" else torch.float32
    has_sinks = case.config["model_type"] == "gpt_oss"  # transformers has no SDPA with sinks
    kernels = {"attn_implementation": "eager" if has_sinks else "sdpa"}
    if any(key in case.config for key in NUM_EXPERTS):
        kernels["experts_implementation"] = "grouped_mm"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **kernels)
    model.train()
    run = torch.compile(model) if case.compiled else model
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=LR, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    assert not case.is_ragged, "transformers needs sequences of one length"
    ids = make_ids(case).view(-1, case.length).to(device)
    parts = ids.split(case.microbatch // case.length)
    autocast = torch.autocast(
        device.type, dtype=torch.bfloat16, enabled=is_gpu and dtype == torch.float32
    )

    def step() -> float:
        total = torch.zeros((), device=device)
        for part in parts:
            with autocast:
                loss = run(input_ids=part, labels=part, use_cache=False).loss / len(parts)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step
