"""Training steps in a plain loop: transformers' modules, torch's AdamW, one row at a time."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from pentad.core.types import TokenOutputs
from pentad.engine.optim import clip_scale

WRITTEN_OUT = {"attn_implementation": "eager", "experts_implementation": "eager"}


class TransformersLoop:
    """Takes the steps that an engine takes, from the same weights."""

    def __init__(self, config, weights, optimizer, temperature):
        with TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            whole = {name: x.contiguous() for name, x in weights.items()}
            save_file(whole, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            given = {"dtype": torch.float32, "output_loading_info": True, **WRITTEN_OUT}
            self.model, seen = AutoModelForCausalLM.from_pretrained(folder, **given)
        assert not any(seen.values()), seen
        self.keys, self.temperature = optimizer, temperature
        table = self.model.get_input_embeddings().weight
        groups = {optimizer.weight_decay: [], 0.0: []}
        for weight in self.model.parameters():
            is_decayed = weight.ndim > 1 and weight is not table
            groups[optimizer.weight_decay if is_decayed else 0.0].append(weight)
        self.optimizer = torch.optim.AdamW(
            [{"params": group, "weight_decay": decay} for decay, group in groups.items()],
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        )

    def outputs(self, row):
        """Log-probs and entropies of the tokens, which the tokens before them give."""
        logits = self.model(row.ids[None]).logits[0] / self.temperature
        logp = logits.log_softmax(-1)[:-1]
        zero = torch.zeros(1)
        taken = logp.gather(1, row.ids[1:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        return TokenOutputs(
            torch.cat((zero, taken)), torch.cat((zero, entropy)), values_T=None, segments=None
        )

    @torch.no_grad()
    def logprobs(self, rows):
        return torch.cat([self.outputs(row).logprobs_T for row in rows])

    def step(self, calls, loss):
        """One step over the rows of several calls, whose losses are summed one by one."""
        self.optimizer.zero_grad()
        sums = []
        for rows in calls:
            sums.append(0.0)
            for row in rows:
                term, _ = loss(self.outputs(row), row.columns)
                if term.requires_grad:
                    term.backward()
                sums[-1] += float(term)
        count = sum(row.count for rows in calls for row in rows)
        moved = [weight for weight in self.model.parameters() if weight.grad is not None]
        gradients = self.named(lambda weight: weight.grad)
        norm = float(torch.stack([weight.grad.norm() for weight in moved]).norm()) / count
        for weight in moved:
            weight.grad *= clip_scale(norm, self.keys.gradient_clipping) / count
        self.optimizer.step()
        return {
            "sums": sums,
            "loss": sum(sums) / count,
            "norm": norm,
            "gradients": gradients,
        }

    def named(self, part):
        """Something of every weight, by the names and in the shapes of the files."""
        held = {n: part(weight) for n, weight in self.model.named_parameters()}
        held = {n: x.detach().clone() for n, x in held.items() if x is not None}
        return dict(revert_weight_conversion(self.model, held))
