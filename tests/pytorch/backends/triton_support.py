# SPDX-License-Identifier: Apache-2.0
"""What the tests of the Triton kernels share: interpreter set-up, poisoned memory, comparisons.

Import this module before anything that imports Triton. Without a GPU it turns Triton's interpreter
on, which must be decided before Triton is imported; where that comes too late, or Triton is
missing, ``REASON`` says so and the test modules skip.
"""

import importlib.util
import os
import sys

import torch
from torch._C._dynamo import guards

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
REASON = ""


def _mend_the_interpreter() -> None:
    """Loops with NumPy 2.4, which does not convert arrays of shape [1]; bf16 rounded to nearest."""
    from triton import language as tl
    from triton.runtime import interpreter

    patch_tensor, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert_float(data, source, target, rounding):
        if source == tl.float32 and target == tl.bfloat16:
            rounded = torch.tensor(data.view("float32")).to(torch.bfloat16)
            return rounded.view(torch.int16).numpy().view("uint16")
        return convert(data, source, target, rounding)

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter._convert_float = convert_float


if importlib.util.find_spec("triton") is None:
    REASON = "Triton is not installed; install it to test the Triton kernels."
elif not ON_GPU:
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    import triton

    if triton.knobs.runtime.interpret and importlib.util.find_spec("numpy"):
        _mend_the_interpreter()
    else:
        REASON = (
            "There is no GPU, and Triton's interpreter needs NumPy and TRITON_INTERPRET=1 set"
            " before "
            "Triton is first imported; run this file alone or set the variable."
        )
elif torch.cuda.get_device_capability() < (8, 9):
    REASON = "Triton casts to FP8 only on GPUs of compute capability 8.9 and newer."


def poison_empty(monkeypatch) -> None:
    """Fill fresh memory with what no kernel would write, so an element left out is seen."""

    def poisoned(function):
        def fill(*args, **kwargs):
            out = function(*args, **kwargs)
            return out.fill_(0xA5 if out.dtype == torch.uint8 else float("nan"))

        return fill

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    allocate = guards._empty_strided_cuda
    monkeypatch.setattr(guards, "_empty_strided_cuda", poisoned(allocate))


def same_bytes(got: torch.Tensor, want: torch.Tensor, fmt: str) -> None:
    """Equal shapes and bytes, where a NaN code of either sign is a NaN."""
    assert got.dtype == torch.uint8 and got.shape == want.shape and got.is_contiguous()
    if fmt == "e4m3":
        nan = (want & 0x7F) == 0x7F
        got_nan = (got & 0x7F) == 0x7F
    else:
        nan = (want & 0x7F) > 0x7C
        got_nan = (got & 0x7F) > 0x7C
    wrong = (got != want) & ~(nan & got_nan)
    assert not wrong.any(), (
        f"{int(wrong.sum())} of {wrong.numel()} bytes differ, first at "
        f"{wrong.nonzero()[0].tolist()}: got {got[wrong][0].item()}, want {want[wrong][0].item()}"
    )


def assert_close(got: torch.Tensor, want: torch.Tensor, ulps: float = 1.01, scale=None) -> None:
    """Equal within ``ulps`` units of the last place of the dtype, with fp32 noise near zero.

    ``scale`` is the magnitude of the terms that ``want`` is the sum of; cancellation leaves errors
    of its size times 2^-20.
    """
    assert got.dtype == want.dtype and got.shape == want.shape and got.is_contiguous()
    eps = torch.finfo(want.dtype).eps
    scale = 1.0 if scale is None else scale
    wanted = want.double()
    bound = max(ulps * eps, 4e-6) * wanted.abs() + 2e-6 * scale
    error = (got.double() - wanted).abs()
    bad = ~((error <= bound) | (got.double() == wanted) | (got.isnan() & want.isnan()))
    assert not bad.any(), (
        f"{int(bad.sum())} of {bad.numel()} elements differ, first at {bad.nonzero()[0].tolist()}: "
        f"got {got[bad][0].item()}, want {want[bad][0].item()}"
    )
