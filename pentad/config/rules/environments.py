"""Rules on environments: workflows and agents that exist, rewards for their samples, and several
environments in one run."""

from __future__ import annotations

from collections.abc import Iterator

from pentad.config.describe import show
from pentad.config.environments import environments
from pentad.config.rules.inputs import model_folder_problem, part_problem, url_problem
from pentad.config.rules.rule import Rules, RunFacts
from pentad.config.schema import Config
from pentad.core.errors import Problem
from pentad.data.shares import MAX_CYCLE, whole_shares
from pentad.rewards.section import JUDGE, MODELS, REWARD_MODEL, REWARD_NAMES, RewardConfig
from pentad.rollout.section import WORKFLOW_NAMES, workflow_kind

RULES = Rules()


@RULES.add(commands=("train",))
def answers_are_scored(config: Config) -> Problem | None:
    """Requires reward functions. Rewards that a workflow gives are checked by the executor."""
    single = [one for one in environments(config) if one.workflow == "single_turn"]
    open_ones = [one for one in single if not one.reward.functions]
    if not open_ones or config.only == "train":
        return None
    where, valid = f"{open_ones[0].reward_key}.fn", open_ones[0].valid_key
    if config.algorithm.facts.needs_teacher:
        rule = f"is not set, and without it the answers to {valid} have no score"
        problem = Problem(where, rule, f"name it, or leave {valid} out")
        return None if all(one.valid is None for one in open_ones) else problem
    remedy = "name a built-in reward or give path/to/file.py:function"
    return Problem(where, f"is not set, and {config.algorithm.name} needs rewards", remedy)


@RULES.add(commands=("eval",))
def evaluated_answers_are_scored(config: Config) -> Problem | None:
    if config.reward.functions or not config.rollout.is_single_turn:
        return None
    remedy = f"give --reward with one of {', '.join(REWARD_NAMES)}, or path/to/file.py:function"
    return Problem("reward.fn", "is not set, so answers cannot be scored", remedy)


@RULES.add(commands=("reward",))
def there_is_a_reward_to_try(config: Config) -> Problem | None:
    if config.reward.functions:
        return None
    return Problem("reward.fn", "is not set, so there is nothing to try", "name it in the recipe")


@RULES.add(commands=("train", "plan", "eval", "reward"))
def the_reward_can_be_found(config: Config) -> list[Problem]:
    remedy = "for your own, give package.module:function or path/to/file.py:function"
    found = [
        part_problem(f"{key}.fn", fn, (*REWARD_NAMES, *MODELS), remedy)
        for key, reward in rewards_of(config).items()
        for fn in reward.functions
    ]
    return [problem for problem in found if problem is not None]


def rewards_of(config: Config) -> dict[str, RewardConfig]:
    """The reward blocks of the run by their keys."""
    own = {one.reward_key: one.reward for one in environments(config)}
    return {"reward": config.reward, **own}


@RULES.add(commands=("train", "plan", "eval", "reward"))
def a_judge_can_be_asked(config: Config) -> Iterator[Problem]:
    for block, reward in rewards_of(config).items():
        if JUDGE in reward.functions:
            yield from _judge_problems(block, reward)


def _judge_problems(block: str, reward: RewardConfig) -> Iterator[Problem]:
    judge = reward.judge
    for key in ("url", "model", "template"):
        if not getattr(judge, key):
            rule = f"is not set, and {block}.fn = judge needs it"
            yield Problem(f"{block}.judge.{key}", rule, "see docs/environments.md")
    if judge.url and (why := url_problem(judge.url)):
        yield Problem(f"{block}.judge.url = {judge.url}", why, "give http://HOST:PORT/v1")
    if judge.template and "{completion}" not in judge.template:
        rule = "has no {completion}, so the judge would not see the answer"
        yield Problem(f"{block}.judge.template", rule, "put it in")
    if reward.on_failure == "zero":
        rule = "a failed request to the judge would be a reward of 0"
        yield Problem(f"{block}.on_failure = zero", rule, "set it to drop")


@RULES.add(commands=("train", "plan", "eval", "reward"))
def a_reward_model_can_be_read(config: Config) -> Iterator[Problem]:
    for block, reward in rewards_of(config).items():
        if REWARD_MODEL not in reward.functions:
            continue
        where, path = f"{block}.model.path", reward.model.path
        if path is None:
            rule = f"is not set, and {block}.fn = reward_model needs it"
            yield Problem(where, rule, "name a folder that pentad reward-model wrote")
        elif problem := model_folder_problem(where, path):
            yield problem


