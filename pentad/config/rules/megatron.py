"""Rules on starting from a Megatron checkpoint, and on converting to one at the start."""

from __future__ import annotations

from pathlib import Path

from pentad.config.rules.rule import Rules
from pentad.config.schema import Config, ModelConfig
from pentad.core.errors import Problem
from pentad.core.folders import recovery_problem

RULES: Rules[[Config]] = Rules()


@RULES.add(
    "megatron", "actor.path", "actor.checkpoint_load_path", commands=("train", "sft", "plan")
)
def a_conversion_knows_where_to(config: Config) -> list[Problem]:
    convertor = config.megatron.ckpt_convertor
    if not config.megatron.use_hf_ckpt:
        return []
    if convertor.save_path is None:
        rule = "is not set, and megatron.use_hf_ckpt = true converts into it"
        return [Problem("megatron.ckpt_convertor.save_path", rule, "give a folder")]
    found = []
    start = config.actor.checkpoint_load_path
    if start is not None and Path(start).expanduser() != Path(convertor.save_path).expanduser():
        where = f"actor.checkpoint_load_path = {start}"
        rule = f"megatron.use_hf_ckpt = true starts from save_path = {convertor.save_path}"
        found.append(Problem(where, rule, "leave one of the two out"))
    source = convertor.hf_model_path or config.actor.path
    if source is not None and Path(source).expanduser() == Path(convertor.save_path).expanduser():
        where = f"megatron.ckpt_convertor.save_path = {convertor.save_path}"
        found.append(Problem(where, "is the folder that is converted", "give another folder"))
    return found


@RULES.add("megatron", "actor.path", commands=("train", "sft"))
def what_is_converted_is_there(config: Config) -> Problem | None:
    source = config.megatron.ckpt_convertor.hf_model_path
    if not config.megatron.use_hf_ckpt:
        return None
    key = "megatron.ckpt_convertor.hf_model_path" if source else "actor.path"
    source = source or config.actor.path
    if source is None or any(Path(source).expanduser().glob("*.safetensors")):
        return None
    rule = "the folder has no *.safetensors, and megatron.use_hf_ckpt = true converts them"
    return Problem(f"{key} = {source}", rule, "give the folder of a HF model")


@RULES.add("actor", "critic", "megatron", commands=("train", "sft"))
def checkpoints_to_start_from_are_there(config: Config) -> list[Problem]:
    found = _start_problems("critic", config.critic)
    if not config.megatron.use_hf_ckpt:
        found = _start_problems("actor", config.actor) + found
    return found


def _start_problems(role: str, model: ModelConfig) -> list[Problem]:
    path = model.checkpoint_load_path
    if path is None:
        return []
    where, folder = f"{role}.checkpoint_load_path = {path}", Path(path).expanduser()
    if problem := recovery_problem(where, folder):
        return [problem]
    if folder.is_dir():
        return []
    return [Problem(where, "there is no such folder", "give a Megatron checkpoint's folder")]


@RULES.add("actor", "critic", commands=("train", "sft", "plan"))
def weights_have_one_origin(config: Config) -> list[Problem]:
    return [
        Problem(
            f"{role}.init_from_scratch = true",
            f"{role}.checkpoint_load_path = {model.checkpoint_load_path} gives the weights",
            "leave one of the two out",
        )
        for role, model in (("actor", config.actor), ("critic", config.critic))
        if model.init_from_scratch and model.checkpoint_load_path is not None
    ]


@RULES.add("actor.checkpoint_load_path", "megatron", commands=("eval",))
def what_is_evaluated_has_one_origin(config: Config) -> Problem | None:
    """A recipe's start is not what became of it: `eval` never takes the one for the other."""
    start = config.actor.checkpoint_load_path
    if start is None or config.megatron.use_hf_ckpt:
        return None
    rule = f"eval judges the weights in actor.path = {config.actor.path}, not where a run starts"
    remedy = "add actor.checkpoint_load_path=null; pentad convert makes HF folders of Megatron's"
    return Problem(f"actor.checkpoint_load_path = {start}", rule, remedy)
