"""What every test shares.

Tests marked `gpu` are skipped where there is no CUDA device. There, Triton kernels called by their own names run in
Triton's interpreter, which must be chosen before Triton is imported; the engine's dispatch goes by device and so keeps
to the PyTorch reference on a CPU.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
