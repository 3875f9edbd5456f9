"""The carry-over mask and its four operations."""

from __future__ import annotations

import numpy as np
import torch

from rollout.engine import carry_over


def test_plan_names_the_place_in_the_batch_in_flight() -> None:
    rows = np.array([0, 2, 5, 6], np.int32)
    previous = np.array([5, -1, 0, 3, -1], np.int32)  # -1: rows whose sample won't count
    assert carry_over.plan(rows, previous, 8).tolist() == [2, -1, 0, -1]


def test_plan_without_a_batch_in_flight_carries_nothing() -> None:
    assert carry_over.plan(np.array([1, 4], np.int32), None, 8).tolist() == [-1, -1]


def test_apply_fills_placeholders_and_leaves_the_rest() -> None:
    ids = torch.tensor([0, 41, 0, 43], dtype=torch.int32)
    carry = torch.tensor([2, -1, 0, -1], dtype=torch.int32)
    previous = torch.tensor([70, 71, 72, 73, 74, 75], dtype=torch.int32)  # longer than the batch: cut to its length
    out = carry_over.apply(ids, carry, previous)
    assert out.tolist() == [72, 41, 70, 43]
    assert out.dtype == torch.int32
