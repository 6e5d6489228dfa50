"""What the log-prob mismatch of trainer and sampler in bf16 is made of, operation by operation.

    OMP_NUM_THREADS=1 python benchmarks/mismatch.py       # SmolLM2-135M's widths, 12 layers
    python benchmarks/mismatch.py --layers 30 --vocab 49152 --rows 8 --device cuda  # all of it

A decoder with random weights that bf16 holds exactly is run over the same tokens in float32 (the
truth), and in float32 with the results of some operations rounded to bf16: of one kind alone, of
all kinds, of all but one. A second run of each takes its sums in two halves, as another kernel
would: the difference of the two (`pair`) is what a trainer and a sampler see of one another. Tokens
are drawn from the truth; differences are |log-prob - log-prob|, in nats. Last come the sampler
and the trainer's forward themselves in bf16, as they are and with the residual stream in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from pentad.core.dims import ModelDims, RopeKind
from pentad.core.swap import swap_classes
from pentad.core.types import Generation, Request, SamplingParams
from pentad.engine.predictor import Predictor
from pentad.infer.sampler import EmbeddedSampler
from pentad.infer.section import SamplerSettings
from pentad.models.decoder import Block, Decoder
from pentad.models.layers import Attention, Embedding, Mlp, Norm, Rotary, Turn
from pentad.models.registry import build_model
from pentad.ops.attention import build_attend

SMOLLM2 = ModelDims(
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    tie_embeddings=True,
    norm_eps=1e-5,
    rope_theta=1e5,
)
KINDS = (
    *("norms", "q/k/v", "cos/sin", "rotary", "attention probs", "attention out", "o"),
    *("gate/up", "silu*up", "down", "residual sums", "final norm"),
)
"""What trainer and sampler round to bf16. Scores, sums and logits are float32 in both."""
ALL = frozenset(KINDS)
WIDER = ("scores", "logits")
"""What a plain bf16 model rounds besides."""
REMEDIES: dict[str, set[str]] = {
    "residual sums in float32": {"residual sums"},
    "norms in float32": {"norms", "final norm"},
    "residual sums and final norm": {"residual sums", "final norm"},
    "the same, o and down": {"residual sums", "final norm", "o", "down"},
    "the same, and norms": {"residual sums", "final norm", "o", "down", "norms"},
}
"""What each side would keep in float32."""


@dataclass(frozen=True)
class Rounding:
    """Which kinds of results are rounded, and whether sums are taken in two halves."""

    kinds: frozenset[str] = frozenset()
    halves: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __call__(self, kind: str, x: Tensor) -> Tensor:
        return x.to(self.dtype).float() if kind in self.kinds else x

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.halves:
            return F.linear(x, weight)
        pairs = zip(x.chunk(2, -1), weight.chunk(2, -1), strict=True)
        first, second = (F.linear(part, held) for part, held in pairs)
        return first + second

    def norm(self, kind: str, layer: Norm, x: Tensor) -> Tensor:
        square = x.pow(2)
        parts = square.chunk(2, -1) if self.halves else (square,)
        mean = torch.stack([part.sum(-1, keepdim=True) for part in parts]).sum(0) / x.shape[-1]
        return self(kind, layer.weight * self(kind, x * torch.rsqrt(mean + layer.eps)))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return self("rotary", self("rotary", x * cos) + self("rotary", turned * sin))

    def attend(self, q_BHLd: Tensor, k_BHLd: Tensor, v_BHLd: Tensor) -> Tensor:
        """As flash kernels do it: weights not yet divided by their sum are rounded, and the
        parts of the keys, each with a maximum of its own, are put together in float32."""
        length, width = q_BHLd.shape[-2:]
        scores = self("scores", q_BHLd @ k_BHLd.transpose(-1, -2)) * width**-0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
        num_parts = 2 if self.halves else 1
        tops, sums, outs = [], [], []
        for part, v in zip(scores.chunk(num_parts, -1), v_BHLd.chunk(num_parts, -2), strict=True):
            top = part.amax(-1, keepdim=True).clamp(min=-1e30)  # a row may see nothing of a part
            weights = (part - top).exp()
            tops.append(top)
            sums.append(weights.sum(-1, keepdim=True))
            outs.append(self("attention probs", weights) @ v)
        top = torch.stack(tops).amax(0)
        scales = [(one - top).exp() for one in tops]
        total = sum(x * scale for x, scale in zip(sums, scales, strict=True))
        out = sum(x * scale for x, scale in zip(outs, scales, strict=True))
        return self("attention out", torch.as_tensor(out) / total)


@torch.inference_mode()
def logits_of(model: Decoder, ids_BL: Tensor, r: Rounding) -> Tensor:
    """The decoder's forward written out, with a rounding behind each operation: [B * L, V]."""
    assert model.embed is not None and model.norm is not None
    num_rows, length = ids_BL.shape
    x = model.embed(ids_BL.flatten())
    positions = torch.arange(length, device=x.device)
    cos, sin = (r("cos/sin", part) for part in model.rotary(positions, x.dtype)["full"])
    for block in model.layers.values():
        assert isinstance(block, Block) and isinstance(block.ffn, Mlp)
        attn: Attention = block.attn
        h = r.norm("norms", block.attn_norm, x)
        q, k, v = (
            r("q/k/v", r.linear(h, part.weight))
            .view(num_rows, length, -1, attn.head_dim)
            .transpose(1, 2)
            for part in (attn.q, attn.k, attn.v)
        )
        q, k = r.rotate(q, cos, sin), r.rotate(k, cos, sin)
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
        o = r.attend(q, k, v).transpose(1, 2).reshape(num_rows * length, -1)
        x = r("residual sums", x + r("o", r.linear(o, attn.o.weight)))
        h = r.norm("norms", block.ffn_norm, x)
        gate_up = block.ffn.gate_up.weight.flatten(0, 1)
        gate, up = r("gate/up", r.linear(h, gate_up)).chunk(2, -1)
        h = r("silu*up", r("silu*up", F.silu(gate)) * up)
        x = r("residual sums", x + r("down", r.linear(h, block.ffn.down.weight)))
    return r("logits", r.linear(r.norm("final norm", model.norm, x), model.head_weight))


