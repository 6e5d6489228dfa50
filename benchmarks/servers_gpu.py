"""Real vLLM and SGLang on one GPU, through our own samplers: the contract, publish, speed, GRPO.

    python benchmarks/servers_gpu.py --vllm ENV --sglang ENV --sums-model SMOLLM2 --out DIR
    python benchmarks/servers_gpu.py --sglang ENV --parts mixture

ENV is the environment that holds the server (`rollout.server.python`). Parts, all by default:

- `contract`: each server as soon as it answers (`servers_contract.py`);
- `publish`, `throughput`: with nothing else running, the embedded sampler beside them;
- `grpo`: a short GRPO (examples/math, two numbers to be added) with each server; SMOLLM2 is a
  folder of SmolLM2-135M-Instruct;
- `adapter`: factors of rank 32 on all matrices: log-probs, replaced in place, a damaged factor,
  publish; `adapter-mixture` the same with a small mixture;
- `fp8`: weights in fp8 (`rollout.weight_dtype`), beside a server in bf16 (`servers_fp8.py`);
  `fp8-mixture` the same with a small mixture;
- `mixture`: a cut of Qwen3-30B-A3B (4 layers, 128 experts, 8 a token): weights, log-probs, and
  which experts each token went to, beside the trainer's own routers.

Only the servers that the parts need are started. Every part is bounded in time, and one that fails
is reported and the next one runs. Dimensions of the others are those of Qwen3-0.6B; weights are
random, bf16. Results: DIR/servers.jsonl, a line for each figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "contracts"))

from sampler_load import MOE_SLICE, QWEN3_06B, random_model, requests  # noqa: E402
from server_models import config_of  # noqa: E402
from servers_contract import (
    Adapters,
    Policies,
    Report,
    adapter,
    contract,
    mixture,
)  # noqa: E402
from servers_fp8 import Rounded, fp8, speeds  # noqa: E402

from pentad.core.dims import ModelDims  # noqa: E402
from pentad.data.toy import write_model  # noqa: E402
from pentad.engine.section import LoraConfig  # noqa: E402
from pentad.infer.sampler import EmbeddedSampler  # noqa: E402
from pentad.infer.section import SamplerSettings  # noqa: E402
from pentad.models.families import dims_of  # noqa: E402
from pentad.models.registry import save_model  # noqa: E402
from pentad.rollout.section import RolloutConfig  # noqa: E402
from pentad.runtime.local_roles import LocalRuntime  # noqa: E402
from pentad.runtime.restarts import RestartPolicy  # noqa: E402
from pentad.runtime.roles import RoleSpec  # noqa: E402
from pentad.samplers import remote, sglang, vllm  # noqa: E402
from pentad.samplers.process import ServerSettings  # noqa: E402
from pentad.samplers.remote import HostedSettings, RoleSampler  # noqa: E402
from pentad.samplers.replica import Replica  # noqa: E402
from pentad.samplers.section import ServerConfig  # noqa: E402
from pentad.samplers.server_sampler import ServerSampler  # noqa: E402
from pentad.sync.weights_dir import WeightsDir  # noqa: E402
from pentad.telemetry.steps import read_lines  # noqa: E402

ROOT = Path(__file__).parents[1]
START = {"vllm": vllm.start, "sglang": sglang.start}
DIMS = replace(QWEN3_06B, initializer_range=0.04, max_position=4096)
MIXTURE = replace(
    MOE_SLICE,
    num_layers=4,
    moe_layers=(True,) * 4,
    initializer_range=0.04,
    max_position=4096,
)
SMALL_MIXTURE = replace(
    MIXTURE,
    hidden_size=1024,
    num_experts=16,
    num_experts_per_token=4,
    moe_intermediate_size=512,
)
ADAPTED = {"adapter": DIMS, "adapter-mixture": SMALL_MIXTURE}
FP8 = {"fp8": DIMS, "fp8-mixture": SMALL_MIXTURE}
PARTS = ("contract", "publish", "throughput", "grpo", "mixture", *ADAPTED, *FP8)
ALONE = {"mixture", *ADAPTED, *FP8}
"""Parts that start servers of their own."""
LORA = LoraConfig(rank=32)
START_S, GRPO_S = 420.0, 110.0
ARGS = {
    "vllm": (),
    "sglang": ("--attention-backend", "triton", "--sampling-backend", "pytorch")
    + ("--max-total-tokens", "120000"),
}
SHARE = {"vllm": 0.15, "sglang": 0.6}


def write_folder(folder: Path, dims: ModelDims) -> Path:
    """Servers want a tokenizer, and nothing here uses it."""
    write_model(folder)
    (folder / "config.json").write_text(json.dumps(config_of(dims, "bfloat16")))
    return folder


def changed(settings: ServerSettings, keys: dict[str, Any], **beside: Any) -> ServerSettings:
    """`keys` are those of the block `rollout`."""
    rollout = settings.rollout.model_copy(update=keys)
    return settings.model_copy(update={"rollout": rollout, **beside})


def settings_of(kind: str, env: Path, folder: Path, dims: Any, context: int) -> ServerSettings:
    return ServerSettings(
        model_folder=str(folder),
        dims=dims,
        dtype="bfloat16",
        max_context=context,
        device="cuda",
        devices=(0,),
        can_sleep=True,
        rollout=RolloutConfig(
            max_running=256,
            max_batch_tokens=8192,
            kv_cache_gb=8,
            server=ServerConfig(
                python=str(env),
                args=ARGS[kind],
                start_timeout_s=400.0,
                weight_transport="ipc",
                check_weights_every=0,
                gpu_memory_share=SHARE[kind],
            ),
        ),
    )


# Figures.


async def publish(kind: str, sampler: ServerSampler, two: Policies, report: Report) -> None:
    dialect = sampler.dialect
    marks: list[float] = []
    pause, resume = dialect.pause, dialect.resume

    async def marked_pause() -> None:
        marks.append(time.perf_counter())
        await pause()

    async def marked_resume() -> None:
        await resume()
        marks.append(time.perf_counter())

    dialect.pause, dialect.resume = marked_pause, marked_resume  # type: ignore[method-assign]
    totals, pauses = [], []
    for number in range(5):
        marks.clear()
        began = time.perf_counter()
        await sampler.install(sampler.version + 1, two.pairs[number % 2])
        totals.append(time.perf_counter() - began)
        pauses.append(marks[1] - marks[0])
    dialect.pause, dialect.resume = pause, resume  # type: ignore[method-assign]
    report.tell(kind, "publish by ipc, median of 5 [s]", statistics.median(totals))
    report.tell(kind, "of it the server paused [s]", statistics.median(pauses))


async def throughput(kind: str, sampler: Any, report: Report) -> None:
    for turn in ("first", "second"):
        load = [replace(r, id=f"{turn}-{r.id}") for r in requests(256)]
        began = time.perf_counter()
        results = await asyncio.gather(*(sampler.generate(r) for r in load))
        seconds = time.perf_counter() - began
        tokens = sum(len(g.ids) for answers in results for g in answers)
    report.tell(kind, "256 requests of 128 + 256, with log-probs [tok/s]", tokens / seconds)


EMBEDDED = SamplerSettings(
    rollout=RolloutConfig(max_running=256), max_context=4096, kv_cache_tokens=1 << 17
)


async def here(report: Report) -> None:
    """The embedded sampler in this process."""
    sampler = EmbeddedSampler(random_model(DIMS, 3), EMBEDDED, version=0)
    await throughput("embedded", sampler, report)
    await sampler.close()


async def apart(two: Policies, qwen: Path, folder: Path, report: Report) -> None:
    """The embedded sampler in a process of its own."""
    wanted = HostedSettings(
        dims=DIMS,
        sampler=EMBEDDED,
        device="cuda",
        dtype="bfloat16",
        seed=3,
        tokenizer=str(qwen),
    )
    spec = RoleSpec(
        name="rollout-0",
        target=remote.TARGET,
        payload=wanted.model_dump(mode="json"),
        log=folder / "rollout.log",
        num_gpus=1,
        devices=(0,),
    )
    runtime = LocalRuntime()
    process, weights_dir = await runtime.start(spec), WeightsDir("ipc", folder)
    sampler = Replica(
        "rollout-0", lambda _: RoleSampler.open(process, weights_dir), weights_dir, RestartPolicy(0)
    )
    await sampler.open()
    totals = []
    for version in range(6):
        began = time.perf_counter()
        await sampler.install(version, list(two.pairs[version % 2]))
        totals.append(time.perf_counter() - began)
    report.tell("embedded", "publish to a process by ipc, first [s]", totals[0])
    report.tell("embedded", "publish, median of the next 5 [s]", statistics.median(totals[1:]))
    await sampler.close()
    await runtime.close()


def grpo_command(kind: str, model: Path, address: str, folder: Path) -> list[str]:
    words = {
        "fileroot": folder,
        "trial_name": kind,
        "actor.path": model,
        "allocation_mode": f"{kind}:d1|archon:d1",
        "rollout.server.addresses": f"[{address}]",
        "rollout.server.weight_transport": "ipc",
        "offload_rollout": "true",
        "actor.optimizer.lr": "1e-5",
        "evaluator.freq_steps": "15",
        "total_train_steps": "30",
        "saver.freq_steps": "null",
        "recover.mode": "off",
    }
    given = [f"{key}={value}" for key, value in words.items()]
    recipe = str(ROOT / "examples" / "math" / "sums.yaml")
    return [sys.executable, "-m", "pentad.cli.main", "train", recipe, *given]


async def grpo(kind: str, model: Path, address: str, folder: Path, report: Report) -> None:
    out = report.path.with_name(f"grpo-{kind}.txt")
    began = time.monotonic()
    with out.open("wb") as file:
        run = await asyncio.create_subprocess_exec(
            *grpo_command(kind, model, address, folder), stdout=file, stderr=file, cwd=ROOT
        )
        try:
            await asyncio.wait_for(run.wait(), GRPO_S)
        except TimeoutError:
            run.terminate()
            await run.wait()
    found = sorted((folder / "logs").glob(f"*/*/{kind}/steps.jsonl"))
    records = [r for path in found for r in read_lines(path)]
    steps = [r for r in records if "step" in r]
    report.tell(
        kind,
        "GRPO seconds, exit code, steps",
        [time.monotonic() - began, run.returncode, len(steps)],
    )
    for path in found:
        shutil.copy(path, report.path.with_name(f"steps-{kind}.jsonl"))
    if not steps:
        report.tell(kind, "GRPO", " ".join(out.read_text(errors="replace").split())[-800:])


# The whole.


samplers: dict[str, ServerSampler] = {}


async def started(kind: str, name: str, wanted: ServerSettings, report: Report) -> None:
    """Waits for the environment, which may still be on its way."""
    while not (Path(str(wanted.server.python)) / "bin" / "python").exists():
        await asyncio.sleep(0.5)

    async def start() -> str:
        began = time.monotonic()
        samplers[name] = await START[kind](wanted, name, report.path.with_name(f"{name}.log"))
        return f"in {time.monotonic() - began:.0f} s, can {sorted(samplers[name].capabilities)}"

    await report.part(name, "start", start, START_S)


async def run(given: argparse.Namespace, folder: Path) -> None:
    report = Report(given.out)
    report.tell("machine", "GPU", torch.cuda.get_device_name())
    envs = {k: e for k, e in (("vllm", given.vllm), ("sglang", given.sglang)) if e is not None}
    parts = set(given.parts)
    try:
        if parts - ALONE:
            await dense(parts, envs, given, folder, report)
        if chosen := [part for part in ADAPTED if part in parts]:
            await adapters(chosen, envs, folder, report)
        for part in [part for part in FP8 if part in parts]:
            await quantised_servers(part, envs, folder, report)
        if "mixture" in parts:
            await mixtures(envs, folder, report)
    finally:
        await close_all()
    report.tell("machine", "done", "ok")


async def close_all() -> None:
    await asyncio.gather(*(s.close() for s in samplers.values()), return_exceptions=True)
    samplers.clear()


async def dense(
    parts: set[str], envs: dict[str, Path], given: argparse.Namespace, folder: Path, report: Report
) -> None:
    """The parts with a dense model."""
    qwen = write_folder(folder / "qwen", DIMS)
    starting: dict[str, asyncio.Task[None]] = {}
    if parts & {"contract", "publish", "throughput"}:
        starting = {
            kind: asyncio.create_task(
                started(kind, kind, settings_of(kind, env, qwen, DIMS, 4096), report)
            )
            for kind, env in envs.items()
        }
    small: dict[str, asyncio.Task[None]] = {}
    if "grpo" in parts and given.sums_model is not None:
        small = {
            kind: asyncio.create_task(small_server(kind, env, given, report))
            for kind, env in envs.items()
        }
    two = Policies(DIMS) if starting else None
    quiet = asyncio.Lock()

    async def first(kind: str) -> None:
        await starting[kind]
        if (sampler := samplers.get(kind)) is not None and "contract" in parts and two is not None:
            async with quiet:
                await contract(kind, sampler, two, report)

    try:
        await asyncio.gather(*(first(kind) for kind in starting))
        await asyncio.gather(*small.values(), return_exceptions=True)
        if two is not None:
            await figures(parts, two, qwen, folder, report)
        for kind in small:
            if (sampler := samplers.get(f"{kind}-small")) is not None:
                address = sampler.dialect.wire.address  # type: ignore[attr-defined]
                await grpo(kind, given.sums_model, address, folder, report)
    finally:
        for task in (*starting.values(), *small.values()):
            task.cancel()
        await close_all()


async def figures(parts: set[str], two: Policies, qwen: Path, folder: Path, report: Report) -> None:
    served = {kind: samplers[kind] for kind in START if kind in samplers}
    if "publish" in parts:
        doing = partial(apart, two, qwen, folder, report)
        await report.part("embedded", "publish to another process", doing)
        for kind, sampler in served.items():
            await report.part(kind, "publish", partial(publish, kind, sampler, two, report))
    if "throughput" in parts:
        await report.part("embedded", "throughput", partial(here, report))
        for kind, sampler in served.items():
            await report.part(kind, "throughput", partial(throughput, kind, sampler, report))


async def mixtures(envs: dict[str, Path], folder: Path, report: Report) -> None:
    """Each server by itself: routes are compared token by token, and memory is another's."""
    moe = write_folder(folder / "mixture", MIXTURE)
    starting = [
        started(
            kind,
            f"{kind}-mixture",
            changed(
                settings_of(kind, env, moe, MIXTURE, 4096), {"replay_routes": True}, can_sleep=False
            ),
            report,
        )
        for kind, env in envs.items()
    ]
    two = Policies(MIXTURE)
    await asyncio.gather(*starting)
    for kind in envs:
        if (sampler := samplers.get(f"{kind}-mixture")) is not None:
            await mixture(kind, sampler, two, report)
    await close_all()


