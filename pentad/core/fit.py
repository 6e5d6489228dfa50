"""Whether a model can be cut as a layout says: the same sentences before a run and at its start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, UserError
from pentad.core.layout import Layout, divisors


def check_fit(layout: Layout, dims: ModelDims) -> None:
    """Raises UserError with everything that does not fit."""
    where = f"layout = {layout}"
    problems = [
        *head_problems(layout, dims, where),
        *width_problems(layout, dims, where),
        *expert_problems(layout, dims, where),
    ]
    if problems:
        raise UserError(problems)


def head_problems(layout: Layout, dims: ModelDims, where: str) -> Iterator[Problem]:
    """Attention heads are dealt over tp x cp; kv heads are dealt too, or whole ones repeated."""
    tp, cp = layout.tp, layout.cp
    ways, heads, kv_heads = tp * cp, dims.num_heads, dims.num_kv_heads
    if heads_work(dims, tp, cp):
        return
    if heads % ways:
        rule = f"t{tp} * c{cp} = {ways} must divide num_heads = {heads}"
    elif kv_heads % ways and ways % kv_heads:
        rule = f"t{tp} * c{cp} = {ways} must divide num_kv_heads = {kv_heads} or be a multiple"
    else:
        rule = f"t{tp} must divide num_kv_heads = {kv_heads} or be a multiple"
    yield Problem(where, rule, _cut_remedy(dims, tp, cp))


def heads_work(dims: ModelDims, tp: int, cp: int) -> bool:
    if dims.num_heads % (tp * cp) or not _deals(dims.num_kv_heads, tp):
        return False
    return _deals(max(dims.num_kv_heads // tp, 1), cp)


def _deals(num_heads: int, num_ranks: int) -> bool:
    return num_heads % num_ranks == 0 or num_ranks % num_heads == 0


def _cut_remedy(dims: ModelDims, tp: int, cp: int) -> str:
    """Degrees that satisfy heads and widths together, one axis changed and the other kept."""
    ways = divisors(dims.num_heads)
    ts = [t for t in ways if heads_work(dims, t, cp) and _cuts(dims, t)]
    cs = [c for c in ways if heads_work(dims, tp, c) and _cuts(dims, tp)]
    parts = [f"with c{cp}, t can be {list_of(ts)}"] if ts else []
    parts += [f"with t{tp}, c can be {list_of(cs)}"] if cs and cp > 1 else []
    return ", or ".join(parts) or f"t1 and c1 always work, or t*c = {dims.num_kv_heads}"


def _cuts(dims: ModelDims, tp: int) -> bool:
    """Whether tp cuts the dense ffn evenly, if there is one."""
    is_dense = not all(dims.is_moe(i) for i in range(dims.num_layers))
    return not is_dense or dims.intermediate_size % tp == 0


def width_problems(layout: Layout, dims: ModelDims, where: str) -> Iterator[Problem]:
    tp, etp = layout.tp, layout.etp
    expert = dims.moe_intermediate_size
    if not _cuts(dims, tp):
        rule = f"t{tp} must divide intermediate_size = {dims.intermediate_size}"
        yield Problem(where, rule, _cut_remedy(dims, tp, layout.cp))
    if -(-dims.vocab_size // tp) * (tp - 1) >= dims.vocab_size:
        rule = f"t{tp} leaves a rank without any of the {dims.vocab_size} words"
        yield Problem(where, rule, "use a smaller t")
    if expert and expert % etp:
        rule = f"t{etp} of ffn must divide moe_intermediate_size = {expert}"
        fits = [n for n in divisors(layout.stage_world) if expert % n == 0]
        yield Problem(where, rule, f"t of ffn can be {list_of(fits)}")


def expert_problems(layout: Layout, dims: ModelDims, where: str) -> Iterator[Problem]:
    if dims.num_experts and not deals_experts(dims.num_experts, layout.ep):
        ranks = layout.dp_replicate * layout.stage_world
        fits = [e for e in divisors(ranks) if deals_experts(dims.num_experts, e)]
        each = experts_each(dims.num_experts, layout.ep)
        rule = (
            f"num_experts = {dims.num_experts}, {each} to a rank, leave a rank of e{layout.ep} none"
        )
        yield Problem(where, rule, f"e can be {list_of(fits)} on {ranks} ranks a stage")
    if not dims.num_experts and layout.ep * layout.etp > 1:
        rule = f"e{layout.ep} and t{layout.etp} of ffn need experts, and the model has none"
        yield Problem(where, rule, "leave them out")


def experts_each(num_experts: int, ep: int) -> int:
    """Experts of a rank; of the last one perhaps fewer."""
    return -(-num_experts // ep)


def deals_experts(num_experts: int, ep: int) -> bool:
    """Whether every rank gets one."""
    return experts_each(num_experts, ep) * (ep - 1) < num_experts


def balance_problems(
    dims: ModelDims, losses: Mapping[str, float], bias: tuple[str, float]
) -> Iterator[Problem]:
    """What keeps experts busy needs experts; a bias needs a place in the files of the family."""
    key, rate = bias
    for name, value in (*losses.items(), bias):
        if value and not dims.num_experts:
            yield Problem(f"{name} = {value:g}", "the model has no experts", "leave it out")
    if rate and dims.num_experts and not dims.router_bias:
        rule = f"a saved {dims.family} has no place for a bias, so it would route otherwise"
        yield Problem(f"{key} = {rate:g}", rule, "use the balancing loss (moe_aux_loss_coef)")


def strict_problems(layout: Layout, who: str) -> Iterator[Problem]:
    """Where a layer is cut over ranks, its sums are made in another order than the sampler's."""
    cut = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "etp": layout.etp}
    if given := ", ".join(f"{name} = {size}" for name, size in cut.items() if size > 1):
        rule = f"{who} has {given}: layers cut over ranks add up in another order than the sampler"
        yield Problem("strict = true", rule, "use data and pipeline parallelism only")


def list_of(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
