"""Fit of a layout to a model: layers of each stage, and the errors for invalid layouts, shared by
`plan` and the start of a run.

Schedules are those of torch.distributed.pipelining, by class name without "Schedule".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import accumulate
from math import gcd, inf
from operator import add

from pentad.core.dims import ModelDims
from pentad.core.errors import Problem, raise_problems
from pentad.core.layout import Layout, divisors


def check_fit(layout: Layout, dims: ModelDims) -> None:
    """Raises UserError with all problems of the layout."""
    where = f"layout = {layout}"
    rules = (head_problems, width_problems, expert_problems, delta_net_problems, stage_problems)
    raise_problems(problem for rule in rules for problem in rule(layout, dims, where))


def head_problems(layout: Layout, dims: ModelDims, where: str) -> Iterator[Problem]:
    """Problems of attention heads, which are sharded over tp x cp; kv heads may be repeated."""
    tp, cp = layout.tp, layout.cp
    if heads_work(dims, tp, cp):
        return
    worst = next(own for own in dims.kinds if not heads_work(own, tp, cp))
    ways, heads, kv_heads = tp * cp, dims.num_heads, worst.num_kv_heads
    if heads % ways:
        rule = f"t{tp} * c{cp} = {ways} must divide num_heads = {heads}"
    elif kv_heads % ways and ways % kv_heads:
        rule = f"t{tp} * c{cp} = {ways} must divide num_kv_heads = {kv_heads} or be a multiple"
    else:
        rule = f"t{tp} must divide num_kv_heads = {kv_heads} or be a multiple"
    yield Problem(where, rule, _cut_remedy(dims, tp, cp))


def delta_net_problems(layout: Layout, dims: ModelDims, where: str) -> Iterator[Problem]:
    """Problems of delta nets: tp splits their key heads, and cp would split their recurrence."""
    heads = dims.linear_key_heads
    if not dims.linear_layers:
        return
    if heads % layout.tp:
        rule = f"t{layout.tp} must divide linear_num_key_heads = {heads}"
        fits = [t for t in divisors(heads) if heads_work(dims, t, layout.cp) and _cuts(dims, t)]
        yield Problem(where, rule, f"t can be {list_of(fits)}")
    if layout.cp > 1:
        rule = f"c{layout.cp} splits tokens over ranks, and in the linear_attention layers of "
        rule += f"{dims.family} (gated delta nets) a state passes from token to token"
        yield Problem(where, rule, "use c1")


def stage_problems(layout: Layout, dims: ModelDims, where: str) -> Iterator[Problem]:
    """Problems of pipelines, whose stages exchange hidden states only."""
    if layout.pp > 1 and (needed := beside_hidden_states(dims)):
        rule = f"p{layout.pp} splits the layers of {dims.family}, and later ones need {needed}"
        yield Problem(where, rule, "use p1")


def beside_hidden_states(dims: ModelDims) -> str:
    """Inputs that layers need besides the previous layer's output, as text; empty: none."""
    if dims.layer_embed_dim:
        return "embeddings of the tokens for each layer (hidden_size_per_layer_input)"
    return "the keys and values of earlier ones (num_kv_shared_layers)" if dims.shares_keys else ""


def whole_kv_head_problems(tp: int, dims: ModelDims, where: str) -> Iterator[Problem]:
    """Further problems of heads for the backend fsdp, which does not repeat kv heads."""
    count = gcd(*(own.num_kv_heads for own in dims.kinds))
    if count % tp and dims.num_heads % tp == 0:
        rule = f"t{tp} of fsdp must divide num_kv_heads = {count}"
        yield Problem(where, rule, f"t can be {list_of(divisors(count))}, or use archon")