@RULES.add(commands=("train", "plan", "eval", "reward"))
def every_reward_has_a_weight(config: Config) -> Iterator[Problem]:
    for block, reward in rewards_of(config).items():
        weights, functions = reward.weights, reward.functions
        if weights is not None and functions and len(weights) != len(functions):
            rule = f"{block}.fn names {len(functions)} functions"
            where = f"{block}.weights = {show(weights)}"
            yield Problem(where, rule, "give one number for each")


@RULES.add(commands=("train", "plan", "eval"))
def the_workflow_can_be_found(config: Config) -> list[Problem]:
    found = [_workflow_problem(f"{one.key}.workflow", one.workflow) for one in environments(config)]
    return [problem for problem in found if problem is not None]


def _workflow_problem(key: str, spec: str) -> Problem | None:
    remedy, where = (
        "for your own, give package.module:Class or path/to/file.py:Class",
        f"{key} = {spec}",
    )
    kind, rest = workflow_kind(spec)
    if kind and not rest:
        return Problem(where, f"nothing follows {kind}:", "name the environment")
    is_address = kind == "openenv" or (kind == "mcp" and rest.startswith(("http://", "https://")))
    if is_address and (rule := url_problem(rest)):
        return Problem(where, rule, f"give {kind}:http://HOST:PORT")
    if kind not in ("", "class"):
        return None  # its package reports errors in it
    problem = part_problem(key, rest, WORKFLOW_NAMES, remedy)
    return problem and Problem(where, problem.rule, problem.remedy)


@RULES.add(commands=("train", "plan", "eval"))
def an_agent_workflow_has_an_agent(config: Config) -> list[Problem]:
    found = [_agent_problem(one.key, one.workflow, one.agent) for one in environments(config)]
    return [problem for problem in found if problem is not None]


def _agent_problem(key: str, workflow: str, agent: str | None) -> Problem | None:
    remedy = "give package.module:function or path/to/file.py:function"
    if workflow == "agent" and agent is None:
        return Problem(f"{key}.agent", f"is not set, and {key}.workflow = agent runs it", remedy)
    if workflow != "agent" and agent is not None:
        rule = f"{key}.workflow = {workflow} runs no agent"
        return Problem(f"{key}.agent = {agent}", rule, f"set {key}.workflow: agent")
    return part_problem(f"{key}.agent", agent, (), remedy)


@RULES.add(commands=("train", "plan"))
def several_environments_are_apart(config: Config) -> Iterator[Problem]:
    """Several environments need distinct names and exact shares; no other key may set the same."""
    workflows = config.rollout.workflows
    if not workflows:
        return
    taken = {
        "rollout.workflow": None if config.rollout.workflow == "single_turn" else 1,
        "rollout.agent": config.rollout.agent,
        "train_dataset.path": config.train_dataset.path,
        "valid_dataset": config.valid_dataset,
    }
    for key in [key for key, value in taken.items() if value is not None]:
        rule = "rollout.workflows names the environments and their data"
        yield Problem(key, rule, "leave one of the two out")
    names = [one.name or one.workflow for one in workflows]
    for name in sorted({name for name in names if names.count(name) > 1}):
        where = f"rollout.workflows.{names.index(name)}.name = {name}"
        yield Problem(where, "another environment has this name", "give each a different name")
    parts = sum(whole_shares([one.weight for one in workflows]))
    if parts > MAX_CYCLE:
        rule = f"the weights are shares of {parts:,}, and at most {MAX_CYCLE:,} are kept exactly"
        yield Problem("rollout.workflows", rule, "give weights of fewer digits")
    for index, one in enumerate(workflows):
        if "batch_size" in one.data.model_fields_set and one.data.batch_size != 32:
            where = f"rollout.workflows.{index}.data.batch_size = {one.data.batch_size}"
            rule = "a batch has prompts of all environments"
            yield Problem(where, rule, "set train_dataset.batch_size")


@RULES.add(commands=("eval", "reward"))
def one_environment_is_looked_at(config: Config, facts: RunFacts) -> Problem | None:
    if not config.rollout.workflows:
        return None
    keys = "rollout.workflow and valid_dataset.path"
    if facts.command == "reward":
        keys = "train_dataset.path and reward.fn"
    rule = f"{facts.command} supports one environment"
    return Problem("rollout.workflows", rule, f"set it to [], and {keys} to those of one of them")
