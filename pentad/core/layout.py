"""Allocation strings and layouts: the devices of each backend, and their parallel axes.

    allocation = group ("+" group)*              groups use different devices
    group      = component ("|" component)*      components of a group share devices
    component  = backend ["[" name "]"] ":" (dims | "(" "attn:" dims "|" "ffn:" dims ")")
    dims       = (letter number)+                letters d p t c e, each at most once

`sglang:d4t4+archon:(attn:d1p4t2c2|ffn:d1p4t1e4)` gives sixteen devices to each component. A parsed
allocation prints as it was written, except for blanks. A syntax error is reported at the first
wrong character; all semantic errors are reported at once.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from pentad.core.errors import Problem, UserError, raise_problems

SERVERS = ("vllm", "sglang")
"""Servers that sample for a run, by their command."""
INFERENCE = ("embedded", *SERVERS)
Backend = Literal["archon", "fsdp", "megatron"]
TRAINING: tuple[Backend, ...] = ("archon", "fsdp", "megatron")
AXES = {
    **dict.fromkeys(INFERENCE, "dtp"),
    "archon": "dptce",
    "fsdp": "dtce",
    "megatron": "dptce",
    "attn:": "dptc",
    "ffn:": "dpte",
}
"""Axis letters that each backend, and each side of a hybrid string, accepts."""
AXIS_NAMES = {
    "d": "data parallel",
    "p": "pipeline stages",
    "t": "tensor parallel",
    "c": "context parallel",
    "e": "expert parallel",
}
WHY_NOT = {
    ("fsdp", "p"): "fsdp has no pipeline; use archon",
    ("attn:", "e"): "experts are laid out on the ffn side",
    ("ffn:", "c"): "context parallelism belongs to the attn side",
}

Dims = tuple[tuple[str, int], ...]
"""(letter, size) of each axis in the order written."""


@dataclass(frozen=True, slots=True)
class AllocationProblem(Problem):
    """A problem of an allocation string, with the position of the wrong character."""

    text: str = ""
    column: int = 0

    def __str__(self) -> str:
        sentence = Problem.__str__(self)
        return f"{sentence}\n    {self.text}\n    {' ' * self.column}^"


@dataclass(frozen=True, slots=True)
class Coords:
    """Coordinates of a rank in the dense mesh, and in the expert mesh over the same ranks."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    efsdp: int
    ep: int
    etp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes of all parallel axes of a training component.

    Ranks are numbered over pp x dp_replicate x dp_shard x cp x tp, the last axis fastest; for
    experts the same ranks are pp x dp_replicate x efsdp x ep x etp.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        assert self.stage_world % (self.ep * self.etp) == 0, (
            f"ep * etp = {self.ep * self.etp} must divide dp_shard * cp * tp = {self.stage_world}"
        )

    @property
    def stage_world(self) -> int:
        """Ranks of one pipeline rank and one replica: dp_shard * cp * tp = efsdp * ep * etp."""
        return self.dp_shard * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        """Number of ranks that shard the weights of one expert group (ep x etp)."""
        return self.stage_world // (self.ep * self.etp)

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def coords(self, rank: int) -> Coords:
        assert 0 <= rank < self.world, f"rank {rank} outside a world of {self.world}"
        outer, inner = divmod(rank, self.stage_world)
        pp, replicate = divmod(outer, self.dp_replicate)
        return Coords(
            pp=pp,
            dp_replicate=replicate,
            dp_shard=inner // (self.cp * self.tp),
            cp=inner // self.tp % self.cp,
            tp=inner % self.tp,
            efsdp=inner // (self.ep * self.etp),
            ep=inner // self.etp % self.ep,
            etp=inner % self.etp,
        )

    def __str__(self) -> str:
        replicas = f"dp_replicate={self.dp_replicate}, " if self.dp_replicate > 1 else ""
        return (
            f"pp={self.pp}, {replicas}dp_shard={self.dp_shard}, tp={self.tp}, cp={self.cp}, "
            f"ep={self.ep}, etp={self.etp}"
        )


