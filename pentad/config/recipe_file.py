"""Reads a YAML recipe and `dotted.key=value` overrides into one plain tree of values.

This module does not depend on the schema. It collects all problems; a value that cannot be read is
left out of the tree and its key is recorded in `bad`, so that the rest can still be checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

from pentad.core.errors import Problem
from pentad.core.folders import what_else

Keys = tuple[str | int, ...]
COMMAND_LINE = "command line"
"""The source of an override."""
MAX_DEPTH = 16
MAX_RECIPE_BYTES = 1 << 20
MAX_NODES = 20_000
"""Maximum number of values after YAML aliases are expanded: a few lines can expand to 9**9."""
MAX_REFERENCES = 200
"""Maximum number of expanded `${...}` references, nested ones included."""
MAX_CHAIN = 64
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
PLAIN_TYPES = {
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:int": (r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    "tag:yaml.org,2002:float": (
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "tag:yaml.org,2002:merge": (r"<<", "<"),
}
"""Patterns of unquoted words that are not text. Stricter than YAML 1.1: `on`, `off`, `yes`, `no`,
`0010`, `1:30` and dates stay text; 1e-6 is a number."""

TEXT = "tag:yaml.org,2002:str"
OTHER_TYPES = (TEXT, "tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
YAML_TEXT = re.compile(
    "['\"[{]|("
    + "|".join(PLAIN_TYPES[f"tag:yaml.org,2002:{t}"][0] for t in ("bool", "null"))
    + ")$"
)
"""Values of an override for a text key that are parsed as YAML; any other is the text itself."""


class Loader(yaml.SafeLoader):
    """YAML with the plain types above; a repeated key is an error."""

    yaml_implicit_resolvers: dict[str, list[Any]] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a word", key.start_mark
                )
            if key.value in seen and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f'key "{key.value}" is given twice', key.start_mark
                )
            seen[key.value] = 1
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes every text that `Loader` or a YAML 1.1 reader would read as something else."""


def _represent_text(dumper: Any, text: str) -> yaml.ScalarNode:
    # PyYAML loses unusual line breaks such as U+0085 unless the text is in double quotes.
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar(TEXT, text, style)


class FastDumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """`Dumper` by libyaml, if it is installed: the same bytes for plain values (`_is_plain`)."""


for _dumper in (Dumper, FastDumper):
    _dumper.add_representer(str, _represent_text)
for _tag, (_pattern, _first) in PLAIN_TYPES.items():
    for _class in (Loader, Dumper, FastDumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list(_first))


@dataclass
class Tree:
    """The user's input: nested plain values, their sources, and unreadable keys."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    """Dotted key -> `recipe.yaml:12` or COMMAND_LINE."""
    problems: list[Problem] = field(default_factory=list)
    bad: set[str] = field(default_factory=set)
    """Dotted keys whose values were left out."""
    written: dict[str, str] = field(default_factory=dict)
    """`key = value` -> the alias that was written for it."""
    is_read: bool = True
    """False if the recipe could not be read, so that its content is unknown."""


def read_tree(
    path: str | Path | None,
    overrides: Sequence[str],
    defaults: Mapping[str, Any],
    texts: Collection[str] = (),
) -> Tree:
    """Reads the recipe and applies overrides; `${...}` may also refer to keys left at their
    default. `texts`: dotted keys with text values, where a number stays as written."""
    tree = Tree()
    if path is not None:
        _read_file(Path(path), tree, texts)
        tree.is_read = not tree.problems
    for override in overrides:
        _apply_override(override, tree, texts)
    _refuse_half_characters(tree)
    _resolve_interpolations(tree, defaults)
    return tree


def dotted(keys: Keys) -> str:
    """Writes keys as text: ("gconfig", "stop", 1) becomes gconfig.stop[1]."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")


