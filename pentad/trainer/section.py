"""Keys of a run: the blocks `ref`, `teacher`, `evaluator`, `saver`, `recover`, `elastic`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from pentad.core.section import Count, NonNegative, NonNegativeInt, Seconds, Section

SWITCH = {"true": "on", "false": "off"}
"""What YAML makes of the words on and off, as text."""


def switch_name(value: object) -> object:
    return SWITCH.get(str(value).lower(), value)


SwitchName = Annotated[Literal["on", "auto", "off", "disabled"], BeforeValidator(switch_name)]


class ReferenceConfig(Section):
    path: str | None = None
    """Folder or name of the reference model of the KL term. null: the actor as it was at the
    start."""


class TeacherConfig(Section):
    path: str | None = None
    """Folder or name of the teacher of the algorithm `distill`; its vocabulary must be the
    actor's."""


class FrequencyConfig(Section):
    freq_epochs: Count | None = None
    """Every n epochs."""
    freq_steps: Count | None = None
    """Every n steps."""
    freq_secs: Seconds | None = None
    """Every n seconds. Any of the three triggers."""


class EvaluatorConfig(FrequencyConfig):
    n_samples: Count = 1
    """Answers per held-out prompt."""
    temperature: NonNegative = 0.0
    """0 is greedy."""
    max_new_tokens: Count | None = None
    """null: as in `gconfig`."""


class SaverConfig(FrequencyConfig):
    mode: Literal["auto", "sync", "async"] = "auto"
    """Whether training waits while a save is written (sync) or continues, with a copy of it in host
    memory (async); of exports and recovery checkpoints. auto: async, unless the host cannot hold
    the copies, which is said."""
    keep_last: Count | None = None
    """HF folders that stay, the newest; older ones are removed once a newer one is whole. null:
    all, or where keep_best is set, the last one."""
    keep_best: Count | None = None
    """HF folders that stay for their held-out evaluation besides: accuracy (mean reward where
    nothing is right or wrong), in SFT the loss. Steps without one are never the best."""

    @property
    def is_periodic(self) -> bool:
        """Whether models are saved before the end, too."""
        return any((self.freq_epochs, self.freq_steps, self.freq_secs))


class RecoverConfig(FrequencyConfig):
    mode: SwitchName = "auto"
    """Whether the state of the run is saved, and a run that stopped resumes where it was when it is
    started again. auto and on do; off and disabled do not."""
    retries: NonNegativeInt = 3
    """How often a run that lost a process, or failed for a reason that may pass, is started again
    from its last checkpoint without a step gained in between. A step that fails three times in a
    row over ranks ends the run before."""
    keep_last: Count = 2
    """Recovery checkpoints that are kept, the newest ones."""
    allow: tuple[str, ...] = ()
    """Keys that may differ from those the run began with although they change what it trains."""

    @property
    def is_on(self) -> bool:
        return self.mode in ("on", "auto")


class ElasticConfig(Section):
    enabled: bool = False
    """Whether a run that lost ranks for good continues with those that are left, in the largest
    layout that they allow, and takes them in again when they return. `plan --world N` shows it."""
    min_ranks: Count = 1
    """With fewer ranks that train the run waits."""
    wait_timeout_s: Seconds = 3600.0
    """A run that waits for ranks for longer ends."""
    drop_grace_s: NonNegative = 0.0
    """How long a rank that is away may take to return before the others continue without it."""
    slot_failures: Count = 2
    """A rank whose process died, hung or raised so often, without a checkpoint gained in between,
    counts as away. One that merely failed once is started again."""
    heartbeat_interval_s: Annotated[float, Field(ge=0.05, le=60)] = 0.5
    """How often each rank shows that it runs; `stall_abort_s` without a sign is a hang."""
    standbys: bool = True
    """Whether processes that have imported everything wait to take the place of lost ones."""
