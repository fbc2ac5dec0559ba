# SPDX-License-Identifier: Apache-2.0
"""Arguments of constructors and of forward: names, order, defaults."""

import inspect

import pytest
from eager_support import GEMM_MODULES, MODULES

import transformer_engine.pytorch as te

REQUIRED = inspect.Parameter.empty

SIGNATURES = {
    "Linear": [
        ("in_features", REQUIRED),
        ("out_features", REQUIRED),
        ("sequence_parallel", False),
        ("fuse_wgrad_accumulation", False),
        ("tp_group", None),
        ("tp_size", 1),
        ("get_rng_state_tracker", None),
        ("rng_tracker_name", None),
        ("init_method", None),
        ("bias", True),
        ("return_bias", False),
        ("params_dtype", None),
        ("parallel_mode", None),
        ("parameters_split", None),
        ("device", "cuda"),
        ("ub_overlap_ag", False),
        ("ub_overlap_rs", False),
        ("ub_overlap_rs_dgrad", False),
        ("ub_bulk_dgrad", False),
        ("ub_bulk_wgrad", False),
        ("ub_name", None),
        ("delay_wgrad_compute", False),
        ("symmetric_ar_type", None),
        ("save_original_input", False),
        ("name", None),
    ],
    "LayerNormLinear": [
        ("in_features", REQUIRED),
        ("out_features", REQUIRED),
        ("eps", 1e-5),
        ("sequence_parallel", False),
        ("fuse_wgrad_accumulation", False),
        ("tp_group", None),
        ("tp_size", 1),
        ("get_rng_state_tracker", None),
        ("init_method", None),
        ("bias", True),
        ("normalization", "LayerNorm"),
        ("return_bias", False),
        ("params_dtype", None),
        ("parallel_mode", None),
        ("return_layernorm_output", False),
        ("return_layernorm_output_gathered", False),
        ("parameters_split", None),
        ("zero_centered_gamma", False),
        ("device", "cuda"),
        ("ub_overlap_ag", False),
        ("ub_overlap_rs", False),
        ("ub_overlap_rs_dgrad", False),
        ("ub_bulk_wgrad", False),
        ("ub_bulk_dgrad", False),
        ("ub_name", None),
        ("delay_wgrad_compute", False),
        ("symmetric_ar_type", None),
        ("name", None),
    ],
    "LayerNormMLP": [
        ("hidden_size", REQUIRED),
        ("ffn_hidden_size", REQUIRED),
        ("eps", 1e-5),
        ("sequence_parallel", False),
        ("return_bias", False),
        ("get_rng_state_tracker", None),
        ("tp_group", None),
        ("tp_size", 1),
        ("init_method", None),
        ("bias", True),
        ("normalization", "LayerNorm"),
        ("activation", "gelu"),
        ("activation_params", None),
        ("output_layer_init_method", None),
        ("fuse_wgrad_accumulation", False),
        ("params_dtype", None),
        ("return_layernorm_output", False),
        ("return_layernorm_output_gathered", False),
        ("seq_length", None),
        ("micro_batch_size", None),
        ("set_parallel_mode", False),
        ("zero_centered_gamma", False),
        ("device", "cuda"),
        ("ub_overlap_ag", False),
        ("name", None),
        ("ub_overlap_rs", False),
        ("ub_overlap_rs_dgrad", False),
        ("ub_bulk_dgrad", False),
        ("ub_bulk_wgrad", False),
        ("delay_wgrad_compute", False),
        ("symmetric_ar_type", None),
        ("checkpoint", False),
    ],
}
NORM_SIGNATURE = [
    ("normalized_shape", None),
    ("eps", 1e-5),
    ("sequence_parallel", None),
    ("params_dtype", None),
    ("zero_centered_gamma", False),
    ("hidden_size", None),
]


@pytest.mark.parametrize("kind", GEMM_MODULES)
def test_constructor_signature(kind):
    """Names, order and defaults, all of them positional-or-keyword."""
    parameters = inspect.signature(getattr(te, kind)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[kind]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_norm_constructor_signature(kind):
    """Six positional arguments; device, dtype and sm_margin by keyword."""
    parameters = list(inspect.signature(getattr(te, kind)).parameters.values())
    assert [(p.name, p.default) for p in parameters[:6]] == NORM_SIGNATURE
    keywords = {p.name: p.default for p in parameters[6:]}
    assert keywords == {"device": None, "dtype": None, "sm_margin": 0}
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[6:])


@pytest.mark.parametrize(
    "kind,expected",
    [
        ("Linear", ["inp", "is_first_microbatch", "fp8_output", "fp8_grad"]),
        ("LayerNormLinear", ["inp", "is_first_microbatch", "fp8_output", "fp8_grad"]),
        ("LayerNormMLP", ["inp", "is_first_microbatch"]),
    ],
)
def test_forward_signature(kind, expected):
    """Forward arguments after the input are optional."""
    parameters = list(inspect.signature(getattr(te, kind).forward).parameters.values())[1:]
    assert [p.name for p in parameters] == expected
    assert [p.default for p in parameters[1:]] == [None, False, False][: len(expected) - 1]


def test_third_positional_argument_of_linear_is_sequence_parallel():
    """``te.Linear(a, b, False)`` keeps its bias, unlike ``torch.nn.Linear``."""
    assert te.Linear(16, 16, False, device="cpu").bias.numel() == 16


@pytest.mark.parametrize("kind", MODULES)
def test_classes_are_found_where_users_look(kind):
    """Frameworks test ``"transformer_engine.pytorch" in module.__module__``."""
    cls = getattr(te, kind)
    assert cls.__module__.startswith("transformer_engine.pytorch")
    base = te.module.base.TransformerEngineBaseModule
    assert issubclass(cls, base) == (kind in GEMM_MODULES)