def dump_yaml(values: Mapping[str, Any]) -> str:
    """YAML that `read_tree` reads back to the same values."""
    escaped = _map_texts(dict(values), _without_references)
    dumper: Any = FastDumper if _is_plain(escaped) else Dumper
    text: str = yaml.dump(escaped, Dumper=dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def _is_plain(value: Any) -> bool:
    """Whether both dumpers write the same: libyaml escapes characters beyond U+FFFF, and breaks
    long lines in double quotes and unusual keys differently."""
    if isinstance(value, dict):
        return all(0 < len(key) < 64 and _is_plain(key) for key in value) and all(
            map(_is_plain, value.values())
        )
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return not isinstance(value, str) or (value.isascii() and value.isprintable())


def write_override(key: str, value: Any) -> str:
    """KEY=VALUE that `read_tree` reads back to the same value."""
    return f"{key}={json.dumps(_map_texts({key: value}, _without_references)[key])}"


def _without_references(text: str) -> str:
    """Escapes `${`, so that it is read as plain text."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def _read_file(path: Path, tree: Tree, texts: Collection[str]) -> None:
    where = f"recipe = {path}"
    try:
        if other := what_else(path):
            rule = f"{other}, not a file"
            tree.problems.append(Problem(where, rule, "give the path of a YAML file"))
            return
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        tree.problems.append(Problem(where, reason, "give the path of a YAML file"))
        return
    except UnicodeDecodeError:
        tree.problems.append(Problem(where, "is not UTF-8 text", "give the path of a YAML file"))
        return
    if len(data) > MAX_RECIPE_BYTES:
        rule = f"is larger than {MAX_RECIPE_BYTES >> 20} MiB, the most a recipe may have"
        tree.problems.append(Problem(where, rule, "give the path of a YAML file"))
        return
    try:
        values = _load(text, texts, source=path.name, sources=tree.sources)
    except yaml.YAMLError as error:
        tree.problems.append(_syntax_problem(str(path), error))
        return
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        tree.problems.append(Problem(where, f"cannot be read: {_first_clause(error)}"))
        return
    if values is None:
        return
    if not isinstance(values, dict):
        rule = f"holds a {type(values).__name__}, not a mapping of keys"
        tree.problems.append(Problem(where, rule, "write lines such as `actor: {path: models/x}`"))
        return
    tree.values = _with_text_keys(values)


def _load(
    text: str,
    texts: Collection[str],
    at: Keys = (),
    *,
    source: str = "",
    sources: dict[str, str] | None = None,
) -> Any:
    """Parses a YAML text as the value at these keys. The line of each key is added to `sources`."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        for keys, inner, line in _bounded_nodes(node, at):
            if sources is not None and isinstance(keys[-1], str):
                sources[dotted(keys)] = f"{source}:{line}"
            if inner.tag in NUMBERS and dotted(names_of(keys)) in texts:
                inner.tag = TEXT  # 1.10 stays the text "1.10" here; as a number it would be 1.1
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _bounded_nodes(node: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any, int]]:
    """Like `_iter_nodes`; raises YAMLError for too many nodes or an unsupported type."""
    for count, found in enumerate(_iter_nodes(node, keys)):
        inner = found[1]
        if count >= MAX_NODES:
            raise _refused(node, f"stands for over {MAX_NODES} values, by aliases of aliases")
        if inner.tag not in (*PLAIN_TYPES, *OTHER_TYPES):
            raise _refused(inner, f"the type {inner.tag} is not supported")
        if inner.tag in PLAIN_TYPES and not _is_of_type(inner):
            raise _refused(inner, f"is no {inner.tag.rpartition(':')[2]}")
        yield found


def _is_of_type(node: Any) -> bool:
    """Whether a value is valid for its YAML type; `!!bool x` is not."""
    tags = NUMBERS if node.tag == NUMBERS[1] else (node.tag,)
    return isinstance(node.value, str) and any(
        re.fullmatch(PLAIN_TYPES[tag][0], node.value) for tag in tags
    )


