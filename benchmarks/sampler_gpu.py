"""Speed of the embedded sampler on a GPU, beside transformers' generate in the same run.

    python benchmarks/sampler_gpu.py                  # everything, about three minutes
    python benchmarks/sampler_gpu.py check load       # the named parts only

Parts: `check` (the kernels and captured graphs give the plain engine's log-probs), `load` (256
requests, 128 prompt + 256 new tokens), `group` (a group of 8 prefills its prompt once), `update`
(new weights in place), `profile` (where a decode step's time goes), `moe` (a slice of a mixture),
`hf` (transformers generate, batch 64). A part that fails is reported and the next one runs.

Dimensions are those of Qwen3-0.6B, weights random, bf16. Needs torch, triton, numpy, transformers.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch

from pentad.core.digest import digest_of
from pentad.core.dims import ModelDims
from pentad.core.types import Generation, Request, SamplingParams
from pentad.infer.engine import Report
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.settings import SamplerSettings
from pentad.models.decoder import Decoder, causal_attend
from pentad.models.exchange import install_hf, iter_hf
from pentad.models.registry import build_model

QWEN3_06B = ModelDims(
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    tie_embeddings=True,
    qk_norm=True,
    rope_theta=1e6,
    max_position=40960,
)
MOE_SLICE = replace(
    QWEN3_06B,
    family="qwen3_moe",
    hidden_size=2048,
    num_layers=8,
    num_heads=32,
    num_kv_heads=4,
    intermediate_size=6144,
    tie_embeddings=False,
    num_experts=128,
    num_experts_per_token=8,
    moe_intermediate_size=768,
    moe_layers=(True,) * 8,
)
NUM_REQUESTS, PROMPT, NEW, HF_BATCH = 256, 128, 256, 64
SETTINGS = SamplerSettings(max_running=256, max_context=4096, kv_cache_tokens=1 << 18)


def requests(num: int, *, n: int = 1, prompt: int = PROMPT, new: int = NEW) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(max_new_tokens=new)
    return [
        Request(
            id=f"r{i}",
            prompt_ids=tuple(torch.randint(151936, (prompt,), generator=generator).tolist()),
            params=params,
            seeds=tuple(range(n * i, n * i + n)),
        )
        for i in range(num)
    ]


def run(sampler: EmbeddedSampler, load: list[Request]) -> tuple[float, list[list[Generation]]]:
    async def once() -> tuple[float, list[list[Generation]]]:
        start = time.perf_counter()
        results = await asyncio.gather(*(sampler.generate(r) for r in load))
        return time.perf_counter() - start, results

    return asyncio.run(once())


def random_model(dims: ModelDims, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """Random weights drawn on the device: seconds sooner than `create_model`."""
    model = build_model(dims, device="cuda", dtype=dtype)
    generator = torch.Generator("cuda").manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, dims.initializer_range, generator=generator)
    return model


def build(dims: ModelDims = QWEN3_06B) -> EmbeddedSampler:
    return EmbeddedSampler(random_model(dims), SETTINGS, version=0)


def close(sampler: EmbeddedSampler) -> None:
    asyncio.run(sampler.close())


@torch.inference_mode()
def forced(model: Decoder, request: Request, generation: Generation) -> torch.Tensor:
    """Log-probs of what was drawn, by one plain forward over the whole sequence."""
    ids = torch.tensor([*request.prompt_ids, *generation.ids], device="cuda")
    hidden = model(ids, torch.arange(len(ids), device="cuda"), causal_attend)
    logprobs = model.logits(hidden).float().log_softmax(-1)[:-1].gather(1, ids[1:, None])
    return logprobs.squeeze(1)[len(request.prompt_ids) - 1 :].cpu()


def check() -> None:
    """fp32 tokens and log-probs of all paths agree; in bf16 the difference is printed."""
    small = replace(QWEN3_06B, num_layers=4, initializer_range=0.05)
    load = [*requests(5, n=3, prompt=100, new=24), *requests(9, prompt=37, new=40)]
    load = [replace(r, id=f"c{i}") for i, r in enumerate(load)]
    for dtype in (torch.float32, torch.bfloat16):
        plain = random_model(small, dtype=dtype)
        ids: dict[str, list[list[int]]] = {}
        for name, settings in (
            ("torch", replace(SETTINGS, kernels="torch")),
            ("triton", replace(SETTINGS, cuda_graphs=False)),
            ("graphs", SETTINGS),
            ("graphs chunked", replace(SETTINGS, max_running=16, max_batch_tokens=64)),
            ("graphs preempted", replace(SETTINGS, kv_cache_tokens=720)),
        ):
            model = random_model(small, dtype=dtype)
            sampler = EmbeddedSampler(model, settings)
            _, results = run(sampler, load)
            differences = [
                (torch.tensor(g.logprobs) - forced(plain, r, g)).abs()
                for r, gs in zip(load, results, strict=True)
                for g in gs
            ]
            all_differences = torch.cat(differences)
            ids[name] = [g.ids for gs in results for g in gs]
            same = sum(a == b for a, b in zip(ids[name], ids["torch"], strict=True))
            print(
                f"check {str(dtype)[6:]:9} {name:16} log-probs against one plain forward: max "
                f"{all_differences.max():.2e}, mean {all_differences.mean():.2e}; sequences equal "
                f"to plain torch {same}/{len(ids[name])}; preemptions "
                f"{sampler.stats()['preemptions']:.0f}"
            )
            if dtype == torch.float32:
                assert all_differences.max() < 1e-3, "fp32 log-probs differ beyond rounding"
            close(sampler)


def load() -> None:
    sampler = build()
    print(f"load: {NUM_REQUESTS} requests, {PROMPT} prompt + {NEW} new tokens")
    for label in ("first (compiles and captures)", "second", "third"):
        seconds, results = run(sampler, requests(NUM_REQUESTS))
        tokens = sum(len(g.ids) for gs in results for g in gs)
        assert tokens == NUM_REQUESTS * NEW
        print(f"load {label}: {seconds:.2f} s, {tokens / seconds:,.0f} generated tok/s")
    generator = torch.Generator().manual_seed(5)
    ragged = [
        replace(r, params=SamplingParams(max_new_tokens=int(n)))
        for r, n in zip(
            requests(4 * NUM_REQUESTS),
            torch.randint(16, NEW + 1, (4 * NUM_REQUESTS,), generator=generator),
            strict=True,
        )
    ]
    for label in ("first", "second"):
        seconds, results = run(sampler, ragged)
        tokens = sum(len(g.ids) for gs in results for g in gs)
        print(
            f"load ragged answers of 16 to {NEW}, {len(ragged)} requests, {label}: "
            f"{seconds:.2f} s, {tokens / seconds:,.0f} generated tok/s"
        )
    close(sampler)


def group() -> None:
    sampler = build()
    run(sampler, requests(8, n=8, prompt=2048, new=2))
    for name, work in (
        ("32 groups of 8", requests(32, n=8, prompt=2048, new=2)),
        ("256 single requests", requests(256, prompt=2048, new=2)),
    ):
        before = sampler.stats()
        seconds, _ = run(sampler, work)
        after = sampler.stats()
        computed, reused = (
            after[key] - before[key] for key in ("prefill_tokens_computed", "prefill_tokens_reused")
        )
        print(
            f"group: {name}, prompts of 2048 + 2 tokens: {1000 * seconds:.0f} ms, prompt tokens "
            f"computed {computed:,.0f}, shared {reused:,.0f}"
        )
    close(sampler)


def update() -> None:
    sampler = build()
    other = random_model(QWEN3_06B, seed=7)
    weights = list(iter_hf(other))
    size = sum(t.numel() * t.element_size() for _, t in weights)
    run(sampler, requests(8, new=8))

    async def timed(version: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        await sampler.install(version, weights)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def parts() -> tuple[float, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        install_hf(sampler.engine.model, weights)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        digest_of(iter_hf(sampler.engine.model)).hex()
        return middle - start, time.perf_counter() - middle

    copy_s, digest_s = min(parts() for _ in range(3))
    print(f"update: copy {1000 * copy_s:.1f} ms, digest {1000 * digest_s:.1f} ms")
    times = [asyncio.run(timed(version)) for version in range(1, 6)]
    print(
        f"update: {len(weights)} tensors, {size / 1e9:.2f} GB in place, copied and digested: "
        f"{1000 * min(times):.1f} ms (all: {', '.join(f'{1000 * t:.1f}' for t in times)})"
    )

    async def nap() -> tuple[float, float]:
        start = time.perf_counter()
        await sampler.sleep()
        middle = time.perf_counter()
        await sampler.wake()
        return middle - start, time.perf_counter() - middle

    down, up = asyncio.run(nap())
    print(f"update: sleep {1000 * down:.0f} ms, wake {1000 * up:.0f} ms")
    close(sampler)


def profile() -> None:
    """Device time of one decode step by kernel, and the host's share of it."""
    sampler = build()
    run(sampler, requests(NUM_REQUESTS, new=NEW))
    engine = sampler.engine
    for request in requests(NUM_REQUESTS, new=NEW):
        engine.submit(request)
    while engine.table.num_tokens[engine.scheduler.rows].max(initial=0) < PROMPT + NEW // 2:
        engine.step(Report())
    torch.cuda.synchronize()
    steps, start = 20, time.perf_counter()
    for _ in range(steps):
        engine.step(Report())
    wall = (time.perf_counter() - start) / steps
    decoder = engine.runner.decoder
    assert decoder is not None
    size, begin = NUM_REQUESTS, time.perf_counter()
    with torch.inference_mode():
        for _ in range(steps):
            decoder.replay(size)
        torch.cuda.synchronize()
        replay = (time.perf_counter() - begin) / steps
        print(
            f"profile: decode step at {NUM_REQUESTS} rows, context {PROMPT + NEW // 2}: "
            f"{1000 * wall:.2f} ms, of it graph {1000 * replay:.2f} ms, the rest host"
        )
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            decoder.replay(size)
            torch.cuda.synchronize()
    print(prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=16))
    close(sampler)