def heads_work(dims: ModelDims, tp: int, cp: int) -> bool:
    counts = {own.num_kv_heads for own in dims.kinds}
    if dims.num_heads % (tp * cp) or not all(_deals(count, tp) for count in counts):
        return False
    return all(_deals(max(count // tp, 1), cp) for count in counts)


def _deals(num_heads: int, num_ranks: int) -> bool:
    return num_heads % num_ranks == 0 or num_ranks % num_heads == 0


def _cut_remedy(dims: ModelDims, tp: int, cp: int) -> str:
    """Text with sizes of one axis, the other kept, that are valid for heads and widths."""
    ways = divisors(dims.num_heads)
    ts = [t for t in ways if heads_work(dims, t, cp) and _cuts(dims, t)]
    cs = [c for c in ways if heads_work(dims, tp, c) and _cuts(dims, tp)]
    parts = [f"with c{cp}, t can be {list_of(ts)}"] if ts else []
    parts += [f"with t{tp}, c can be {list_of(cs)}"] if cs and cp > 1 else []
    return ", or ".join(parts) or f"t1 and c1 always work, or t*c = {dims.num_kv_heads}"


def _cuts(dims: ModelDims, tp: int) -> bool:
    """Whether tp splits the dense ffn evenly, if there is one."""
    is_dense = dims.has_dense_beside or not all(map(dims.is_moe, range(dims.num_layers)))
    return not is_dense or dims.intermediate_size % tp == 0


def width_problems(layout: Layout, dims: ModelDims, where: str) -> Iterator[Problem]:
    tp, etp = layout.tp, layout.etp
    expert = dims.moe_intermediate_size
    if not _cuts(dims, tp):
        rule = f"t{tp} must divide intermediate_size = {dims.intermediate_size}"
        yield Problem(where, rule, _cut_remedy(dims, tp, layout.cp))
    rows = min(dims.vocab_size, dims.layer_embed_rows or dims.vocab_size)
    if -(-rows // tp) * (tp - 1) >= rows:
        rule = f"t{tp} leaves a rank without any of the {rows} words"
        yield Problem(where, rule, "use a smaller t")
    if expert and expert % etp:
        rule = f"t{etp} of ffn must divide moe_intermediate_size = {expert}"
        fits = [n for n in divisors(layout.stage_world) if expert % n == 0]
        yield Problem(where, rule, f"t of ffn can be {list_of(fits)}")


def expert_problems(layout: Layout, dims: ModelDims, where: str) -> Iterator[Problem]:
    if dims.num_experts and layout.ep > dims.num_experts:
        ranks = layout.dp_replicate * layout.stage_world
        fits = [e for e in divisors(ranks) if e <= dims.num_experts]
        rule = f"num_experts = {dims.num_experts} leave a rank of e{layout.ep} none"
        yield Problem(where, rule, f"e can be {list_of(fits)} on {ranks} ranks a stage")
    if not dims.num_experts and layout.ep * layout.etp > 1:
        rule = f"e{layout.ep} and t{layout.etp} of ffn need experts, and the model has none"
        yield Problem(where, rule, "leave them out")


def experts_each(num_experts: int, ep: int) -> int:
    """Maximum number of experts per rank."""
    return -(-num_experts // ep)


def expert_range(num_experts: int, ep: int, rank: int) -> tuple[int, int]:
    """Experts of an ep rank: equally many on all ranks, or one more on the first ones."""
    each, more = divmod(num_experts, ep)
    start = rank * each + min(rank, more)
    return start, start + each + (rank < more)


def balance_problems(
    dims: ModelDims, losses: Mapping[str, float], bias: tuple[str, float]
) -> Iterator[Problem]:
    """Problems of balancing settings, which need experts; a bias must be part of the files."""
    key, rate = bias
    for name, value in (*losses.items(), bias):
        if value and not dims.num_experts:
            yield Problem(f"{name} = {value:g}", "the model has no experts", "leave it out")
    if rate and dims.num_experts and not dims.router_bias:
        rule = f"a saved {dims.family} cannot store a bias, so it would route differently"
        yield Problem(f"{key} = {rate:g}", rule, "use the balancing loss (moe_aux_loss_coef)")


def strict_problems(layout: Layout, who: str, dims: ModelDims | None = None) -> Iterator[Problem]:
    """Problems of strict mode: layers split over ranks sum in another order than the sampler."""
    if dims is not None and dims.linear_layers:
        rule = f"the linear_attention layers of {dims.family} (gated delta nets) add up in chunks "
        rule += "in training and token by token in the sampler"
        yield Problem("strict = true", rule, "leave it out")
    if dims is not None and dims.value_norm:
        rule = f"{dims.family} has norms of values, for which there are no invariant operations"
        yield Problem("strict = true", rule, "leave it out")
    cut = {"tp": layout.tp, "cp": layout.cp, "ep": layout.ep, "etp": layout.etp}
    if given := ", ".join(f"{name} = {size}" for name, size in cut.items() if size > 1):
        rule = f"{who} has {given}: layers split over ranks sum in another order than the sampler"
        yield Problem("strict = true", rule, "use data and pipeline parallelism only")


def no_tree(
    layout: Layout,
    backend: str,
    *,
    strict: bool,
    balanced: bool,
    dims: ModelDims | None = None,
) -> str | None:
    """Why common prefixes of rows cannot be computed once (as a tree); None if they can."""
    if dims is not None and dims.linear_layers:
        return f"the linear_attention layers of {dims.family} pass states along whole rows"
    if dims is not None and dims.score_cap is not None:
        return f"{dims.family} limits attention scores, which the kernels of trees do not"
    if backend == "fsdp":
        return f"{backend} runs transformers' own layers, which support whole rows only"
    if layout.cp > 1:
        return f"c{layout.cp} splits the tokens of whole rows over ranks"
    if strict:
        return "strict mode computes every row as the sampler does"
    if balanced:
        return "losses and biases that balance experts count every token of every row"
    return None


def list_of(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")


def splits_backward(schedule: str) -> bool:
    """Whether backward has two parts (zero-bubble schedules): input gradients, then weights."""
    return schedule.endswith("ZeroBubble")


def is_interleaved(schedule: str) -> bool:
    return schedule.startswith("Interleaved")


def default_stages_per_rank(schedule: str) -> int:
    return 1 if schedule == "1F1B" else 2


def takes_stages_per_rank(schedule: str, stages_per_rank: int) -> bool:
    if schedule == "1F1B":
        return stages_per_rank == 1
    return stages_per_rank == 2 if schedule == "ZBVZeroBubble" else stages_per_rank >= 2


def takes_microbatches(schedule: str, pp: int, num_microbatches: int) -> bool:
    """Whether the schedule supports this number; interleaved: equal rounds of at least pp."""
    rounds = max(1, num_microbatches // pp)
    return not is_interleaved(schedule) or num_microbatches % rounds == 0


def stages_of_rank(schedule: str, pp: int, stages_per_rank: int, rank: int) -> tuple[int, ...]:
    """Stages of a pipeline rank: looped, or both arms of a V under ZBV."""
    if schedule == "ZBVZeroBubble":
        return (rank, 2 * pp - 1 - rank)
    return tuple(rank + turn * pp for turn in range(stages_per_rank))


def split_layers(dims: ModelDims, num_stages: int) -> list[range]:
    """Splits layers into contiguous non-empty stages; minimises the costliest stage.

    Cost is the matrix work per token; the head counts in the last stage, the lookup of the first
    costs nothing. Ties are broken by evenness.
    """
    assert 1 <= num_stages <= dims.num_layers, f"{num_stages} stages of {dims.num_layers} layers"
    costs = [dims.layer_parts(i).active for i in range(dims.num_layers)]
    cuts = _even_cuts(tuple(costs), dims.embedding_params, num_stages)
    return [range(start, end) for start, end in zip((0, *cuts), (*cuts, len(costs)), strict=True)]


@cache
def _even_cuts(costs: tuple[int, ...], last_extra: int, num_stages: int) -> tuple[int, ...]:
    """Cuts with the smallest maximum cost of a stage, then the smallest sum of squares."""
    before = (0, *accumulate(costs))

    def cost(start: int, end: int) -> int:
        return before[end] - before[start] + (last_extra if end == len(costs) else 0)

    cap, _ = _best_cuts(len(costs), num_stages, cost, max)
    _, cuts = _best_cuts(
        len(costs), num_stages, lambda a, b: cost(a, b) ** 2 if cost(a, b) <= cap else inf, add
    )
    return cuts


def _best_cuts(
    size: int,
    num_stages: int,
    cost: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """(value, cuts) of the split of range(size) with the smallest joined stage costs."""
    # best[i]: smallest value of splitting items i.. into the stages so far, last stage first.
    best = [cost(i, size) for i in range(size)] + [inf]
    picks: list[list[int]] = []
    for left in range(2, num_stages + 1):
        pick = [0] * size
        now = [inf] * (size + 1)
        for i in range(size - left + 1):
            for cut in range(i + 1, size - left + 2):
                value = join(cost(i, cut), best[cut])
                # On a tie the later cut wins: early stages get the additional layer.
                if value <= now[i]:
                    now[i], pick[i] = value, cut
        best = now
        picks.append(pick)
    cuts = [0]
    for pick in reversed(picks):
        cuts.append(pick[cuts[-1]])
    return best[0], tuple(cuts[1:])


def peak_in_flight(
    schedule: str, pp: int, stages_per_rank: int, num_microbatches: int, rank: int
) -> int:
    """Maximum number of (stage, microbatch) activation sets that a pipeline rank holds at once.

    A set is held from its forward to the end of its backward; under a zero-bubble schedule to the
    end of the weight part, because the graph is retained.
    """
    if pp == 1:
        return 1
    total = num_microbatches * stages_per_rank
    if schedule == "1F1B":
        return min(total, pp - rank)
    if schedule == "ZBVZeroBubble":
        return min(total, 2 * pp, num_microbatches + rank + 1)
    rounds = max(1, num_microbatches // pp)
    warmup = (stages_per_rank - 1) * (num_microbatches // rounds)
    if schedule == "Interleaved1F1B":
        return min(total, warmup + 2 * (pp - 1 - rank) + 1)
    return min(total, warmup + pp)
