"""Keys of a run: the blocks `ref`, `teacher`, `evaluator`, `saver`, `recover`, `elastic`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from pentad.core.section import Count, NonNegative, NonNegativeInt, Seconds, Section

SWITCH = {"true": "on", "false": "off"}
"""Converts YAML's booleans for on and off back to text."""


SwitchName = Annotated[
    Literal["on", "auto", "off", "disabled"],
    BeforeValidator(lambda value: SWITCH.get(str(value).lower(), value)),
]


class ReferenceConfig(Section):
    path: str | None = None
    """Folder or name of the reference model of the KL term. null: the actor's initial weights."""


class TeacherConfig(Section):
    path: str | None = None
    """Folder or name of the teacher of the algorithm `distill`; it must have the actor's
    vocabulary."""


class FrequencyConfig(Section):
    freq_epochs: Count | None = None
    """Every n epochs."""
    freq_steps: Count | None = None
    """Every n steps."""
    freq_secs: Seconds | None = None
    """Every n seconds. If several keys are set, any of them triggers."""

    @property
    def is_periodic(self) -> bool:
        """Whether any of these keys is set."""
        return any(getattr(self, key) for key in FrequencyConfig.model_fields)


class EvaluatorConfig(FrequencyConfig):
    n_samples: Count = 1
    """Answers per held-out prompt."""
    temperature: NonNegative = 0.0
    """0 is greedy."""
    max_new_tokens: Count | None = None
    """null: as in `gconfig`."""


class SaverConfig(FrequencyConfig):
    mode: Literal["auto", "sync", "async"] = "auto"
    """Whether training waits while a save is written (sync) or continues with a copy in host memory
    (async); for exports and recovery checkpoints. auto: async, or sync with a warning if the host
    memory is too small for the copies."""
    keep_last: Count | None = None
    """Number of newest HF folders to keep; older ones are removed once a newer one is complete.
    null: all, or with keep_best only the last one."""
    keep_best: Count | None = None
    """Number of additional HF folders to keep, those with the best held-out evaluation: accuracy
    (mean reward if the reward has no part `correct`), in SFT the loss. Steps without an evaluation
    do not count."""


class RecoverConfig(FrequencyConfig):
    mode: SwitchName = "auto"
    """Whether the state of the run is saved so that the same command resumes it. auto and on: yes;
    off and disabled: no."""
    retries: NonNegativeInt = 3
    """Maximum number of restarts from the last checkpoint without progress in between, after a lost
    process or a transient failure. A step that fails three times in a row on different ranks ends
    the run earlier."""
    keep_last: Count = 2
    """Number of newest recovery checkpoints to keep."""
    allow: tuple[str, ...] = ()
    """Keys that may change at a resume although they affect training."""

    @property
    def is_on(self) -> bool:
        return self.mode in ("on", "auto")


class ElasticConfig(Section):
    enabled: bool = False
    """Whether a run that lost ranks for good continues with the remaining ones, in the largest
    layout they allow, and uses the lost ones again when they return. `plan --world N` shows it."""
    min_ranks: Count = 1
    """Minimum number of training ranks; with fewer the run waits."""
    wait_timeout_s: Seconds = 3600.0
    """Time limit of the wait for `min_ranks`; then the run ends."""
    drop_grace_s: NonNegative = 0.0
    """How long the run waits for a missing rank to return before the others continue without it."""
    slot_failures: Count = 2
    """Number of failures (death, hang or exception) without a new checkpoint in between after which
    a rank's slot is retired. With fewer failures its process is restarted."""
    heartbeat_interval_s: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """Interval of each rank's heartbeat; `stall_abort_s` without one is a hang."""
    standbys: bool = True
    """Whether spare processes that have imported everything wait to replace lost ones."""