def moe() -> None:
    sampler = build(MOE_SLICE)
    for label in ("first", "second"):
        seconds, results = run(sampler, requests(NUM_REQUESTS, new=32))
        tokens = sum(len(g.ids) for gs in results for g in gs)
        print(f"moe: 8 layers of 30B-A3B, {label}: {tokens / seconds:,.0f} generated tok/s")
    close(sampler)


def hf() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    d = QWEN3_06B
    config = Qwen3Config(
        vocab_size=d.vocab_size,
        hidden_size=d.hidden_size,
        num_hidden_layers=d.num_layers,
        num_attention_heads=d.num_heads,
        num_key_value_heads=d.num_kv_heads,
        head_dim=d.head_dim,
        intermediate_size=d.intermediate_size,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
        dtype=torch.bfloat16,
    )
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    ids = torch.tensor([r.prompt_ids for r in requests(HF_BATCH)], device="cuda")
    for label, new in (("warm-up", 8), ("timed", NEW)):
        start = time.perf_counter()
        model.generate(ids, do_sample=True, max_new_tokens=new, min_new_tokens=new)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if label == "timed":
            print(
                f"hf: transformers generate, batch {HF_BATCH}, {PROMPT} + {NEW}: "
                f"{HF_BATCH * NEW / seconds:,.0f} generated tok/s"
            )


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part for part in (check, load, profile, group, update, hf, moe)
}


def main() -> None:
    names = sys.argv[1:] or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        sys.exit(f"no such part: {unknown}; known are {list(PARTS)}")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    failed = []
    for name in names:
        start = time.perf_counter()
        try:
            PARTS[name]()
        except Exception:
            failed.append(name)
            traceback.print_exc()
        gc.collect()
        torch.cuda.empty_cache()
        print(f"-- {name}: {time.perf_counter() - start:.0f} s", flush=True)
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
