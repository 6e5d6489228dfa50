"""The environments of a run with their keys: those of `rollout.workflows`, or the single one that
is defined by `rollout.workflow`, the datasets and `reward`."""

from __future__ import annotations

from dataclasses import dataclass

from pentad.config.schema import Config
from pentad.data.section import DatasetConfig
from pentad.rewards.section import RewardConfig


@dataclass(frozen=True, slots=True)
class EnvironmentKeys:
    name: str
    """Name in the records; empty if the run has only one environment."""
    key: str
    """Dotted key of the block with `workflow` and `agent`."""
    workflow: str
    agent: str | None
    data: DatasetConfig
    data_key: str
    valid: DatasetConfig | None
    valid_key: str
    reward: RewardConfig
    reward_key: str
    weight: float = 1.0


def environments(config: Config) -> tuple[EnvironmentKeys, ...]:
    rollout = config.rollout
    if rollout.workflows:
        return tuple(_listed(config, index) for index in range(len(rollout.workflows)))
    return (
        EnvironmentKeys(
            name="",
            key="rollout",
            workflow=rollout.workflow,
            agent=rollout.agent,
            data=config.train_dataset,
            data_key="train_dataset",
            valid=config.valid_dataset,
            valid_key="valid_dataset",
            reward=config.reward,
            reward_key="reward",
        ),
    )


def _listed(config: Config, index: int) -> EnvironmentKeys:
    one, key = config.rollout.workflows[index], f"rollout.workflows.{index}"
    return EnvironmentKeys(
        name=one.name or one.workflow,
        key=key,
        workflow=one.workflow,
        agent=one.agent,
        data=one.data,
        data_key=f"{key}.data",
        valid=one.valid,
        valid_key=f"{key}.valid",
        reward=one.reward or config.reward,
        reward_key="reward" if one.reward is None else f"{key}.reward",
        weight=one.weight,
    )


def as_only(config: Config, one: EnvironmentKeys) -> Config:
    """The config with this environment as the only one."""
    if not config.rollout.workflows:
        return config
    rollout = {"workflow": one.workflow, "agent": one.agent, "workflows": ()}
    data = one.data.model_copy(update={"batch_size": config.train_dataset.batch_size})
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update=rollout),
            "train_dataset": data,
            "valid_dataset": one.valid,
            "reward": one.reward,
        }
    )


def is_evaluated(config: Config) -> bool:
    """Whether any environment has held-out prompts."""
    return any(one.valid is not None for one in environments(config))
