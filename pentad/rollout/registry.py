"""Workflows by name: built in, or a class or function of your own."""

from __future__ import annotations

import inspect
from typing import cast

from pentad.core.errors import Problem, UserError
from pentad.core.specs import load
from pentad.rollout.workflows import SingleTurn, Workflow


def load_workflow(spec: str, agent: str | None = None) -> Workflow:
    """`single_turn`, `agent` with the function that `agent` names, or a class or function of no
    arguments that makes a workflow of your own."""
    if spec == "single_turn":
        return SingleTurn()
    if spec == "agent":
        try:
            from pentad.rollout.agents import load_agent
        except ImportError as error:
            rule = f"agents are given an address, which needs a web server ({error})"
            remedy = "pip install 'pentad[serve]'"
            raise UserError(Problem("rollout.workflow = agent", rule, remedy)) from error
        return load_agent(agent)
    where = f"rollout.workflow = {spec}"
    if ":" not in spec:
        remedy = "use single_turn, agent, package.module:Class or path/to/file.py:Class"
        raise UserError(Problem(where, "there is no built-in workflow of that name", remedy))
    try:
        workflow = load(spec)()
    except (Exception, SystemExit) as failure:
        rule = f"it cannot be made ({type(failure).__name__}: {failure})"
        raise UserError(Problem(where, rule)) from failure
    run = getattr(workflow, "run", None)
    if not inspect.iscoroutinefunction(run):
        rule = f"{type(workflow).__name__} has no coroutine `run`"
        raise UserError(Problem(where, rule, "write async def run(self, prompt, sampler, context)"))
    return cast(Workflow, workflow)
