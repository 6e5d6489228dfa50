"""`pentad eval`: samples answers to a dataset and scores them; prints the metrics and writes the
answers to a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pentad.cli.output import make_table, print_parts, quiet_transformers
from pentad.config.schema import Config
from pentad.core.errors import Problem, UserError, naming
from pentad.core.section import chosen
from pentad.rollout.evaluation import Answered
from pentad.trainer.sampling.evaluate import Evaluation, check_eval, eval_params, run_eval


def run_eval_command(
    config: Config, *, out: Path | None, as_json: bool, device: str = "auto"
) -> None:
    quiet_transformers()
    subject = check_eval(config)
    answer_key = chosen(config.valid_dataset, "valid_dataset").answer_key
    with kept_answers(out) as file, progress(len(subject.stream)) as bar:

        def on_answered(found: Answered) -> None:
            bar.advance(bar.task_ids[0])
            if file is not None:
                file.writelines(json.dumps(line) + "\n" for line in lines_of(found, answer_key))

        evaluation = run_eval(config, subject, device=device, on_answered=on_answered)
    if as_json:
        print(json.dumps({**about(config), **evaluation.as_record()}, indent=2))
        return
    params = eval_params(config, subject.tokenizer)
    print_parts(table_of(config, evaluation, params.max_new_tokens))
    for warning in subject.stream.warnings:
        print(f"note: {warning}.")
    for note in notes_on(evaluation, params.max_new_tokens):
        print(note)
    if out is not None:
        print(f"every answer: {out}")


@contextmanager
def kept_answers(out: Path | None) -> Iterator[IO[str] | None]:
    """Opens the file for the answers, which gets its name when it is complete. A pipe or device,
    such as /dev/stdout, and the target of a link are written in place, never replaced."""
    if out is None:
        yield None
        return
    try:
        if out.is_dir():
            raise UserError(Problem(f"--out = {out}", "is a folder", "give the name of a file"))
        is_file = not out.is_symlink() and (out.is_file() or not out.exists())
        part = out.with_name(out.name + ".part") if is_file else out
        part.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(
            Problem(f"--out = {out}", f"cannot be written: {error.strerror}")
        ) from error
    try:
        with naming(part), file:
            yield file
        if is_file:
            part.replace(out)
    except BaseException:
        if is_file:
            part.unlink(missing_ok=True)
        raise


@contextmanager
def progress(total: int) -> Iterator[Progress]:
    """Shows a progress bar on stderr if it is a terminal."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        bar.add_task("prompts", total=total)
        yield bar


def lines_of(found: Answered, answer_key: str) -> Iterator[dict[str, Any]]:
    """Yields one record per sample, or one with the reason if there are no samples."""
    prompt = found.prompt
    head = {"gid": prompt.gid, "prompt": prompt.text, "answer": prompt.fields.get(answer_key)}
    if found.group is None:
        yield {**head, "failure": found.failure}
        return
    for index, sample in enumerate(found.group.samples):
        yield {
            **head,
            "index": index,
            "text": sample.text,
            "result": None if found.votes is None else found.votes[index],
            "reward": sample.reward,
            "reward_parts": sample.reward_parts,
            "finish": sample.finish,
            "num_sampled": sample.num_sampled,
        }


def about(config: Config) -> dict[str, Any]:
    data, evaluator = chosen(config.valid_dataset, "valid_dataset"), config.evaluator
    return {
        "model": config.actor.path,
        "data": data.path,
        "reward": config.reward.fn,
        "samples_per_prompt": evaluator.n_samples,
        "temperature": evaluator.temperature,
        "max_new_tokens": evaluator.max_new_tokens or config.gconfig.max_new_tokens,
        "seed": config.seed,
    }


def table_of(config: Config, evaluation: Evaluation, max_new_tokens: int) -> Table:
    result, facts = evaluation.result, about(config)
    how = "greedy" if facts["temperature"] == 0 else f"temperature {facts['temperature']:g}"
    rows = [
        ("model", str(facts["model"])),
        ("data", f"{facts['data']}, {result.num_prompts} prompts"),
        ("answers", f"{facts['samples_per_prompt']} a prompt, {how}, seed {facts['seed']}"),
    ]
    if result.accuracy is None:
        rows.append(("accuracy", 'none: the reward has no part "correct"'))
    else:
        interval = f"95% interval {result.accuracy_low:.4f} to {result.accuracy_high:.4f}"
        rows.append(("accuracy", f"{result.accuracy:.4f}  ({interval}, over prompts)"))
    for k, value in (result.pass_at or {}).items():
        if result.num_samples > result.num_prompts:
            rows.append((f"pass@{k}", f"{value:.4f}"))
    if result.majority is not None:
        rows.append((f"maj@{facts['samples_per_prompt']}", f"{result.majority:.4f}"))
    elif facts["samples_per_prompt"] > 1:
        why = evaluation.no_majority or 'not every answer has the part "correct"'
        rows.append((f"maj@{facts['samples_per_prompt']}", f"does not apply: {why}"))
    rows.append(("reward", f"{result.reward_mean:.4f}"))
    rows.append(("tokens", f"mean {result.length_mean:.1f}, most {result.length_max}"))
    rows.append(("truncated", f"{result.truncated_share:.1%} (at {max_new_tokens} tokens)"))
    rate = result.length_mean * result.num_samples / max(result.seconds, 1e-9)
    rows.append(("time", f"{result.seconds:.1f} s, {rate:.0f} tokens/s"))
    return make_table(("", ""), rows, show_header=False)


def notes_on(evaluation: Evaluation, max_new_tokens: int) -> Iterator[str]:
    """Yields caveats about the metrics."""
    for reason, num in evaluation.num_left_out.items():
        yield f"note: {num} rows were left out ({reason}) and count nowhere."
    for failure, num in evaluation.failures.items():
        yield f"note: {num} prompts failed and count nowhere: {failure}"
    if evaluation.result.truncated_share > 0.01:
        yield (
            f"note: {evaluation.result.truncated_share:.1%} of the answers were cut at "
            f"{max_new_tokens} tokens; raise --max-new-tokens if they were not finished."
        )
