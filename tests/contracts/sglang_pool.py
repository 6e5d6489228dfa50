"""SGLang's adapters in memory, laid out as in srt/lora of 0.5.17 (lora_manager, mem_pool, layers).

Fused matrices have their A one below the other at steps of the rank; B of linear layers is stored
unscaled, B of experts scaled, and there gate and up of A are at steps of the largest rank.
"""

from types import SimpleNamespace

import torch

from pentad.core.dims import ModelDims


class ColumnLayer:
    def __init__(self, slots: int, rank: int, size: int, widths: list[int], suffix: str = ""):
        self.widths = widths
        self.output_offset_cpu = torch.tensor([0, *widths]).cumsum(0).int()
        self.a = torch.full((slots, rank * len(widths), size), torch.nan)
        self.b = torch.full((slots, sum(widths), rank), torch.nan)
        setattr(self, f"A_buffer{suffix}", self.a)
        setattr(self, f"B_buffer{suffix}", self.b)

    def clear(self, slot: int) -> None:
        self.a[slot], self.b[slot] = 0.0, 0.0

    def pairs(self, slot: int, rank: int, scale: float):
        """What the kernels multiply with, for each matrix: A, and B unscaled."""
        rows = self.b[slot, :, :rank].split(self.widths)
        return list(zip(self.a[slot].split(rank)[: len(rows)], rows, strict=True))


class ExpertLayer:
    def __init__(self, slots: int, rank: int, hidden: int, inner: int, experts: int) -> None:
        self.gate_up_lora_a_weights = torch.full((slots, experts, 2 * rank, hidden), torch.nan)
        self.gate_up_lora_b_weights = torch.full((slots, experts, 2 * inner, rank), torch.nan)
        self.down_lora_a_weights = torch.full((slots, experts, rank, inner), torch.nan)
        self.down_lora_b_weights = torch.full((slots, experts, hidden, rank), torch.nan)

    def clear(self, slot: int) -> None:
        for memory in vars(self).values():
            memory[slot] = 0.0

    def pairs(self, slot: int, rank: int, scale: float):
        for e in range(self.down_lora_a_weights.shape[1]):
            a, b = self.gate_up_lora_a_weights[slot, e], self.gate_up_lora_b_weights[slot, e]
            step = len(a) // 2
            gate, up = (b[:, :rank] / scale).chunk(2)
            yield "gate_proj", e, a[:rank], gate
            yield "up_proj", e, a[step : step + rank], up
            b = self.down_lora_b_weights[slot, e, :, :rank] / scale
            yield "down_proj", e, self.down_lora_a_weights[slot, e, :rank], b


class LoraPool:
    """LoRAManager and its LoRAMemoryPool in one."""

    def __init__(self, dims: ModelDims, rank: int, skips: tuple[str, ...] = ()) -> None:
        """`skips`: modules without adapter capacity."""
        self.max_lora_rank, self.tp_rank, self.device = rank, 0, torch.device("cpu")
        self.memory_pool, self.max_loras_per_batch, self.num_pinned_loras = self, 2, 0
        self.lora_refs, self.loras = {}, {}
        self.uid_to_buffer_id = {None: 0}
        self.notified: list[set[int]] = []
        self.skips = skips
        self.lora_modules = [self.layers(dims, number) for number in range(dims.num_layers)]

    def layers(self, dims: ModelDims, number: int):
        place, own = f"model.layers.{number}", (2, self.max_lora_rank)
        heads = [dims.num_heads, dims.num_kv_heads, dims.num_kv_heads]
        widths, hidden = [n * dims.head_dim for n in heads], dims.hidden_size
        found = {
            f"{place}.self_attn.qkv_proj": ColumnLayer(*own, hidden, widths, "_qkv"),
            f"{place}.self_attn.o_proj": ColumnLayer(*own, widths[0], [hidden]),
        }
        if dims.is_moe(number):
            shape = (hidden, dims.moe_intermediate_size, dims.num_experts)
            found[f"{place}.mlp.experts"] = ExpertLayer(*own, *shape)
        else:
            inner = dims.intermediate_size
            found[f"{place}.mlp.gate_up_proj"] = ColumnLayer(*own, hidden, [inner, inner])
            found[f"{place}.mlp.down_proj"] = ColumnLayer(*own, inner, [hidden])
        return {name: layer for name, layer in found.items() if name not in self.skips}

    def load_lora_adapter_from_tensors(self, ref, tensors, config):
        assert ref.lora_id not in self.loras and config["peft_type"] == "LORA"
        assert not config["target_modules"] and not tensors and config["r"] <= self.max_lora_rank
        assert not (ref.pinned and self.num_pinned_loras >= self.max_loras_per_batch - 1)
        self.lora_refs[ref.lora_id] = ref
        scaling = config["lora_alpha"] / config["r"]
        self.loras[ref.lora_id] = SimpleNamespace(scaling=scaling, rank=config["r"])
        self.num_pinned_loras += int(ref.pinned)
        return SimpleNamespace(success=True, error_message="")

    def fetch_new_loras(self, uids) -> None:
        for uid in uids:
            slot = self.uid_to_buffer_id[uid] = len(self.uid_to_buffer_id)
            assert slot < self.max_loras_per_batch
            for layer in self.lora_modules:
                for module in layer.values():
                    module.clear(slot)

    def get_buffer_id(self, uid) -> int:
        return self.uid_to_buffer_id[uid]

    def _notify_lora_slots_updated(self, slots) -> None:
        self.notified.append(slots)

    def factors(self, uid) -> dict[str, torch.Tensor]:
        """The adapter that requests of this id are answered with."""
        slot, one = self.get_buffer_id(uid), self.loras[uid]
        out = {}
        fused = {"qkv_proj": "q_proj k_proj v_proj", "gate_up_proj": "gate_proj up_proj"}
        for layer in self.lora_modules:
            for name, module in layer.items():
                place, _, last = name.rpartition(".")
                pairs = module.pairs(slot, one.rank, one.scaling)
                if isinstance(module, ExpertLayer):
                    named = [(f"{name}.{e}.{part}", a, b) for part, e, a, b in pairs]
                else:
                    own = fused.get(last, last).split()
                    named = [(f"{place}.{p}", a, b) for p, (a, b) in zip(own, pairs, strict=True)]
                for module_name, a, b in named:
                    out[f"{module_name}.lora_A.weight"] = a.clone()
                    out[f"{module_name}.lora_B.weight"] = b.clone()
        return out
