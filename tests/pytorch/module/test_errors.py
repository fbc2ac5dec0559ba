# SPDX-License-Identifier: Apache-2.0
"""What modules refuse, and what they say."""

import pytest
import torch
from eager_support import GEMM_MODULES, construct

import transformer_engine.pytorch as te


@pytest.mark.parametrize(
    "make,error,match",
    [
        (lambda: construct("Linear", parallel_mode="diagonal"), AssertionError, "diagonal"),
        (
            lambda: construct("LayerNormLinear", parallel_mode="row"),
            NotImplementedError,
            "column",
        ),
        (
            lambda: construct("LayerNormLinear", normalization="BatchNorm"),
            AssertionError,
            "BatchNorm",
        ),
        (lambda: construct("LayerNormMLP", normalization="l2"), AssertionError, "RMSNorm"),
        (lambda: construct("LayerNormMLP", activation="mish"), NotImplementedError, "swiglu"),
        (
            lambda: construct(
                "LayerNormMLP", activation="clamped_swiglu", activation_params={"limt": 1}
            ),
            ValueError,
            "limt",
        ),
        (
            lambda: te.Linear(32, 49, tp_size=2, parallel_mode="column", device="cpu"),
            (ValueError, RuntimeError),
            "49",
        ),
        (
            lambda: te.Linear(33, 48, tp_size=2, parallel_mode="row", device="cpu"),
            ValueError,
            "33",
        ),
        (lambda: te.LayerNormMLP(32, 63, tp_size=2, device="cpu"), ValueError, "63"),
    ],
)
def test_construction_errors(make, error, match):
    """Types that callers catch, and messages that name the value."""
    with pytest.raises(error, match=match):
        make()


@pytest.mark.parametrize(
    "kind,options",
    [
        ("Linear", {"fuse_wgrad_accumulation": True}),
        ("Linear", {"delay_wgrad_compute": True}),
        ("LayerNormMLP", {"checkpoint": True}),
    ],
)
def test_training_options_do_not_matter_without_gradients(kind, options):
    """They act in backward only, so inference works."""
    module, plain = construct(kind, **options), construct(kind)
    plain.load_state_dict(module.state_dict())
    x = torch.randn(4, 32)
    with torch.no_grad():
        assert torch.equal(module(x), plain(x))


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_input_of_wrong_width(kind):
    """Both error types that callers catch, with the module, the shape and the width needed."""
    module = construct(kind, name="here")
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match=r"GEMM not possible.*'here'.*\(4, 31\).*32"):
            module(torch.randn(4, 31))
    with pytest.raises(ValueError, match="GEMM not possible"):
        module(torch.tensor(1.0))


def test_weights_of_wrong_shape():
    """LayerNormMLP names the GEMM: FC1, or FC2 with the width that the activation leaves."""
    mlp, x = construct("LayerNormMLP", activation="swiglu", name="here"), torch.randn(4, 32)
    weight = mlp.fc1_weight
    mlp.fc1_weight = torch.nn.Parameter(torch.zeros(128, 33))
    with pytest.raises(ValueError, match=r"FC1 of LayerNormMLP 'here'.*\(128, 33\).*32"):
        mlp(x)
    mlp.fc1_weight = weight
    mlp.fc2_weight = torch.nn.Parameter(torch.zeros(32, 128))  # forgot that swiglu halves
    with pytest.raises(ValueError, match=r"FC2 of.*'here'.*\(32, 128\).*64, the width of swiglu"):
        mlp(x)


def test_norm_input_of_wrong_width():
    """A ValueError that names both shapes."""
    for kind in ("LayerNorm", "RMSNorm"):
        with pytest.raises(ValueError, match=r"\(4, 31\).*\(32,\)"):
            construct(kind)(torch.randn(4, 31))
        with pytest.raises(ValueError, match="normalized_shape"):
            getattr(te, kind)((3, 8), device="cpu")(torch.randn(8))
