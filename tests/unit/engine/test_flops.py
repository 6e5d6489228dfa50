"""MFU by both conventions, against published figures; unknown devices have none."""

import pytest
import torch

from pentad.core import device
from pentad.core.dims import ModelDims
from pentad.core.machine import Gpu
from pentad.engine.flops import detect_peak_tflops, measure_throughput, peak_of

QWEN3_0_6B = ModelDims(
    family="qwen3",
    vocab_size=151936,
    hidden_size=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    tie_embeddings=True,
    qk_norm=True,
)


def test_a_measured_run_gives_its_known_mfu():
    # transformers on an H200, 8 x 2048 tokens: 74,863 tok/s were measured as 32.4% causal.
    lengths = [2048] * 8
    seconds = sum(lengths) / 74863
    speed = measure_throughput(QWEN3_0_6B, lengths, seconds, peak_tflops=989.0)
    assert speed.tokens_per_s == pytest.approx(74863)
    assert speed.mfu_causal == pytest.approx(0.324, abs=0.002)
    assert speed.mfu_full is not None and speed.mfu_full > 1.15 * speed.mfu_causal
    two = measure_throughput(QWEN3_0_6B, lengths, seconds, peak_tflops=989.0, num_devices=2)
    assert two.mfu_causal == pytest.approx(speed.mfu_causal / 2)


def test_peaks_are_found_by_name_and_never_guessed():
    assert peak_of("NVIDIA H200") == 989.0
    assert peak_of("NVIDIA H100 80GB HBM3") == 989.0
    assert peak_of("NVIDIA H100 PCIe") == 756.0
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312.0
    assert peak_of("NVIDIA L40S") == 362.0
    assert peak_of("NVIDIA GeForce GTX 1080") is None
    assert detect_peak_tflops(torch.device("cpu")) is None


def test_the_peak_of_a_gpu_is_known_without_memory_of_it(monkeypatch):
    """The driver's program says its name; torch is asked where there is none."""
    gpus = tuple(Gpu(name, 1, 1, "", "") for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(device, "find_gpus", lambda: gpus)
    assert detect_peak_tflops(torch.device("cuda:1")) == peak_of("NVIDIA H200")
    monkeypatch.setattr(device, "find_gpus", lambda: ())
    assert detect_peak_tflops(torch.device("cuda")) == peak_of("NVIDIA A100")
    assert measure_throughput(QWEN3_0_6B, [10], 1.0, peak_tflops=None).mfu_full is None
