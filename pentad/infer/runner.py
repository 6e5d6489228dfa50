"""The runner: executes a plan as one forward pass and samples, on the model's device.

It owns the key-value memory and all device-specific code; it makes no scheduling decisions.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, raise_problems
from pentad.core.fit import strict_problems
from pentad.core.layout import Layout
from pentad.core.sizes import latent_cache_problems
from pentad.core.types import Attend, TopTokens
from pentad.infer.attend import KVCache, OrderedAttend, PagedAttend, StepRows
from pentad.infer.host import apply_host, product
from pentad.infer.sampling import draw, likeliest, uniforms
from pentad.infer.scheduler import Plan
from pentad.infer.section import SamplerSettings
from pentad.infer.sequence import Table
from pentad.infer.shared import Grouping
from pentad.infer.states import KindSlots, StateSlots, StepMemory
from pentad.infer.strict import StrictAttend, head_logits, strict_logprobs
from pentad.models.decoder import Decoder
from pentad.models.language_model import LanguageModel, bent
from pentad.models.latent import apply_absorbed
from pentad.models.lora import apply_lora, blank_factors
from pentad.models.moe import Experts, Routes
from pentad.models.strict import apply_strict
from pentad.ops.capture import free_cached_memory, wait_for_device
from pentad.ops.delta import RememberingAttend
from pentad.ops.experts import can_group
from pentad.ops.pages import EIGHT_BITS

if TYPE_CHECKING:
    from pentad.infer.adapters import JoinedAdapter
    from pentad.infer.graphs import GraphDecoder, Launched

MAX_LOGITS = 1 << 26
"""Maximum number of logits (rows x vocabulary) in memory at once."""


class Runner:
    """A model with its key-value cache."""

    def __init__(
        self,
        model: LanguageModel,
        table: Table,
        num_blocks: int,
        max_context: int,
        settings: SamplerSettings,
    ) -> None:
        self.model = model.requires_grad_(False).eval()
        self.table = table
        self.num_blocks = num_blocks
        self.max_context = max_context
        self.settings = settings
        self.device = model.head_weight.device
        self.dtype = model.head_weight.dtype
        raise_problems(latent_cache_problems(model.dims, settings.rollout.kv_cache_dtype))
        self.holds_latents = bool(model.dims.kv_latent) and not settings.strict
        # Kernels do not support transformers' modules, which attend in plain torch.
        self.has_kernels = wants_triton(settings, self.device) and isinstance(model, Decoder)
        if self.has_kernels and self.holds_latents:
            from pentad.ops import latent_decode

            self.has_kernels = latent_decode.takes(model.dims)
        is_static = self.device.type == "cuda" and never_asks_the_device(model, settings)
        self.captures_graphs = self.has_kernels and is_static and settings.cuda_graphs
        self.is_host = self.dtype == torch.float32 and self.device.type == "cpu"
        self.is_host &= not (self.has_kernels or settings.strict)
        self.resting: dict[str, Tensor] = {}
        """Pinned host memory for the weights of a sleeping GPU; never freed, because pinning is
        slow."""
        self.tops: dict[int, TopTokens] = {}
        """Row -> its most likely tokens at the last step, if requested."""
        self.cache: KVCache | None = None
        self.slots: StateSlots | KindSlots | None = None
        """The states that layers carry from token to token, if any do."""
        self.decoder: GraphDecoder | None = None
        self.is_fused = self.has_kernels and not settings.strict
        self.grouping: Grouping | None = None
        if self.is_fused and settings.shares_prompts:
            from pentad.ops.shared_places import rows_per_tile

            groups = [own.num_heads // own.num_kv_heads for own in model.dims.kinds]
            if reads_prompts(model.dims):
                is_small = settings.rollout.kv_cache_dtype in EIGHT_BITS
                most = min(map(rows_per_tile, groups))
                self.grouping = Grouping(table, most, is_small=is_small)
        self.adapter: JoinedAdapter | None = None
        if isinstance(model, Decoder):
            self.swap_layers(model)
        else:
            raise_problems(own_layers_problems(settings, model))
            self.add_factors(model)
        self.refresh()
        self.wake()

    def swap_layers(self, model: Decoder) -> None:
        """Replaces layers by those for the device and the settings."""
        settings = self.settings
        if self.is_fused:  # Triton is optional, so its users are imported here
            from pentad.infer.fuse import apply_fused

            apply_fused(model)
        if settings.strict:
            raise_problems(strict_problems(Layout(), "the sampler", model.dims))
            apply_strict(model)
        elif self.is_host:
            apply_host(model, joins=settings.lora is None)
        if self.holds_latents:
            apply_absorbed(model)
        self.add_factors(model)
        if settings.lora is not None and self.is_fused:
            from pentad.infer.adapters import join_factors

            self.adapter = join_factors(model)

    def add_factors(self, model: LanguageModel) -> None:
        """Adds an adapter's factors to the model; an install sets their values."""
        if self.settings.lora is not None:
            apply_lora(model, self.settings.lora)
            blank_factors(model.requires_grad_(False), self.device)

    def refresh(self) -> None:
        """Renews copies and joins after weights were installed."""
        if self.adapter is not None:
            self.adapter.refresh()

    # Memory.

    def wake(self) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(self.device, non_blocking=True)
        model = self.model
        if self.is_fused:  # the learner has already joined frozen weights that it shares
            from pentad.infer.fuse import join_all

            assert isinstance(model, Decoder)
            join_all(model)
            if self.device.type == "cuda":
                free_cached_memory()  # frees the parts that were joined
        self.cache = KVCache(
            model.cache_dims,
            self.num_blocks,
            self.settings.block_size,
            device=self.device,
            dtype=EIGHT_BITS.get(self.settings.rollout.kv_cache_dtype, self.dtype),
            expanded=self.settings.strict,
        )
        if self.settings.rollout.replay_routes:
            self.cache.keep_routes(self.model.dims)
        if self.model.dims.linear_layers:
            num_rows = len(self.table.sequences)
            kind: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
            self.slots = StateSlots(self.model.dims, num_rows, self.has_kernels, **kind)
        if model.state_kinds:
            self.slots = KindSlots(model.state_kinds, len(self.table.sequences), self.device)
        if self.has_kernels:
            from pentad.infer.graphs import GraphDecoder

            assert isinstance(model, Decoder) and not isinstance(self.slots, KindSlots)
            self.decoder = GraphDecoder(
                model,
                self.cache,
                self.table,
                self.max_context,
                self.settings.steps_together,
                capture=self.captures_graphs,
                strict=self.settings.strict,
                slots=self.slots,
                grouping=self.grouping,
            )

    def sleep(self) -> None:
        """Frees the cache, and on a GPU the weights, which are kept in host memory."""
        self.cache = self.decoder = self.slots = None
        if self.device.type == "cuda" and self.settings.lora is None:
            if self.is_fused:
                from pentad.infer.fuse import part_all

                assert isinstance(self.model, Decoder)
                part_all(self.model)
            for name, parameter in self.model.named_parameters():
                if name not in self.resting:
                    self.resting[name] = torch.empty_like(
                        parameter, device="cpu", pin_memory=True, requires_grad=False
                    )
                self.resting[name].copy_(parameter.data, non_blocking=True)
            wait_for_device(self.device)
            for name, parameter in self.model.named_parameters():
                parameter.data = self.resting[name]
            free_cached_memory()

    # Steps.

    @torch.inference_mode()
    def run(self, plan: Plan) -> tuple[np.ndarray, np.ndarray]:
        """Computes the planned tokens; returns ids and log-probs of the sampled rows."""
        self.tops = {}
        with self.on_device():
            if self.decoder is not None and plan.is_decode:
                return self.decode(self.decoder, plan.rows)
            ids_N, logprobs_N = self.compute(plan)
            return ids_N.cpu().numpy(), logprobs_N.cpu().numpy()

    def can_launch(self, rows: np.ndarray) -> bool:
        """Whether decode steps of these rows can be captured, and sampling needs no host."""
        needs_host = self.table.is_truncated[rows].any() or self.table.num_top[rows].any()
        return self.decoder is not None and self.captures_graphs and not needs_host

    @torch.inference_mode()
    def begin(self, plan: Plan) -> Launched:
        """Launches a step with prefills without waiting."""
        assert self.decoder is not None
        self.tops = {}
        with self.on_device():
            return self.decoder.adopt(plan.drawn_rows, *self.compute(plan))

    @torch.inference_mode()
    def launch(self, rows: np.ndarray, num_steps: int, after: Launched | None = None) -> Launched:
        """Launches decode steps without waiting."""
        assert self.decoder is not None
        self.tops = {}
        with self.on_device():
            return self.decoder.launch(rows, num_steps, after)

    def on_device(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def compute(self, plan: Plan) -> tuple[Tensor, Tensor]:
        """Computes a step with any mixture of prefill and decode; returns ids and log-probs of the
        sampled rows, on the device."""
        hidden_TD = self.forward(plan)
        if plan.copies:
            assert self.cache is not None
            sources, targets = np.array(plan.copies, np.int64).T
            self.cache.copy_blocks(self.put(sources), self.put(targets))
        if plan.forks and self.slots is not None:
            sources, targets = np.array(plan.forks, np.int64).T
            self.slots.copy(self.put(sources), self.put(targets))
        last = np.cumsum(plan.counts) - 1
        ids, logprobs = [], []
        step = max(1, MAX_LOGITS // self.model.dims.vocab_size)
        for start in range(0, len(plan.drawn_rows), step):
            part = slice(start, start + step)
            ends, which = np.unique(last[plan.drawn_from[part]], return_inverse=True)
            hidden_ND = hidden_TD.index_select(0, self.put(ends))
            logits_NV = self.logits(hidden_ND)
            if len(ends) < len(which) or (np.diff(which) < 0).any():
                logits_NV = logits_NV.index_select(0, self.put(which))
            drawn = self.draw(plan.drawn_rows[part], logits_NV)
            ids.append(drawn[0])
            logprobs.append(drawn[1])
        if not ids:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        return torch.cat(ids), torch.cat(logprobs)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        model = self.model
        if not self.is_host:
            return head_logits(model, hidden_ND, strict=self.settings.strict)
        product_NV = product(hidden_ND, model.head_weight).contiguous()
        return bent(product_NV, model.logit_scale, model.logit_cap)

    def decode(self, decoder: GraphDecoder, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        launched = decoder.launch(rows, 1)
        assert launched.logits_NV is not None
        if self.table.is_truncated[rows].any():
            ids_N, logprobs_N = self.draw(rows, launched.logits_NV)
            return ids_N.cpu().numpy(), logprobs_N.cpu().numpy()
        self.note_tops(rows, launched.logits_NV)
        ids_1N, logprobs_1N = launched.read()
        return ids_1N[0], logprobs_1N[0]

    def inputs(self, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ids, positions and cache places of the planned tokens."""
        table, size = self.table, self.settings.block_size
        counts = plan.counts
        row_T = np.repeat(plan.rows, counts)
        first = np.cumsum(counts) - counts
        position_T = np.arange(len(row_T)) + np.repeat(plan.starts - first, counts)
        ids_T = table.tokens[row_T, position_T]
        places_T = table.blocks[row_T, position_T // size].astype(np.int64) * size
        places_T += position_T % size
        return self.put(ids_T), self.put(position_T), self.put(places_T)

    def forward(self, plan: Plan) -> Tensor:
        if isinstance(self.slots, KindSlots):
            return self.forward_alike(plan, self.slots)
        ids_T, position_T, where_T = self.inputs(plan)
        attend = self.build_attend(plan, where_T)
        if self.slots is not None:
            memory = StepMemory(self.slots, plan.rows, plan.starts, plan.counts)
            attend = RememberingAttend(attend, memory)
        ordered: OrderedAttend | None = None
        if self.model.cache_shapes:
            attend = ordered = OrderedAttend(attend, self.model.cache_shapes, self.dtype)
        routes: Routes | None = {} if self.settings.rollout.replay_routes else None
        hidden_TD: Tensor = self.model(ids_T, position_T, attend, routes)
        if ordered is not None:
            ordered.check_whole()
        if routes is not None:
            assert self.cache is not None
            self.cache.write_routes(where_T, routes)
        return hidden_TD

    def forward_alike(self, plan: Plan, slots: KindSlots) -> Tensor:
        """Computes rows with equal numbers of new tokens in one pass: layers of transformers that
        carry state take several rows, but no packed ones."""
        model, shapes = self.model, self.model.cache_shapes
        hidden_TD = torch.empty(0)
        how = {"batches": model.batches_tokens, "continues_runs": model.continues_runs}
        for members, part in alike(plan, **how):
            shape = len(members), int(part.counts[0])
            ids_T, positions_T, where_T = self.inputs(part)
            attend = OrderedAttend(self.build_attend(part, where_T), shapes, self.dtype)
            rows_S = self.put(part.rows)
            states = slots.read(rows_S) if part.starts[0] else None
            ids_ST, positions_ST = ids_T.view(shape), positions_T.view(shape)
            hidden_STD, states = model.advance(ids_ST, positions_ST, attend, states)
            attend.check_whole()
            slots.write(rows_S, states)
            if not len(hidden_TD):
                hidden_TD = hidden_STD.new_empty(int(plan.counts.sum()), hidden_STD.shape[-1])
            is_own = np.zeros(len(plan.rows), bool)
            is_own[members] = True
            own_T = self.put(np.flatnonzero(np.repeat(is_own, plan.counts)))
            new_STD = hidden_STD[:, -int(plan.counts[members[0]]) :]
            hidden_TD.index_copy_(0, own_T, new_STD.flatten(0, 1))
        return hidden_TD

    def routes_of(self, blocks: list[int], num_tokens: int) -> np.ndarray:
        """Returns the routes of the first tokens of a sequence in these blocks."""
        assert self.cache is not None, "the runner is asleep"
        return self.cache.read_routes(self.put(np.array(blocks, np.int64)), num_tokens)

    def build_attend(self, plan: Plan, places_T: Tensor) -> Attend:
        assert self.cache is not None, "the runner is asleep"
        rows = StepRows(plan.starts, plan.counts, self.table.blocks[plan.rows], places_T)
        if self.settings.strict:
            return StrictAttend(self.cache, rows)
        if self.has_kernels:
            from pentad.infer.mixed import MixedAttend

            return MixedAttend(self.cache, rows, self.dtype)
        return PagedAttend(self.cache, rows)

    def draw(self, rows: np.ndarray, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        table = self.table
        uniform_N = self.put(uniforms(table.seed[rows], table.num_tokens[rows]))
        temperature_N = self.put(table.temperature[rows])
        if table.is_truncated[rows].any():
            limits = self.put(table.top_k[rows]), self.put(table.top_p[rows])
            ids_N, logprobs_N = draw(logits_NV, uniform_N, temperature_N.float(), *limits)
        elif self.has_kernels:
            from pentad.infer.draw_kernel import draw_fused

            ids_N, logprobs_N = draw_fused(logits_NV, uniform_N, temperature_N)
        else:
            ids_N, logprobs_N = draw(logits_NV, uniform_N, temperature_N.float())
        if self.settings.strict:
            logprobs_N = strict_logprobs(logits_NV, ids_N, temperature_N)
        self.note_tops(rows, logits_NV)
        return ids_N, logprobs_N

    def note_tops(self, rows: np.ndarray, logits_NV: Tensor) -> None:
        """Stores the most likely tokens of the rows that request them."""
        wanted = self.table.num_top[rows]
        which = np.flatnonzero(wanted)
        if not len(which):
            return
        logits_NV = logits_NV.index_select(0, self.put(which))
        temperature_N = self.put(self.table.temperature[rows[which]])
        ids_Nk, logprobs_Nk = likeliest(logits_NV, temperature_N.float(), int(wanted.max()))
        if self.settings.strict:
            columns = [strict_logprobs(logits_NV, ids_N, temperature_N) for ids_N in ids_Nk.T]
            logprobs_Nk = torch.stack(columns, dim=1)
        for row, num, ids, logprobs in zip(
            *(rows[which], wanted[which], ids_Nk.tolist(), logprobs_Nk.tolist()), strict=True
        ):
            self.tops[int(row)] = list(zip(ids[:num], logprobs[:num], strict=True))

    def put(self, array: np.ndarray) -> Tensor:
        """Copies to the device without waiting for earlier kernels; pageable memory may be reused
        at once."""
        return torch.from_numpy(array).to(self.device, non_blocking=True)


def reads_prompts(dims: ModelDims) -> bool:
    """Whether a layer attends to whole sequences by the kernel that can read shared places once."""
    is_plain = not (dims.kv_latent or dims.attn_sinks)
    return is_plain and any(dims.window(layer) is None for layer in dims.cached_layers)


def own_layers_problems(settings: SamplerSettings, model: LanguageModel) -> Iterator[Problem]:
    """Reports settings that need Pentad's own layers instead of transformers' modules."""
    family = model.dims.family
    if settings.strict:
        rule = f"needs a model file, and {family} has none"
        yield Problem("strict = true", rule, "leave it out")
    if settings.lora is not None and model.state_kinds:
        rule = f"layers of {family} use some of their matrices without calling them"
        yield Problem("adapter", rule, "merge it into the model's weights")


def alike(plan: Plan, *, batches: bool, continues_runs: bool) -> Iterator[tuple[np.ndarray, Plan]]:
    """Splits a plan into parts whose rows have equal numbers of tokens, and all begin or all
    continue; with the places of their rows in the plan. `batches`: whether single tokens of several
    rows may be one part. Unless the model continues with several tokens, such rows are computed
    again from their beginning."""
    starts, counts = plan.starts, plan.counts
    if not continues_runs:
        starts = np.where(counts > 1, 0, starts)
        counts = counts + plan.starts - starts
    apart = np.arange(len(counts)) * ((counts == 1) & (not batches))
    kinds = np.stack([plan.counts, counts, starts > 0, apart])
    for kind in np.unique(kinds, axis=1).T:
        members = np.flatnonzero((kinds == kind[:, None]).all(0))
        none = np.zeros(0, np.int64)
        yield members, Plan(plan.rows[members], starts[members], counts[members], none, none)


def never_asks_the_device(model: LanguageModel, settings: SamplerSettings) -> bool:
    """Whether a forward pass needs no size from the device, because experts are grouped on the
    device."""
    if not model.dims.num_experts or settings.strict:
        return True
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    return all(
        weight.dtype == torch.bfloat16 and can_group(weight[0, :1], weight)
        for module in experts
        for weight in module.matrices
    )


def wants_triton(settings: SamplerSettings, device: torch.device) -> bool:
    if settings.kernels == "auto":
        return device.type == "cuda" and importlib.util.find_spec("triton") is not None
    return settings.kernels == "triton"