@dataclass(frozen=True)
class Case:
    """A model, tokens, and what the model in float32 says of tokens drawn from it."""

    model: Decoder
    ids_BL: Tensor
    labels_T: Tensor
    entropy: float

    def logprobs(self, rounding: Rounding) -> Tensor:
        logits = logits_of(self.model, self.ids_BL, rounding)
        return logits.log_softmax(-1).gather(1, self.labels_T[:, None]).squeeze(1)


def build_case(
    dims: ModelDims, *, rows: int, length: int, entropy: float, device: torch.device, seed: int = 0
) -> Case:
    """The final norm's weight, one number, is chosen such that the entropy is the wanted one."""
    model = build_model(dims, device=device, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                drawn = torch.empty(parameter.shape).uniform_(0.5, 1.5, generator=generator)
            else:
                drawn = torch.empty(parameter.shape)
                drawn.normal_(0.0, dims.initializer_range, generator=generator)
            parameter.copy_(drawn.bfloat16())
    assert model.norm is not None
    ids = torch.randint(dims.vocab_size, (rows, length), generator=generator).to(device)
    model.norm.weight.data.fill_(1.0)
    logits = logits_of(model, ids, Rounding())
    low, high = 0.0, 100.0
    for _ in range(20):
        middle = (low + high) / 2
        is_flat = mean_entropy(middle * logits) > entropy
        low, high = (middle, high) if is_flat else (low, middle)
    scale = torch.tensor(low).bfloat16().float().item()
    model.norm.weight.data.fill_(scale)
    probs = (scale * logits).softmax(-1).cpu()
    labels = torch.multinomial(probs, 1, generator=generator).squeeze(1).to(device)
    return Case(model, ids, labels, mean_entropy(scale * logits))


def mean_entropy(logits: Tensor) -> float:
    logprobs = logits.log_softmax(-1)
    return float(-(logprobs.exp() * logprobs).sum(-1).mean())


def figures(difference: Tensor) -> dict[str, float]:
    wide = difference.double()
    return {
        "mean": float(wide.abs().mean()),
        "p99": float(wide.abs().quantile(0.99)),
        "square": float(wide.pow(2).mean()),
    }


def dissect(case: Case) -> dict[str, dict[str, float]]:
    """By row: how far a rounding is from the truth, and two of them from one another."""
    truth = case.logprobs(Rounding())
    found: dict[str, dict[str, float]] = {}

    def pair(kept: set[str], dtype: torch.dtype = torch.bfloat16) -> dict[str, float]:
        one, other = (case.logprobs(Rounding(ALL - kept, half, dtype)) for half in (False, True))
        return {**figures(one - truth), "pair": float((one - other).abs().mean())}

    found["all"] = pair(set())
    for kind in (*KINDS, *WIDER):
        row = figures(case.logprobs(Rounding(frozenset({kind}))) - truth)
        row["share"] = row["square"] / found["all"]["square"]
        if kind in ALL:
            rest = pair({kind})
            row |= {"without": rest["mean"], "pair_without": rest["pair"]}
        found[kind] = row
    for name, kept in REMEDIES.items():
        found[name] = pair(kept)
    found["all, to float16 instead of bf16"] = pair(set(), torch.float16)
    found["none, sums in halves"] = figures(case.logprobs(Rounding(halves=True)) - truth)
    return found


class WideEmbedding(Embedding):
    """The residual stream begins, and so stays, in float32."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids).float()


class NarrowingNorm(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.eps).to(self.weight.dtype)


class NarrowRotary(Rotary):
    def forward(self, positions_T: Tensor, dtype: torch.dtype) -> dict[RopeKind, Turn]:
        return super().forward(positions_T, torch.bfloat16)


WIDE = {Embedding: WideEmbedding, Norm: NarrowingNorm, Rotary: NarrowRotary}


def measure_real(case: Case, *, is_wide: bool, new: int = 32) -> dict[str, float]:
    """The sampler's log-probs of what it drew against the trainer's forward, both in bf16."""
    device, dims = case.ids_BL.device, case.model.dims
    models = [build_model(dims, device=device, dtype=torch.bfloat16) for _ in range(2)]
    for model in models:
        model.load_state_dict(case.model.state_dict())
        if is_wide:
            swap_classes(model, WIDE)
    sampler = EmbeddedSampler(models[0], SamplerSettings(max_context=1024, kv_cache_tokens=1 << 14))
    prompts, params = case.ids_BL.tolist(), SamplingParams(max_new_tokens=new)

    async def draw() -> list[list[Generation]]:
        load = [
            Request(id=f"r{i}", prompt_ids=tuple(ids), params=params, seeds=(i,))
            for i, ids in enumerate(prompts)
        ]
        results = await asyncio.gather(*(sampler.generate(request) for request in load))
        await sampler.close()
        return results

    answers = [one for (one,) in asyncio.run(draw())]
    rows = [torch.tensor([*ids, *one.ids]) for ids, one in zip(prompts, answers, strict=True)]
    lengths = [len(row) for row in rows]
    attend = build_attend(lengths, device=device, dtype=torch.bfloat16, head_dim=dims.head_dim)
    labels = torch.cat([row.roll(-1) for row in rows]).to(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    with torch.inference_mode():
        logprobs, _, _ = Predictor(models[1], 1.0, None)(
            torch.cat(rows).to(device), positions, labels, attend
        )
    parts = [part[len(prompts[0]) - 1 : -1] for part in logprobs.cpu().split(lengths)]
    return figures(torch.cat(parts) - torch.tensor([p for one in answers for p in one.logprobs]))


def print_rows(found: dict[str, dict[str, float]]) -> None:
    columns = ("mean", "p99", "share", "without", "pair", "pair_without")
    print(f"{'rounded to bf16':38}" + "".join(f"{name:>13}" for name in columns))
    for name, row in found.items():
        cells = (f"{row[key]:13.5f}" if key in row else " " * 13 for key in columns)
        print(f"{name:38}" + "".join(cells))
    total = sum(found[kind]["share"] for kind in KINDS)
    print(f"shares of the kinds together: {total:.2f}")
    print(
        f"two roundings of everything differ by {found['all']['pair']:.4f} in the mean; sqrt(2) "
        f"times one's distance from the truth is {2**0.5 * found['all']['mean']:.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=4, help="sequences")
    parser.add_argument("--length", type=int, default=128, help="tokens of each")
    parser.add_argument("--entropy", type=float, default=2.0, help="nats, about")
    parser.add_argument("--init", type=float, default=0.02, help="spread of the weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start = time.perf_counter()
    dims = replace(
        SMOLLM2,
        num_layers=options.layers,
        vocab_size=options.vocab,
        initializer_range=options.init,
    )
    sizes = {"rows": options.rows, "length": options.length, "entropy": options.entropy}
    case = build_case(dims, **sizes, device=torch.device(options.device))
    print(f"{dims.num_layers} layers, vocabulary {dims.vocab_size}, entropy {case.entropy:.2f}")
    found = dissect(case)
    print_rows(found)
    for is_wide, name in ((False, "as they are"), (True, "residual sums in float32")):
        real = found[f"sampler and trainer, {name}"] = measure_real(case, is_wide=is_wide)
        print(f"sampler and trainer, {name}: mean {real['mean']:.1e}, p99 {real['p99']:.1e}")
    print(f"{time.perf_counter() - start:.0f} s")
    if options.json is not None:
        about = {"torch": torch.__version__, "options": {**vars(options), "json": None}}
        options.json.write_text(json.dumps({**about, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
