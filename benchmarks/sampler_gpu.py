"""Speed of the embedded sampler on a GPU, beside transformers' generate in the same run.

    python benchmarks/sampler_gpu.py                  # everything, about four minutes
    python benchmarks/sampler_gpu.py check load       # the named parts only
    python benchmarks/sampler_gpu.py --json out.json  # and the figures as JSON

Parts: `check` (the kernels and captured graphs give the plain engine's log-probs), `load` (256
requests, 128 prompt + 256 new tokens), `group` (a group of 8 prefills its prompt once), `update`
(new weights in place), `profile` (where a decode step's time goes), `moe` (a slice of a mixture),
`strict` (bitwise equality with the strict learner), `price` (what strict costs), `hf` and
`hf_batch` (transformers generate at batch 64, and generate_batch). A part that fails is reported
and the next one runs.

Dimensions are those of Qwen3-0.6B, weights random, bf16. Needs torch, triton, numpy, transformers.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sampler_load import (
    MOE_SLICE,
    NEW,
    PROMPT,
    QWEN3_06B,
    forced,
    random_model,
    requests,
)

from pentad.core.dims import ModelDims
from pentad.core.types import Generation, Request, SamplingParams
from pentad.engine.predictor import Predictor
from pentad.infer.engine import Report
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.section import SamplerSettings
from pentad.models.decoder import Decoder
from pentad.models.hf_weights import install_hf, iter_hf
from pentad.models.strict import apply_strict
from pentad.ops.attention import build_attend
from pentad.ops.digest import digest_of
from pentad.ops.invariant import PackedAttend
from pentad.rollout.section import RolloutConfig

NUM_REQUESTS, HF_BATCH = 256, 64
FIGURES: dict[str, float] = {}
"""What the parts measured, by name and unit."""
SETTINGS = SamplerSettings(
    rollout=RolloutConfig(max_running=256), max_context=4096, kv_cache_tokens=1 << 18
)


def run(sampler: EmbeddedSampler, load: list[Request]) -> tuple[float, list[list[Generation]]]:
    async def once() -> tuple[float, list[list[Generation]]]:
        start = time.perf_counter()
        results = await asyncio.gather(*(sampler.generate(r) for r in load))
        return time.perf_counter() - start, results

    return asyncio.run(once())


def changed(**values: Any) -> SamplerSettings:
    keys = {k: values.pop(k) for k in [*values] if k in RolloutConfig.model_fields}
    rollout = SETTINGS.rollout.model_copy(update=keys)
    return SETTINGS.model_copy(update={"rollout": rollout, **values})


def build(dims: ModelDims = QWEN3_06B, settings: SamplerSettings = SETTINGS) -> EmbeddedSampler:
    return EmbeddedSampler(random_model(dims), settings, version=0)


def close(sampler: EmbeddedSampler) -> None:
    asyncio.run(sampler.close())


def check() -> None:
    """fp32 tokens and log-probs of all paths agree; in bf16 the difference is printed."""
    small = replace(QWEN3_06B, num_layers=4, initializer_range=0.05)
    load = [*requests(5, n=3, prompt=100, new=24), *requests(9, prompt=37, new=40)]
    load = [replace(r, id=f"c{i}") for i, r in enumerate(load)]
    for dtype in (torch.float32, torch.bfloat16):
        plain = random_model(small, dtype=dtype)
        ids: dict[str, list[list[int]]] = {}
        for name, settings in (
            ("torch", changed(kernels="torch")),
            ("triton", changed(cuda_graphs=False)),
            ("graphs", SETTINGS),
            ("graphs chunked", changed(max_running=16, max_batch_tokens=64)),
            ("graphs preempted", changed(kv_cache_tokens=720)),
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
        FIGURES["load_tok_per_s"] = tokens / seconds
    generator = torch.Generator().manual_seed(5)
    ragged = [
        replace(r, params=SamplingParams(max_new_tokens=int(n)))
        for r, n in zip(
            requests(4 * NUM_REQUESTS),
            torch.randint(16, NEW + 1, (4 * NUM_REQUESTS,), generator=generator),
            strict=True,
        )
    ]
    close(sampler)
    del sampler
    for max_running in (NUM_REQUESTS, len(ragged)):  # the second is what a run takes by itself
        room = 2 * max_running * (PROMPT + NEW)
        sampler = build(settings=changed(max_running=max_running, kv_cache_tokens=room))
        for label in ("first", "second", "third"):
            seconds, results = run(sampler, ragged)
            tokens = sum(len(g.ids) for gs in results for g in gs)
            FIGURES[f"load_ragged_{max_running}_tok_per_s"] = tokens / seconds
            print(
                f"load ragged answers of 16 to {NEW}, {len(ragged)} requests, at most "
                f"{max_running} together, {label}: {seconds:.2f} s, {tokens / seconds:,.0f} "
                "generated tok/s"
            )
        close(sampler)
        del sampler


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
    FIGURES["update_ms"] = 1000 * sorted(times)[2]
    FIGURES["update_copy_ms"], FIGURES["update_digest_ms"] = 1000 * copy_s, 1000 * digest_s
    print(
        f"update: {len(weights)} tensors, {size / 1e9:.2f} GB in place, copied and digested: "
        f"{1000 * min(times):.1f} ms (all: {', '.join(f'{1000 * t:.1f}' for t in times)})"
    )

    odd = [("odd", torch.randn(1001, device="cuda").bfloat16()[1:]), ("none", torch.zeros(0))]
    odd += [("wide", torch.randn(3, 70001, device="cuda").t()), weights[0]]
    on_gpu, on_cpu = digest_of(odd), digest_of([(name, t.cpu()) for name, t in odd])
    assert on_gpu.entries == on_cpu.entries, "the digest depends on the device"

    async def nap() -> tuple[float, float]:
        start = time.perf_counter()
        await sampler.sleep()
        middle = time.perf_counter()
        await sampler.wake()
        torch.cuda.synchronize()
        return middle - start, time.perf_counter() - middle

    for label in ("first", "second", "third"):
        down, up = asyncio.run(nap())
        print(f"update: {label} sleep {1000 * down:.0f} ms, wake {1000 * up:.0f} ms")
        FIGURES[f"sleep_{label}_ms"], FIGURES[f"wake_{label}_ms"] = 1000 * down, 1000 * up
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
            decoder.replay(size, is_shared=False)
        torch.cuda.synchronize()
        replay = (time.perf_counter() - begin) / steps
        print(
            f"profile: decode step at {NUM_REQUESTS} rows, context {PROMPT + NEW // 2}: "
            f"{1000 * wall:.2f} ms, of it graph {1000 * replay:.2f} ms, the rest host"
        )
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            decoder.replay(size, is_shared=False)
            torch.cuda.synchronize()
    print(prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=16))
    close(sampler)


def moe() -> None:
    for name, settings in (
        ("eager", changed(cuda_graphs=False)),
        ("graphs", SETTINGS),
        ("graphs, routes recorded", changed(replay_routes=True)),
    ):
        sampler = build(MOE_SLICE, settings)
        is_captured = sampler.engine.runner.captures_graphs
        for label in ("first", "second"):
            seconds, results = run(sampler, requests(NUM_REQUESTS, new=128))
            tokens = sum(len(g.ids) for gs in results for g in gs)
            print(
                f"moe: 8 layers of 30B-A3B, {name} (captured: {is_captured}), {label}: "
                f"{tokens / seconds:,.0f} generated tok/s"
            )
        FIGURES[f"moe_{name.replace(', ', '_').replace(' ', '_')}_tok_per_s"] = tokens / seconds
        close(sampler)
        del sampler
        gc.collect()
        torch.cuda.empty_cache()


SHORT = replace(QWEN3_06B, num_layers=4, initializer_range=0.05)
SHORT_MOE = replace(MOE_SLICE, num_layers=4, num_experts=32, moe_layers=(True,) * 4)


def predict(model: Decoder, load: list[Request], results: list[list[Generation]]) -> list:
    """The strict learner's log-probs of what was drawn, all sequences packed."""
    pairs = [(r, g) for r, gs in zip(load, results, strict=True) for g in gs]
    rows = [torch.tensor([*r.prompt_ids, *g.ids]) for r, g in pairs]
    lengths = [len(row) for row in rows]
    plain = build_attend(
        lengths, device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=model.dims.head_dim
    )
    attend = PackedAttend(lengths, plain, torch.device("cuda"))
    labels = torch.cat([torch.cat([row[1:], torch.tensor([-1])]) for row in rows]).cuda()
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    predictor = Predictor(model, 0.8, None, strict=True)
    with torch.no_grad():
        logprobs, _, _ = predictor(torch.cat(rows).cuda(), positions, labels, attend)
    parts = logprobs.cpu().split(lengths)
    return [
        (part[len(r.prompt_ids) - 1 : -1], torch.tensor(g.logprobs))
        for part, (r, g) in zip(parts, pairs, strict=True)
    ]


