"""New families on a GPU: right and fast, beside transformers in the same run.

    python benchmarks/families_gpu.py                        # everything
    python benchmarks/families_gpu.py check qwen3_5_text     # the named parts and families only
    python benchmarks/families_gpu.py --tiny                 # the same code with toy dimensions

Parts: `check` (the sampler's log-probs by kernels, captured graphs, chunks and preemption against
one plain forward, float32), `train` (tokens/s of bf16 training), `sample` (256 requests of 128 +
256 tokens, bf16), `peer` (transformers' training and generate at batch 64 for the same config). A
part that fails prints its traceback and the next one runs.

Dimensions are those of published models, with fewer layers where a whole one is too large; weights
are random.
"""

from __future__ import annotations

import asyncio
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from sampler_load import requests  # noqa: E402

from pentad.core.types import Generation, Request  # noqa: E402
from pentad.infer.sampler import EmbeddedSampler  # noqa: E402
from pentad.infer.section import SamplerSettings  # noqa: E402
from pentad.models.decoder import Decoder, causal_attend  # noqa: E402
from pentad.models.families import dims_of  # noqa: E402
from pentad.models.moe import Router, Routes  # noqa: E402
from pentad.models.registry import build_model, initialise  # noqa: E402
from pentad.rollout.section import RolloutConfig  # noqa: E402
from pentad_tools.bench.bench_train import TrainCase, Who, build_ours, free_memory, measure  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_TINY = "--tiny" in sys.argv
NUM_REQUESTS, BATCH = (8, 4) if IS_TINY else (256, 64)
PROMPT, NEW = (24, 8) if IS_TINY else (128, 256)
VOCAB = 512 if IS_TINY else 151936
SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
}


def linear(num_layers: int) -> list[str]:
    return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(num_layers)]


MODELS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": SHARED  # as Qwen3.5-0.8B
    | {
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": linear(24),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "gpt_oss": SHARED  # six layers of gpt-oss-20b
    | {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "deepseek_v3": SHARED  # eight layers of Moonlight-16B-A3B
    | {
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 8,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.446,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
    "gemma2": SHARED  # as gemma-2-2b
    | {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(26)],
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gemma3_text": SHARED  # as gemma-3-1b
    | {
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(26)],
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
}
CUTS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 0.5,
}


def config_of(family: str, num_layers: int | None = None) -> dict[str, Any]:
    config = {"model_type": family, **MODELS[family]}
    if IS_TINY:
        config |= {key: value for key, value in CUTS.items() if key in config}
        if family == "deepseek_v3":
            config["num_key_value_heads"] = config["num_attention_heads"]
        num_layers = 4
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:num_layers]
    return config


def model_of(family: str, dtype: torch.dtype, num_layers: int | None = None) -> Decoder:
    model = build_model(dims_of(config_of(family, num_layers)), device=DEVICE, dtype=dtype)
    initialise(model, seed=0)
    assert isinstance(model, Decoder)
    return model


def settings(**values: Any) -> SamplerSettings:
    keys = {"max_running": NUM_REQUESTS}
    keys |= {k: values.pop(k) for k in [*values] if k in RolloutConfig.model_fields}
    room = values.pop("kv_cache_tokens", NUM_REQUESTS * (PROMPT + NEW) * 2)
    return SamplerSettings(
        rollout=RolloutConfig(**keys), max_context=4096, kv_cache_tokens=room, **values
    )


def load_of(num: int, **shape: int) -> list[Request]:
    return [
        replace(r, prompt_ids=tuple(i % VOCAB for i in r.prompt_ids))
        for r in requests(num, **shape)
    ]


def drawn(sampler: EmbeddedSampler, load: list[Request]) -> tuple[float, list[list[Generation]]]:
    async def once() -> tuple[float, list[list[Generation]]]:
        start = time.perf_counter()
        results = await asyncio.gather(*(sampler.generate(r) for r in load))
        return time.perf_counter() - start, results

    return asyncio.run(once())


