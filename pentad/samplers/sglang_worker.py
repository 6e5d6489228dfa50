"""Plugin of SGLang's workers: installs the factors of an adapter in place, and verifies them.

SGLang calls `register` in each of its processes (entry point group `sglang.srt.plugins`), in its
own environment, where only modules of Pentad that need nothing but torch may be imported. Calls
arrive as the `action` of /weights_checker, the answer is in its `checksums`: JSON text both ways.

The front end registers an adapter without factors under one name. Its slot in SGLang's memory pool
is then written directly: requests in progress and captured graphs keep the memory they read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pentad.ops.digest import digest_of
from pentad.samplers.receiver import Receiver, Reply, TensorStream, reports_errors
from pentad.sync.group import PROTOCOL
from pentad.weights.peft import FUSED, A, B, expanded

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
PoolPart = tuple[str, Tensor, Tensor, float]
"""Module name as in files, its memory for A and for B, and the factor by which B is stored."""


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{RUNNER}.check_weights", answered, HookType.AROUND)
    HookRegistry.register(f"{RUNNER}.load_lora_adapter", registered, HookType.AROUND)


def answered(check: Callable[..., Any], runner: Any, *args: Any, **keys: Any) -> Any:
    """Answers our calls, and passes other actions of /weights_checker on."""
    action = keys.get("action", "")
    if not action.startswith("{"):
        return check(runner, *args, **keys)
    call = json.loads(action)
    reply = getattr(receiver_of(runner), call["method"])(*call["args"])
    roles = {"role": keys["role"]} if "role" in keys else {}
    place = runner._weight_checker._parallelism_info(**roles).model_dump()
    sums = {"reply": json.dumps(reply)}
    return {"checksums": sums, "per_gpu_checksum": "", "parallelism_info": place}


def registered(load: Callable[..., Any], runner: Any, ref: Any) -> Any:
    """Registers our adapter, without factors; loads others from their folders."""
    receiver = receiver_of(runner)
    if receiver.lora is None or ref.lora_name != receiver.lora["name"]:
        return load(runner, ref)
    config = {"peft_type": "LORA", "r": receiver.lora["rank"], "target_modules": []}
    config["lora_alpha"] = receiver.lora["alpha"]
    return runner.lora_manager.load_lora_adapter_from_tensors(ref, {}, config)


def receiver_of(runner: Any) -> FactorReceiver:
    if "pentad_receiver" not in vars(runner):
        runner.pentad_receiver = FactorReceiver(runner)
    found: FactorReceiver = runner.pentad_receiver
    return found


class FactorReceiver(Receiver):
    def __init__(self, runner: Any) -> None:
        self.manager = runner.lora_manager
        self.lora: dict[str, Any] | None = None
        """Name, rank and alpha of the adapter whose factors are received."""
        self.taken: set[str] = set()
        """Names of the factors of the last install."""
        if self.manager is not None:
            self.rank, self.device = self.manager.tp_rank, self.manager.device

    @reports_errors
    def pentad_adapter(self, spec: str) -> Reply:
        """Prepares the worker for factors; returns the modules that support them."""
        if self.manager is None:
            raise RuntimeError("adapters are not enabled")
        self.lora = json.loads(spec)
        rank = self.manager.max_lora_rank
        if rank < self.lora["rank"]:
            raise RuntimeError(f"adapters have at most rank {rank}")
        refs = self.manager.lora_refs.items()
        found = [self.manager.loras[uid] for uid, ref in refs if ref.lora_name == self.lora["name"]]
        if any(one.scaling != self.lora["alpha"] / self.lora["rank"] for one in found):
            raise RuntimeError("it has an adapter of the same name with another rank or alpha")
        parts = list(self.parts(0))
        dtype = str(parts[0][1].dtype).removeprefix("torch.") if parts else ""
        names = sorted(name for name, *_ in parts)
        said = {"protocol": PROTOCOL, "is_registered": bool(found), "dtype": dtype}
        return {"modules": names, **said}

    @reports_errors
    @torch.inference_mode()
    def pentad_held_factors(self) -> Reply:
        """Returns the digest of every factor in the memory that the layers read; omits modules
        without factors, whose values are 0."""
        held: dict[str, Tensor] = {}
        for name, a, b, _ in self.parts(self.slot()):
            held |= {f"{name}{A}": a, f"{name}{B}": b}
        kept = [(n, t.contiguous()) for n, t in held.items() if n in self.taken or bool(t.any())]
        return {"held": digest_of(kept).entries}

    @torch.inference_mode()
    def pentad_take(self, pairs: TensorStream, *, is_part: bool = False) -> Reply:
        """Replaces the factors, which requests in progress then use."""
        factors = dict(pairs)
        arrived, slot = digest_of(factors.items()), self.slot()
        wanted = expanded(factors)
        parts = {name: (a, b, scale) for name, a, b, scale in self.parts(slot)}
        missed = [n for n in wanted if n.removesuffix(A).removesuffix(B) not in parts]
        if missed:
            raise RuntimeError(f"there is no layer for {len(missed)} factors, first {missed[0]}")
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # the last pass may still read them on another stream
        for name, (a, b, scale) in parts.items():
            given = [wanted.get(f"{name}{kind}") for kind in (A, B)]
            for memory, factor, by in zip((a, b), given, (1.0, scale), strict=True):
                if factor is None:
                    memory.zero_()
                else:
                    stored = factor.to(memory.dtype)
                    memory.copy_(stored if by == 1 else stored * by)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.manager._notify_lora_slots_updated({slot})
        self.taken = set(wanted)
        return {"num_tensors": len(arrived.entries), "digest": arrived.hex()}

    def slot(self) -> int:
        """Slot of the adapter in the memory pool; it is pinned, so it keeps the slot."""
        assert self.lora is not None, "pentad_adapter comes first"
        refs = self.manager.lora_refs.items()
        uid = next(uid for uid, ref in refs if ref.lora_name == self.lora["name"])
        if uid not in self.manager.memory_pool.uid_to_buffer_id:
            self.manager.fetch_new_loras({uid})
        found: int = self.manager.memory_pool.get_buffer_id(uid)
        return found

    def parts(self, slot: int) -> Iterator[PoolPart]:
        """Yields the parts of a slot of every layer with adapter capacity."""
        assert self.lora is not None
        rank = self.lora["rank"]
        for layer in self.manager.lora_modules:
            for name, module in layer.items():
                if hasattr(module, "gate_up_lora_a_weights"):
                    yield from expert_parts(name, module, slot, self.lora, self.manager)
                else:
                    yield from dense_parts(name, module, slot, rank)


def dense_parts(name: str, module: Any, slot: int, rank: int) -> Iterator[PoolPart]:
    """Parts of a linear layer: SGLang stores A of fused matrices one after another, and scales
    their product instead of B."""
    kind = "_qkv" if hasattr(module, "A_buffer_qkv") else ""
    a, b = (getattr(module, f"{side}_buffer{kind}")[slot] for side in "AB")
    place, _, last = name.rpartition(".")
    own = FUSED.get(last, (last,))
    bounds = module.output_offset_cpu.tolist() if len(own) > 1 else [0, len(b)]
    if len(bounds) != len(own) + 1:
        return  # fused of other matrices than those of the file
    for i, part in enumerate(own):
        rows = slice(bounds[i], bounds[i + 1])
        yield f"{place}.{part}", a[i * rank : (i + 1) * rank], b[rows, :rank], 1.0


def expert_parts(
    name: str, module: Any, slot: int, lora: dict[str, Any], manager: Any
) -> Iterator[PoolPart]:
    """Parts of stacked experts, whose B is stored scaled; a shared factor may be stored once."""
    gate_a, gate_b = module.gate_up_lora_a_weights[slot], module.gate_up_lora_b_weights[slot]
    down_a, down_b = module.down_lora_a_weights[slot], module.down_lora_b_weights[slot]
    half, rank, scale = gate_b.shape[1] // 2, lora["rank"], lora["alpha"] / lora["rank"]
    for e in range(max(len(gate_b), len(down_a))):
        a, b = gate_a[min(e, len(gate_a) - 1)], gate_b[min(e, len(gate_b) - 1)]
        for at, part in enumerate(("gate_proj", "up_proj")):
            rows = slice(at * half, (at + 1) * half)
            first = at * manager.max_lora_rank
            yield f"{name}.{e}.{part}", a[first : first + rank], b[rows, :rank], scale
        a, b = down_a[min(e, len(down_a) - 1)], down_b[min(e, len(down_b) - 1)]
        yield f"{name}.{e}.down_proj", a[:rank], b[:, :rank], scale
