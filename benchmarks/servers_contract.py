"""What real servers on a GPU must do, asked of one of them: `servers_gpu.py` starts and reports.

Two sets of random weights are published in turn; each answer is held against the trainer's own
model of both.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from sampler_load import forced, random_model, requests  # noqa: E402

from pentad.core.dims import ModelDims  # noqa: E402
from pentad.core.errors import InfraFailure  # noqa: E402
from pentad.core.types import Generation, Request, SamplingParams  # noqa: E402
from pentad.engine.section import LoraConfig  # noqa: E402
from pentad.models.decoder import Decoder, causal_attend  # noqa: E402
from pentad.models.hf_weights import iter_hf  # noqa: E402
from pentad.models.lora import apply_lora, blank_factors, factors_of  # noqa: E402
from pentad.ops.digest import digest_of  # noqa: E402
from pentad.samplers import sglang, vllm  # noqa: E402
from pentad.samplers.process import ServerSettings  # noqa: E402
from pentad.samplers.server_sampler import ServerSampler  # noqa: E402

ATTACH = {"vllm": vllm.attach, "sglang": sglang.attach}
PART_S = 60.0
DRAWING_S = 0.5
"""After which the first tokens of a request are drawn."""
NEAR = 0.1
"""Mean difference of log-probs in bf16 below which two policies are one; others differ by more."""


class Report:
    def __init__(self, folder: Path) -> None:
        """Lines are added to a report that is there."""
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
            traceback.print_exc()
            self.tell(who, what, f"FAILED {type(error).__name__}: {text}")
            return None
        self.tell(who, what, "ok" if value is None else value)
        return value


def used_gib() -> float:
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.check_output(asked, text=True).split()[0]) / 1024


class Policies:
    """Two sets of weights, and what each would say of drawn tokens."""

    def __init__(self, dims: ModelDims) -> None:
        self.models = [random_model(dims, seed) for seed in (1, 2)]
        self.pairs = [list(iter_hf(model)) for model in self.models]

    def difference(self, which: int, request: Request, drawn: Generation, part: slice) -> float:
        truth = forced(self.models[which], request, drawn)[part]
        return float((torch.tensor(drawn.logprobs)[part] - truth).abs().mean())

    def check(self, which: int, request: Request, answers: list[Generation]) -> str:
        assert len(answers) == len(request.seeds)
        own = [self.difference(which, request, g, slice(None)) for g in answers]
        other = [self.difference(1 - which, request, g, slice(None)) for g in answers]
        told = f"mean |log-prob difference| {max(own):.4f}, from the other weights {min(other):.2f}"
        assert max(own) < min(NEAR, min(other) / 4), told
        return told


class Adapters(Policies):
    """Two adapters of one random base."""

    def __init__(self, dims: ModelDims, lora: LoraConfig) -> None:
        self.models = [random_model(dims, 3) for _ in range(2)]
        self.pairs = []
        for seed, model in enumerate(self.models):
            apply_lora(model, lora)
            blank_factors(model.requires_grad_(False), torch.device("cuda"))
            generator = torch.Generator("cuda").manual_seed(seed)
            for factor in (t for f in factors_of(model) for t in f.parameters()):
                factor.data.normal_(0.0, 0.04, generator=generator)
            pairs = iter_hf(model, torch.float32, model.adapter_map)
            self.pairs.append([(name, tensor.clone()) for name, tensor in pairs])


def ask(name: str, num: int = 1, new: int = 32, **params: Any) -> Request:
    (request,) = requests(1, n=num, prompt=40, new=new)
    return replace(request, id=name, params=SamplingParams(max_new_tokens=new, **params))


def by(transport: str, sampler: ServerSampler) -> ServerSettings:
    """The settings of the server, with another transport of weights."""
    settings = sampler.dialect.settings
    server = settings.server.model_copy(update={"weight_transport": transport})
    rollout = settings.rollout.model_copy(update={"server": server})
    return settings.model_copy(update={"rollout": rollout})


async def compare_held(sampler: ServerSampler, pairs: Any) -> None:
    """Raises InfraFailure unless the server holds these weights."""
    dialect: Any = sampler.dialect
    dialect.num_loads = 0  # the first install is compared
    await dialect._prove_if_due(pairs, is_part=False)


# The contract.


async def contract(kind: str, sampler: ServerSampler, two: Policies, report: Report) -> None:
    async def prove(which: int, seconds: list[float]) -> None:
        began = time.perf_counter()
        await compare_held(sampler, two.pairs[which])
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
        """A third of all ids end an answer: no two answers of a server in bf16 need be equal."""
        ends = range(0, sampler.dims.vocab_size, 3)
        answers = await sampler.generate(ask("stop", 4, new=200, stop_ids=tuple(ends)))
        for g in answers:
            *before, last = g.ids
            assert g.finish == "stop" and last in ends and not set(before) & set(ends), g

    async def abort() -> str:
        request = ask("long", 3, new=3000)
        task = asyncio.create_task(sampler.generate(request))
        await asyncio.sleep(DRAWING_S)
        began = time.perf_counter()
        await sampler.abort("long")
        answers = await task
        assert all(g.finish == "abort" for g in answers)
        return f"{1e3 * (time.perf_counter() - began):.0f} ms, {[len(g.ids) for g in answers]}"

    async def under_way() -> str:
        request = ask("cut", 2, new=3000)
        task = asyncio.create_task(sampler.generate(request))
        await asyncio.sleep(DRAWING_S)
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
            settings = by(name, sampler)
            client = await ATTACH[kind](sampler.dialect.wire.address, settings)  # type: ignore[attr-defined]
            # NCCL takes no two processes of one GPU: these travel by gloo.
            pairs = two.pairs[which]
            given = [(n, t.cpu()) for n, t in pairs] if name == "broadcast" else pairs
            began = time.perf_counter()
            await asyncio.wait_for(client.install(10 + number, given), 75)
            took.append(f"{name} {time.perf_counter() - began:.2f} s")
            request = ask(f"by-{name}", 2)
            two.check(which, request, await client.generate(request))
            await client.close()
            sampler.version = 10 + number
        return "randomised, published, compared: " + ", ".join(took)

    async def delta() -> str:
        """By disk, and only one layer changes: there and back."""
        settings = by("disk", sampler)
        client = await ATTACH[kind](sampler.dialect.wire.address, settings)  # type: ignore[attr-defined]
        other = dict(two.pairs[1])
        mixed = [(n, other[n] if ".layers.1." in n else t) for n, t in two.pairs[0]]
        took = []
        for number, pairs in enumerate((two.pairs[0], mixed, two.pairs[0])):
            began = time.perf_counter()
            receipt = await client.install(20 + number, pairs)
            assert receipt.digest == digest_of(pairs).hex()
            seconds = time.perf_counter() - began
            took.append(f"{receipt.num_bytes / 1e6:.1f} MB in {seconds:.2f} s")
        request = ask("delta", 2)
        told = two.check(0, request, await client.generate(request))
        await client.close()
        sampler.version = 22
        return f"all, one layer, it back: {', '.join(took)}; {told}"

    await report.part(kind, "generate: n samples, log-probs, versions", first)
    await report.part(kind, "weights as held", held)
    if "seeds" in sampler.capabilities:
        await report.part(kind, "seeds", seeds)
    await report.part(kind, "stop ids", stops)
    await report.part(kind, "abort", abort)
    await report.part(kind, "install with answers under way", under_way)
    await report.part(kind, "sleep and wake", sleep)
    await report.part(kind, "transports", transports, 180)
    await report.part(kind, "disk with deltas", delta)


# A mixture of experts.


@torch.inference_mode()
def routed(
    model: Decoder, request: Request, drawn: Generation, rows: slice
) -> tuple[np.ndarray, torch.Tensor]:
    """Where the trainer's own routers send the tokens, and what it would say of them if it sent
    those of `rows` where the server did. The others may be of other weights, and the server
    computed their cache anew with its own routes of these, which no answer carries."""
    assert drawn.routes is not None
    ids = torch.tensor([*request.prompt_ids, *drawn.ids], device="cuda")
    at = torch.arange(len(ids), device="cuda")
    own: dict[int, torch.Tensor] = {}
    model(ids, at, causal_attend, own)
    own_TLk = torch.stack([own[layer] for layer in sorted(own)], 1).sort(-1).values
    told = torch.from_numpy(drawn.routes).long().cuda()
    given = {layer: one.clone() for layer, one in own.items()}
    for number, layer in enumerate(sorted(own)):
        given[layer][rows] = told[rows, number].to(given[layer].dtype)
    hidden = model(ids, at, causal_attend, given)
    logprobs = model.logits(hidden).float().log_softmax(-1)[:-1].gather(1, ids[1:, None])
    return own_TLk.cpu().numpy(), logprobs.squeeze(1)[len(request.prompt_ids) - 1 :].cpu()


async def mixture(kind: str, sampler: ServerSampler, two: Policies, report: Report) -> None:
    """Weights by ipc, every tensor as held, log-probs, and the routes beside our own routers'."""

    def compare(which: int, request: Request, drawn: Generation, part: slice) -> list[float]:
        """Share of equal routes; mean log-prob difference with our routes, and with its own."""
        start, stop, _ = part.indices(len(drawn.ids))
        before = len(request.prompt_ids) - 1  # the row of a token's predecessor drew it
        rows = slice(before + start if start else 0, before + stop)
        own, replayed = routed(two.models[which], request, drawn, rows)
        assert drawn.routes is not None and drawn.routes.shape == own.shape
        told = np.sort(drawn.routes, -1)[rows]
        equal = float((told == own[rows]).mean())
        logprobs = torch.tensor(drawn.logprobs)[part]
        plain = forced(two.models[which], request, drawn)[part]
        gaps = [float((logprobs - truth).abs().mean()) for truth in (plain, replayed[part])]
        return [equal, *gaps]

    def told_of(figures: list[list[float]]) -> str:
        equal, plain, replayed = np.mean(figures, 0)
        return (
            f"routes equal {equal:.4f}; mean |log-prob difference| {plain:.4f} by our routes, "
            f"{replayed:.4f} by the server's"
        )

    async def first() -> str:
        began = time.perf_counter()
        receipt = await sampler.install(0, two.pairs[0])
        seconds = time.perf_counter() - began
        assert receipt.digest == digest_of(two.pairs[0]).hex()
        request = ask("routes", 8, new=128)
        answers = await sampler.generate(request)
        two.check(0, request, answers)
        told = told_of([compare(0, request, g, slice(None)) for g in answers])
        return (
            f"{len(two.pairs[0])} tensors installed and compared as held in {seconds:.2f} s; {told}"
        )

    async def damaged() -> str:
        """A tensor of an expert is replaced, and must be found."""
        name = next(n for n, _ in two.pairs[1] if ".experts.17.up_proj" in n)
        bad = [(n, torch.zeros_like(t) if n == name else t) for n, t in two.pairs[1]]
        await sampler.dialect.pause()
        await sampler.dialect.load(0, bad)
        try:
            await compare_held(sampler, two.pairs[1])
        except InfraFailure as failure:
            found = str(failure).partition(": ")[2].split(" has ")[0]
        else:
            raise AssertionError(f"{name} was replaced and nobody noticed")
        await sampler.dialect.load(0, two.pairs[0])
        await sampler.dialect.resume()
        return f"replaced {name}, found in {found}"

    async def under_way() -> str:
        request = ask("moved", 2, new=2000)
        task = asyncio.create_task(sampler.generate(request))
        await asyncio.sleep(DRAWING_S)
        await sampler.install(1, two.pairs[1])
        answers = await task
        figures = []
        for g in answers:
            old = g.versions.count(0)
            assert set(g.versions) == {0, 1} and len(g.ids) == 2000, old
            figures += [
                compare(0, request, g, slice(0, old)),
                compare(1, request, g, slice(old, None)),
            ]
        return (
            f"{[g.versions.count(0) for g in answers]} of 2000 tokens are old; {told_of(figures)}"
        )

    async def speed() -> str:
        load = [replace(r, id=f"speed-{r.id}") for r in requests(128, new=128)]
        began = time.perf_counter()
        results = await asyncio.gather(*(sampler.generate(r) for r in load))
        tokens = sum(len(g.ids) for answers in results for g in answers)
        return f"128 requests of 128 + 128: {tokens / (time.perf_counter() - began):.0f} tok/s"

    await report.part(kind, "mixture: weights, log-probs, routes", first)
    await report.part(kind, "mixture: an expert that is not as published", damaged)
    await report.part(kind, "mixture: install with answers under way", under_way)
    await report.part(kind, "mixture: throughput with routes", speed)


