"""The keys of the block `telemetry`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pentad.core.section import NonNegativeInt, Positive, Section


class WandbConfig(Section):
    project: str = "pentad"
    """Project the run appears in."""
    entity: str | None = None
    """User or team. null: the account's default."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """Whether records are sent at once, kept for later, or dropped."""


class TrackioConfig(Section):
    project: str = "pentad"
    """Project the run appears in."""
    space: str | None = None
    """Space on the Hugging Face Hub that receives the records, OWNER/NAME. null: this machine;
    `trackio show` displays them."""


class TelemetryConfig(Section):
    tensorboard: bool = False
    """Writes TensorBoard files beside steps.jsonl."""
    wandb: WandbConfig | None = None
    """Sends records to Weights & Biases. null: off."""
    trackio: TrackioConfig | None = None
    """Sends records to Trackio. null: off."""
    hardware_peak_tflops: Positive | None = None
    """Peak of one device for MFU. null: that of the detected GPU; on a CPU MFU is not reported."""
    mfu_target: Annotated[float, Field(gt=0, le=1)] | None = None
    """Warns when MFU stays below it."""
    samples_per_step: NonNegativeInt = 4
    """Samples of each step written to samples.jsonl, TensorBoard, Weights & Biases and
    Trackio."""
    keep_batches: NonNegativeInt = 16
    """Number of latest steps whose groups are kept for `pentad replay`, about 33 bytes a token. 0:
    none."""
