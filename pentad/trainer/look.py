"""Runs a start's checks of data, rewards, workflows and tokenizer for a plan, on the first rows.

`pentad plan` runs this in a separate process (`cli/look.py`), because it imports torch and user
code. It reads no weights and calls no model.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from pentad.config.environments import environments
from pentad.core.errors import Problem, UserError
from pentad.data.sft import SftDataset
from pentad.data.tokenizer import TOKENIZER_FILES, Tokenizer
from pentad.models.catalog import known_dims
from pentad.planner.present import with_data_here
from pentad.rewards.section import MODELS
from pentad.trainer.inputs import (
    CheckedEnvironment,
    Collector,
    RowReader,
    check_environment,
    open_examples,
    parts_of,
    tokenizer_of,
    tokenizer_problems,
)

if TYPE_CHECKING:
    from pentad.config.schema import Config
    from pentad.core.dims import ModelDims
    from pentad.data.examples import OrderedData

FIRST_ROWS = 256
"""Rows of each dataset that a plan reads."""
MAX_TEXT_BYTES = 64 << 20
"""Maximum size of a pretraining text that a plan tokenises, in bytes."""
OF_THE_MACHINE = ("reward pool", "platform = ")
"""Prefixes of problems that depend on this machine."""
END = "<|end of a text without a tokenizer|>"
ANY_TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for message in messages %}{{ message | tojson }}"
    "{% endfor %}"
)
"""A chat template that renders every message and tool, and rejects none."""


@dataclass
class Look:
    """Result of a plan's checks: inputs that were read, inputs that were not, and problems."""

    checks: Collector = field(default_factory=Collector)
    notes: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    not_read: list[str] = field(default_factory=list)
    is_without_tokenizer: bool = False
    longest: int | None = None
    """Tokens of the longest training row read; of the longest prompt if answers are sampled."""

    def add_notes(self, data: OrderedData) -> None:
        """Adds the notes that a start would log about the data; they need the tokenizer."""
        if not self.is_without_tokenizer:
            self.notes += [*data.notes, *sorted(data.warnings)]

    def add_length(self, tokens: int) -> None:
        if not self.is_without_tokenizer:
            self.longest = max(tokens, self.longest or 0)

    def sort(self) -> None:
        """Turns problems of this machine (missing extras or isolation) into notes."""
        found, self.checks.problems = self.checks.problems, []
        needs_extra = any("pip install 'pentad[" in str(one) for one in found)
        for one in found:
            text = str(one)
            is_extra = "pip install 'pentad[" in text
            is_cause = needs_extra and "No module named" in text
            if is_extra or is_cause or text.startswith(OF_THE_MACHINE):
                self.notes.append(f"a run on this machine rejects it: {text}")
            else:
                self.checks.problems.append(one)

    def as_json(self) -> dict[str, Any]:
        problems = [
            [one.where, one.rule, one.remedy] if isinstance(one, Problem) else one
            for one in UserError(self.checks.problems).problems
        ]
        return {
            "problems": problems,
            "notes": list(dict.fromkeys(self.notes)),
            "read": list(dict.fromkeys(self.read)),
            "not_read": list(dict.fromkeys(self.not_read)),
            "longest": self.longest,
        }


def look(config: Config) -> Look:
    """Reads the inputs of a start of the recipe's command, as far as they are on this machine."""
    found = Look()
    task = config.task
    config, found.not_read = with_data_here(config)
    with suppress(UserError):  # a config rule reports this
        config.register_models()
    dims = known_dims(config.actor.path)
    reader = open_reader(config, dims, found)
    if task == "train":
        for keys in environments(config):
            checked = check_environment(config, keys, reader, found.checks, asks_models=False)
            if checked is not None:
                describe(checked, found)
    elif reader is not None:
        with TemporaryDirectory() as folder:  # tokens of texts are written there
            read_examples(task, config.model_copy(update={"fileroot": folder}), reader, found)
    found.sort()
    return found