# An adapter.


async def adapter(kind: str, sampler: ServerSampler, two: Adapters, report: Report) -> None:
    """Factors by ipc, replaced in place, every factor as held, and log-probs."""
    dialect: Any = sampler.dialect

    async def first() -> str:
        began = time.perf_counter()
        receipt = await sampler.install(0, two.pairs[0])
        seconds = time.perf_counter() - began
        assert receipt.digest == digest_of(two.pairs[0]).hex()
        request = ask("adapter", 4)
        told = two.check(0, request, await sampler.generate(request))
        return f"{len(two.pairs[0])} factors, first install {seconds:.2f} s; {told}"

    async def under_way() -> str:
        request = ask("replaced", 2, new=2000)
        task = asyncio.create_task(sampler.generate(request))
        await asyncio.sleep(DRAWING_S)
        await sampler.install(1, two.pairs[1])
        gaps, old = [], []
        for g in await task:
            old.append(g.versions.count(0))
            assert set(g.versions) == {0, 1} and len(g.ids) == 2000, old
            parts = ((0, slice(0, old[-1])), (1, slice(old[-1], None)))
            gaps += [two.difference(which, request, g, part) for which, part in parts]
        assert max(gaps) < NEAR, gaps
        return f"{old} of 2000 tokens are old; differences {[f'{x:.3f}' for x in gaps]}"

    async def damaged() -> str:
        """A factor is replaced behind the published ones, and must be found."""
        name, tensor = two.pairs[1][-1]
        bad = [*two.pairs[1][:-1], (name, tensor + 1e-2)]
        await sampler.dialect.pause()
        await dialect.transport.send(bad, dialect.call_workers)
        sent, dialect.transport.send = dialect.transport.send, lost
        try:
            await sampler.dialect.load(2, two.pairs[1])
        except InfraFailure as failure:
            told = str(failure).partition(": ")[2].split(" has ")[0]
        else:
            raise AssertionError(f"{name} was replaced and not found")
        finally:
            dialect.transport.send = sent
        await sampler.dialect.load(2, two.pairs[1])
        await sampler.dialect.resume()
        sampler.version = 2
        return f"replaced {name}, found in {told}"

    async def lost(weights: Any, call: Any, **_: Any) -> list[dict[str, Any]]:
        """A transfer that reports success, and does not arrive."""
        whole = digest_of(weights)
        return [{"num_tensors": len(whole.entries), "digest": whole.hex()}]

    async def publish() -> str:
        seconds = []
        for number in range(7):
            began = time.perf_counter()
            await sampler.install(3 + number, two.pairs[number % 2])
            seconds.append(1e3 * (time.perf_counter() - began))
        request = ask("again", 2)
        told = two.check(0, request, await sampler.generate(request))
        return f"publish, each compared as held [ms]: {sorted(map(round, seconds))}; {told}"

    async def speed() -> str:
        rates = []
        for turn in range(2):
            load = [replace(r, id=f"speed-{turn}-{r.id}") for r in requests(256)]
            began = time.perf_counter()
            results = await asyncio.gather(*(sampler.generate(r) for r in load))
            tokens = sum(len(g.ids) for answers in results for g in answers)
            rates.append(tokens / (time.perf_counter() - began))
        return f"256 requests of 128 + 256: {rates[-1]:.0f} tok/s"

    await report.part(kind, "adapter: factors, log-probs", first)
    await report.part(kind, "adapter: replaced with answers under way", under_way)
    await report.part(kind, "adapter: a factor that is not as published", damaged)
    await report.part(kind, "adapter: publish", publish)
    await report.part(kind, "adapter: throughput", speed)