def strict() -> None:
    """Bits of the sampler's log-probs against the learner's, for every way of batching."""
    hot = SamplingParams(max_new_tokens=40, temperature=0.8)
    load = [*requests(5, n=3, prompt=100), *requests(9, prompt=37), *requests(40, prompt=300)]
    load = [replace(r, id=f"s{i}", params=hot) for i, r in enumerate(load)]
    for name, dims in (("dense", SHORT), ("mixture", SHORT_MOE)):
        for way, settings in (
            ("graphs", SETTINGS),
            ("eager", changed(cuda_graphs=False)),
            ("chunked", changed(max_running=16, max_batch_tokens=64)),
            ("preempted", changed(kv_cache_tokens=2048)),
            ("not strict", changed(strict=False)),
        ):
            is_strict = way != "not strict"
            sampler = EmbeddedSampler(random_model(dims), replace(settings, strict=is_strict))
            _, results = run(sampler, load)
            learner = random_model(dims)
            apply_strict(learner)
            pairs = predict(learner, load, results)
            same = sum(torch.equal(a, b) for a, b in pairs)
            gap = torch.cat([(a - b).abs() for a, b in pairs])
            print(
                f"strict {name}, {way}: {same}/{len(pairs)} sequences equal bit for bit, largest "
                f"difference {gap.max():.2e}, mean {gap.mean():.2e}, preemptions "
                f"{sampler.stats()['preemptions']:.0f}"
            )
            FIGURES[f"strict_{name}_{way.replace(' ', '_')}_equal_share"] = same / len(pairs)
            FIGURES[f"strict_{name}_{way.replace(' ', '_')}_gap_mean"] = float(gap.mean())
            close(sampler)


