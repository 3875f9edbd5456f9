"""Blocks are conserved, shared by reference, and remembered by what they hold."""

from __future__ import annotations

import numpy as np
import pytest

from rollout.engine.kv_cache import SCRATCH_BLOCK, BlockAllocator, prefix_digests


def test_allocate_and_release_conserve_blocks() -> None:
    blocks = BlockAllocator(9)
    first = blocks.allocate(5)
    assert SCRATCH_BLOCK not in first
    assert len(set(first.tolist())) == 5
    assert (blocks.used, blocks.available) == (5, 3)
    blocks.check()
    blocks.release(first[:2])
    again = blocks.allocate(5)
    assert not set(again.tolist()) & set(first[2:].tolist()), "a block has two owners"
    blocks.check()
    with pytest.raises(AssertionError, match="asked for"):
        blocks.allocate(1)
    blocks.release(np.concatenate([first[2:], again]))
    assert blocks.available == blocks.capacity == 8
    blocks.check()


def test_releasing_twice_is_caught() -> None:
    blocks = BlockAllocator(4)
    mine = blocks.allocate(1)
    blocks.release(mine)
    with pytest.raises(AssertionError, match="more often"):
        blocks.release(mine)


def test_digests_cover_all_tokens_before() -> None:
    a = prefix_digests(np.array([1, 2, 3, 4, 5], np.int32), 2, 2)
    b = prefix_digests(np.array([9, 2, 3, 4, 5], np.int32), 2, 2)
    c = prefix_digests(np.array([1, 2, 3, 4, 6, 7], np.int32), 2, 3)
    assert len(a) == 2
    assert a == c[:2]
    assert a[1] != b[1], "equal blocks after different prefixes are different"


def test_a_prefix_is_found_shared_and_survives_its_owner() -> None:
    blocks = BlockAllocator(6)
    digests = prefix_digests(np.arange(6, dtype=np.int32), 2, 3)
    mine = blocks.allocate(3)
    for digest, block in zip(digests, mine.tolist(), strict=True):
        blocks.publish(digest, block)
    assert blocks.match(digests).tolist() == mine.tolist()
    assert blocks.match([b"else", *digests]).size == 0
    blocks.share(mine[:2])
    blocks.release(mine)
    blocks.check()
    assert blocks.used == 2  # the sharer's
    assert blocks.available == 3
    blocks.release(mine[:2])
    assert blocks.match(digests).tolist() == mine.tolist(), "idle blocks keep their contents"
    assert blocks.idle_among(mine) == 3
    blocks.share(mine)
    assert blocks.used == 3
    blocks.release(mine)
    blocks.check()


def test_idle_prefixes_make_room_longest_idle_first() -> None:
    blocks = BlockAllocator(4)
    digests = prefix_digests(np.arange(6, dtype=np.int32), 2, 3)
    mine = blocks.allocate(3)
    for digest, block in zip(digests, mine.tolist(), strict=True):
        blocks.publish(digest, block)
    blocks.release(mine[2:])
    blocks.release(mine[:2])
    taken = blocks.allocate(1)
    assert taken.tolist() == mine[2:].tolist()
    assert blocks.match(digests).tolist() == mine[:2].tolist()
    blocks.check()


def test_forgotten_prefixes_are_never_found() -> None:
    blocks = BlockAllocator(6)
    digests = prefix_digests(np.arange(4, dtype=np.int32), 2, 2)
    mine = blocks.allocate(2)
    for digest, block in zip(digests, mine.tolist(), strict=True):
        blocks.publish(digest, block)
    blocks.release(mine[:1])
    blocks.forget_prefixes()
    assert blocks.match(digests).size == 0
    blocks.check()
    blocks.release(mine[1:])
    assert blocks.available == blocks.capacity
    blocks.check()


def test_an_equal_block_keeps_the_first_ones_place() -> None:
    blocks = BlockAllocator(4)
    one, two = blocks.allocate(2).tolist()
    blocks.publish(b"d", one)
    blocks.publish(b"d", two)
    assert blocks.match([b"d"]).tolist() == [one]
    blocks.release(np.array([one, two], np.int32))
    blocks.check()
