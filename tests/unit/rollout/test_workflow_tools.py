"""Which tools a workflow shows to the policy, and how a function is described."""

from __future__ import annotations

import pytest

from pentad.core.errors import UserError
from pentad.rollout.environments import ToolEnvironment, schema_of, tools_of
from pentad.rollout.workflows import MultiTurn, SingleTurn


async def add(a: int, b: list[int], c: str = "x", d=None, e: Unknown = 1, **more):  # noqa: F821
    """Adds numbers."""


async def bare(a, b):
    return ""


SCHEMA = {"type": "function", "function": {"name": "own", "parameters": {}}}


def names(workflow):
    return [tool["function"]["name"] for tool in tools_of(workflow)]


class Talk:
    """An environment without tools."""


class Declared:
    tools = (add, SCHEMA)


class Broken:
    def __init__(self):
        raise ValueError("no room")


class Strange:
    tools = ("hammer",)


class Mine:
    """A workflow of a user's own."""

    tools = (bare,)


SHOWN = {
    "single turn": (SingleTurn(), []),
    "an environment without tools": (MultiTurn(Talk), []),
    "tools by name": (MultiTurn(lambda: ToolEnvironment({"plus": add, "x": bare})), ["plus", "x"]),
    "an environment that declares them": (MultiTurn(Declared), ["add", "own"]),
    "given ones": (MultiTurn(Declared, tools=[bare]), ["bare"]),
    "none, although the environment has some": (MultiTurn(Declared, tools=()), []),
    "a workflow of a user's own": (Mine(), ["bare"]),
}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_workflow_shows_its_tools_or_its_environments(kind):
    workflow, expected = SHOWN[kind]
    assert names(workflow) == expected


@pytest.mark.parametrize("environment", [Strange, Broken])
def test_tools_that_cannot_be_told_are_refused(environment):
    with pytest.raises(UserError, match=r"rollout.workflow: tools of MultiTurn.*tools=\(\)"):
        tools_of(MultiTurn(environment))


def test_a_function_is_described_by_what_it_says_of_itself():
    described = schema_of(bare)["function"]
    assert described == {
        "name": "bare",
        "description": "",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"]},
    }


def test_names_that_cannot_be_resolved_leave_parameters_without_a_type():
    described = schema_of(add, "plus")["function"]
    assert (described["name"], described["description"]) == ("plus", "Adds numbers.")
    assert described["parameters"]["required"] == ["a", "b"]
    assert list(described["parameters"]["properties"]) == ["a", "b", "c", "d", "e"]


def test_annotations_become_types_of_json():
    async def tool(a: int, b: list[int], c: float, d: str, e: bool, f: dict, g: object):
        return ""

    found = schema_of(tool)["function"]["parameters"]["properties"]
    kinds = ["integer", "array", "number", "string", "boolean", "object", None]
    assert [one.get("type") for one in found.values()] == kinds