def price() -> None:
    """Strict beside plain: sampling, and one forward and backward of the learner."""
    for name, dims, new in (("dense", QWEN3_06B, NEW), ("moe", MOE_SLICE, 128)):
        for is_strict in (False, True):
            sampler = build(dims, changed(strict=is_strict))
            run(sampler, requests(NUM_REQUESTS, new=new))
            seconds, results = run(sampler, requests(NUM_REQUESTS, new=new))
            speed = sum(len(g.ids) for gs in results for g in gs) / seconds
            label = "strict" if is_strict else "plain"
            print(f"price: sampling {name}, {label}: {speed:,.0f} generated tok/s")
            FIGURES[f"price_sampling_{name}_{label}_tok_per_s"] = speed
            close(sampler)
            del sampler
            gc.collect()
            torch.cuda.empty_cache()
    lengths = [2048] * 8
    ids = torch.randint(151936, (sum(lengths),), device="cuda")
    positions = torch.arange(2048, device="cuda").repeat(8)
    for is_strict in (False, True):
        model = random_model(replace(QWEN3_06B, num_layers=8))
        if is_strict:
            apply_strict(model)
        attend = build_attend(
            lengths, device=torch.device("cuda"), dtype=torch.bfloat16, head_dim=128
        )
        core = PackedAttend(lengths, attend, torch.device("cuda")) if is_strict else attend
        predictor = Predictor(model, 1.0, None, strict=is_strict)
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            logprobs, _, _ = predictor(ids, positions, ids.roll(-1), core)
            torch.cuda.synchronize()
            middle = time.perf_counter()
            logprobs.sum().backward()
            torch.cuda.synchronize()
            end = time.perf_counter()
        label = "strict" if is_strict else "plain"
        print(
            f"price: learner, 8 layers of 0.6B, 8 x 2048 tokens, uncompiled, {label}: forward "
            f"{1000 * (middle - start):.1f} ms, backward {1000 * (end - middle):.1f} ms"
        )
        FIGURES[f"price_forward_{label}_ms"] = 1000 * (middle - start)
        FIGURES[f"price_backward_{label}_ms"] = 1000 * (end - middle)


def hf_model(attention: str) -> Any:
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
        attn_implementation=attention,
    )
    with torch.device("cuda"):
        return Qwen3ForCausalLM(config).to(torch.bfloat16).eval()


def hf() -> None:
    model = hf_model("sdpa")
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
            FIGURES["hf_generate_tok_per_s"] = HF_BATCH * NEW / seconds


def hf_batch() -> None:
    """The load's 256 requests; fewer new tokens, since it takes long."""
    from transformers import GenerationConfig

    model, new = hf_model("sdpa"), 64
    options = GenerationConfig(
        do_sample=True, max_new_tokens=new, min_new_tokens=new, eos_token_id=-1, pad_token_id=0
    )
    inputs = [list(r.prompt_ids) for r in requests(NUM_REQUESTS)]
    for label, part in (("warm-up", inputs[:16]), ("timed", inputs)):
        start = time.perf_counter()
        found = model.generate_batch(inputs=part, generation_config=options, progress_bar=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(one.generated_tokens) for one in found.values())
        if label == "timed":
            print(
                f"hf_batch: transformers generate_batch, {NUM_REQUESTS} requests, {PROMPT} + "
                f"{new}: {tokens / seconds:,.0f} generated tok/s"
            )
            FIGURES["hf_generate_batch_tok_per_s"] = tokens / seconds


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part
    for part in (check, strict, load, profile, group, update, moe, price, hf, hf_batch)
}


def main() -> None:
    names = sys.argv[1:]
    out = None
    if "--json" in names:
        at = names.index("--json")
        out = Path(names[at + 1])
        names = names[:at] + names[at + 2 :]
    names = names or list(PARTS)
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
    if out is not None:
        hardware = torch.cuda.get_device_name()
        about = {"hardware": hardware, "torch": torch.__version__, "parts": names}
        out.write_text(json.dumps({**about, "failed": failed, "figures": FIGURES}, indent=1))
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
