"""Triton kernels of decoding against their plain references; interpreted where there is no GPU."""

import os

import pytest
import torch
from tables import table

pytest.importorskip("triton", reason="the kernels need Triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from pentad.ops import adapter_kernel, delta, delta_kernel, fused, paged_decode  # noqa: E402
from pentad.ops.delta import recall_token  # noqa: E402
from pentad.ops.latent_decode import decode  # noqa: E402
from pentad.ops.pages import EIGHT_BITS, LARGEST, Pages, quantise  # noqa: E402
from pentad.ops.shared_places import SharedRows, reference_shared_decode  # noqa: E402


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]
# the interpreter has no bf16 products
ATOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # values up to 8: rounding of sums; as stored


FORMATS = [None, "int8", "fp8"]


def with_formats(cases, slow):
    """Cases with each format of the pages; on a CPU, which interprets a kernel's programs one after
    the other, a slow one has the format that is given."""
    every = [(*case, form) for case in cases for form in FORMATS]
    left_out = [(*case, form) for case, only in slow.items() for form in FORMATS if form != only]
    return table(every, left_out if DEVICE == "cpu" else [])


def pages_of(num_blocks, block_size, kv_heads, width, *, dtype, form):
    """Pages of random keys and values."""
    shape = (num_blocks, block_size, kv_heads, width)
    stored = EIGHT_BITS.get(form, dtype)
    scales = [torch.ones(shape[:-1], device=DEVICE) for _ in range(2)] if form else []
    pages = Pages(*(torch.zeros(shape, device=DEVICE, dtype=stored) for _ in range(2)), *scales)
    k, v = (rand(num_blocks * block_size, kv_heads, width, dtype=dtype) for _ in range(2))
    pages.write(torch.arange(num_blocks * block_size, device=DEVICE), k, v)
    return pages


DECODED = [
    (4, 2, 8, 4, None, 1),
    (4, 2, 64, 16, None, 512),
    (6, 2, 24, 16, 37, 40),
    (4, 1, 16, 4, 3, 8),
    (2, 2, 128, 16, None, 1),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block_size", "window", "min_programs", "form"),
    with_formats(DECODED, {DECODED[1]: "fp8", DECODED[2]: "int8"}),
)
def test_paged_decode(
    monkeypatch, dtype, heads, kv_heads, width, block_size, window, min_programs, form
):
    monkeypatch.setattr(paged_decode, "MIN_PROGRAMS", min_programs)
    num_seqs, num_blocks = 4, 60
    row = 12 if DEVICE == "cuda" else 6  # Triton's interpreter takes seconds for more
    pages = pages_of(num_blocks, block_size, kv_heads, width, dtype=dtype, form=form)
    q = rand(num_seqs, heads, width, dtype=dtype)
    blocks = torch.stack([torch.randperm(num_blocks)[:row] for _ in range(num_seqs)])
    blocks = blocks.to(DEVICE, torch.int32)
    lengths = torch.tensor([1, block_size, row * block_size, 2 * block_size + 3], device=DEVICE)
    out = paged_decode.paged_decode(
        q, pages, blocks.reshape(-1), torch.tensor([row], device=DEVICE), lengths, window
    )
    wanted = paged_decode.reference_decode(q, pages, blocks, lengths, window)
    torch.testing.assert_close(out, wanted, atol=ATOL[dtype], rtol=0)


SPLITS = [(None, 1), (7, 40)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "min_programs", "form"), with_formats(SPLITS, {SPLITS[1]: "int8"})
)
def test_paged_decode_with_sinks(monkeypatch, dtype, form, window, min_programs):
    """In one pass over a sequence, and in splits, some of which are empty."""
    monkeypatch.setattr(paged_decode, "MIN_PROGRAMS", min_programs)
    pages = pages_of(12, 4, 2, 16, dtype=dtype, form=form)
    q, sinks = rand(3, 6, 16, dtype=dtype), 3 * rand(6, dtype=dtype)
    blocks = torch.randperm(12).view(3, 4).to(DEVICE, torch.int32)
    lengths, row = torch.tensor([1, 9, 16], device=DEVICE), torch.tensor([4], device=DEVICE)
    out = paged_decode.paged_decode(q, pages, blocks.flatten(), row, lengths, window, sinks)
    wanted = paged_decode.reference_decode(q, pages, blocks, lengths, window, sinks)
    torch.testing.assert_close(out, wanted, atol=ATOL[dtype], rtol=0)


