"""Tokens per second and model FLOPs utilisation (MFU), with both conventions for attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pentad.core.device import gpu_name
from pentad.core.dims import ModelDims

PEAK_TFLOPS = {
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "RTX 4090": 165.0,
}
"""Dense bf16 datasheet peaks in TFLOPS, by part of the device's name; the first match counts."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Training throughput. MFU is None if the peak or the model's size is unknown."""

    tokens_per_s: float
    mfu_causal: float | None
    """MFU counting only causal attention pairs."""
    mfu_full: float | None
    """MFU counting all attention pairs (torchtitan's convention)."""
    peak_tflops: float | None


def detect_peak_tflops(device: torch.device) -> float | None:
    """Returns the datasheet peak of one device; None for a CPU or an unknown GPU."""
    if device.type != "cuda":
        return None
    return peak_of(gpu_name(device))


def peak_of(device_name: str) -> float | None:
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def measure_throughput(
    dims: ModelDims,
    lengths: Sequence[int],
    seconds: float,
    *,
    peak_tflops: float | None,
    num_devices: int = 1,
    left_out: Sequence[int] = (),
) -> Throughput:
    """Returns the throughput of training these sequences once. Does not count recomputation, nor
    prefix tokens computed for another sequence (`left_out`: their number in each sequence)."""
    counts = Counter(lengths)
    counts.subtract(left_out)
    num_params = dims.num_matmul_params

    def mfu(causal: bool) -> float | None:
        if peak_tflops is None or not dims.is_whole:
            return None
        attention = sum(dims.attention_flops(n, causal=causal) * k for n, k in counts.items())
        flops = 6.0 * num_params * (sum(lengths) - sum(left_out)) + attention
        return flops / seconds / (peak_tflops * 1e12 * num_devices)

    return Throughput(sum(lengths) / seconds, mfu(True), mfu(False), peak_tflops)
