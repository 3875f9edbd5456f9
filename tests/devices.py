"""Where tests of Triton kernels run: in Triton's interpreter (see conftest.py), or on a GPU."""

import os

import pytest

in_interpreter = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off")
on_devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=in_interpreter), pytest.param("cuda", marks=pytest.mark.gpu)]
)
