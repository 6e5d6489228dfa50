"""Models of transformers, parallelised for an engine: the backend `fsdp`.

Blocks are the classes that transformers marks as not splittable, sharded by FSDP2; tp follows
transformers' plan, cp is in the attention core as for every model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pentad.core.device import DTYPES
from pentad.core.errors import Problem, UserError, raise_problems
from pentad.core.fit import check_fit, whole_kv_head_problems
from pentad.core.layout import Layout
from pentad.engine.held import Maker
from pentad.engine.predictor import Predictor, present_cut
from pentad.engine.section import EngineSettings, carrying_problems
from pentad.models.families import ConfigLike
from pentad.models.hf.config import read_hf_config
from pentad.models.hf.experts import stack_problems, without_stacks
from pentad.models.hf.module import HfModel, build_hf_model
from pentad.models.language_model import LanguageModel
from pentad.models.lora import apply_lora
from pentad.parallel.blocks import apply_to_blocks, compiling
from pentad.parallel.cuts import cut_parameters
from pentad.parallel.mesh import Meshes
from pentad.parallel.stacks import apply_to_stacks
from pentad.parallel.storage import apply_storage, kept_apart
from pentad.parallel.styles import apply_styles, match_styles, plan_style_cuts


def transformers_maker(
    source: ConfigLike, settings: EngineSettings, meshes: Meshes, *, value_head: bool
) -> Maker:
    """Builds models of transformers; rejects unsupported ones."""
    config = read_hf_config(source)
    problems = []
    archon = settings.model.archon
    if any(archon.router_losses.values()) or archon.moe_bias_rate:
        rule = "losses and biases that balance experts need a model file"
        problems.append(Problem("backend = fsdp", rule, "leave them out, or use archon"))
    if settings.strict:
        rule = "log-probs that equal a sampler's bit for bit need a model file"
        problems.append(Problem("strict = true", rule, "leave it out, or use archon"))
    raise_problems(problems)

    def build(**stage: object) -> HfModel:
        assert not stage, "transformers' models are not split into stages"
        dtype, lora = DTYPES[settings.model.param_dtype], settings.model.lora
        model = build_hf_model(config, dtype=dtype, value_head=value_head)
        if lora is not None and not model.packs_rows:
            raise_problems(carrying_problems(model.dims.family, "actor", has_lora=True))
        if lora is not None:
            apply_lora(model, lora)
        return model

    def wrap(model: LanguageModel) -> Predictor:
        assert isinstance(model, HfModel)
        return lay_out_hf(model, settings, meshes)

    return Maker(build, wrap, offloads=archon.offload_params)


def match_layout(model: HfModel, layout: Layout) -> dict[str, str]:
    """Returns the tp style of each module by transformers' plan; UserError if that is not
    possible."""
    where, dims, stacks = f"layout = {layout}", model.dims, model.expert_stacks
    if layout.pp > 1 or layout.etp > 1:
        rule = "the backend fsdp supports only d, t, c and e"
        raise UserError(Problem(where, rule, "use archon"))
    if not model.packs_rows and (layout.tp > 1 or layout.cp > 1):
        rule = f"layers of {dims.family} carry state from token to token: only d and e can be used"
        raise UserError(Problem(where, rule, "leave out t and c"))
    if layout.ep > 1 and not stacks:
        rule = f"{dims.family} has no experts with transformers' interface for experts"
        raise UserError(Problem(where, f"e{layout.ep} needs them: {rule}", "leave out e"))
    if stacks:
        is_moe = (True,) * dims.num_layers
        dims = replace(dims, num_experts=min(stacks.values()), moe_layers=is_moe)
    check_fit(layout, dims)
    if splits_experts(model, layout):
        wide = {name for name, e in model.hf_map.entries.items() if e.rule.dtype == "float32"}
        raise_problems(stack_problems(model, stacks, wide, where))
    if layout.tp == 1:
        return {}
    raise_problems(whole_kv_head_problems(layout.tp, dims, where))
    # Embedding and head stay whole: a tied one is used at both ends.
    whole = {name.removesuffix(".weight") for name in model.tables}
    whole.add(model.head_name)
    given = without_stacks(model.tp_plan, stacks)
    plan = {name: style for name, style in given.items() if name not in whole}
    return match_styles(model, plan, layout.tp, where)


def splits_experts(model: HfModel, layout: Layout) -> bool:
    """Whether experts are on the expert mesh: ep splits them, or tp their tokens."""
    return bool(model.expert_stacks) and (layout.ep > 1 or layout.tp > 1)


def lay_out_hf(model: HfModel, settings: EngineSettings, meshes: Meshes) -> Predictor:
    """The steps of `parallel.apply`, with styles instead of seams."""
    styles = match_layout(model, meshes.layout)
    stacks = model.expert_stacks if splits_experts(model, meshes.layout) else {}
    keeps, room = settings.model.archon.keep_logits is True, settings.logprob_bytes
    predictor = Predictor(model, settings.temperature, room, keep_logits=keeps)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    own_dtypes = {name: e.rule.dtype for name, e in model.hf_map.entries.items() if e.rule.dtype}
    apart = kept_apart(model, own_dtypes, settings.model, meshes)
    if apart and settings.model.archon.offload_params:
        rule = f"FSDP2 does not move {min(apart)}, which is float32 beside 16-bit weights"
        raise UserError(Problem("archon.offload_params = true", rule, "leave it out"))
    trained = () if model.adapter_map is None else model.adapter_map.entries
    cuts = plan_style_cuts(shapes, styles, meshes, {*trained, *apart}, stacks)
    cut_parameters(model, cuts)
    apply_styles(model, styles, meshes.tp, getattr(model.causal.config, "qk_rope_head_dim", 0))
    apply_to_stacks(model, stacks, meshes)
    blocks, keys = model.blocks, settings.model
    if stacks or not model.packs_rows:  # exchanges, and kernels that are chosen at run time
        keys = keys.model_copy(
            update={"archon": keys.archon.model_copy(update={"enable_compile": False})}
        )
    compiling.expect(model.dims, keys, meshes.layout, meshes.device)
    apply_to_blocks(blocks, keys, meshes.device)
    given = (own_dtypes, settings.model, meshes, apart)
    apply_storage(predictor, model, blocks.values(), cuts, *given)
    predictor.cuts = cuts
    if meshes.layout.world > 1:
        model.present = partial(present_cut, cuts)
    return predictor