def _refused(node: Any, rule: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=rule, problem_mark=node.start_mark)


def _iter_nodes(node: Any, keys: Keys = (), line: int = 0) -> Iterator[tuple[Keys, Any, int]]:
    """Yields (keys, node, line of its key) of all nodes below one, and of itself if it has keys."""
    if len(keys) > MAX_DEPTH:
        raise _refused(node, f"is nested more than {MAX_DEPTH} deep")
    if keys:
        yield keys, node, line
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _iter_nodes(value, (*keys, str(key.value)), key.start_mark.line + 1)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _iter_nodes(value, (*keys, 0), node.start_mark.line + 1)


def _syntax_problem(where: str, error: yaml.YAMLError) -> Problem:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return Problem(where, f"is not YAML: {' '.join(str(error).split())}")
    mark = error.problem_mark
    context = f" {error.context}" if error.context else ""
    place = f"{where}, line {mark.line + 1}, column {mark.column + 1}"
    return Problem(place, f"{error.problem}{context}", "check indentation, colons and quotes")


def _apply_override(override: str, tree: Tree, texts: Collection[str]) -> None:
    where = _escaped(f'override "{override}"')
    key, equals, text = override.partition("=")
    key = key.strip().lstrip("+")
    if not equals or not KEY.fullmatch(key):
        rule = "is not of the form dotted.key=value"
        remedy = "write it without spaces, for example gconfig.n_samples=16"
        if key.endswith((".yaml", ".yml")):
            remedy = "name one recipe, before the overrides"
        tree.problems.append(Problem(where, rule, remedy))
        return
    try:
        value = _read_value(text, key, texts)
    except yaml.YAMLError as error:
        is_marked = isinstance(error, yaml.MarkedYAMLError)
        reason = error.problem if is_marked else " ".join(str(error).split())
        remedy = "put quotes around text with special characters"
        tree.problems.append(Problem(where, f"the value is not YAML: {reason}", remedy))
        tree.bad.add(key)
        return
    except (ValueError, RecursionError) as error:
        rule = f"the value cannot be read: {_first_clause(error)}"
        tree.problems.append(Problem(where[:80], rule))
        tree.bad.add(key)
        return
    put(tree.values, key, _with_text_keys(value))
    tree.sources[key] = COMMAND_LINE


def put(values: dict[str, Any], key: str, value: object) -> None:
    """Sets a dotted key; missing blocks above it are added."""
    *outer, last = key.split(".")
    for name in outer:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[last] = value


def _first_clause(error: Exception) -> str:
    """First clause of an error message; the rest is advice for developers."""
    return str(error).partition(":")[0].lower()


def _refuse_half_characters(tree: Tree) -> None:
    """Reports unpaired surrogates, which YAML escapes and bytes of a command line can contain."""
    for keys, value in list(_iter_leaves(tree.values)):
        names = [value, *keys] if isinstance(value, str) else keys
        if any(isinstance(name, str) and _escaped(name) != name for name in names):
            rule = "has half of a surrogate pair, which no file can store"
            _leave_out(tree, keys, value, rule, "write it in UTF-8")


