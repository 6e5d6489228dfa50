"""Quantised weights: which folders can be read as 16-bit weights, by their config.json, and which
matrices a run quantises for its servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, raise_problems

KEY = "quantization_config"
FP8_BLOCK = (128, 128)
"""What transformers takes where a config names no block."""
REMEDY = (
    "give a folder with 16-bit weights: transformers reads this one with dequantize=True in its "
    "quantization config, and save_pretrained writes it"
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a folder are quantised."""

    method: Literal["fp8", "mxfp4"]
    """fp8: 8 bits, with a scale per block of rows and columns (DeepSeek-V3, Qwen3-FP8). mxfp4: 4
    bits, with an exponent per 32 numbers (experts of gpt-oss)."""
    block: tuple[int, int] = FP8_BLOCK
    """Rows and columns of a block in fp8."""


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """None: not quantised. UserError for a kind that is not read."""
    raise_problems(quantization_problems(config))
    given = config.get(KEY)
    if not given:
        return None
    rows, columns = given.get("weight_block_size") or FP8_BLOCK
    return Quantization(given["quant_method"], (rows, columns))


def quantization_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    """The problem of weights that cannot be dequantised."""
    given = config.get(KEY)
    if not given or _is_read(given):
        return
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    rule = (
        "its weights are quantised in a way that is not read; fp8 with weight_block_size and "
        "mxfp4 can be dequantised"
    )
    yield Problem(f"config.json: {KEY}.quant_method = {str(method)[:80]}", rule, REMEDY)


def _is_read(given: object) -> bool:
    if not isinstance(given, Mapping):
        return False
    block = given.get("weight_block_size", FP8_BLOCK)
    is_block = (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    )
    return given.get("quant_method") == "mxfp4" or (given.get("quant_method") == "fp8" and is_block)


FLAG = "--dequantize"


def needs_key(where: str, quantization: Quantization, key: str) -> Problem:
    """The problem of a folder that can be dequantised, where neither key nor flag asks for it."""
    rule = f"its weights are quantised ({quantization.method})"
    asking = f"give {FLAG}" if key == FLAG else f"set {key}: true"
    remedy = f"{asking} to read them as 16-bit weights, or give a folder that holds these"
    return Problem(where, rule, remedy)


def flag_problems(
    where: str, quantization: Quantization | None, *, dequantize: bool
) -> Iterator[Problem]:
    """The problem of a command whose flag does not fit the folder."""
    if quantization is not None and not dequantize:
        yield needs_key(where, quantization, FLAG)
    if quantization is None and dequantize:
        yield Problem(FLAG, f"the weights of {where} are not quantised", "leave it out")


# Weights that a run quantises for its servers.

WeightDtype = Literal["auto", "fp8"]
SPLIT_ROWS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
"""Last names of matrices whose rows tensor parallelism splits."""
SPLIT_COLUMNS = frozenset({"o_proj", "down_proj"})
FP8_KEY = "rollout.weight_dtype = fp8"
Shapes = Mapping[str, Sequence[int]]
"""Shapes of the published tensors, by their names in model folders."""


def is_quantised(name: str, shape: Sequence[int]) -> bool:
    """Whether servers get this tensor in fp8: a matrix of attention, of an MLP or of an expert;
    not the embedding, the head, norms and routers."""
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    is_layer = ".layers." in name and last in SPLIT_ROWS | SPLIT_COLUMNS
    return kind == "weight" and len(shape) == 2 and is_layer


def fp8_config(shapes: Shapes) -> dict[str, Any]:
    """`quantization_config` of a server that receives tensors of these shapes in fp8."""
    others = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) > 1 and not is_quantised(name, shape)
    ]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": list(FP8_BLOCK),
        "modules_to_not_convert": others,
    }


def fp8_problems(shapes: Shapes, dims: ModelDims, ways: int) -> Iterator[Problem]:
    """The problem of a model that servers cannot hold in fp8. `ways`: GPUs of tensor
    parallelism."""
    fp8 = {name: shape for name, shape in shapes.items() if is_quantised(name, shape)}
    if dims.num_experts and not any(".experts." in name for name in fp8):
        rule = "the experts of this family are published under names that stay in 16 bits"
        yield Problem(FP8_KEY, rule, "leave it at auto")
        return
    for name, shape in fp8.items():
        sizes = _part_of(name, shape, dims, ways)
        if any(size % step for size, step in zip(sizes, FP8_BLOCK, strict=True)):
            of = f"on each of {ways} GPUs " if ways > 1 else ""
            rule = (
                f"{name} has {sizes[0]} rows and {sizes[1]} columns {of}, which must be multiples "
                f"of {FP8_BLOCK[0]}"
            )
            yield Problem(FP8_KEY, rule.replace(" ,", ","), "leave it at auto")
            return
    if not fp8:
        yield Problem(FP8_KEY, "this model has no matrix of fp8", "leave it at auto")


def _part_of(name: str, shape: Sequence[int], dims: ModelDims, ways: int) -> tuple[int, int]:
    """Rows and columns of a matrix on each GPU; key-value heads are repeated if there are fewer."""
    rows, columns = shape
    last = name.split(".")[-2]
    if last in SPLIT_COLUMNS:
        return rows, columns // ways
    is_kv = last in ("k_proj", "v_proj")
    return rows // (min(ways, dims.num_kv_heads) if is_kv else ways), columns