async def adapters(chosen: list[str], envs: dict[str, Path], folder: Path, report: Report) -> None:
    """All servers start together; each is asked alone."""
    asked: list[tuple[str, str, asyncio.Task[None], Adapters]] = []
    for part in chosen:
        two, place = Adapters(ADAPTED[part], LORA), write_folder(folder / part, ADAPTED[part])
        config = json.loads((place / "config.json").read_text())
        save_model(random_model(ADAPTED[part], 3), place / "model", hf_config=config)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(place / name, place / "model")
        for kind, env in envs.items():
            wanted = settings_of(kind, env, place / "model", ADAPTED[part], 4096)
            server = wanted.server.model_copy(update={"gpu_memory_share": 0.2})
            wanted = changed(wanted, {"server": server}, can_sleep=False, lora=LORA)
            task = asyncio.create_task(started(kind, f"{kind}-{part}", wanted, report))
            asked.append((kind, part, task, two))
    for kind, part, task, two in asked:
        await task
        if (sampler := samplers.get(f"{kind}-{part}")) is not None:
            await adapter(f"{kind}-{part}", sampler, two, report)
    await close_all()


async def quantised_servers(part: str, envs: dict[str, Path], folder: Path, report: Report) -> None:
    """Of each kind a server in fp8 and one in bf16, which start together; each is asked alone."""
    place, dims = write_folder(folder / part, FP8[part]), FP8[part]
    starting = []
    for kind, env in envs.items():
        wanted = settings_of(kind, env, place, dims, 4096)
        server = wanted.server.model_copy(update={"gpu_memory_share": 0.2})
        keys = {"server": server, "max_running": 1024}
        for dtype, name in (("fp8", f"{kind}-{part}"), ("auto", f"{kind}-{part}-bf16")):
            given = changed(wanted, {**keys, "weight_dtype": dtype}, can_sleep=False)
            starting.append(asyncio.create_task(started(kind, name, given, report)))
    two = Rounded(dims)
    await asyncio.gather(*starting)
    for name in [f"{kind}-{part}" for kind in envs]:
        log = report.path.with_name(f"{name}.log")
        if (sampler := samplers.get(name)) is not None:
            await fp8(name, sampler, two, log, report)
        else:
            print(log.read_text(errors="replace")[-6000:] if log.exists() else f"no {log}")
        if (sampler := samplers.get(f"{name}-bf16")) is not None:
            first = partial(sampler.install, 0, two.pairs[0])
            await report.part(f"{name}-bf16", "install", first)
            await speeds(f"{name}-bf16", sampler, report)
    await close_all()


async def small_server(kind: str, env: Path, given: argparse.Namespace, report: Report) -> None:
    """Of the model that is trained; not touched here."""
    while not (given.sums_model / "config.json").exists():
        await asyncio.sleep(0.5)
    dims = dims_of(json.loads((given.sums_model / "config.json").read_text()))
    wanted = settings_of(kind, env, given.sums_model, dims, dims.max_position)
    wanted = changed(wanted, {"max_running": 1024, "kv_cache_gb": 4.0})
    await started(kind, f"{kind}-small", wanted, report)


def named_parts(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {PARTS}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--sums-model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/servers_gpu"))
    parser.add_argument("--parts", type=named_parts, default=PARTS, help=",".join(PARTS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if given.sums_model is not None and "grpo" in given.parts:
            sums = [sys.executable, str(ROOT / "examples/math/sums.py"), str(folder / "sums")]
            subprocess.run(sums, check=True, env=os.environ)
        asyncio.run(run(given, folder))


if __name__ == "__main__":
    main()