def random_groups(generator, num_blocks, block_size, most_rows):
    """A block table of neighbouring groups of one to six rows, lengths, and tiles of the groups."""
    width, table, shared, lengths, tiles = 7, [], [], [], []
    while len(table) < 8:
        size = int(torch.randint(1, 7, (), generator=generator))
        num = int(torch.randint(0, 5, (), generator=generator)) * (size > 1)
        common = torch.randperm(num_blocks, generator=generator)[:num]
        tiles += [(len(table) + i, min(most_rows, size - i)) for i in range(0, size, most_rows)]
        for _ in range(size):
            own = torch.randperm(num_blocks, generator=generator)[: width - num]
            most = (width - num) * block_size + 1
            table.append(torch.cat([common, own]))
            lengths.append(num * block_size + int(torch.randint(1, most, (), generator=generator)))
            shared.append(num * block_size)
    tiles = [tile for tile in tiles if shared[tile[0]]] + [(0, 0)]  # the last one is padding
    firsts, counts = torch.tensor(tiles, device=DEVICE).t().contiguous()
    rows = SharedRows(torch.tensor(shared, device=DEVICE), firsts, counts)
    return torch.stack(table).to(DEVICE, torch.int32), torch.tensor(lengths, device=DEVICE), rows


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("seed", range(8))
def test_the_reference_of_shared_places_is_that_of_whole_rows(form, seed):
    generator = torch.Generator().manual_seed(seed)
    blocks, lengths, shared = random_groups(generator, 60, 4, most_rows=4)
    pages = pages_of(60, 4, 2, 8, dtype=torch.float32, form=form)
    q = rand(len(blocks), 6, 8)
    found = reference_shared_decode(q, pages, blocks, lengths, shared)
    wanted = paged_decode.reference_decode(q, pages, blocks, lengths)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


TILES = [(4, 1, 2.0), (6, 20, None)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "min_programs", "cap", "form"), with_formats(TILES, {TILES[1]: "int8"})
)
def test_shared_places_are_read_once_for_a_tile_of_rows(
    monkeypatch, dtype, form, heads, min_programs, cap
):
    """Groups of one, with a partial last block, of more rows than a tile; in one split and more."""
    monkeypatch.setattr(paged_decode, "MIN_PROGRAMS", min_programs)
    blocks, lengths, shared = random_groups(torch.Generator().manual_seed(heads), 60, 4, 4)
    pages = pages_of(60, 4, 2, 8, dtype=dtype, form=form)
    q, width = rand(len(blocks), heads, 8, dtype=dtype), torch.tensor([7], device=DEVICE)
    table = (blocks.flatten(), width, lengths)
    found = paged_decode.paged_decode(q, pages, *table, cap=cap, shared=shared)
    wanted = reference_shared_decode(q, pages, blocks, lengths, shared, cap)
    assert shared.counts_I.sum() > 4 and (shared.shared_S == 0).any()
    torch.testing.assert_close(found, wanted, atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("limit", ["window", "sinks"])
def test_layers_with_a_window_or_sinks_read_all_rows_alone(limit):
    blocks, lengths, shared = random_groups(torch.Generator().manual_seed(1), 60, 4, 4)
    pages = pages_of(60, 4, 1, 8, dtype=torch.float32, form=None)
    q, width = rand(len(blocks), 2, 8), torch.tensor([7], device=DEVICE)
    beside = {"window": 6} if limit == "window" else {"sinks": rand(2)}
    found, wanted = (
        paged_decode.paged_decode(
            q, pages, blocks.flatten(), width, lengths, **beside, shared=tiles
        )
        for tiles in (shared, None)
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "min_programs", "form"), with_formats(SPLITS, {SPLITS[1]: "fp8"})
)
def test_paged_decode_with_limited_scores(monkeypatch, dtype, form, window, min_programs):
    monkeypatch.setattr(paged_decode, "MIN_PROGRAMS", min_programs)
    pages = pages_of(12, 4, 2, 16, dtype=dtype, form=form)
    q, cap = 3 * rand(3, 6, 16, dtype=dtype), 0.9
    blocks = torch.randperm(12).view(3, 4).to(DEVICE, torch.int32)
    lengths, row = torch.tensor([1, 9, 16], device=DEVICE), torch.tensor([4], device=DEVICE)
    limits = (window, None, cap)
    out = paged_decode.paged_decode(q, pages, blocks.flatten(), row, lengths, *limits)
    wanted = paged_decode.reference_decode(q, pages, blocks, lengths, *limits)
    torch.testing.assert_close(out, wanted, atol=ATOL[dtype], rtol=0)
    unlimited = paged_decode.reference_decode(q, pages, blocks, lengths, window)
    assert (wanted - unlimited).abs().max() > 0.1, "the limit must have an effect"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "latent", "turned", "min_programs"),
    [(4, 32, 8, 1), (20, 48, 16, 1), (16, 512, 64, 1), (3, 24, 8, 40)],
)
def test_latents_are_decoded_as_one_key_head_whose_values_they_are(
    monkeypatch, dtype, heads, latent, turned, min_programs
):
    monkeypatch.setattr(paged_decode, "MIN_PROGRAMS", min_programs)
    stored = rand(12, 4, 1, latent + turned, dtype=dtype)
    pages = Pages(stored, stored[..., :latent])
    q = rand(3, heads, latent + turned, dtype=dtype)
    blocks = torch.randperm(12).view(3, 4).to(DEVICE, torch.int32)
    lengths, row = torch.tensor([1, 9, 16], device=DEVICE), torch.tensor([4], device=DEVICE)
    out = decode(q, pages, blocks.flatten(), row, lengths)
    wanted = paged_decode.reference_decode(q, pages, blocks, lengths)
    assert out.shape == (3, heads, latent)
    torch.testing.assert_close(out, wanted, atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "key_heads", "keys", "values"), [(4, 2, 6, 5), (2, 2, 16, 64), (6, 3, 128, 128)]
)
def test_states_in_slots_follow_the_delta_rule(dtype, heads, key_heads, keys, values):
    """Rows 4 and 1 of five, of which the second begins; what others hold stays."""
    held = rand(5, heads, keys, values)
    before, rows = held.clone(), torch.tensor([4, 1], device=DEVICE)
    begins = torch.tensor([False, True], device=DEVICE)
    joined = rand(2, (2 * key_heads * keys) + heads * values, dtype=dtype)
    q, k, v = joined.split((key_heads * keys, key_heads * keys, heads * values), dim=-1)
    q, k, v = q.view(2, key_heads, -1), k.view(2, key_heads, -1), v.view(2, heads, -1)
    g, b = -rand(2, heads).exp(), rand(2, heads, dtype=dtype).sigmoid()
    found = delta_kernel.recall_rows(held, rows, begins, q, k, v, g, b)
    first = before[rows] * (~begins).view(-1, 1, 1, 1)
    wanted, states = recall_token(q, k, v, g, b, first)
    torch.testing.assert_close(found, wanted, atol=ATOL[dtype], rtol=0)
    torch.testing.assert_close(held[rows], states, atol=1e-5, rtol=0)
    others = torch.tensor([0, 2, 3], device=DEVICE)
    assert torch.equal(held[others], before[others])


