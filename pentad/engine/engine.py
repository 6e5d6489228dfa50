"""The engine: the learner of one model on one rank, in the terms of `core.roles.Learner`.

It takes rows and a loss and knows no algorithm. The loss is a sum; nothing divides before
`end_step`, which divides once by the summed count, so the gradient does not depend on how rows were
cut into calls, microbatches and chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pentad.core.errors import RunError
from pentad.core.roles import NamedTensors
from pentad.core.types import Accumulated, Loss, Row, StepResult, TokenOutputs
from pentad.engine.batch import PackedRows, check_rows, pack_rows, split_out
from pentad.engine.optim import (
    build_adamw,
    check_named,
    clip_scale,
    copy_named,
    gradient_norm,
    local,
    optimizer_state,
    scale_gradients,
)
from pentad.engine.packing import plan_microbatches, sequence_cost
from pentad.engine.predictor import Predicted, Predictor
from pentad.engine.schedule import compute_lr
from pentad.engine.settings import DTYPES, EngineSettings
from pentad.engine.step import OpenStep
from pentad.engine.tags import WeightTags
from pentad.engine.wrap import reshard, wrap_model
from pentad.models.decoder import Decoder
from pentad.models.exchange import install_hf, iter_hf
from pentad.models.families import ConfigLike, dims_of, read_config
from pentad.models.registry import build_model, initialise, load_weights, save_model
from pentad.ops.attention import build_attend

Part = tuple[list[int], list[int], Predicted]
"""Of one microbatch: its rows, their lengths, and what the model said of them."""


def build_engine(
    source: ConfigLike,
    settings: EngineSettings,
    *,
    device: torch.device | str = "cpu",
    value_head: bool = False,
    init_from_scratch: bool = False,
    seed: int = 0,
    family: str | None = None,
    tokenizer_folder: str | None = None,
) -> Engine:
    """An engine for the model of a HF folder, or of a config when it starts from scratch.

    The model is built without memory, wrapped, and only then given its weights, so that each rank
    holds and reads no more than its part. `value_head` makes it a critic: values, no log-probs.
    """
    device = torch.device(device)
    dims = dims_of(source, family)
    dtype = DTYPES[settings.param_dtype]
    decoder = build_model(dims, device="meta", dtype=dtype, value_head=value_head)
    predictor = wrap_model(decoder, settings, device).to_empty(device=device)
    if init_from_scratch:
        initialise(predictor.decoder, seed)
    else:
        assert isinstance(source, str | Path), "weights are loaded from a folder"
        load_weights(predictor.decoder, source, seed=seed)
    return Engine(
        predictor,
        settings,
        device=device,
        hf_config=read_config(source),
        source_folder=source if isinstance(source, str | Path) else None,
        tokenizer_folder=tokenizer_folder,
    )


class Engine:
    """Implements `core.roles.Learner`. Built by `build_engine`."""

    def __init__(
        self,
        predictor: Predictor,
        settings: EngineSettings,
        *,
        device: torch.device,
        hf_config: Mapping[str, Any],
        source_folder: str | Path | None = None,
        tokenizer_folder: str | Path | None = None,
    ) -> None:
        self.predictor = predictor
        self.decoder = predictor.decoder
        self.dims = predictor.decoder.dims
        self.settings = settings
        self.device = device
        self.hf_config = hf_config
        self.source_folder = source_folder
        self.tokenizer_folder = tokenizer_folder
        if settings.deterministic:
            torch.use_deterministic_algorithms(True)
        self.parameters: dict[str, Tensor] = dict(self.decoder.named_parameters())
        self.tensors = self.parameters | dict(self.decoder.named_buffers())
        """All that makes up the weights, by native name."""
        self.tags = WeightTags({k: local(v) for k, v in self.tensors.items()}, settings.tag_memory)
        self.optimizer = (
            build_adamw(self.parameters, settings.optimizer) if settings.optimizer else None
        )
        self.cost = sequence_cost(self.dims)
        self.step: OpenStep | None = None
        self.num_steps = 0
        """Calls of `end_step`: what the learning rate follows."""
        self.num_skipped = 0
        """Those of them in which the weights did not move."""

    # Scoring

    def forward(self, rows: Sequence[Row], tag: str = "actor") -> list[dict[str, Tensor]]:
        check_rows(rows, (), self.dims.vocab_size)
        parts: list[Part] = []
        with self.use(tag), torch.no_grad():
            try:
                for indices in self._microbatches(rows):
                    packed = pack_rows([rows[i] for i in indices], (), self.device)
                    with explain_memory("scoring", packed):
                        logprobs_T, _, values_T = self._predict(packed)
                    parts.append((indices, packed.lengths, (logprobs_T, None, values_T)))
            finally:
                reshard(self.predictor)
        return _per_row(parts, len(rows))

    def _microbatches(self, rows: Sequence[Row]) -> list[list[int]]:
        (plan,) = plan_microbatches(
            [row.ids.numel() for row in rows],
            self.cost,
            max_tokens=self.settings.max_tokens_per_mb,
            min_per_rank=self.settings.n_mbs,
        )
        return [indices for indices in plan if indices]

    def _predict(self, packed: PackedRows) -> Predicted:
        attend = build_attend(
            packed.lengths,
            device=self.device,
            dtype=DTYPES[self.settings.compute_dtype],
            head_dim=self.dims.head_dim,
        )
        result: Predicted = self.predictor(
            packed.ids_T, packed.positions_T, packed.labels_T, attend
        )
        return result

    # Training

    def begin_step(self) -> None:
        """Starts a step; a step that was begun and not ended is given up with its gradient."""
        if self.optimizer is None:
            raise RunError("this engine only scores: its settings have no optimizer")
        self.tags.require_actor("a step")
        self.optimizer.zero_grad(set_to_none=True)
        self.step = OpenStep()

    def accumulate(self, rows: Sequence[Row], loss: Loss, *, last: bool = True) -> Accumulated:
        step = self._open_step("accumulate")
        self.tags.require_actor("a gradient")
        if step.is_complete:
            raise RunError("accumulate was called after the call with last=True; begin a new step")
        check_rows(rows, loss.columns, self.dims.vocab_size)
        parts: list[Part] = []
        sums: list[tuple[Tensor, dict[str, Tensor]]] = []
        for indices in self._microbatches(rows):
            packed = pack_rows([rows[i] for i in indices], loss.columns, self.device)
            with explain_memory("forward and backward", packed):
                loss_sum, stats, predicted = self._backward(packed, loss)
            sums.append((loss_sum, stats))
            parts.append((indices, packed.lengths, predicted))
        loss_total, stats_total = _add_up(sums)
        count = math.fsum(row.count for row in rows)
        num_tokens = sum(row.ids.numel() for row in rows)
        step.add(loss_total, count, num_tokens, len(sums), is_last=last)
        return Accumulated(loss_total, count, stats_total, _per_row(parts, len(rows)))

    def _backward(
        self, packed: PackedRows, loss: Loss
    ) -> tuple[Tensor, dict[str, Tensor], Predicted]:
        logprobs_T, entropy_T, values_T = self._predict(packed)
        shown_T = entropy_T
        if entropy_T is not None and not loss.needs_entropy:
            shown_T = entropy_T.detach()
        if logprobs_T is None:  # a critic: the loss reads values only
            assert values_T is not None, "the model has neither a language head nor a value head"
            logprobs_T = torch.zeros_like(values_T, requires_grad=False)
            named: Predicted = (None, None, values_T)
        else:
            named = (logprobs_T, entropy_T, values_T)
        outputs = TokenOutputs(logprobs_T, shown_T, values_T, packed.segments)
        loss_sum, stats = loss(outputs, packed.columns)
        if not loss_sum.requires_grad:
            raise RunError(f"{type(loss).__name__} does not depend on what the model computed")
        loss_sum.backward()
        lp_T, ent_T, val_T = (None if x is None else x.detach() for x in named)
        return loss_sum.detach(), stats, (lp_T, ent_T, val_T)

    def end_step(self) -> StepResult:
        step = self._open_step("end_step")
        assert self.optimizer is not None and self.settings.optimizer is not None
        if not step.is_complete:
            raise RunError("end_step was called before accumulate(..., last=True)")
        lr = compute_lr(self.settings.optimizer, self.num_steps)
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = gradient_norm(gradients) / step.count if step.count else 0.0
        reason = step.why_skipped(norm)
        if not reason:
            scale = clip_scale(norm, self.settings.optimizer.gradient_clipping) / step.count
            scale_gradients(gradients, scale)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step = None
        self.num_steps += 1
        self.num_skipped += bool(reason)
        return StepResult(
            loss=step.loss_sum / step.count if step.count else 0.0,
            grad_norm=norm,
            lr=lr,
            skipped=bool(reason),
            num_tokens=step.num_tokens,
            num_microbatches=step.num_microbatches,
            reason=reason,
        )

    def _open_step(self, deed: str) -> OpenStep:
        if self.step is None:
            raise RunError(f"{deed} was called outside a step; call begin_step first")
        return self.step

    # Weights

    def use(self, tag: str) -> AbstractContextManager[None]:
        return self.tags.use(tag)

    def save_tag(self, tag: str) -> None:
        self.tags.save(tag)

    def load_tag(self, tag: str, weights: NamedTensors | str | Path) -> None:
        """Remembers other weights of the same shape as `tag`: a HF folder or named tensors."""

        def write() -> object:
            if isinstance(weights, str | Path):
                return load_weights(self._at_rest(), weights)
            return install_hf(self._at_rest(), weights)

        self.tags.load(tag, write)

    def iter_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in iter_hf(self._at_rest(), self._publish_dtype):
            # Asked anew each time: a generator may be read on while the weights are exchanged.
            self.tags.require_actor("handing out weights")
            yield name, tensor

    def save_hf(self, folder: str) -> None:
        self.tags.require_actor("saving")
        save_model(
            self._at_rest(),
            folder,
            dtype=self._publish_dtype,
            source_folder=self.source_folder,
            hf_config=self.hf_config,
            tokenizer_folder=self.tokenizer_folder,
        )

    def _at_rest(self) -> Decoder:
        """The decoder with its master weights in place."""
        reshard(self.predictor)
        return self.decoder

    @property
    def _publish_dtype(self) -> torch.dtype:
        return DTYPES[self.settings.publish_dtype or self.settings.compute_dtype]

    # State

    def state_dict(self) -> dict[str, Any]:
        """All that training continues from; the tensors are the live ones, not copies."""
        self.tags.require_actor("saving state")
        state: dict[str, Any] = {
            "model": {name: tensor.detach() for name, tensor in self.tensors.items()},
            "tags": {tag: self.tags.views(tag) for tag in self.tags.copies},
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "rng": {"cpu": torch.get_rng_state()},
        }
        if self.device.type == "cuda":
            state["rng"]["cuda"] = torch.cuda.get_rng_state(self.device)
        if self.optimizer is not None:
            state["optimizer"] = optimizer_state(self.parameters, self.optimizer)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes everything, or raises before anything is changed."""
        self.tags.require_actor("loading state")
        present = {"model": self.tensors}
        saved: dict[str, Mapping[str, Tensor]] = {"model": state["model"]}
        if self.optimizer is not None:
            for key, tensors in optimizer_state(self.parameters, self.optimizer).items():
                present[f"optimizer state ({key})"] = tensors
                saved[f"optimizer state ({key})"] = state["optimizer"][key]
        for what, tensors in present.items():
            check_named(tensors, saved[what], what)
        for tag, tensors in state["tags"].items():
            check_named(self.tensors, tensors, f"tag {tag}")
        for what, tensors in present.items():
            copy_named(tensors, saved[what])
        self.tags.restore(state["tags"])
        self.num_steps, self.num_skipped = int(state["num_steps"]), int(state["num_skipped"])
        torch.set_rng_state(state["rng"]["cpu"])
        if self.device.type == "cuda" and "cuda" in state["rng"]:
            torch.cuda.set_rng_state(state["rng"]["cuda"], self.device)
        self.step = None