@dataclass(frozen=True, slots=True)
class Component:
    """One backend and its devices. Example: Component("archon", None, (("d", 4), ("t", 2)))."""

    backend: str
    name: str | None
    dims: Dims
    """The dense axes; of a hybrid string, its `attn:` side."""
    ffn: Dims | None = None

    @property
    def is_inference(self) -> bool:
        return self.backend in INFERENCE

    @property
    def role(self) -> str:
        """The component's name; without one, its default role: rollout or actor."""
        return self.name or ("rollout" if self.is_inference else "actor")

    def size(self, letter: str) -> int:
        return dict(self.dims).get(letter, 1)

    @property
    def world(self) -> int:
        return self.size("d") * self.size("p") * self.size("t") * self.size("c")

    def layout(self, dp_replicate: int = 1) -> Layout:
        """The mesh of a training component; `dp_replicate` must divide d."""
        ep, etp = self.size("e"), 1
        if self.ffn is not None:
            ffn = dict(self.ffn)
            ep, etp = ffn.get("e", 1), ffn.get("t", 1)
        assert self.size("d") % dp_replicate == 0, f"dp_replicate {dp_replicate} must divide d"
        return Layout(
            pp=self.size("p"),
            dp_replicate=dp_replicate,
            dp_shard=self.size("d") // dp_replicate,
            cp=self.size("c"),
            tp=self.size("t"),
            ep=ep,
            etp=etp,
        )

    def __str__(self) -> str:
        name = f"[{self.name}]" if self.name else ""
        dims = print_dims(self.dims)
        if self.ffn is not None:
            dims = f"(attn:{dims}|ffn:{print_dims(self.ffn)})"
        return f"{self.backend}{name}:{dims}"


@dataclass(frozen=True, slots=True)
class Allocation:
    """All components of a run. Groups use consecutive devices, in the order written."""

    groups: tuple[tuple[Component, ...], ...]

    def __iter__(self) -> Iterator[Component]:
        return (component for group in self.groups for component in group)

    @property
    def num_devices(self) -> int:
        return sum(max(component.world for component in group) for group in self.groups)

    def find(self, role: str) -> Component | None:
        return next((component for component in self if component.role == role), None)

    def devices(self, component: Component) -> range:
        """The devices of a component, counted over the whole cluster."""
        start = 0
        for group in self.groups:
            if component in group:
                return range(start, start + component.world)
            start += max(member.world for member in group)
        raise ValueError(f"{component} is not part of {self}")

    def shares_devices(self, first: Component, second: Component) -> bool:
        return any(first in group and second in group for group in self.groups)

    @property
    def are_apart(self) -> bool | None:
        """Whether rollout and training have separate devices; None if one is missing."""
        rollout, actor = self.find("rollout"), self.find("actor")
        return None if not (rollout and actor) else not self.shares_devices(rollout, actor)

    def ordered(self, *roles: str) -> Allocation:
        """The allocation with the groups of these roles first."""
        first = [g for role in roles for g in self.groups if any(p.role == role for p in g)]
        return Allocation(tuple(dict.fromkeys([*first, *self.groups])))

    def stands_alone(self, role: str) -> bool:
        """Whether the role has separate devices, apart from those that train and sample."""
        part, others = self.find(role), [self.find("actor"), self.find("rollout")]
        return part is not None and not any(o and self.shares_devices(part, o) for o in others)

    def with_own(self, sizes: Mapping[str, int]) -> Allocation:
        """The allocation with additional devices for each role; every component is then named."""
        named = [tuple(replace(part, name=part.role) for part in group) for group in self.groups]
        added = [(Component("archon", role, (("d", size),)),) for role, size in sizes.items()]
        return Allocation((*named, *added)) if added else self

    def joined(self, first: str, second: str) -> Allocation:
        """The allocation with the first role on the devices of the second."""
        moved, host = self.find(first), self.find(second)
        if not moved or not host or self.shares_devices(moved, host):
            return self
        rest = self.without(first).groups
        return Allocation(tuple((moved, *group) if host in group else group for group in rest))

    def without(self, role: str) -> Allocation:
        rest = [tuple(part for part in group if part.role != role) for group in self.groups]
        return Allocation(tuple(group for group in rest if group))

    def __str__(self) -> str:
        return "+".join("|".join(map(str, group)) for group in self.groups)


def print_dims(dims: Dims) -> str:
    return "".join(f"{letter}{size}" for letter, size in dims)


def divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]


@lru_cache(maxsize=256)
def parse_allocation(text: str, where: str = "allocation_mode") -> Allocation:
    """Reads an allocation string; raises UserError with an AllocationProblem for each fault."""
    parser = _Parser(text, where)
    allocation = parser.allocation()
    raise_problems(parser.problems)
    return allocation