def open_reader(config: Config, dims: ModelDims | None, found: Look) -> RowReader | None:
    """Opens a reader with the actor's tokenizer, or with one for any text if it is not here."""
    folder = Path(config.actor.path or "").expanduser()
    if config.actor.path is None or not any((folder / name).is_file() for name in TOKENIZER_FILES):
        place = f"the tokenizer of actor.path = {config.actor.path} is not on this machine"
        found.not_read.append(f"{place}: rows are read without lengths and chat template")
        found.is_without_tokenizer = True
        return RowReader(None, any_tokenizer(folder), FIRST_ROWS)
    tokenizer = found.checks.attempt(lambda: tokenizer_of(config))
    if tokenizer is None:
        return None
    if dims is not None:
        problems = found.checks.attempt(lambda: tokenizer_problems(config, dims, tokenizer))
        found.checks.problems += problems or []
    return RowReader(dims, tokenizer, FIRST_ROWS)


def any_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level tokenizer, in place of one that is not on this machine."""
    symbols = [END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    backend = Backend(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, chat_template=ANY_TEMPLATE
    )
    return Tokenizer(folder, inner, len(vocab), 0, (0,), ())


def read_examples(task: str, config: Config, reader: RowReader, found: Look) -> None:
    for part in parts_of(config):
        key = f"{part}_dataset"
        data = config.train_dataset if part == "train" else config.valid_dataset
        if data is None or data.path is None:
            continue
        if task == "pretrain" and (why := why_not_tokenised(data.path, reader)):
            found.not_read.append(f"{key}.path = {data.path}: {why}")
            continue
        opened = found.checks.attempt(partial(open_examples, task, config, part, reader))
        if opened is not None:
            found.add_notes(opened)
            text = opened.summary()
            if isinstance(opened, SftDataset):
                text = f"{key}.path = {data.path}: {rows_of(opened, opened.num_rows)}"
                if part == "train" and len(opened) > 0:
                    found.add_length(opened.max_row_tokens)
            found.read.append(text)


def why_not_tokenised(path: str, reader: RowReader) -> str:
    """Returns why a plan does not read the text of a pretraining run; empty if it does."""
    if reader.dims is None:
        return "text is not read without the tokenizer"
    place = Path(path).expanduser()
    files = [place] if place.is_file() else [*place.rglob("*")] if place.is_dir() else []
    sizes = [file.stat().st_size for file in files if file.suffix in (".txt", ".md")]
    size = sum(sizes[:FIRST_ROWS])
    return f"{size >> 20} MiB of text are not tokenised by a plan" if size > MAX_TEXT_BYTES else ""


def describe(checked: CheckedEnvironment, found: Look) -> None:
    """Adds notes on the inputs of an environment that were read."""
    config = checked.config
    for stream in (checked.stream, checked.valid):
        if stream is None:
            continue
        source, lengths = stream.source, stream.lengths()
        text = rows_of(stream, len(stream.rows))
        if lengths and not found.is_without_tokenizer:
            text += f", prompts of {min(lengths)} to {max(lengths)} tokens"
        text += "".join(f", {n} left out: {why}" for why, n in stream.dropped.items())
        found.read.append(f"{source.key}.path = {source.path}: {text}")
        found.add_notes(stream)
        if stream is checked.stream and lengths:
            found.add_length(max(lengths))
    tried = [fn for fn in config.reward.functions if fn not in MODELS]
    asked = [fn for fn in config.reward.functions if fn in MODELS]
    if tried:
        how = "imported and tried on a row" if checked.stream else "imported"
        found.read.append(f"reward.fn = {', '.join(tried)}: {how}")
    if asked:
        found.not_read.append(f"reward.fn = {', '.join(asked)}: a plan calls no model")
    if config.rollout.workflow != "single_turn":
        found.read.append(f"rollout.workflow = {config.rollout.workflow}: loaded")


def rows_of(opened: OrderedData, num: int) -> str:
    if opened.source.first == num:
        return f"the first {num} rows"
    return f"all {num} rows" if num > 1 else "its one row"


def main() -> None:
    """Reads a pickled config from stdin, writes the result as JSON to stdout. Output of user code
    goes to stderr."""
    config = pickle.load(sys.stdin.buffer)
    out = os.dup(1)
    os.dup2(2, 1)
    done = json.dumps(look(config).as_json())
    with os.fdopen(out, "w", encoding="utf-8") as file:
        file.write(done)
