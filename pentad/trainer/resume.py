"""Resumes a run from its newest intact checkpoint, detects a run whose steps are all done, and
rolls back to a checkpoint during training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pentad.checkpoint.folders import MANIFEST, Checkpoint, find_checkpoints, folder_of, reading
from pentad.config.describe import show
from pentad.config.load import record_values, with_hub_names
from pentad.config.rules.checkpoint import changed_keys, fixed_problems
from pentad.config.schema import SCORERS, Config
from pentad.core.errors import Problem, UserError, raise_problems, visible
from pentad.rl.bounds import Bounds
from pentad.telemetry import host
from pentad.telemetry.log import NOTICE
from pentad.telemetry.runfolder import set_aside
from pentad.trainer.context import RunContext, RunSummary
from pentad.trainer.run_folders import accept_config, checkpoint_path
from pentad.trainer.saving.recovery import Check, RecoverHandler

log = logging.getLogger(__name__)


def finished(context: RunContext, *, roles: Sequence[str], evaluates: bool) -> RunSummary | None:
    """Returns the summary of a run that has done all steps and has the model of every role and, if
    it `evaluates`, the score of the last step; None if work is left."""
    if not (context.config.recover.is_on and roles):
        return None
    found = find_checkpoints(context.checkpoints, report=log.info)
    trained = found[0].step + 1 if found else 0
    last = f"epoch*globalstep{trained - 1}"
    models = [list((context.checkpoints / folder_of(role)).glob(last)) for role in roles]
    if not trained or trained < context.num_steps or not all(models):
        return None
    if evaluates and trained not in context.recorder.evaluated():
        return None
    log.info("the run is finished: all its %d steps are done", trained, extra=NOTICE)
    tiers = context.tiers()
    tiers.after_commit(trained - 1)  # the store may have been unreachable at the end of the run
    tiers.close(context.config.checkpoint.finish_timeout_s)
    evals = context.recorder.evaluations()
    return RunSummary(context.folder.path, models[0][0], trained, evals)


def resume(context: RunContext, handler: RecoverHandler, check: Check) -> Checkpoint | None:
    """Restores the newest intact checkpoint, and logs it; None: the run starts from the
    beginning."""
    if not handler.is_on:
        return None
    is_known = bool(context.folder.manifest["starts"])

    def accept(checkpoint: Checkpoint) -> None:
        facts = checkpoint.manifest.facts
        with reading(checkpoint.root / checkpoint.info / MANIFEST):
            before = facts["config"]
            _ = facts["time"], before["train_dataset"]["batch_size"]
            _ = [before[tag]["path"] for tag in ("ref", "teacher")]
            if not is_known:  # the records were moved or deleted
                context.folder.changes = accept_config(context.config, before)
        raise_problems(fixed_problems(before, context.config.model_dump(mode="json")))
        check(checkpoint)

    checkpoint = handler.restore(accept)
    if checkpoint is None and is_known:
        _check_place(context)
    redone = context.recorder.resume(0 if checkpoint is None else checkpoint.step + 1)
    for change in context.folder.changes:
        log.info("the config differs from the previous start: %s", change, extra=NOTICE)
    _report(context, checkpoint, redone)
    return checkpoint


def _report(context: RunContext, checkpoint: Checkpoint | None, redone: int) -> None:
    """Logs the resume. `redone`: recorded steps that are repeated."""
    some, verb = ("1 step that was", "is") if redone == 1 else (f"{redone} steps that were", "are")
    again = f"; {some} recorded since {verb} repeated" if redone else ""
    if checkpoint is not None:
        place = checkpoint.root / checkpoint.info
        saved = visible(str(checkpoint.manifest.facts["time"]))
        text = "resumed after step %d from %s (%s)%s"
        log.info(text, checkpoint.step + 1, place, saved, again, extra=NOTICE)
        for change in changed_versions(checkpoint.manifest.facts.get("versions")):
            log.info("%s", change, extra=NOTICE)
    elif redone:
        place = context.checkpoints
        models = ""
        for moved in set_aside([place]):
            if list(moved.glob("*/epoch*")):
                models = f"; earlier models are in {moved}"
        text = "no recovery checkpoint in %s: the run starts again at step 1%s%s"
        log.info(text, place, again, models, extra=NOTICE)


def _check_place(context: RunContext) -> None:
    """Raises UserError if the run's checkpoints are in a folder that is no longer configured."""
    config = context.config
    former = context.folder.manifest["config"].get("checkpoint")
    former = former.get("local_dir") if isinstance(former, dict) else None
    if not isinstance(former, str | None):
        former = None
    checkpoint = config.checkpoint.model_copy(update={"local_dir": former})
    place = checkpoint_path(config.model_copy(update={"checkpoint": checkpoint}))
    if place != context.checkpoints and find_checkpoints(place, report=log.info):
        rule = f"the run's recovery checkpoints are in {place}"
        remedy = f"move that folder to {context.checkpoints}, set it back, or start with --fresh"
        where = f"checkpoint.local_dir = {show(config.checkpoint.local_dir)}"
        raise UserError(Problem(where, rule, remedy))


def replaced_weights(checkpoint: Checkpoint, config: Config) -> set[str]:
    """Returns the tags of frozen weights that have another folder than in the checkpoint."""
    before, values = with_hub_names(checkpoint.manifest.facts["config"]), record_values(config)
    return {tag for tag in SCORERS if before[tag]["path"] != values[tag]["path"]}


def changed_versions(before: Any) -> list[str]:
    """Describes packages whose version has changed since a checkpoint was saved."""
    if not isinstance(before, Mapping):
        return []
    return [
        f"{visible(name)} was {visible(str(was or 'not installed'))} when the checkpoint was "
        f"saved, and is {now or 'not installed'}: numbers may differ in their last bits"
        for name, was, now in changed_keys(before, host.versions())
    ]


def roll_back(
    context: RunContext, handler: RecoverHandler, bounds: Bounds, step: int, sentence: str
) -> str:
    """Rolls back after `step`, counted from 0, if the weights give no usable gradient. Returns the
    error text that ends the run, or "" if a checkpoint was restored."""
    to = handler.roll_back(step, bounds.rollbacks) if bounds.may_roll_back else None
    if to is None:
        return sentence
    bounds.rolled_back(step, to)
    context.steps.rolled_back_to = to + 1
    log.warning(
        "step %d: %s. The weights and the optimizer state of step %d are restored (rollback %d "
        "of guards.max_rollbacks = %d); steps and data continue",
        step + 1,
        sentence.partition(":")[0],
        to + 1,
        len(bounds.rollbacks),
        bounds.settings.max_rollbacks,
    )
    return ""