class _Parser:
    """Recursive-descent parser of the grammar above, one method per rule."""

    def __init__(self, text: str, where: str) -> None:
        self.text = "".join(" " if char.isspace() else char for char in text)
        self.where = where
        self.at = 0
        self.problems: list[AllocationProblem] = []

    def problem(self, column: int, rule: str, remedy: str = "") -> AllocationProblem:
        return AllocationProblem(self.where, rule, remedy, self.text, column)

    def blame(self, column: int, rule: str, remedy: str = "") -> None:
        self.problems.append(self.problem(column, rule, remedy))

    def stop(self, column: int, rule: str, remedy: str = "") -> UserError:
        return UserError([*self.problems, self.problem(column, rule, remedy)])

    def peek(self) -> str:
        """The next character that is not blank (not consumed); "" at the end."""
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def take(self, char: str) -> bool:
        found = self.peek() == char
        self.at += found
        return found

    def expect(self, char: str, rule: str, remedy: str) -> None:
        if not self.take(char):
            raise self.stop(
                self.at, f"{rule}, not {self.peek()!r}" if self.peek() else rule, remedy
            )

    def run_of(self, characters: str) -> str:
        """Reads the following characters that are in `characters`, after skipping blanks."""
        self.peek()
        found = re.compile(f"[{characters}]*").match(self.text, self.at)
        assert found is not None, "an empty match is a match"
        self.at = found.end()
        return found.group()

    def word(self) -> str:
        return self.run_of("A-Za-z0-9_")

    def allocation(self) -> Allocation:
        if not self.peek():
            raise self.stop(0, "the string is empty", "write for instance archon:d1")
        starts: list[int] = []
        groups = [self.group(starts)]
        while self.take("+"):
            groups.append(self.group(starts))
        if self.peek():
            rule = f"{self.peek()!r} does not belong here"
            raise self.stop(self.at, rule, "join components with + (own devices) or | (shared)")
        allocation = Allocation(tuple(groups))
        self.check_names(allocation, starts)
        return allocation

    def group(self, starts: list[int]) -> tuple[Component, ...]:
        members = [self.component(starts)]
        while self.take("|"):
            members.append(self.component(starts))
        return tuple(members)

    def component(self, starts: list[int]) -> Component:
        self.peek()
        start = self.at
        starts.append(start)
        backend = self.word()
        if backend not in AXES:
            raise self.unknown_backend(start, backend)
        name = self.name() if self.take("[") else None
        self.expect(":", f"a ':' and the axes must follow {backend}", f"write {backend}:d1")
        if self.peek() == "(":
            return self.hybrid(backend, name)
        columns: dict[str, int] = {}
        dims = self.dims(backend, columns)
        component = Component(backend, name, dims)
        self.check_folding(component, columns)
        return component

    def unknown_backend(self, start: int, word: str) -> UserError:
        known = [*INFERENCE, *TRAINING]
        remedy = f"backends: {', '.join(known)}"
        if word in ("attn", "ffn"):
            return self.stop(start, f"{word}: is outside parentheses", _HYBRID_REMEDY)
        if not word:
            return self.stop(start, "a backend is expected here", remedy)
        near = difflib.get_close_matches(word, known, 1)
        guess = f"did you mean {near[0]}? " if near else ""
        if re.fullmatch(r"([a-z]\d+)+", word):
            guess = f"did you mean embedded:{word}|archon:{word}? "
        return self.stop(start, f"{word!r} is not a backend", guess + remedy)

    def name(self) -> str:
        self.peek()
        start = self.at
        name = self.word()
        if not name or name[0].isdigit():
            raise self.stop(start, "a name is expected between [ and ]", "write archon[actor]:d1")
        self.expect("]", "the name must end with ']'", "names are letters, digits and _")
        return name

    def dims(self, kind: str, columns: dict[str, int]) -> Dims:
        """Parses (letter number)+ and adds the column of each letter to `columns`."""
        found: dict[str, int] = {}
        while self.peek() and self.peek() not in "+|)":
            letter, column = self.peek(), self.at
            if letter not in AXIS_NAMES:
                raise self.not_an_axis(kind)
            self.at += 1
            size = self.number(letter)
            if letter in columns:
                self.blame(column, f"the axis {letter} is given twice", "keep one of the two")
                continue
            columns[letter] = column
            if letter in AXES[kind]:
                found[letter] = size
            else:
                self.blame(column, *_refusal(kind, letter))
        if not columns:
            raise self.stop(self.at, "an axis such as d1 is expected here", _axes_of(kind))
        return tuple(found.items())

    def not_an_axis(self, kind: str) -> UserError:
        if self.text[self.at :].startswith(("attn", "ffn")):
            return self.stop(self.at, "a hybrid layout must be in parentheses", _HYBRID_REMEDY)
        return self.stop(self.at, f"{self.peek()!r} is not an axis", _axes_of(kind))

    def number(self, letter: str) -> int:
        self.peek()
        start = self.at
        digits = self.run_of("0-9")
        if not digits or digits[0] == "0" or len(digits) > 6:
            what = f"not {digits}" if digits else "which is missing"
            rule = f"{letter} takes a number from 1 to 999999, {what}"
            raise self.stop(start, rule, f"write for instance {letter}2")
        return int(digits)

    def hybrid(self, backend: str, name: str | None) -> Component:
        start = self.at
        self.take("(")
        if backend not in ("archon", "megatron"):
            raise self.stop(
                start, f"{backend} has no separate expert layout", "use archon:(attn:...|ffn:...)"
            )
        columns: dict[str, int] = {}
        attn = self.side("attn", columns)
        self.expect("|", "'|' and the ffn side must follow the attn side", _HYBRID_REMEDY)
        ffn_columns: dict[str, int] = {}
        ffn = self.side("ffn", ffn_columns)
        self.expect(")", "')' must close the parenthesis", _HYBRID_REMEDY)
        component = Component(backend, name, attn, ffn)
        self.check_hybrid(component, start, ffn_columns)
        return component

    def side(self, word: str, columns: dict[str, int]) -> Dims:
        self.peek()
        start = self.at
        if self.word() != word:
            raise self.stop(start, f"'{word}:' is expected here", _HYBRID_REMEDY)
        self.expect(":", f"a ':' and the axes must follow {word}", _HYBRID_REMEDY)
        return self.dims(f"{word}:", columns)

    def check_folding(self, component: Component, columns: dict[str, int]) -> None:
        """Reports a plain `e` that does not divide d*c*t, whose ranks it uses."""
        ep = component.size("e")
        ranks = component.world // component.size("p")
        if ranks % ep == 0:
            return
        raised = component.size("d") * ep // math.gcd(ep, ranks)
        dims = dict(component.dims) | {"d": raised}
        letters = [letter for letter in "dptce" if letter in dims]
        fix = Component(component.backend, component.name, tuple((x, dims[x]) for x in letters))
        rule = f"e{ep} must divide d*c*t = {ranks}, the ranks of one pipeline stage"
        fits = ", ".join(map(str, divisors(ranks)))
        self.blame(columns["e"], rule, f"e can be {fits}, or use {fix} ({fix.world} devices)")

    def check_hybrid(self, component: Component, start: int, columns: dict[str, int]) -> None:
        assert component.ffn is not None
        ffn = dict(component.ffn)
        pp, ffn_pp = component.size("p"), ffn.get("p")
        if ffn_pp not in (None, pp):
            rule = f"p{ffn_pp} of ffn must equal p{pp} of attn"
            self.blame(columns["p"], rule, f"write p{pp} on both sides")
        ranks = component.world // pp
        width = ffn.get("t", 1) * ffn.get("e", 1)
        if ranks % width:
            etp = math.gcd(ffn.get("t", 1), ranks)
            fits = ", ".join(map(str, divisors(ranks // etp)))
            rule = f"t*e = {width} of ffn must divide d*t*c = {ranks} of attn"
            self.blame(
                columns.get("e", columns.get("t", start)), rule, f"with t{etp}, e can be {fits}"
            )
        elif "d" in ffn and ffn["d"] != ranks // width:
            rule = f"ffn has d*t*e = {ffn['d'] * width} ranks a stage, attn has d*t*c = {ranks}"
            self.blame(columns["d"], rule, f"write d{ranks // width} there or leave it out")

    def check_names(self, allocation: Allocation, starts: list[int]) -> None:
        """Rejects duplicate roles, and unnamed components if there are three or more."""
        components = list(allocation)
        seen: set[str] = set()
        for component, start in zip(components, starts, strict=True):
            example = f"write for instance {component.backend}[{component.role}]:"
            if len(components) > 2 and component.name is None:
                rule = f"with {len(components)} components each needs a name"
                self.blame(start, rule, example)
            elif component.role in seen:
                rule = f"two components would be the {component.role}"
                self.blame(start, rule, f"name this one, {component.backend}[critic]: for instance")
            seen.add(component.role)


_HYBRID_REMEDY = "the form is archon:(attn:d1p4t2c2|ffn:p4t1e4)"


def _axes_of(kind: str) -> str:
    letters = ", ".join(f"{letter} ({AXIS_NAMES[letter]})" for letter in AXES[kind])
    return f"axes of {kind.rstrip(':')}: {letters}"


def _refusal(kind: str, letter: str) -> tuple[str, str]:
    """(rule, remedy) for an axis that this backend or side does not have."""
    who = kind.rstrip(":")
    why = WHY_NOT.get((kind, letter), f"it has no {AXIS_NAMES[letter]} axis")
    return f"{who} does not take {letter}: {why}", _axes_of(kind)
