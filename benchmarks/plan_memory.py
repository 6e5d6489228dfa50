"""What `plan` predicts against what one GPU measures: peak memory by phase over a grid.

    python benchmarks/plan_memory.py                        # Qwen3-0.6B, 16k tokens, every mode
    python benchmarks/plan_memory.py --tokens 8192 --compile off --json out.json

Allocated bytes are compared, so the constant for context and allocator slack is left out of both.
Needs torch, numpy, safetensors and transformers; on a CPU it only says that it needs a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from engine_smoke import QWEN3_0_6B, MeanNll, make_engine, make_rows  # noqa: E402

from pentad.config.activations import Keeping  # noqa: E402
from pentad.config.memory import Training, training_phases  # noqa: E402
from pentad.core.dims import ModelDims, dims_from_hf  # noqa: E402
from pentad.core.layout import Layout  # noqa: E402

GIB = 2**30
QWEN3_MOE_SLICE = {
    **QWEN3_0_6B,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
MODELS = {"dense": QWEN3_0_6B, "moe": QWEN3_MOE_SLICE}
MODES: list[tuple[str, str | int]] = [
    ("none", "op"),
    ("selective", "op"),
    ("selective", 2),
    ("full", "op"),
]


def predict(
    dims: ModelDims, tokens: int, mode: str, selective: str | int, is_compiled: bool
) -> dict[str, float]:
    keeping = Keeping(mode=mode, selective=selective, is_compiled=is_compiled)  # type: ignore[arg-type]
    training = Training(
        dims=dims, layout=Layout(), keeping=keeping, microbatch_tokens=tokens, num_microbatches=2
    )
    phases = training_phases(training, 0)
    return {name: phase.device_bytes - phase.device["overhead"] for name, phase in phases.items()}


def measure(
    config: dict[str, Any],
    tokens: int,
    length: int,
    mode: str,
    selective: str | int,
    compiles: bool,
) -> dict[str, float]:
    gc.collect()
    torch.cuda.empty_cache()
    engine = make_engine(
        config,
        ac_mode=mode,
        ac_selective=selective,
        compile=compiles,
        max_tokens_per_mb=tokens,
    )
    found = {"load": float(torch.cuda.memory_allocated())}
    rows = make_rows([length] * (2 * tokens // length), config["vocab_size"])
    peaks: dict[str, float] = {}

    def watch(name: str, call: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        peaks[name] = float(torch.cuda.max_memory_allocated())

    for _ in range(2):  # the first round allocates the optimizer's state and compiles
        engine.begin_step()
        watch("backward", lambda: engine.accumulate(rows, MeanNll()))
        watch("optimizer", engine.end_step)
        watch("log-prob", lambda: engine.forward(rows))
    return found | peaks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--compile", nargs="+", default=["off", "on"], choices=["off", "on"])
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    records = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.tokens} tokens")
    for name in args.model:
        config = MODELS[name]
        dims = dims_from_hf(config)
        for compiles in [word == "on" for word in args.compile]:
            for mode, selective in MODES:
                got = measure(config, args.tokens, args.length, mode, selective, compiles)
                want = predict(dims, args.tokens, mode, selective, compiles)
                for phase, size in got.items():
                    ratio = want[phase] / size
                    print(
                        f"{name:6} compile={compiles!s:5} {mode:9} {selective!s:3} {phase:10} "
                        f"predicted {want[phase] / GIB:6.2f} measured {size / GIB:6.2f} "
                        f"ratio {ratio:.3f}",
                        flush=True,
                    )
                    records.append(
                        {
                            "model": name,
                            "compile": compiles,
                            "mode": mode,
                            "selective": selective,
                            "phase": phase,
                            "predicted_bytes": want[phase],
                            "measured_bytes": size,
                        }
                    )
    if args.json:
        Path(args.json).write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