def check(family: str) -> None:
    """Log-probs of what each path drew against one plain forward of the same model."""
    load = [*load_of(5, n=3, prompt=100, new=24), *load_of(9, prompt=37, new=40)]
    load = [replace(r, id=f"c{i}") for i, r in enumerate(load)]
    plain = model_of(family, torch.float32, 4)
    paths: dict[str, dict[str, Any]] = {
        "torch": {"kernels": "torch"},
        "default": {},
        "no graphs": {"cuda_graphs": False},
        "chunked": {"max_running": 16, "max_batch_tokens": 64},
        "preempted": {"kv_cache_tokens": 720},
    }
    for dtype in (torch.float32, torch.bfloat16) if DEVICE.type == "cuda" else (torch.float32,):
        truth = plain if dtype == torch.float32 else model_of(family, dtype, 4)
        for name, values in paths.items():
            if DEVICE.type != "cuda" and name == "no graphs":
                continue
            replays = bool(plain.dims.num_experts)
            sampler = EmbeddedSampler(
                model_of(family, dtype, 4), settings(replay_routes=replays, **values)
            )
            runner = sampler.engine.runner
            _, results = drawn(sampler, load)
            pairs = [(r, g) for r, gs in zip(load, results, strict=True) for g in gs]
            found = [(torch.tensor(g.logprobs) - forced_on(truth, r, g)).abs() for r, g in pairs]
            ties = [
                near_ties(truth, r, g) if replays else gap > 1e9
                for (r, g), gap in zip(pairs, found, strict=True)
            ]
            gaps, is_tie = torch.cat(found), torch.cat(ties)
            print(
                f"check {family} {str(dtype)[6:]} {name}: kernels {runner.has_kernels}, captured "
                f"{runner.captures_graphs}; log-probs against one forward: max {gaps.max():.2e}, "
                f"mean {gaps.mean():.2e}; preemptions {sampler.stats()['preemptions']:.0f}; tokens "
                f"at or after a tie of experts {int(is_tie.sum())}, the others max "
                f"{gaps[~is_tie].max():.2e}",
                flush=True,
            )
            asyncio.run(sampler.close())
            assert dtype != torch.float32 or gaps[~is_tie].max() < 2e-3, (
                "log-probs differ beyond rounding"
            )


@torch.inference_mode()
def forced_on(model: Decoder, request: Request, generation: Generation) -> torch.Tensor:
    """Log-probs of what was drawn by one plain forward, whose tokens go to the same experts: with
    random weights two scores of a router may differ by less than rounding."""
    ids = torch.tensor([*request.prompt_ids, *generation.ids], device=DEVICE)
    routes: Routes | None = None
    if generation.routes is not None:
        chosen = torch.from_numpy(generation.routes.astype("int64")).to(DEVICE)
        layers = [n for n in range(model.dims.num_layers) if model.dims.is_moe(n)]
        ids = ids[: len(chosen)]
        routes = {layer: chosen[:, n] for n, layer in enumerate(layers)}
    hidden = model(ids, torch.arange(len(ids), device=DEVICE), causal_attend, routes)
    logprobs = model.logits(hidden).float().log_softmax(-1)
    drawn = torch.tensor(generation.ids, device=DEVICE)
    first = len(request.prompt_ids) - 1
    part = logprobs[first : first + len(drawn)].gather(1, drawn[:, None])
    return part.squeeze(1).cpu()


@torch.inference_mode()
def near_ties(model: Decoder, request: Request, generation: Generation) -> torch.Tensor:
    """Tokens at or after a position where some router's last chosen score and the first that is not
    chosen differ by less than rounding: computed again after a preemption, that position may go to
    another expert, and what follows attends to the result."""
    margins: list[torch.Tensor] = []

    def note(router: Router, given: tuple[torch.Tensor, ...], _: object) -> None:
        logits = router.moved(given[0].float() @ router.weight.float().t())
        best = logits.topk(model.dims.num_experts_per_token + 1, dim=-1).values
        margins.append(best[:, -2] - best[:, -1])

    hooks = [m.register_forward_hook(note) for m in model.modules() if isinstance(m, Router)]
    ids = torch.tensor([*request.prompt_ids, *generation.ids], device=DEVICE)
    model(ids, torch.arange(len(ids), device=DEVICE), causal_attend)
    for hook in hooks:
        hook.remove()
    first = len(request.prompt_ids) - 1
    least = torch.stack(margins).amin(0).cummin(0).values
    return (least[first : first + len(generation.ids)] < 2e-5).cpu()