@pytest.mark.parametrize("size", [1, 6, 64])
def test_inverses_of_lower_systems_and_their_gradients(size):
    system = (0.4 * rand(3, 2, size, size)).requires_grad_()
    found = delta.inverse_of(system)
    wanted = torch.linalg.solve_triangular(
        system, torch.eye(size, device=DEVICE), upper=False, unitriangular=True
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    weights = rand(*found.shape)
    mine, true = (torch.autograd.grad((x * weights).sum(), system)[0] for x in (found, wanted))
    torch.testing.assert_close(mine, true, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "width"), [(7, 4), (1100, 3), (16, 1)])
def test_convolution_of_a_token_and_those_its_slot_holds(dtype, channels, width):
    held = rand(4, width - 1, channels, dtype=dtype)
    before, rows = held.clone(), torch.tensor([2, 0], device=DEVICE)
    begins = torch.tensor([True, False], device=DEVICE)
    x, weight = rand(2, channels, dtype=dtype), rand(channels, width, dtype=dtype)
    found = delta_kernel.convolve_rows(held, rows, begins, x, weight)
    seen = torch.cat((before[rows] * (~begins).view(-1, 1, 1), x[:, None]), dim=1)
    wanted = (seen.float() * weight.t().float()).sum(1).to(dtype)
    torch.testing.assert_close(found, wanted, atol=ATOL[dtype], rtol=0)
    assert torch.equal(held[rows], seen[:, 1:])
    assert torch.equal(held[[1, 3]], before[[1, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(dtype):
    x, weight = rand(5, 48, dtype=dtype), rand(48, dtype=dtype)
    wanted = fused.reference_norm(x, weight, 1e-6)
    torch.testing.assert_close(fused.norm(x, weight, 1e-6), wanted, atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm(dtype):
    x, y, weight = rand(5, 48, dtype=dtype), rand(5, 48, dtype=dtype), rand(48, dtype=dtype)
    total, normed = fused.add_norm(x, y, weight, 1e-6)
    wanted_total, wanted = fused.reference_add_norm(x, y, weight, 1e-6)
    assert torch.equal(total, wanted_total)
    torch.testing.assert_close(normed, wanted, atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (9, 3), (16, 8)])
def test_norm_rotate_of_parts_of_one_tensor(dtype, has_norm, heads, kv_heads):
    whole = rand(5, heads + kv_heads, 24, dtype=dtype)
    q, k = whole.split([heads, kv_heads], dim=1)
    weights = (rand(24, dtype=dtype), rand(24, dtype=dtype)) if has_norm else (None, None)
    angle = rand(5, 24)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    for x, weight, out in zip(
        (q, k), weights, fused.norm_rotate(q, k, *weights, cos, sin, 1e-6), strict=True
    ):
        wanted = fused.reference_rotate(x, weight, cos, sin, 1e-6)
        # One unit in the last place of bfloat16 apart: sums of the norm have another order.
        rtol = 2**-7 if dtype == torch.bfloat16 else 0
        torch.testing.assert_close(out, wanted, atol=ATOL[dtype], rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [70, 1500])
def test_silu_mul_of_the_halves_of_one_tensor(dtype, width):
    gate, up = rand(5, 2 * width, dtype=dtype).chunk(2, dim=-1)
    wanted = fused.reference_silu_mul(gate, up)
    torch.testing.assert_close(fused.silu_mul(gate, up), wanted, atol=ATOL[dtype], rtol=0)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_store(dtype, form):
    places = torch.randperm(20, device=DEVICE)[:5]
    k, v = rand(5, 4, 24, dtype=dtype).chunk(2, dim=1)
    k[2, 1] = 0  # a head without a largest number
    sizes = {"dtype": dtype, "form": form}
    ours, theirs = (pages_of(5, 4, 2, 24, **sizes) for _ in range(2))
    for name in Pages.__slots__:
        if getattr(ours, name) is not None:
            getattr(theirs, name).view(torch.uint8).copy_(getattr(ours, name).view(torch.uint8))
    fused.store(ours, places, k, v)
    theirs.write(places, k, v)
    for name in Pages.__slots__:
        held, wanted = getattr(ours, name), getattr(theirs, name)
        if held is None or held.dtype != EIGHT_BITS["fp8"]:
            assert held is wanted is None or torch.equal(held, wanted), name
            continue
        steps = held.view(torch.uint8).int() - wanted.view(torch.uint8).int()
        if DEVICE == "cpu":  # rounding up to a power of two, the interpreter loses the carry
            steps[steps == -8] = 0 if (steps == -8).float().mean() < 0.02 else -8
        assert (steps == 0).all(), name


@pytest.mark.parametrize("form", EIGHT_BITS)
def test_eight_bits_keep_each_number_to_half_a_step(form):
    """int8: half of a 127th of the head's largest. e4m3 has three bits after the first: a sixteenth
    of the number, or of the smallest one that has them."""
    x = rand(64, 4, 32) * torch.logspace(-6, 6, 64, device=DEVICE)[:, None, None]
    bits, scale = quantise(x, EIGHT_BITS[form])
    back = bits.float() * scale[..., None]
    step = scale[..., None] / 2
    if form == "fp8":
        step = torch.maximum(x.abs() / 16, scale[..., None] * 2.0**-10)
    assert ((back - x).abs() <= step * 1.0001).all()
    largest = torch.full_like(scale, LARGEST[EIGHT_BITS[form]])
    assert torch.equal(bits.float().abs().amax(-1), largest)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("form", EIGHT_BITS)
def test_what_is_not_finite_stays_so(form, number):
    k, v = rand(2, 2, 8), rand(2, 2, 8)
    k[1, 0, 3] = number
    places = torch.arange(2, device=DEVICE)
    for write in (Pages.write, fused.store):
        pages = pages_of(1, 4, 2, 8, dtype=torch.float32, form=form)
        write(pages, places, k, v)
        keys, values = pages.read(torch.zeros(1, dtype=torch.long, device=DEVICE), torch.float32)
        assert keys[0, :2].isfinite().all(-1).tolist() == [[True, True], [False, True]]
        assert values.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num", "widths", "rank", "scale"),
    [(5, (48, 16, 16), 16, 2.0), (70, (64, 64), 32, 1.0), (1, (32,), 48, 0.5)],
)
def test_factors_are_added_part_by_part(dtype, num, widths, rank, scale):
    y = rand(num, sum(widths), dtype=dtype)
    h, b = rand(num, len(widths) * rank, dtype=dtype), rand(sum(widths), rank, dtype=dtype)
    wanted = adapter_kernel.reference_add_expanded(y, h, b, widths, scale)
    found = adapter_kernel.add_expanded(y, h, b, widths, scale)
    assert found is y
    torch.testing.assert_close(found, wanted, atol=10 * ATOL[dtype], rtol=ATOL[dtype])


def test_a_tile_of_outputs_is_of_one_part():
    found = [adapter_kernel.columns_of(w) for w in ((4096, 1024, 1024), (576, 192), (48,), (24,))]
    assert found == [64, 64, 16, 0]