def _escaped(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _read_value(text: str, key: str, texts: Collection[str]) -> Any:
    """Parses the value of an override. A text key takes it as written (also `#` and `*`), unless it
    is quoted, starts with a bracket or is a YAML word."""
    bare = text.strip()
    if key in texts and not re.match(YAML_TEXT, bare):
        return bare
    return _load(text, texts, tuple(key.split(".")))


def _resolve_interpolations(tree: Tree, defaults: Mapping[str, Any]) -> None:
    references: list[tuple[Keys, str]] = []
    for keys, value in list(_iter_leaves(tree.values)):
        if value == "???":
            _leave_out(tree, keys, value, "a value must be filled in", "replace the question marks")
        elif isinstance(value, str) and "${" in value:
            references.append((keys, value))
    references = _without_bombs(tree, references)
    if not references:
        return
    from omegaconf import OmegaConf  # here, as most recipes do without it and it loads slowly
    from omegaconf.errors import OmegaConfBaseException

    for keys, value in references:
        try:
            OmegaConf.create({"value": value})
        except OmegaConfBaseException:
            rule = "the reference is incomplete"
            _leave_out(tree, keys, value, rule, "write ${other.key}, or \\${ for the text")
    whole = OmegaConf.create(_merged(defaults, tree.values))
    for keys, value in references:
        if dotted(names_of(keys)) in tree.bad:
            continue
        try:
            place: Any = reduce(getitem, keys, whole)
            if OmegaConf.is_config(place):
                place = OmegaConf.to_container(place, resolve=True)
            outer: Any = tree.values
            reduce(getitem, keys[:-1], outer)[keys[-1]] = place
        except OmegaConfBaseException as error:
            rule = str(error).splitlines()[0].split("interpolation: ")[-1].strip('"')
            remedy = "refer to another key by its whole path, such as ${actor.path}"
            if "oc.env" in value:
                remedy = "set it, or give a default: ${oc.env:NAME,default}"
            _leave_out(tree, keys, value, rule[:1].lower() + rule[1:], remedy)


def _without_bombs(tree: Tree, references: list[tuple[Keys, str]]) -> list[tuple[Keys, str]]:
    """Reports and removes texts with too many references, counted recursively; returns the rest."""
    texts = {dotted(keys): value for keys, value in references}
    sizes: dict[str, int] = {}

    def size(key: str, depth: int = 0) -> int:
        if depth > MAX_CHAIN:
            return MAX_REFERENCES
        if key not in sizes:
            sizes[key] = 1  # a reference to itself is rejected when it is resolved
            others = REFERENCE.findall(texts.get(key, ""))
            sizes[key] += sum(size(other, depth + 1) for other in others)
        return sizes[key]

    large = [(keys, value) for keys, value in references if size(dotted(keys)) > MAX_REFERENCES]
    if len(references) > MAX_REFERENCES:
        large = references
    if large:
        rule = f"stands for over {MAX_REFERENCES} references to other keys"
        _leave_out(tree, *large[0], rule, "write the text itself")
    for keys, _ in large[1:]:
        tree.bad.add(dotted(names_of(keys)))
        drop(tree.values, names_of(keys))
    return [found for found in references if found not in large]


def names_of(keys: Keys) -> Keys:
    """The keys up to the first list."""
    return next((keys[:i] for i, key in enumerate(keys) if isinstance(key, int)), keys)


def _leave_out(tree: Tree, keys: Keys, value: object, rule: str, remedy: str) -> None:
    """Reports a problem with a value and drops its key (of a list, the whole list)."""
    names = names_of(keys)
    source = tree.sources.get(dotted(names))
    where = _escaped(f"{dotted(keys)} = {value}") + (f" ({source})" if source else "")
    tree.problems.append(Problem(where, rule, remedy))
    tree.bad.add(dotted(names))
    drop(tree.values, names)


def drop(values: dict[str, Any], keys: Keys) -> None:
    """Removes one key, if it exists."""
    place: Any = values
    for key in keys[:-1]:
        place = place.get(key) if isinstance(place, dict) else None
    if isinstance(place, dict):
        place.pop(keys[-1], None)


def _iter_leaves(value: object, keys: Keys = ()) -> Iterator[tuple[Keys, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _iter_leaves(inner, (*keys, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _iter_leaves(inner, (*keys, index))
    else:
        yield keys, value


def _merged(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in top.items():
        inner = out.get(key)
        if isinstance(inner, Mapping) and isinstance(value, Mapping):
            value = _merged(inner, value)
        out[key] = value
    return out


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list) else value


def _map_texts(value: Any, change: Any) -> Any:
    if isinstance(value, dict):
        return {key: _map_texts(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_map_texts(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value
