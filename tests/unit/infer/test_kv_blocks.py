"""Blocks: counts always add up, and a prefix is found by its tokens alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pentad.infer.blocks import SCRATCH, BlockPool


def remember_all(pool, ids, blocks):
    node = pool.root
    for i, block in enumerate(blocks):
        node = pool.remember(node, ids[i * pool.block_size : (i + 1) * pool.block_size], block)
    return node


def test_the_scratch_block_is_never_handed_out():
    pool = BlockPool(5, 4)
    taken = [pool.take() for _ in range(pool.num_free)]
    assert sorted(taken) == [1, 2, 3, 4] and SCRATCH == 0
    assert pool.num_free == 0 and pool.num_held == 4


def test_a_shared_block_is_free_only_when_nobody_holds_it():
    pool = BlockPool(3, 4)
    block = pool.take()
    pool.share([block])
    pool.release([block])
    assert pool.num_free == 1
    pool.release([block])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block])


def test_a_prefix_is_found_up_to_the_first_different_token():
    pool = BlockPool(10, 2)
    ids = [1, 2, 3, 4, 5, 6]
    blocks = [pool.take() for _ in range(3)]
    remember_all(pool, ids, blocks)
    assert pool.find_prefix(ids, 6)[0] == blocks
    assert pool.find_prefix(ids, 5)[0] == blocks[:2]
    assert pool.find_prefix([1, 2, 3, 9, 5, 6], 6)[0] == blocks[:1]
    # the same tokens behind another beginning are another prefix
    assert pool.find_prefix([3, 4, 5, 6], 4)[0] == []


def test_equal_blocks_of_two_sequences_are_one_node():
    pool = BlockPool(10, 2)
    first, second = [pool.take(), pool.take()], [pool.take(), pool.take()]
    assert remember_all(pool, [1, 2, 3, 4], first) == remember_all(pool, [1, 2, 3, 4], second)
    pool.release(second)  # never remembered: free at once
    assert pool.find_prefix([1, 2, 3, 4], 4)[0] == first


def test_released_prefixes_live_on_until_memory_is_needed_longest_unused_first():
    pool = BlockPool(4, 2)
    a, b, c = pool.take(), pool.take(), pool.take()
    pool.remember(pool.root, [1, 1], a)
    pool.remember(pool.root, [2, 2], b)
    pool.release([a])
    pool.release([b])
    assert pool.num_free == 2
    pool.share(pool.find_prefix([1, 1], 2)[0])
    assert pool.num_free == 1
    assert pool.take() == b
    assert pool.find_prefix([2, 2], 2)[0] == []
    assert pool.find_prefix([1, 1], 2)[0] == [a]
    assert pool.num_free == 0 and c not in (a, b)


def test_the_end_of_a_chain_is_given_up_before_its_beginning():
    pool = BlockPool(4, 2)
    blocks = [pool.take() for _ in range(3)]
    remember_all(pool, [1, 2, 3, 4, 5, 6], blocks)
    pool.release(blocks)
    assert pool.take() == blocks[2]
    assert pool.find_prefix([1, 2, 3, 4, 5, 6], 6)[0] == blocks[:2]


def test_after_forgetting_nothing_is_found_and_old_nodes_lead_nowhere():
    pool = BlockPool(6, 2)
    held, idle = pool.take(), pool.take()
    old = pool.remember(pool.root, [1, 2], held)
    pool.remember(old, [3, 4], idle)
    pool.release([idle])
    pool.forget_prefixes()
    assert pool.find_prefix([1, 2, 3, 4], 4)[0] == []
    late = pool.take()
    pool.remember(old, [7, 8], late)  # a chain begun with the old weights
    assert pool.find_prefix([1, 2, 7, 8], 4)[0] == []
    pool.release([held])
    assert pool.num_free == 4  # of 5: `late` is held


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 99)), max_size=80))
def test_counts_add_up_under_any_order_of_calls(calls):
    pool = BlockPool(8, 2)
    held: list[int] = []
    for kind, number in calls:
        if kind == 0 and pool.num_free:
            held.append(pool.take())
        elif kind == 1 and held:
            held.append(held[number % len(held)])
            pool.share(held[-1:])
        elif kind == 2 and held:
            pool.release([held.pop(number % len(held))])
        elif kind == 3 and held:
            block = held[number % len(held)]
            if block not in pool.key_of:
                pool.remember(pool.root, [number % 3, 0], block)
        elif kind == 4 and number % 7 == 0:
            pool.forget_prefixes()
        found, _ = pool.find_prefix([number % 3, 0], 2)
        assert len(found) <= 1 and SCRATCH not in found
        assert [pool.holders[b] for b in range(8)] == [held.count(b) for b in range(8)]
        assert pool.num_held == len(set(held))
        assert len({*pool.unused, *pool.idle}) == pool.num_free == 7 - len(set(held))