def case_of(family: str, who: Who, *, compiled: bool) -> TrainCase:
    length, tokens = (32, 128) if IS_TINY else (2048, 16384)
    return TrainCase(
        model=family,
        config=config_of(family),
        length=length,
        num_tokens=tokens,
        who=who,
        microbatch=tokens,
        masters="float32" if IS_TINY else "bfloat16",
        compiled=compiled,
        ac_mode="selective" if who == "pentad" and not IS_TINY else "none",
    )


def train(family: str) -> None:
    found = measure(case_of(family, "pentad", compiled=not IS_TINY), DEVICE, 5)
    show_training(family, "pentad", found)


def profile(family: str) -> None:
    """Kernels of a training step by their time on the device."""
    found = case_of(family, "pentad", compiled=not IS_TINY)
    step = build_ours(found, DEVICE)
    for _ in range(3):
        step()
    kinds = torch.profiler.ProfilerActivity
    activity = kinds.CUDA if DEVICE.type == "cuda" else kinds.CPU
    with torch.profiler.profile(activities=[activity]) as prof:
        step()
    key = "self_cuda_time_total" if DEVICE.type == "cuda" else "self_cpu_time_total"
    print(prof.key_averages().table(sort_by=key, row_limit=22, max_name_column_width=60))


def show_training(family: str, who: str, found: Any) -> None:
    peak = f", peak {found.peak_gib:.1f} GiB" if found.peak_gib else ""
    print(
        f"train {family} {who} ({found.case.name}): {found.tokens_per_s:,.0f} tok/s, "
        f"{found.ms:.0f} ms a step{peak}, warm-up {found.warm_up_s:.0f} s, first loss "
        f"{found.loss:.3f}",
        flush=True,
    )


def sample(family: str) -> None:
    dtype = torch.float32 if IS_TINY else torch.bfloat16
    sampler = EmbeddedSampler(model_of(family, dtype), settings())
    runner = sampler.engine.runner
    for label in ("first", "second"):
        seconds, results = drawn(sampler, load_of(NUM_REQUESTS, prompt=PROMPT, new=NEW))
        tokens = sum(len(g.ids) for gs in results for g in gs)
        print(
            f"sample {family} {label}: {tokens / seconds:,.0f} tok/s (kernels "
            f"{runner.has_kernels}, captured {runner.captures_graphs})",
            flush=True,
        )
    asyncio.run(sampler.close())


def peer(family: str) -> None:
    """transformers in eager mode: what it compiles of these families breaks in most."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        found = measure(case_of(family, "transformers", compiled=False), DEVICE, 3, 1)
        show_training(family, "transformers", found)
    except (RuntimeError, ValueError) as problem:
        print(f"train {family} transformers: {type(problem).__name__}: {problem}"[:300], flush=True)
    free_memory(DEVICE)
    options = {key: value for key, value in config_of(family).items() if key != "model_type"}
    config = AutoConfig.for_model(family, **options, eos_token_id=None, pad_token_id=0)
    dtype = torch.float32 if IS_TINY else torch.bfloat16
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    ids = torch.tensor([r.prompt_ids for r in load_of(BATCH, prompt=PROMPT, new=NEW)])
    new = min(NEW, 64)
    for label, count in (("warm-up", 4), ("timed", new)):
        start = time.perf_counter()
        model.generate(
            ids.to(DEVICE),
            attention_mask=torch.ones_like(ids).to(DEVICE),
            do_sample=True,
            max_new_tokens=count,
            min_new_tokens=count,
        )
        seconds = time.perf_counter() - start
        if label == "timed":
            print(
                f"sample {family} transformers generate, batch {BATCH}: "
                f"{BATCH * new / seconds:,.0f} tok/s",
                flush=True,
            )


PARTS: dict[str, Callable[[str], None]] = {
    part.__name__: part for part in (check, sample, train, profile, peer)
}


def main() -> None:
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    if unknown := [name for name in names if name not in {**PARTS, **MODELS}]:
        sys.exit(
            f"{unknown[0]}: name a part ({', '.join(PARTS)}) or a family ({', '.join(MODELS)})"
        )
    failed = 0
    for family in [n for n in names if n in MODELS] or list(MODELS):
        for part in [n for n in names if n in PARTS] or list(PARTS):
            try:
                PARTS[part](family)
            except Exception:  # one part's trouble is shown, and the next one runs
                traceback.print_exc()
                failed += 1
            free_memory(DEVICE)
    sys.exit(f"{failed} parts failed" if failed else 0)


if __name__ == "__main__":
    main()
