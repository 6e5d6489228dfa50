"""Real vLLM and SGLang on one GPU, through our own samplers: the contract, publish, speed, GRPO.

    python benchmarks/servers_gpu.py --vllm ENV --sglang ENV --sums-model SMOLLM2 --out DIR

ENV is the environment that holds the server (`rollout.server.python`). Servers start at once; each
goes through the contract as soon as it answers, then publish times and throughput are measured
with nothing else running, the embedded sampler beside them, then a short GRPO (examples/math, two
numbers to be added) is trained with each server. Every part is bounded in time, and one that fails
is reported and the next one runs. Dimensions are those of Qwen3-0.6B, weights random, bf16;
SMOLLM2 is a folder of SmolLM2-135M-Instruct. Results: DIR/servers.jsonl, a line for each figure.
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
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from sampler_gpu import QWEN3_06B, forced, random_model, requests  # noqa: E402

from pentad.core.failures import InfraFailure  # noqa: E402
from pentad.core.types import Generation, Request, SamplingParams  # noqa: E402
from pentad.data.toy import write_model  # noqa: E402
from pentad.infer.sampler import EmbeddedSampler  # noqa: E402
from pentad.infer.settings import SamplerSettings  # noqa: E402
from pentad.models.exchange import iter_hf  # noqa: E402
from pentad.models.families import dims_of  # noqa: E402
from pentad.ops.digest import digest_of  # noqa: E402
from pentad.runtime.local_roles import LocalRuntime  # noqa: E402
from pentad.runtime.roles import RoleSpec  # noqa: E402
from pentad.samplers import hosted, sglang, vllm  # noqa: E402
from pentad.samplers.hosted import HostedSettings  # noqa: E402
from pentad.samplers.remote import RemoteSampler  # noqa: E402
from pentad.samplers.server_sampler import ServerSampler  # noqa: E402
from pentad.samplers.settings import ServerSettings  # noqa: E402
from pentad.sync.handoff import Handoff  # noqa: E402
from pentad.telemetry.steps import read_lines  # noqa: E402

ROOT = Path(__file__).parents[1]
START = {"vllm": vllm.start, "sglang": sglang.start}
ATTACH = {"vllm": vllm.attach, "sglang": sglang.attach}
DIMS = replace(QWEN3_06B, initializer_range=0.04, max_position=4096)
PART_S, GRPO_S = 60.0, 110.0
NEAR = 0.1
"""Mean difference of log-probs in bf16 below which two policies are one; others differ by more."""
ARGS = {
    "vllm": (),
    "sglang": ("--attention-backend", "triton", "--sampling-backend", "pytorch")
    + ("--max-total-tokens", "120000"),
}
SHARE = {"vllm": 0.15, "sglang": 0.6}


class Report:
    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "servers.jsonl"
        self.began = time.monotonic()

    def tell(self, who: str, what: str, value: Any) -> None:
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"{time.monotonic() - self.began:6.1f} s  {who:10} {what}: {shown}", flush=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"who": who, "what": what, "value": value}) + "\n")

    async def part(
        self, who: str, what: str, doing: Callable[[], Awaitable[Any]], limit_s: float = PART_S
    ) -> Any:
        try:
            value = await asyncio.wait_for(doing(), limit_s)
        except Exception as error:
            text = " ".join(str(error).split())[-600:]
            self.tell(who, what, f"FAILED {type(error).__name__}: {text}")
            return None
        self.tell(who, what, "ok" if value is None else value)
        return value


def used_gib() -> float:
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.check_output(asked, text=True).split()[0]) / 1024


def write_folder(folder: Path) -> Path:
    """config.json of `DIMS`; servers want a tokenizer, and nothing here uses it."""
    write_model(folder)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": DIMS.vocab_size,
        "hidden_size": DIMS.hidden_size,
        "intermediate_size": DIMS.intermediate_size,
        "num_hidden_layers": DIMS.num_layers,
        "num_attention_heads": DIMS.num_heads,
        "num_key_value_heads": DIMS.num_kv_heads,
        "head_dim": DIMS.head_dim,
        "max_position_embeddings": DIMS.max_position,
        "rms_norm_eps": DIMS.norm_eps,
        "rope_theta": DIMS.rope_theta,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def settings_of(kind: str, env: Path, folder: Path, dims: Any, context: int) -> ServerSettings:
    return ServerSettings(
        model_folder=str(folder),
        dims=dims,
        dtype="bfloat16",
        max_context=context,
        max_running=256,
        max_batch_tokens=8192,
        kv_cache_bytes=8 << 30,
        on_update="continue",
        device="cuda",
        devices=(0,),
        python=str(env),
        arguments=ARGS[kind],
        start_timeout_s=400.0,
        transport="ipc",
        can_sleep=True,
        memory_share=SHARE[kind],
    )


class Policies:
    """Two sets of weights, and what each would say of drawn tokens."""

    def __init__(self) -> None:
        self.models = [random_model(DIMS, seed) for seed in (1, 2)]
        self.pairs = [list(iter_hf(model)) for model in self.models]

    def difference(self, which: int, request: Request, drawn: Generation, part: slice) -> float:
        truth = forced(self.models[which], request, drawn)[part]
        return float((torch.tensor(drawn.logprobs)[part] - truth).abs().mean())

    def check(self, which: int, request: Request, answers: list[Generation]) -> str:
        assert len(answers) == len(request.seeds)
        own = [self.difference(which, request, g, slice(None)) for g in answers]
        other = [self.difference(1 - which, request, g, slice(None)) for g in answers]
        told = f"mean |log-prob difference| {max(own):.4f}, from the other weights {min(other):.2f}"
        assert max(own) < NEAR < min(other), told
        return told


def ask(name: str, num: int = 1, new: int = 32, **params: Any) -> Request:
    (request,) = requests(1, n=num, prompt=40, new=new)
    return replace(request, id=name, params=SamplingParams(max_new_tokens=new, **params))


# The contract.


async def contract(kind: str, sampler: ServerSampler, two: Policies, report: Report) -> None:
    async def prove(which: int, seconds: list[float]) -> None:
        began = time.perf_counter()
        await sampler.dialect._prove(two.pairs[which])  # type: ignore[attr-defined]
        seconds.append(time.perf_counter() - began)

    async def first() -> str:
        receipt = await sampler.install(0, two.pairs[0])
        assert receipt.digest == digest_of(two.pairs[0]).hex()
        request = ask("first", 4)
        answers = await sampler.generate(request)
        assert all(g.versions == [0] * 32 and g.finish == "length" for g in answers)
        assert len({tuple(g.ids) for g in answers}) == 4
        return two.check(0, request, answers)

    async def held() -> str:
        """Every tensor as held; then one is replaced, and must be found."""
        seconds: list[float] = []
        await prove(0, seconds)
        await prove(0, seconds)
        name, tensor = two.pairs[0][5]
        bad = [(n, torch.zeros_like(t) if n == name else t) for n, t in two.pairs[0]]
        await sampler.dialect.pause()
        await sampler.dialect.load(0, bad)
        try:
            await prove(0, seconds)
        except InfraFailure as failure:
            told = str(failure).partition(": ")[2].split(" has ")[0]
        else:
            raise AssertionError(f"{name} was replaced and nobody noticed")
        await sampler.dialect.load(0, two.pairs[0])
        await sampler.dialect.resume()
        took = ", ".join(f"{s:.2f}" for s in seconds)
        return f"all tensors compared in {took} s; replaced {name}, found in {told}"

    async def seeds() -> None:
        one, same = await sampler.generate(ask("s1", 3)), await sampler.generate(ask("s2", 3))
        assert [g.ids for g in one] == [g.ids for g in same]

    async def stops() -> None:
        (free,) = await sampler.generate(ask("free", new=20, temperature=0.0))
        stop = free.ids[7]
        request = ask("stop", new=20, temperature=0.0, stop_ids=(stop,))
        (g,) = await sampler.generate(request)
        assert g.ids == free.ids[: free.ids.index(stop) + 1] and g.finish == "stop", (free, g)

    async def abort() -> str:
        heard = asyncio.Event()
        request = ask("long", 3, new=3000)
        task = asyncio.create_task(sampler.generate(request, lambda *_: heard.set()))
        await heard.wait()
        began = time.perf_counter()
        await sampler.abort("long")
        answers = await task
        assert all(g.finish == "abort" for g in answers)
        return f"{1e3 * (time.perf_counter() - began):.0f} ms, {[len(g.ids) for g in answers]}"

    async def pause() -> None:
        heard: list[int] = []
        first = asyncio.Event()

        def hear(_i: int, token: int, _l: float) -> None:
            heard.append(token)
            first.set()

        request = ask("paused", new=600)
        task = asyncio.create_task(sampler.generate(request, hear))
        await first.wait()
        await sampler.pause()
        num = len(heard)
        await asyncio.sleep(0.5)
        assert len(heard) == num < 600, (num, len(heard))
        await sampler.resume()
        (g,) = await task
        assert len(g.ids) == 600 and g.ids == heard

    async def under_way() -> str:
        heard = asyncio.Event()
        request = ask("cut", 2, new=3000)
        task = asyncio.create_task(sampler.generate(request, lambda *_: heard.set()))
        await heard.wait()
        await sampler.install(1, two.pairs[1])
        answers = await task
        old = [g.versions.count(0) for g in answers]
        assert all(set(g.versions) == {0, 1} and len(g.ids) == 3000 for g in answers), old
        gaps = [
            two.difference(which, request, g, part)
            for g, n in zip(answers, old, strict=True)
            for which, part in ((0, slice(0, n)), (1, slice(n, None)))
        ]
        assert max(gaps) < NEAR, gaps
        return f"{old} of 3000 tokens are old; differences old, new {[f'{x:.3f}' for x in gaps]}"

    async def sleep() -> str:
        figures = [used_gib()]
        await sampler.sleep()
        figures.append(used_gib())
        await sampler.install(2, two.pairs[0])
        await sampler.wake()
        figures.append(used_gib())
        request = ask("awake", 2)
        told = two.check(0, request, await sampler.generate(request))
        shown = " -> ".join(f"{gib:.1f}" for gib in figures)
        assert figures[1] < figures[0] - 1.0, shown
        return f"GPU memory in use awake -> asleep -> awake {shown} GiB; {told}"

    async def transports() -> str:
        took = []
        for number, name in enumerate(("disk", "broadcast", "ipc")):
            which = (number + 1) % 2
            settings = replace(sampler.dialect.settings, transport=name)  # type: ignore[attr-defined]
            client = await ATTACH[kind](sampler.dialect.wire.address, settings)  # type: ignore[attr-defined]
            # NCCL takes no two processes of one GPU: these travel by gloo.
            pairs = two.pairs[which]
            given = [(n, t.cpu()) for n, t in pairs] if name == "broadcast" else pairs
            began = time.perf_counter()
            await asyncio.wait_for(client.install(10 + number, given), 30)
            took.append(f"{name} {time.perf_counter() - began:.2f} s")
            request = ask(f"by-{name}", 2)
            two.check(which, request, await client.generate(request))
            await client.close()
            sampler._version = 10 + number
        return "randomised, published, compared: " + ", ".join(took)

    await report.part(kind, "generate: n samples, log-probs, versions", first)
    await report.part(kind, "weights as held", held)
    if "seeds" in sampler.capabilities:
        await report.part(kind, "seeds", seeds)
    await report.part(kind, "stop ids", stops)
    await report.part(kind, "abort", abort)
    await report.part(kind, "pause and resume", pause)
    await report.part(kind, "install with answers under way", under_way)
    await report.part(kind, "sleep and wake", sleep)
    await report.part(kind, "transports", transports)


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


async def embedded(two: Policies, folder: Path, report: Report) -> None:
    settings = SamplerSettings(max_running=256, max_context=4096, kv_cache_tokens=1 << 17)

    async def here() -> None:
        sampler = EmbeddedSampler(random_model(DIMS, 3), settings, version=0)
        await throughput("embedded", sampler, report)
        await sampler.close()

    async def apart() -> None:
        wanted = HostedSettings(
            dims=DIMS,
            sampler=settings,
            device="cuda",
            dtype="bfloat16",
            seed=3,
            tokenizer=str(folder / "qwen"),
        )
        spec = RoleSpec(
            name="rollout-0",
            target=hosted.TARGET,
            payload=asdict(wanted),
            log=folder / "rollout.log",
            num_gpus=1,
            devices=(0,),
        )
        runtime = LocalRuntime()
        handoff = Handoff("ipc", folder)
        sampler = await RemoteSampler.open(await runtime.start(spec), handoff)
        totals = []
        for version in range(6):
            began = time.perf_counter()
            await sampler.install(version, list(two.pairs[version % 2]))
            totals.append(time.perf_counter() - began)
        report.tell("embedded", "publish to a process by ipc, first [s]", totals[0])
        report.tell("embedded", "publish, median of the next 5 [s]", statistics.median(totals[1:]))
        await sampler.close()
        await runtime.close()

    await report.part("embedded", "publish to another process", apart)
    await report.part("embedded", "throughput", here)


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
    while not (Path(str(wanted.python)) / "bin" / "python").exists():
        await asyncio.sleep(0.5)

    async def start() -> str:
        began = time.monotonic()
        samplers[name] = await START[kind](wanted, name, report.path.with_name(f"{name}.log"))
        return f"in {time.monotonic() - began:.0f} s, can {sorted(samplers[name].capabilities)}"

    await report.part(name, "start", start, 420)


async def run(given: argparse.Namespace, folder: Path) -> None:
    report = Report(given.out)
    report.tell("machine", "GPU", torch.cuda.get_device_name())
    envs = {k: e for k, e in (("vllm", given.vllm), ("sglang", given.sglang)) if e is not None}
    qwen = write_folder(folder / "qwen")
    starting = {
        kind: asyncio.create_task(
            started(kind, kind, settings_of(kind, env, qwen, DIMS, 4096), report)
        )
        for kind, env in envs.items()
    }
    two = Policies()
    small: dict[str, asyncio.Task[Any]] = {}
    if given.sums_model is not None:
        small = {
            kind: asyncio.create_task(small_server(kind, env, given, report))
            for kind, env in envs.items()
        }
    try:
        quiet = asyncio.Lock()

        async def first(kind: str) -> None:
            await starting[kind]
            if (sampler := samplers.get(kind)) is not None:
                async with quiet:
                    await contract(kind, sampler, two, report)

        await asyncio.gather(*(first(kind) for kind in envs))
        await asyncio.gather(*small.values(), return_exceptions=True)
        await embedded(two, folder, report)
        for kind in envs:
            if (sampler := samplers.get(kind)) is not None:
                await report.part(
                    kind, "publish", lambda k=kind, s=sampler: publish(k, s, two, report)
                )
                await report.part(
                    kind, "throughput", lambda k=kind, s=sampler: throughput(k, s, report)
                )
        for kind in small:
            if (sampler := samplers.get(f"{kind}-small")) is not None:
                address = sampler.dialect.wire.address  # type: ignore[attr-defined]
                await grpo(kind, given.sums_model, address, folder, report)
    finally:
        for task in (*starting.values(), *small.values()):
            task.cancel()
        await asyncio.gather(*(s.close() for s in samplers.values()), return_exceptions=True)
    report.tell("machine", "done", "ok")


async def small_server(kind: str, env: Path, given: argparse.Namespace, report: Report) -> None:
    """Of the model that is trained; not touched here."""
    while not (given.sums_model / "config.json").exists():
        await asyncio.sleep(0.5)
    dims = dims_of(json.loads((given.sums_model / "config.json").read_text()))
    wanted = settings_of(kind, env, given.sums_model, dims, dims.max_position)
    wanted = replace(wanted, max_running=1024, kv_cache_bytes=4 << 30)
    await started(kind, f"{kind}-small", wanted, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument("--sglang", type=Path)
    parser.add_argument("--sums-model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/servers_gpu"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if given.sums_model is not None:
            sums = [sys.executable, str(ROOT / "examples/math/sums.py"), str(folder / "sums")]
            subprocess.run(sums, check=True, env=os.environ)
        asyncio.run(run(given, folder))


if __name__ == "__main__":
    main()
