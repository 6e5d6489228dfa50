"""`verify-model --table`: which of the most used text models of transformers train and sample here.

Each type is tested with a tiny random config. Log-probs of packed rows by every training backend,
and of tokens sampled by the embedded sampler (with chunked prefill and preemptions), are compared
with transformers' logits of each sequence alone.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from pentad.core.errors import Problem, UserError
from pentad.core.types import Generation, Request, Row, SamplingParams
from pentad.engine.engine import build_engine
from pentad.engine.section import EngineSettings, ModelConfig
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.section import SamplerSettings
from pentad.models.families import has_file
from pentad.rollout.section import RolloutConfig
from pentad_tools.models.cases import PLAIN, generator

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"head_dim": 8}
WINDOW = {**HEADS, "sliding_window": 4}
HALF = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {
    **HEADS,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
DEEPSEEK = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
DEEPSEEK |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
LATENT |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
LINEAR = {
    **HEADS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "layer_types": ["linear_attention", "full_attention"],
}
PER_LAYER = {"vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
GROWING = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 32.0},
    **{"original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.5},
}
"""Makes queries grow from the fifth position on."""
MULTIPLIERS = {
    **{"lm_head_multiplier": 0.3, "embedding_multiplier": 2.0, "key_multiplier": 0.8},
    **{"ssm_multipliers": [0.9, 1.2, 0.7, 1.1, 0.8], "mlp_multipliers": [0.6, 1.4]},
    **{"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7, "attention_out_multiplier": 0.9},
}
FACTORS = {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5}
TYPES: dict[str, dict[str, Any]] = {
    "apertus": HEADS,
    "arcee": HEADS,
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "bloom": {},
    "cohere": {"logit_scale": 0.25},
    "cohere2": HALF,
    "deepseek_v2": {**DEEPSEEK, **LATENT},
    "deepseek_v3": {**DEEPSEEK, **LATENT},
    "deepseek_v32": {**DEEPSEEK, **LATENT},
    "dots1": {**DEEPSEEK, "routed_scaling_factor": 1.5},
    "ernie4_5": HEADS,
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": HALF,
    "falcon": {},
    "falcon_h1": {**MAMBA, **MULTIPLIERS, "mamba_d_ssm": 64},
    "gemma": HEADS,
    "gemma2": WINDOW,
    "gemma3_text": HALF,
    "gemma3n_text": {
        **{**HALF, **PER_LAYER, "num_hidden_layers": 6, "num_kv_shared_layers": 1},
        **{"laurel_rank": 4, "layer_types": ["sliding_attention", "full_attention"] * 3},
    },
    "gemma4_text": {**HALF, **PER_LAYER, "global_head_dim": 16},
    "gemma4_unified_text": {**HALF, "global_head_dim": 16},
    "glm": HEADS,
    "glm4": HEADS,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": {**DEEPSEEK, **LATENT},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {**EXPERTS, **HALF},
    "granite": {**FACTORS, "embedding_multiplier": 7.0, "tie_word_embeddings": True},
    "granitemoe": {**EXPERTS, "logits_scaling": 2.0},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "helium": HEADS,
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2, "moe_intermediate_size": 48},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**DEEPSEEK, **LATENT, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {
        **{**EXPERTS, "moe_intermediate_size": 16, "num_dense_layers": 1},
        "layer_types": ["conv", "full_attention"],
    },
    "llama": HEADS,
    "llama4_text": {**HEADS, "num_local_experts": 4, "intermediate_size_mlp": 48},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "minimax_m2": EXPERTS,
    "ministral": HALF,
    "ministral3": {**HEADS, "rope_parameters": GROWING},
    "mistral": WINDOW,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron": HEADS,
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2},
    "olmo": {},
    "olmo2": {},
    "olmo_hybrid": {**LINEAR, "linear_num_value_heads": 2},
    "olmo3": {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phi": {},
    "phi3": {},
    "phimoe": {**EXPERTS, "sliding_window": 4},
    "qwen2": {},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": HEADS,
    "qwen3_5_moe_text": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "seed_oss": HEADS,
    "smollm3": HEADS,
    "stablelm": {},
    "starcoder2": WINDOW,
    "zamba2": {
        **{"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 1},
        "layers_block_type": ["mamba", "hybrid"],
    },
}
"""model_type -> keys of its tiny config, in addition to `SIZES`."""
PAGE = """# Model types

The most used text model types of transformers {version}, each tried on a CPU in float32 with a tiny
config and random weights. This page is the output of `pentad verify-model --table`.

