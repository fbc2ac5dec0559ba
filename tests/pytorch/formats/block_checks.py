# SPDX-License-Identifier: Apache-2.0
"""What the tests of the three formats with block scales have in common."""

import block_references
import numpy
import torch

from transformer_engine.pytorch.formats import blocks, fp4, fp8
from transformer_engine.pytorch.formats.layout import Quantized, quantized_layout

DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def up(value, multiple):
    """Rounded up to a multiple."""
    return -(-value // multiple) * multiple


def forbid_branches(monkeypatch):
    """Let the CPU take the paths of an accelerator, where Python may not look at values."""
    for module in (fp8, fp4, blocks):
        monkeypatch.setattr(module, "_may_look_at_values", lambda x: False)


def assert_layout(made, spec, rows, columns, rowwise, columnwise):
    """Shapes, dtypes and contiguity are as ``quantized_layout`` says, and no memory is shared."""
    layout = quantized_layout(spec, rows, columns, rowwise, columnwise)
    dtypes = Quantized(
        torch.uint8,
        torch.uint8,
        layout.scale_dtype,
        layout.scale_dtype,
        torch.float32,
        torch.float32,
    )
    addresses = []
    for name, tensor, shape, dtype in zip(Quantized._fields, made, layout, dtypes):
        assert (tensor is None) == (shape is None), name
        if tensor is not None:
            assert tuple(tensor.shape) == tuple(shape), name
            assert tensor.dtype == dtype and tensor.is_contiguous(), name
            if tensor.numel():
                addresses.append(tensor.untyped_storage().data_ptr())
    assert len(set(addresses)) == len(addresses)


def assert_bytes(actual, expected, nan_codes=()):
    """A tensor of bytes equals an array; codes in ``nan_codes`` are one and the same."""
    actual = actual.cpu().numpy().copy()
    expected = numpy.array(expected, dtype=numpy.uint8)
    for array in (actual, expected):
        array[numpy.isin(array, nan_codes)] = 0xFF if nan_codes else 0
    numpy.testing.assert_array_equal(actual, expected)


def assert_padded(actual, expected):
    """The corner of ``actual`` equals ``expected`` and everything else is zero."""
    actual = actual.cpu().numpy()
    rows, columns = expected.shape
    numpy.testing.assert_array_equal(actual[:rows, :columns], expected)
    assert not actual[rows:].any() and not actual[:, columns:].any()


def nan_codes(fmt):
    """FP8 bytes that are NaN."""
    table = references_table(fmt)
    return tuple(code for code in range(256) if table[code] != table[code])


def references_table(fmt):
    """float64 values of the codes of a format."""
    return block_references.references.fp8_table(fmt).tolist()


def assert_values(actual, expected, dtype):
    """Equal after rounding to ``dtype`` by way of fp32, NaNs being equal."""
    expected = torch.from_numpy(expected).float().to(dtype)
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def padded_transpose(x, rows):
    """``x^T`` with zeros up to ``rows`` columns."""
    out = torch.zeros(x.shape[1], rows, dtype=x.dtype)
    out[:, : x.shape[0]] = x.cpu().t()
    return out
