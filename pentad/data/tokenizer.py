"""The tokenizer of a model folder: text to ids and back, chat rendering, and the ids that end a
text.

It is read from local files only, by transformers. A text ends with the tokenizer's end-of-sequence
id or any `eos_token_id` of generation_config.json (chat models have two). An id outside the
vocabulary is rejected, because the model would never stop.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.files import file_digest
from pentad.core.folders import check_plain, read_object
from pentad.data.cut import MAX_CPU_S, MAX_GROWTH_BYTES, CutOff, cut_off
from pentad.weights.hf import companion_files

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
MORE_FILES = ("added_tokens.json", "merges.txt", "special_tokens_map.json")
DIRECT = {
    "TokenizersBackend": ("glm4_moe", "llama", "qwen2_moe", "qwen3", "qwen3_moe"),
    "Qwen2Tokenizer": ("qwen2_moe", "qwen3", "qwen3_moe"),
}
"""Tokenizer class -> `model_type`s for which transformers' search selects it."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    folder: Path
    inner: Any
    """The transformers tokenizer."""
    vocab_size: int
    """Number of ids that the tokenizer can produce; the model may have more rows."""
    eos_id: int
    stop_ids: tuple[int, ...]
    """Every id that ends a text, `eos_id` first."""
    prefix_ids: tuple[int, ...]
    """Ids that the model expects before plain text, such as a beginning-of-sequence id; often
    none."""
    prefix_text: str = ""

    @property
    def digest(self) -> bytes:
        """A digest of the tokenizer's files."""
        found = sorted(self.folder / name for name in (*TOKENIZER_FILES, *MORE_FILES))
        return b"".join(file_digest(file) for file in found if file.exists())

    @property
    def has_chat_template(self) -> bool:
        return bool(self.inner.chat_template)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without added special ids."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode`, for many texts at once, on all cores."""
        if not texts:
            return []
        found = self.inner(list(texts), add_special_tokens=False, return_attention_mask=False)
        return [list(ids) for ids in found["input_ids"]]

    def decode(self, ids: Sequence[int], *, keep_special: bool = False) -> str:
        if is_plain_decoder(self.inner):
            return str(self.inner.backend_tokenizer.decode(ids, not keep_special))
        text = self.inner.decode(
            list(ids),
            skip_special_tokens=not keep_special,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text

    def render(
        self,
        messages: Messages,
        *,
        for_answer: bool,
        tools: Messages = (),
        template_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Renders a conversation to text; `for_answer` starts an assistant turn at the end.
        `template_args` override those that the tokenizer was loaded with."""
        return rendered(
            self.inner,
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            add_generation_prompt=for_answer,
            **template_args,
        )


def rendered(inner: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Renders messages with a transformers chat template, with a time limit."""
    try:
        with cut_off():
            text = inner.apply_chat_template(messages, tokenize=False, **options)
    except CutOff as error:
        limits = f"{MAX_CPU_S:g} s or {MAX_GROWTH_BYTES >> 20} MiB"
        rule = f"one conversation of {len(messages)} messages takes it more than {limits}"
        where = f"chat template of {getattr(inner, 'name_or_path', 'the tokenizer')}"
        raise UserError(Problem(where, rule, "mend chat_template.jinja")) from error
    assert isinstance(text, str)
    return text


def is_plain_decoder(inner: Any) -> bool:
    """Whether the tokenizers library, which is faster, decodes like transformers. Clean-up of
    spaces is not considered: do not use it for callers that need the clean-up."""
    own = (getattr(type(inner), name, None) for name in ("decode", "_decode"))
    plain = ["PreTrainedTokenizerBase.decode", "TokenizersBackend._decode"]
    return [getattr(method, "__qualname__", "") for method in own] == plain


def decode_all(inner: Any, many: Sequence[Sequence[int]]) -> list[str]:
    """Decodes without special tokens, like the transformers tokenizer `inner`, but in parallel."""
    if is_plain_decoder(inner) and not inner.clean_up_tokenization_spaces:
        return list(inner.backend_tokenizer.decode_batch(many, True))  # releases the GIL
    return [inner.decode(ids, skip_special_tokens=True) for ids in many]


def load_tokenizer(
    folder: str | Path,
    *,
    key: str = "actor.path",
    template_args: Mapping[str, Any] = MappingProxyType({}),
) -> Tokenizer:
    """Loads the tokenizer of a model folder; `key` is the config key for errors. Its chat template
    receives `template_args` in every rendering."""
    # Not Path's, which raises where there is no such user.
    where, path = f"{key} = {folder}", Path(os.path.expanduser(folder))  # noqa: PTH111
    if not path.is_dir():
        raise UserError(
            Problem(where, "no such folder", "give a model's folder, with its tokenizer")
        )
    check_plain(path)
    companion_files(path)
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        rule = f"the folder has no tokenizer (none of {', '.join(TOKENIZER_FILES)})"
        raise UserError(Problem(where, rule, "copy it from the model's original folder"))
    try:
        inner = tokenizer_class(path).from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises nearly anything on a broken file
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(Problem(where, f"the tokenizer does not load: {first}")) from error
    check_expansion(path)
    if template_args:
        check_template_args(inner, template_args, path)
        inner.apply_chat_template = partial(inner.apply_chat_template, **template_args)
    more = path / "generation_config.json"
    config = read_object(more) if more.exists() else {}
    vocab_size = len(inner)
    stop_ids = resolve_stop_ids(inner.eos_token_id, config, vocab_size, where)
    prefix_ids = find_prefix(inner)
    return Tokenizer(
        folder=path,
        inner=inner,
        vocab_size=vocab_size,
        eos_id=stop_ids[0],
        stop_ids=stop_ids,
        prefix_ids=prefix_ids,
        prefix_text=inner.decode(prefix_ids, skip_special_tokens=False) if prefix_ids else "",
    )


def check_template_args(
    inner: Any, template_args: Mapping[str, Any], folder: Path, key: str = "template_args"
) -> None:
    """Raises UserError for template arguments that have no effect or that the run itself sets."""
    templates = inner.chat_template or ""
    text = "".join(templates.values()) if isinstance(templates, Mapping) else str(templates)
    own = signature(type(inner).apply_chat_template).parameters
    problems = []
    for name, value in template_args.items():
        where = f"{key}.{name} = {str(value).lower() if value in (True, False) else value}"
        if name in own:
            problems.append(Problem(where, "is given to the template by the run itself"))
        elif not re.search(rf"\b{re.escape(name)}\b", text):
            rule = f"the chat template in {folder} does not read {name}, so it would change nothing"
            problems.append(Problem(where, rule, "leave it out, or use a template that does"))
    raise_problems(problems)


MAX_EXPANSION = 64
"""Maximum growth of a text by a tokenizer's replacements; Unicode's normal forms reach 18."""


def check_expansion(folder: Path) -> None:
    """Raises UserError for a tokenizer whose replacements can expand a text too much."""
    file = folder / "tokenizer.json"
    if not file.exists():
        return
    found = read_object(file)
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        factor = _expansion(found.get(name))
        if factor > MAX_EXPANSION:
            rule = f"its {name} can make a text {factor:,} times as long (at most {MAX_EXPANSION})"
            raise UserError(Problem(str(file), rule, "take the tokenizer of the original model"))


def _expansion(part: Any) -> int:
    """Factor by which a part of tokenizer.json and its nested parts can lengthen a text. Iterative,
    because the nesting depth is unlimited."""
    level, factor = [part], 1
    while level:
        parts = [one for one in level if isinstance(one, dict)]
        for one in parts:
            factor = min(10**9, factor * _replacing(one))
        level = [inner for one in level if isinstance(one, list) for inner in one]
        level += [inner for one in parts for inner in one.values()]
    return factor


def _replacing(part: dict[str, Any]) -> int:
    content, pattern = part.get("content"), part.get("pattern")
    if part.get("type") != "Replace" or not isinstance(content, str):
        return 1
    num = len(content)
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(1, -(-num // len(text)))
    return 1 + num if num > 1 else 1  # it may match the empty text between all characters


def tokenizer_class(folder: Path) -> Any:
    """The tokenizer class for the folder, or AutoTokenizer if it is not known."""
    # Here, since transformers takes seconds to import, and its search for a class as long again.
    import transformers

    config, model = folder / "tokenizer_config.json", folder / "config.json"
    if config.exists() and model.exists():
        given, model_type = read_object(config), read_object(model).get("model_type")
        name = str(given.get("tokenizer_class"))
        if model_type in DIRECT.get(name, ()) and "auto_map" not in given:
            return getattr(transformers, name)
    return transformers.AutoTokenizer


def resolve_stop_ids(
    eos_id: int | None, config: Mapping[str, Any], vocab_size: int, where: str
) -> tuple[int, ...]:
    """The distinct stop ids: the tokenizer's end token, then those of the generation config."""
    more = config.get("eos_token_id")
    listed = more if isinstance(more, list) else [more]
    given = [i for i in [eos_id, *listed] if i is not None]
    if not given:
        rule = "neither the tokenizer nor generation_config.json names an end-of-sequence token"
        remedy = 'set "eos_token" in tokenizer_config.json'
        raise UserError(Problem(where, rule, remedy))
    for stop_id in given:
        if not isinstance(stop_id, int) or not 0 <= stop_id < vocab_size:
            rule = f"eos_token_id {stop_id!r} is not an id of the tokenizer (0 to {vocab_size - 1})"
            remedy = "tokenizer and generation_config.json belong to different models"
            raise UserError(Problem(where, rule, remedy))
    return tuple(dict.fromkeys(given))


def find_prefix(inner: Any) -> tuple[int, ...]:
    """The special ids that the tokenizer adds before a text. Those that it adds after a text (such
    as an end-of-sequence) are omitted, because a prompt must not have them."""
    bare = inner.encode("a", add_special_tokens=False)
    full = inner.encode("a", add_special_tokens=True)
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()