- **trains with**: `archon` needs a model file ([model-families.md](model-families.md)), `fsdp`
  trains the modules of transformers ([parallelism.md](parallelism.md#any-hf-model)).
- **sampler**: the embedded sampler runs the model file, or the modules of transformers without one.
- **difference**: the largest of a log-prob, in nats, from transformers' own logits of each sequence
  alone. It covers packed rows under every backend listed, and tokens that the sampler drew with
  prompts in chunks, cached prefixes (unless layers carry state) and preemptions.
- **rejected because**: what `pentad plan` and the start of a run report. Models that only the
  sampler rejects are sampled by vLLM or SGLang.

{rows}
"""
CLOSE = 5e-5
"""Tolerance: float32 sums in another order differ by less, a lost window or scale by far more."""
SAMPLING: tuple[dict[str, Any], ...] = (
    {"max_running": 2, "max_batch_tokens": 3},
    {"max_running": 64, "kv_cache_tokens": 48},
)
"""Sampler keys: prompt chunks of three tokens, and a cache so small that sequences are preempted.
Prompts have a common prefix, so cached prefixes are used."""


@dataclass(frozen=True, slots=True)
class TypeReport:
    """The result of one type."""

    model_type: str
    trains: tuple[str, ...]
    """Backends that train it; empty if it is rejected."""
    max_diff: float | None
    """Largest difference of a log-prob over all backends and the sampler."""
    reason: str = ""
    """The reason if it, or the embedded sampler, is rejected."""

    @property
    def passed(self) -> bool:
        return self.max_diff is None or self.max_diff < CLOSE

    def cells(self) -> tuple[str, ...]:
        trains, samples = ", ".join(self.trains) or "rejected", "no" if self.reason else "yes"
        largest = "" if self.max_diff is None else f"{self.max_diff:.0e}"
        return self.model_type, trains, samples, largest, self.reason.replace("|", "/")


def types_table(reports: Sequence[TypeReport]) -> Iterator[str]:
    """Renders the table as Markdown lines."""
    yield "| `model_type` | trains with | sampler | difference | rejected because |"
    yield "|---|---|---|---|---|"
    for report in reports:
        yield f"| {' | '.join(report.cells())} |"


def types_page(report_on: Callable[[TypeReport], None] = lambda report: None) -> str:
    """Tests all types in sequence and renders their page in docs/."""
    reports = []
    for name in sorted(TYPES):
        reports.append(try_type(name))
        report_on(reports[-1])
    return PAGE.format(version=transformers.__version__, rows="\n".join(types_table(reports)))


def try_type(name: str) -> TypeReport:
    with tempfile.TemporaryDirectory() as scratch:
        theirs = write_tiny(name, scratch)
        found: dict[str, float] = {}
        reason = ""
        for backend in ("archon", "fsdp") if has_file(name) else ("fsdp",):
            try:
                found[backend] = _trained_diff(scratch, backend, theirs)
            except UserError as error:
                reason = _rules_of(error)
        if not found:
            return TypeReport(name, (), None, reason)
        sampled: list[float] = []
        reason = ""
        try:
            sampled += [_sampled_diff(scratch, how, theirs) for how in SAMPLING]
        except UserError as error:
            reason = f"sampler: {_rules_of(error)}"
        largest = max([*found.values(), *sampled])
        return TypeReport(name, tuple(found), largest, reason)


def _rules_of(error: UserError) -> str:
    return "; ".join(p.rule if isinstance(p, Problem) else p for p in error.problems)


@torch.no_grad()
def write_tiny(name: str, folder: str | Path, **more: Any) -> nn.Module:
    """Creates transformers' model of a type with random weights and saves it to the folder."""
    config = transformers.AutoConfig.for_model(name, **{**SIZES, **TYPES[name], **more})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **PLAIN)
    source = generator(2)
    for tensor in model.parameters():
        tensor.add_(0.1 * torch.randn(tensor.shape, generator=source))
    model.save_pretrained(folder)
    own: nn.Module = model.eval()
    return own


@torch.no_grad()
def own_logprobs(theirs: nn.Module, ids_T: Tensor) -> Tensor:
    """transformers' log-prob of every token but the first."""
    logits_TV = theirs(input_ids=ids_T[None], use_cache=False).logits[0].float()
    return logits_TV.log_softmax(-1)[:-1].gather(1, ids_T[1:, None])[:, 0]


def _trained_diff(folder: str, backend: str, theirs: nn.Module) -> float:
    settings = EngineSettings(model=ModelConfig(dtype="float32"))
    engine = build_engine(folder, settings, backend=backend)  # type: ignore[arg-type]
    draw = generator(3)
    rows = [Row(torch.randint(3, 96, (n,), generator=draw), {}) for n in (7, 12, 3)]
    pairs = zip(rows, engine.forward(rows), strict=True)
    gaps = [out["logprobs"][1:] - own_logprobs(theirs, row.ids) for row, out in pairs]
    return float(torch.cat(gaps).abs().max())


def _sampled_diff(folder: str, keys: dict[str, Any], theirs: nn.Module) -> float:
    given = dict(keys)
    tokens = given.pop("kv_cache_tokens", 8192)
    rollout = RolloutConfig().model_copy(update=given)  # bypasses the bounds of config keys
    settings = SamplerSettings(rollout=rollout, kv_cache_tokens=tokens, block_size=4)
    requests = [
        Request(
            id=f"{i}",
            prompt_ids=tuple(3 + 7 * j % 90 for j in range(1 + 5 * i)),
            params=SamplingParams(max_new_tokens=8),
            seeds=(i, i + 100),
        )
        for i in range(5)
    ]

    async def draw() -> list[list[Generation]]:
        sampler = EmbeddedSampler.from_folder(folder, settings)
        try:
            return await asyncio.gather(*(sampler.generate(one) for one in requests))
        finally:
            await sampler.close()

    largest = 0.0
    for request, made in zip(requests, asyncio.run(draw()), strict=True):
        for one in made:
            ids_T = torch.tensor([*request.prompt_ids, *one.ids])
            expected_N = own_logprobs(theirs, ids_T)[-len(one.ids) :]
            largest = max(largest, float((expected_N - torch.tensor(one.logprobs)).abs().max()))
    return largest
