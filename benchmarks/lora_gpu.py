"""LoRA on one GPU, a table for each case: `python benchmarks/lora_gpu.py CASE ... [--tiny]`.

    train4b   Qwen3-4B: tokens/s and peak memory of an adapter beside all weights, 16k tokens a step
    grpo8b    Qwen3-8B: GRPO of 32 x 16 answers of up to 1,024 tokens, a step by phase
    grpo30b   Qwen3-30B-A3B, all 48 layers: GRPO of 16 x 8 answers of up to 512 tokens, by phase
    full8b    Qwen3-8B: GRPO of all weights, 16 x 8 answers of up to 512 tokens, by the place and
              the dtype of weights and optimizer state; --only for some of them
    decode    Qwen3-0.6B and 8B: decoding with and without an adapter, and its install
    sums      SmolLM2 on two-digit sums: all weights, rank 32, rank 1; --model FOLDER --seeds 1 2 3,
              adapters at --times the learning rate of the recipe

Weights are random but for `sums`, and come from one block of noise on the device: a 30B model is
made in seconds. Runs are those of `pentad train` with its defaults. A part that fails prints its
traceback and the next one runs. `--tiny` is the same code with toy dimensions, for a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from sampler_load import requests  # noqa: E402

from pentad.config.rules.lora import (  # noqa: E402
    RULES,
    frozen_weights_come_from_a_folder,
)
from pentad.core.roles import NativeWeights  # noqa: E402
from pentad.core.seeds import derive_seed  # noqa: E402
from pentad.core.types import Request  # noqa: E402
from pentad.data.toy import write_byte_model  # noqa: E402
from pentad.engine.engine import build_engine  # noqa: E402
from pentad.engine.section import EngineSettings, LoraConfig, ModelConfig  # noqa: E402
from pentad.infer.sampler import EmbeddedSampler  # noqa: E402
from pentad.infer.section import SamplerSettings  # noqa: E402
from pentad.models.catalog import known_config  # noqa: E402
from pentad.models.families import dims_of  # noqa: E402
from pentad.models.hf_weights import iter_hf, native_tensors  # noqa: E402
from pentad.models.lora import factors_of  # noqa: E402
from pentad.models.registry import build_model, initialise  # noqa: E402
from pentad.ops.digest import WeightDigest  # noqa: E402
from pentad.planner.prepare import prepare  # noqa: E402
from pentad.rl.losses import SftLoss  # noqa: E402
from pentad.rollout.section import RolloutConfig  # noqa: E402
from pentad.sync.publisher import LiveSnapshot  # noqa: E402
from pentad.trainer.sources.rollouts import run_train  # noqa: E402
from pentad.weights.regions import Box, box_shape  # noqa: E402
from pentad.weights.transfer import RandomReader  # noqa: E402
from pentad_tools.bench.bench_rl import RlCase, write_recipe  # noqa: E402
from pentad_tools.bench.bench_train import TOY, TOY_MOE, free_memory, make_row  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_GPU = DEVICE.type == "cuda"
GIB = 2**30
RANK = 32
SUMS_RATE = 5e-6
"""Learning rate of examples/math/sums.yaml."""


def say(text: str) -> None:
    print(text, flush=True)


def settle() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def peak_gib() -> float:
    return torch.cuda.max_memory_allocated() / GIB if IS_GPU else 0.0


def config_of(name: str, given: argparse.Namespace, *, moe: bool = False) -> dict[str, Any]:
    if given.tiny:
        return TOY_MOE if moe else TOY
    return {**(known_config(name) or {}), "head_dim": 128, "max_position_embeddings": 40960}


@contextmanager
def noise_on_device() -> Iterator[None]:
    """Random weights are slices of one block of noise, instead of draws of a CPU: the tensors are
    no longer those of their seed, and as good for measuring."""
    block = torch.randn(2**26 if IS_GPU else 2**20, device=DEVICE)
    drawn = RandomReader.read

    def read(self: RandomReader, name: str, box: Box) -> torch.Tensor:
        source = self.sources[name]
        if source.init in ("ones", "zeros"):
            return drawn(self, name, box)
        shape = box_shape(box)
        size = torch.Size(shape).numel()
        scale = source.shape[-1] ** -0.5 if source.init == "uniform" else self.std
        at = derive_seed(self.seed, "noise", name) % (len(block) // 2)
        times = -(-(at + size) // len(block))
        flat = block if times == 1 else block.repeat(times)
        return (flat[at : at + size] * scale).view(shape)

    allowed = [rule for rule in RULES.all if rule.check is not frozen_weights_come_from_a_folder]
    kept, RULES.all[:] = list(RULES.all), allowed  # here an adapter stands on random weights
    RandomReader.read = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        RandomReader.read = drawn  # type: ignore[method-assign]
        RULES.all[:] = kept


# Training alone


def train4b(given: argparse.Namespace) -> None:
    config = config_of("Qwen3-4B", given)
    tokens, length = (256, 64) if given.tiny else (16384, 4096)
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config["vocab_size"], (tokens,), generator=gen)
    rows = [make_row(part) for part in ids.split(length)]
    say(
        f"\n| {tokens:,} tokens a step in one microbatch | tok/s | step ms | peak GiB | warm-up s |"
    )
    say("|---|---|---|---|---|")
    lora = {"rank": RANK}
    for name, keys in (
        ("adapter, ac full", {"lora": lora, "archon": {"ac_mode": "full"}}),
        ("adapter, ac selective", {"lora": lora}),
        ("all weights, ac full", {"archon": {"ac_mode": "full"}}),
        ("all weights, ac selective", {}),
    ):
        attempt(name, lambda keys=keys, name=name: train_one(name, config, keys, rows, tokens))


def train_one(
    name: str, config: dict[str, Any], keys: dict[str, Any], rows: list[Any], tokens: int
) -> None:
    free_memory(DEVICE)
    keys = {**keys, "mb_spec": {"max_tokens_per_mb": tokens}, "optimizer": {"lr": 1e-5}}
    settings = EngineSettings(model=ModelConfig.model_validate(keys), total_steps=10)
    start = time.perf_counter()
    with noise_on_device():
        engine = build_engine(config, settings, device=DEVICE, init_from_scratch=True, seed=1)
    built = time.perf_counter() - start
    times = []
    for _ in range(8):
        began = time.perf_counter()
        engine.begin_step()
        engine.accumulate(rows, SftLoss())
        result = engine.end_step()
        settle()
        assert not result.skipped, result.reason
        times.append(time.perf_counter() - began)
    seconds, warm = statistics.median(times[3:]), built + sum(times[:3])
    speed, ms = f"{tokens / seconds:,.0f}", f"{1e3 * seconds:.0f}"
    say(f"| {name} | {speed} | {ms} | {peak_gib():.1f} | {warm:.0f} |")
    del engine


# Whole steps


def grpo8b(given: argparse.Namespace) -> None:
    case = RlCase(
        model="Qwen3-8B",
        config=config_of("Qwen3-8B", given),
        num_prompts=4 if given.tiny else 32,
        num_samples=4 if given.tiny else 16,
        mean_length=16 if given.tiny else given.mean or 700,
        max_new_tokens=24 if given.tiny else 1024,
    )
    grpo(case, given, [f"actor.lora.rank={RANK}"])


def grpo30b(given: argparse.Namespace) -> None:
    case = RlCase(
        model="Qwen3-30B-A3B",
        config=config_of("Qwen3-30B-A3B", given, moe=True),
        num_prompts=4 if given.tiny else 16,
        num_samples=4 if given.tiny else 8,
        mean_length=16 if given.tiny else given.mean or 350,
        max_new_tokens=24 if given.tiny else 512,
    )
    grpo(case, given, [f"actor.lora.rank={RANK}"])


PLACES = {
    "fp32 on the GPU": [],
    "bf16 on the GPU": ["actor.param_dtype=bfloat16", "offload_rollout=true"],
    "fp32 on the host": ["actor.archon.offload_params=true"],
    "bf16 on the host": ["actor.archon.offload_params=true", "actor.param_dtype=bfloat16"],
}
"""Place and dtype of weights and optimizer state -> keys."""


def full8b(given: argparse.Namespace) -> None:
    case = RlCase(
        model="Qwen3-8B",
        config=config_of("Qwen3-8B", given),
        num_prompts=4 if given.tiny else 16,
        num_samples=4 if given.tiny else 8,
        mean_length=16 if given.tiny else given.mean or 350,
        max_new_tokens=24 if given.tiny else 512,
    )
    for name in given.only or PLACES:
        # Checkpoints of 46 to 92 GiB are not what is measured.
        words = [*PLACES[name], "recover.mode=off", "saver.freq_steps=null"]
        attempt(name, lambda words=words: grpo(case, given, words))


def grpo(case: RlCase, given: argparse.Namespace, keys: list[str]) -> None:
    """The first step compiles and captures, and is shown beside the median of the rest."""
    free_memory(DEVICE)
    total = given.steps or 4
    say(f"\n{case.name}, at most {case.max_new_tokens}; {' '.join(keys)}, else defaults")
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="pentad-lora-") as name:
        words = [*keys, *given.words]
        recipe = write_recipe(case, Path(name), total)
        with noise_on_device(), followed(Path(name), start):
            config, notes = prepare(recipe, words, "train")
            say("\n".join(f"  note: {note}" for note in notes))
            summary = run_train(config, notes, device=str(DEVICE))
        lines = (summary.records / "steps.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    say(f"whole run: {time.perf_counter() - start:.0f} s")
    show_steps(records)


def show_steps(records: list[dict[str, Any]]) -> None:
    counted = records[1:] or records
    drawn = [r["num_samples"] * r["rl"]["length_mean"] for r in counted]
    phases = {
        phase: statistics.median(r["phases"].get(phase, 0.0) for r in counted)
        for phase in counted[-1]["phases"]
    }
    wall = statistics.median(r["wall_clock_ms"] for r in counted)
    say("\n| first step s | median step s | tokens drawn | peak GB | phases, ms |")
    say("|---|---|---|---|---|")
    shown = ", ".join(f"{name} {ms:,.1f}" for name, ms in phases.items())
    peak = counted[-1]["memory"].get("peak_allocated_gb") or 0.0
    say(
        f"| {records[0]['wall_clock_ms'] / 1e3:.1f} | {wall / 1e3:.1f} "
        f"| {statistics.median(drawn):,.0f} | {peak:.1f} | {shown} |"
    )
    say(f"memory of the last step: {json.dumps(counted[-1]['memory'])}")


@contextmanager
def followed(folder: Path, start: float) -> Iterator[None]:
    """Prints each record of a step below `folder` when it is there."""
    over = threading.Event()

    def follow() -> None:
        seen = 0
        while not over.wait(0.5):
            for path in folder.rglob("steps.jsonl"):
                for line in path.read_text().splitlines()[seen:]:
                    seen += 1
                    record = json.loads(line)
                    reward = (record.get("rl") or {}).get("reward_mean")
                    say(
                        f"  [{time.perf_counter() - start:.0f} s] step {seen}: "
                        f"{record['wall_clock_ms'] / 1e3:.1f} s, reward {reward}, "
                        f"phases {json.dumps(record['phases'])}"
                    )

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# The embedded sampler


def decode(given: argparse.Namespace) -> None:
    say("\n| model | requests | base tok/s | adapter tok/s | slower | install ms | by name ms |")
    say("|---|---|---|---|---|---|---|")
    for name in ("Qwen3-0.6B", "Qwen3-8B"):
        for num in (4, 8) if given.tiny else (32, 256):
            attempt(name, lambda name=name, num=num: decode_one(name, num, given))


def decode_one(name: str, num: int, given: argparse.Namespace) -> None:
    speeds, install_ms, named_ms = {}, 0.0, 0.0
    for rank in (None, RANK):
        free_memory(DEVICE)
        sampler = make_sampler(config_of(name, given), rank, num)
        load = decode_load(sampler, num, given)
        if rank is not None:
            named_ms, install_ms = asyncio.run(installs(sampler))
        asyncio.run(generate(sampler, load))
        rates = [asyncio.run(generate(sampler, load)) for _ in range(3)]
        speeds[rank] = statistics.median(rates)
        asyncio.run(sampler.close())
        del sampler
        gc.collect()
    base, adapted = speeds[None], speeds[RANK]
    say(
        f"| {name} | {num} | {base:,.0f} | {adapted:,.0f} | {1 - adapted / base:.1%} "
        f"| {install_ms:.1f} | {named_ms:.1f} |"
    )


def make_sampler(config: dict[str, Any], rank: int | None, num: int) -> EmbeddedSampler:
    dtype = torch.bfloat16 if IS_GPU else torch.float32
    model = build_model(dims_of(config), device=DEVICE, dtype=dtype)
    with noise_on_device():
        initialise(model, 1)
    settings = SamplerSettings(
        rollout=RolloutConfig(max_running=num),
        max_context=4096,
        kv_cache_tokens=num * 512,
        lora=None if rank is None else LoraConfig(rank=rank),
    )
    return EmbeddedSampler(model, settings, version=0)


def decode_load(sampler: EmbeddedSampler, num: int, given: argparse.Namespace) -> list[Request]:
    prompt, new = (16, 32) if given.tiny else (128, 256)
    vocab = sampler.engine.model.dims.vocab_size
    load = requests(num, prompt=prompt, new=new)
    return [replace(r, prompt_ids=tuple(i % vocab for i in r.prompt_ids)) for r in load]


async def generate(sampler: EmbeddedSampler, load: list[Request]) -> float:
    start = time.perf_counter()
    answers = await asyncio.gather(*(sampler.generate(request) for request in load))
    tokens = sum(len(g.ids) for answer in answers for g in answer)
    return tokens / (time.perf_counter() - start)


async def installs(sampler: EmbeddedSampler) -> list[float]:
    """Median milliseconds until new factors are in place and verified: tensors by their names in
    files, and those of a learner in this process."""
    model = sampler.engine.model
    for factors in factors_of(model):
        for factor in factors.parameters():
            factor.data.normal_(std=0.01)  # in place: kernels read copies of this memory
    pairs = [(n, t.clone()) for n, t in iter_hf(model, torch.float32, model.adapter_map)]
    own = {n: t.clone() for n, t in native_tensors(model, model.adapter_map).items()}
    dtypes = {n: t.dtype for n, t in own.items()}
    native = NativeWeights(own, dtypes, len(pairs), lambda: pairs)
    live = LiveSnapshot(0, native, WeightDigest(native))
    medians = []
    for first, weights in ((1, pairs), (9, live)):
        times = []
        for version in range(first, first + 8):
            settle()
            start = time.perf_counter()
            receipt = await sampler.install(version, weights)
            settle()
            times.append(1e3 * (time.perf_counter() - start))
        medians.append(statistics.median(times[3:]))
    assert receipt.is_same
    return medians


# A pretrained model


def sums(given: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="pentad-lora-") as name:
        root = Path(name)
        script = ROOT / "examples/math/sums.py"
        subprocess.run([sys.executable, str(script), str(root / "sums")], check=True)
        words = [f"fileroot={root}", f"actor.path={given.model}", *given.words]
        if given.tiny:
            words += tiny_sums(root)
        rows = []
        for seed in given.seeds:
            for what, rank in (("all weights", None), ("rank 32", 32), ("rank 1", 1)):
                if given.only and what not in given.only:
                    continue
                attempt(
                    f"{what}, seed {seed}",
                    lambda what=what, rank=rank, seed=seed: rows.append(
                        sums_one(what, rank, seed, [*words, *rate_of(rank, given.times)], root)
                    ),
                )
        say("\n| what | seed | held-out accuracy by step | median step ms | run s | peak GB |")
        say("|---|---|---|---|---|---|")
        for row in rows:
            say(row)


def tiny_sums(root: Path) -> list[str]:
    write_byte_model(root / "model")
    return [
        f"actor.path={root / 'model'}",
        "actor.init_from_scratch=true",
        "total_train_steps=2",
        "evaluator.freq_steps=2",
        "train_dataset.batch_size=4",
        "gconfig.n_samples=2",
        "gconfig.max_new_tokens=4",
    ]


def rate_of(rank: int | None, times: float) -> list[str]:
    if rank is None:
        return []
    return [f"actor.lora.rank={rank}", f"actor.optimizer.lr={times * SUMS_RATE:g}"]


def sums_one(what: str, rank: int | None, seed: int, words: list[str], root: Path) -> str:
    free_memory(DEVICE)
    start = time.perf_counter()
    is_tiny = "actor.init_from_scratch=true" in words
    trial = f"{what.replace(' ', '-')}-{seed}"
    words = [*words, f"seed={seed}", f"trial_name={trial}"]
    with noise_on_device() if is_tiny else nullcontext():
        config, notes = prepare(ROOT / "examples/math/sums.yaml", words, "train")
        summary = run_train(config, notes, device=str(DEVICE))
    records = [
        json.loads(line) for line in (summary.records / "steps.jsonl").read_text().splitlines()
    ]
    scores = held_out(summary.records)
    step = statistics.median(r["wall_clock_ms"] for r in records)
    peak = records[-1]["memory"].get("peak_allocated_gb") or 0.0
    took = time.perf_counter() - start
    row = f"| {what} | {seed} | {scores} | {step:.0f} | {took:.0f} | {peak:.1f} |"
    say(row)
    return row


def held_out(records: Path) -> str:
    """`step: accuracy` of every evaluation of a run."""
    found = [json.loads(line) for line in (records / "evals.jsonl").read_text().splitlines()]
    return ", ".join(f"{one['version']}: {one['accuracy']:.3f}" for one in found)


# The command


def attempt(name: str, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception:
        say(f"{name} FAILED\n{traceback.format_exc()}")
    gc.collect()
    if IS_GPU:
        torch.cuda.empty_cache()


CASES: dict[str, Callable[[argparse.Namespace], None]] = {
    "train4b": train4b,
    "grpo8b": grpo8b,
    "grpo30b": grpo30b,
    "full8b": full8b,
    "decode": decode,
    "sums": sums,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--tiny", action="store_true", help="toy dimensions")
    parser.add_argument("--steps", type=int, help="steps of a grpo case (4)")
    parser.add_argument("--mean", type=int, help="mean tokens of an answer that nothing cuts")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="for sums")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    only = f"of sums: 'all weights', 'rank 32', 'rank 1'; of full8b: {', '.join(map(repr, PLACES))}"
    parser.add_argument("--only", nargs="+", help=only)
    parser.add_argument(
        "--times", type=float, default=20.0, help="learning rate of adapters in sums"
    )
    parser.add_argument("--words", nargs="*", default=[], help="overrides of the recipe")
    given = parser.parse_args()
    kind = torch.cuda.get_device_name() if IS_GPU else "cpu"
    for case in given.cases:
        start = time.perf_counter()
        say(f"\n## {case} ({kind}, torch {torch.__version__})")
        attempt(case, lambda case=case: CASES[case](given))
        say(f"{case}: {time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
