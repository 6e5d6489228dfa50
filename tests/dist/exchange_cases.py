"""What ranks run in the tests of the exchange of pairs between experts."""

import torch
import torch.distributed as dist
from balance_toys import GLM, MIXTURE, make_mixture, step

from pentad.core.group_values import gather_values
from pentad.core.layout import Layout
from pentad.models.moe import Moe
from pentad.parallel import experts as exchange_module
from pentad.parallel.experts import ExpertDispatch
from pentad.parallel.mesh import build_meshes

NUM_EXPERTS, WIDTH, CHOSEN = 8, 5, 3


def conserve(layout: Layout):
    """Tokens of this rank through a dispatch whose experts give back what they get; on every rank:
    what was chosen, what arrived at the experts held here, and how far results are off."""
    group = build_meshes(layout, torch.device("cpu")).expert_group
    dispatch = ExpertDispatch(group, layout.etp, NUM_EXPERTS)
    rank = dist.get_rank()
    torch.manual_seed(rank)
    num_tokens = (7, 0, 16, 1, 3)[rank]  # uneven, and one rank without any
    x_TD = torch.randn(num_tokens, WIDTH, dtype=torch.float64)
    weights_Tk = torch.rand(num_tokens, CHOSEN, dtype=torch.float64)
    skewed_TE = torch.rand(num_tokens, NUM_EXPERTS) + torch.arange(NUM_EXPERTS) / 8
    chosen_Tk = skewed_TE.argsort(dim=1, descending=True)[:, :CHOSEN]
    arrived = []

    def mirror(x_MD, sizes_E, weights_M):
        arrived.extend(sizes_E.tolist())
        assert len(x_MD) == sum(arrived), "rows without an expert"
        return x_MD * weights_M[:, None] / layout.etp  # each etp rank gives a part of the sum

    y_TD = dispatch(x_TD, weights_Tk, chosen_Tk, mirror)
    off = (y_TD - x_TD * weights_Tk.sum(1, keepdim=True)).abs().sum()
    return gather_values((chosen_Tk.flatten().tolist(), arrived, float(off)))


def measured_step(layout: Layout):
    """A training step: what its record is made of, and what was routed, noted at the router."""
    engine = make_mixture(layout, config=MIXTURE, ac_mode="none", max_tokens_per_mb=64)
    noted = []
    for module in engine.held.decoders[0].modules():
        if isinstance(module, Moe):
            module.router.register_forward_hook(lambda _, x, out: noted.append(out[1].flatten()))
    result = step(engine)
    chosen = torch.cat(noted)
    held = NUM_EXPERTS // layout.ep
    mine = range(held * (engine.meshes.expert_group.rank // layout.etp), NUM_EXPERTS)[:held]
    kept = sum(int(e) in mine for e in chosen)
    found = {name: (work.num_bytes, work.num_calls) for name, work in result.work.items()}
    seconds = {name: work.seconds for name, work in result.work.items()}
    return gather_values((found, seconds, len(chosen), kept, len(noted), result.num_pairs))


def order_of_work(layout: Layout):
    """What a rank does one after the other in a mixture with a shared expert."""
    engine = make_mixture(layout, config=GLM, ac_mode="none")
    done, plain = [], exchange_module.exchange

    def exchange(x, *sizes):
        done.append("exchange")
        return plain(x, *sizes)

    moe = next(m for m in engine.held.decoders[0].modules() if isinstance(m, Moe))
    shared = moe.shared
    for name, module in (("experts", moe.experts), ("up", shared.gate_up), ("down", shared.down)):
        module.register_forward_pre_hook(lambda *_, name=name: done.append(name))
    x_TD = torch.randn(4, GLM["hidden_size"])
    exchange_module.exchange = exchange
    try:
        with torch.no_grad():
            moe(x_TD)
    finally:
        exchange_module.exchange = plain
    return done
