"""The peer of `pretrain_gpu`: a recipe of `pentad pretrain` trained by transformers, step for step.

The same weights, batches in the same order, microbatches, AdamW (embeddings and norms not decayed),
learning rate, clipping and balancing loss, all read from the recipe, as is the dtype of products
(by default bfloat16 on a GPU); masters, moments and summed gradients are in float32. transformers'
own balancing loss is another one (over all layers together), so that of Pentad is computed here
from the routers' logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from pentad.config.schema import Config
from pentad.core.device import DTYPES
from pentad.data.tokenizer import load_tokenizer
from pentad.engine.optim import compute_lr
from pentad.models.families import dims_of
from pentad.trainer.inputs import RowReader, open_examples


class Objective(nn.Module):
    """Of sequences of one length: the mean negative log-probability, what is differentiated (with
    the balancing loss of every layer), and the tokens of each expert by layer."""

    def __init__(self, model: nn.Module, coef: float) -> None:
        super().__init__()
        self.model, self.coef = model, coef

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        model: Any = self.model
        found = model.model(input_ids=ids_BT, use_cache=False, output_router_logits=True)
        logits = model.lm_head(found.last_hidden_state[:, :-1]).float()
        nll = F.cross_entropy(logits.flatten(0, 1), ids_BT[:, 1:].flatten())
        balance, loads = torch.zeros_like(nll), []
        for logits_TE in found.router_logits:
            scores_TE = logits_TE.float().softmax(-1)
            chosen_N = scores_TE.topk(model.num_experts_per_tok, dim=-1).indices.flatten()
            load_E = torch.zeros_like(scores_TE[0]).scatter_add(
                0, chosen_N, torch.ones_like(chosen_N, dtype=torch.float32)
            )
            share_E = load_E / len(chosen_N)
            balance = balance + model.num_experts * (share_E * scores_TE.mean(0)).sum()
            loads.append(load_E)
        return nll, nll + self.coef * balance, torch.stack(loads)


class Peer:
    """`train(step)` trains the batch of a step, counted from 0; nothing waits for the device."""

    def __init__(self, config: Config, device: torch.device) -> None:
        actor = config.actor
        assert actor.path is not None and config.total_train_steps is not None
        dims = dims_of(actor.path)
        self.data = open_examples(
            "pretrain", config, "train", RowReader(dims, load_tokenizer(actor.path))
        )
        self.device, self.batch_size = device, config.train_dataset.batch_size
        self.per_pass = (actor.mb_spec.max_tokens_per_mb or 1) // self.data.max_row_tokens
        self.optim, self.num_steps = actor.optimizer, config.total_train_steps
        disable_progress_bar()
        self.model = Qwen3MoeForCausalLM.from_pretrained(
            actor.path,
            dtype=DTYPES[actor.compute_dtype(device.type)],
            attn_implementation="sdpa",
            experts_implementation="grouped_mm",
        ).to(device)
        self.model.train()
        self.run: Callable[[Tensor], Any]
        self.run = Objective(self.model, actor.archon.moe_aux_loss_coef)
        self.parameters = list(self.model.parameters())
        wide = Qwen3MoeForCausalLM.from_pretrained(actor.path, dtype=torch.float32)
        named = {n: nn.Parameter(x.detach().to(device)) for n, x in wide.named_parameters()}
        self.masters, self.names = list(named.values()), list(named)
        decayed = [p for n, p in named.items() if p.ndim >= 2 and "embed_tokens" not in n]
        kept = [p for n, p in named.items() if p.ndim < 2 or "embed_tokens" in n]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self.optim.weight_decay},
                {"params": kept, "weight_decay": 0.0},
            ],
            lr=self.optim.lr,
            betas=(self.optim.beta1, self.optim.beta2),
            eps=self.optim.eps,
            fused=True,
        )

    def compiles(self) -> bool:
        """Compiles it, or says why that cannot be and leaves it as it is."""
        plain, self.run = self.run, torch.compile(self.run)
        try:
            self.run(self.batch(0)[: self.per_pass])[1].backward()
        except Exception as error:  # torch raises nearly anything here
            print(f"the peer does not compile: {error!r}"[:2000], flush=True)
            self.run = plain
        for parameter in self.parameters:
            parameter.grad = None
        return self.run is not plain

    def batch(self, step: int) -> Tensor:
        """As `pentad pretrain` has it."""
        rows = self.data.batch(step, self.batch_size)
        return torch.stack([row.ids for row in rows]).to(self.device)

    def train(self, step: int) -> tuple[Tensor, Tensor]:
        """Its loss, and the tokens of each expert by layer."""
        found = self.accumulate(self.batch(step))
        if self.optim.gradient_clipping:
            nn.utils.clip_grad_norm_(self.masters, self.optim.gradient_clipping)
        for group in self.optimizer.param_groups:
            group["lr"] = compute_lr(self.optim, step, self.num_steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.cast()
        return found

    @torch.no_grad()
    def cast(self) -> None:
        """The masters to what is computed with."""
        torch._foreach_copy_(self.parameters, self.masters)

    def accumulate(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the gradient of the mean loss to the masters'."""
        losses, loads = [], []
        parts = ids_BT.split(self.per_pass)
        for part in parts:
            nll, loss, load = self.run(part)
            (loss / len(parts)).backward()
            losses.append(nll.detach())
            loads.append(load)
            self._add_gradients()
        return torch.stack(losses).mean(), torch.stack(loads).sum(0)

    @torch.no_grad()
    def _add_gradients(self) -> None:
        """To those of the masters, in float32."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.to(master.dtype)
            else:
                master.grad += parameter.grad
            parameter.grad = None
