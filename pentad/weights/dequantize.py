"""Reads a quantised HF folder as the weights it stands for, any block of any tensor at a time.

Numbers are those of transformers' dequantisation: a product in float32, rounded once to the dtype
of the model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pentad.core.errors import Problem, raise_problems
from pentad.core.quantization import Quantization
from pentad.weights.files import BUFFER_BYTES
from pentad.weights.hf import HfFolder
from pentad.weights.regions import Box, Shape, box_shape
from pentad.weights.transfer import TensorInfo

SCALES = "_scale_inv"
"""What follows the name of an fp8 weight in that of its scales."""
PACKED, EXPONENTS = "_blocks", "_scales"
"""What follows the name of an mxfp4 weight in those of its numbers and exponents."""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of 4 bits, without their sign."""
BIAS = 127
GROUP = 32
"""Numbers with one exponent, in 16 bytes."""


class DequantizedFolder:
    """Implements `transfer.DirectReader`. Extra memory is a few rows of a tensor for each thread,
    or one expert."""

    def __init__(self, folder: HfFolder, quantization: Quantization) -> None:
        self.folder = folder
        self.where = folder.where
        self.block = quantization.block
        self.infos = dict(folder.infos)
        self.scales: dict[str, str] = {}
        """Name of a weight that is dequantised -> that of its scales in the folder."""
        add = self._add_fp8 if quantization.method == "fp8" else self._add_mxfp4
        raise_problems(
            problem
            for name, info in folder.infos.items()
            if (problem := add(name, info)) is not None
        )

    def _add_fp8(self, name: str, info: TensorInfo) -> Problem | None:
        if not info.dtype.is_floating_point or info.dtype.itemsize > 1 or len(info.shape) != 2:
            return None
        sizes = zip(info.shape, self.block, strict=True)
        self.scales[name] = name + SCALES
        self.infos[name] = TensorInfo(info.shape, torch.float32)
        return self._take(name + SCALES, tuple(-(-size // step) for size, step in sizes))

    def _add_mxfp4(self, name: str, info: TensorInfo) -> Problem | None:
        if not name.endswith(PACKED) or len(info.shape) != 4:
            return None
        weight = name.removesuffix(PACKED)
        experts, rows, groups, _ = info.shape
        del self.infos[name]
        self.scales[weight] = weight + EXPONENTS
        self.infos[weight] = TensorInfo((experts, groups * GROUP, rows), torch.bfloat16)
        if info.shape[-1] * 2 != GROUP or info.dtype != torch.uint8:
            rule = f"is {info.dtype} of shape {list(info.shape)}, not bytes of {GROUP} numbers each"
            return Problem(f"{self.where}: {name}", rule)
        return self._take(weight + EXPONENTS, info.shape[:-1])

    def _take(self, name: str, shape: Shape) -> Problem | None:
        """Removes scales from the tensors of the folder."""
        found = self.infos.pop(name, None)
        if found is not None and found.shape == shape:
            return None
        rule = "missing" if found is None else f"shape {list(found.shape)}"
        return Problem(f"{self.where}: {name}", f"{rule}; the weight needs it as {list(shape)}")

    def read(self, name: str, box: Box) -> Tensor:
        """Reads a block of a tensor."""
        if name not in self.scales:
            return self.folder.read(name, box)
        out = torch.empty(box_shape(box), dtype=self.infos[name].dtype, device="cpu")
        self.read_into(name, box, out)
        return out

    def read_into(self, name: str, box: Box, out: Tensor) -> None:
        """Reads a block of a tensor into `out`."""
        if name not in self.scales:
            self.folder.read_into(name, box, out)
            return
        dequantize = self._fp8 if len(box) == 2 else self._mxfp4
        (first, stop), *others = box
        step = max(1, BUFFER_BYTES // max(1, 4 * math.prod(self.infos[name].shape[1:])))
        for at in range(first, stop, step):
            end = min(at + step, stop)
            out[at - first : end - first].copy_(dequantize(name, ((at, end), *others)))

    def _fp8(self, name: str, box: Box) -> Tensor:
        starts = [start // step for (start, _), step in zip(box, self.block, strict=True)]
        stops = [-(-stop // step) for (_, stop), step in zip(box, self.block, strict=True)]
        scales = self.folder.read(self.scales[name], tuple(zip(starts, stops, strict=True)))
        rows, columns = (
            torch.arange(*ends, device="cpu") // step - start
            for ends, step, start in zip(box, self.block, starts, strict=True)
        )
        return self.folder.read(name, box).float().mul_(scales.float()[rows][:, columns])

    def _mxfp4(self, name: str, box: Box) -> Tensor:
        """A block of [experts, in, out], stored as [experts, out, in / 32, 16]."""
        experts, (start, stop), rows = box
        groups = (start // GROUP, -(-stop // GROUP))
        packed = self.folder.read(name + PACKED, (experts, rows, groups, (0, GROUP // 2)))
        exponents = self.folder.read(self.scales[name], (experts, rows, groups))
        values = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], device="cpu")
        # Two numbers of each byte, the one in its low bits first.
        pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1)
        numbers = pairs[packed.int()].flatten(-2)
        whole = torch.ldexp(numbers, exponents.int()[..., None] - BIAS).flatten(-2)
        first = groups[0] * GROUP
        return whole[..., start - first : stop - first].transpose(1, 2)
