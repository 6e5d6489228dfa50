"""Which quantised model folders can be read as 16-bit weights, by their config.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