@contextmanager
def explain_memory(phase: str, packed: PackedRows) -> Iterator[None]:
    """Says where memory ran out, how much was asked for, and what would help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = str(error).partition("Tried to allocate ")[2].partition(". ")[0]
        raise RunError(
            f"out of device memory in {phase} of a microbatch of {packed.num_tokens} tokens"
            + (f", asking for {asked} more" if asked else "")
            + "; lower max_tokens_per_mb, or recompute more (ac_mode)"
        ) from error


def _per_row(parts: Sequence[Part], num_rows: int) -> list[dict[str, Tensor]]:
    """Gives each row its own, token-aligned, on the CPU; after all work was sent to the device."""
    outputs: list[dict[str, Tensor]] = [{} for _ in range(num_rows)]
    for indices, lengths, predicted in parts:
        for name, x_T in zip(("logprobs", "entropy", "values"), predicted, strict=True):
            if x_T is not None:
                for i, piece in zip(indices, split_out(x_T, lengths), strict=True):
                    outputs[i][name] = piece
    return outputs


def _add_up(sums: Sequence[tuple[Tensor, dict[str, Tensor]]]) -> tuple[float, dict[str, float]]:
    """Totals of loss and statistics over microbatches, fetched from the device at once."""
    if not sums:
        return 0.0, {}
    flat = [x.detach().double() for loss_sum, stats in sums for x in (loss_sum, *stats.values())]
    fetched = iter(torch.stack(flat).tolist())
    loss_total = 0.0
    totals: dict[str, float] = {}
    for _, stats in sums:
        loss_total += next(fetched)
        for name in stats:
            totals[name] = totals.get(name, 0.0) + next(fetched)
    return loss_total, totals
