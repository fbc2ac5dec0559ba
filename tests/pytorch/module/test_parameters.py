# SPDX-License-Identifier: Apache-2.0
"""Parameters of fresh modules: names, shapes, values, tensor-parallel attributes."""

import math
from contextlib import contextmanager

import pytest
import torch
from eager_support import MODULES, construct

import transformer_engine.pytorch as te

LAYOUTS = [
    ("Linear", {}, {"weight": (48, 32), "bias": (48,)}),
    ("Linear", {"bias": False}, {"weight": (48, 32)}),
    (
        "LayerNormLinear",
        {},
        {
            "layer_norm_weight": (32,),
            "layer_norm_bias": (32,),
            "weight": (48, 32),
            "bias": (48,),
        },
    ),
    (
        "LayerNormLinear",
        {"normalization": "RMSNorm", "bias": False},
        {"layer_norm_weight": (32,), "weight": (48, 32)},
    ),
    (
        "LayerNormMLP",
        {},
        {
            "layer_norm_weight": (32,),
            "layer_norm_bias": (32,),
            "fc1_weight": (64, 32),
            "fc1_bias": (64,),
            "fc2_weight": (32, 64),
            "fc2_bias": (32,),
        },
    ),
    (
        "LayerNormMLP",
        {"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
        {"layer_norm_weight": (32,), "fc1_weight": (128, 32), "fc2_weight": (32, 64)},
    ),
    ("LayerNorm", {}, {"weight": (32,), "bias": (32,)}),
    ("RMSNorm", {}, {"weight": (32,)}),
]


@pytest.mark.parametrize("kind,options,expected", LAYOUTS)
def test_parameters_and_state_dict_keys(kind, options, expected, device):
    """Names, order and shapes; extra state last; no buffers; dtype and device as asked."""
    module = construct(kind, device, params_dtype=torch.bfloat16, **options)
    assert {k: tuple(p.shape) for k, p in module.named_parameters()} == expected
    assert list(dict(module.named_parameters())) == list(expected)
    assert list(module.state_dict()) == [*expected, "_extra_state"]
    assert not list(module.buffers())
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in module.parameters()} == {torch.device(device).type}
    assert all(p.requires_grad and p.is_leaf for p in module.parameters())
    extra = module.state_dict()["_extra_state"]
    assert extra.numel() == 0 and extra.dtype == torch.uint8 and extra.device.type == "cpu"


@pytest.mark.parametrize("activation", ["gelu", "relu", "srelu", "silu", "qgelu"])
def test_plain_activations_do_not_widen_fc1(activation):
    """fc1 has as many rows as fc2 has columns."""
    assert tuple(construct("LayerNormMLP", activation=activation).fc1_weight.shape) == (64, 32)


@pytest.mark.parametrize(
    "activation", ["geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu"]
)
def test_gated_activations_double_fc1(activation):
    """fc1 makes both halves."""
    assert tuple(construct("LayerNormMLP", activation=activation).fc1_weight.shape) == (128, 32)


def test_default_dtype_is_torchs():
    """``params_dtype=None`` follows ``torch.set_default_dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        for kind in MODULES:
            assert {p.dtype for p in construct(kind).parameters()} == {torch.float16}
        assert construct("Linear", bias=False).bias.dtype == torch.float16
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "kind,options,names",
    [
        ("Linear", {}, ["bias"]),
        ("Linear", {"parameters_split": ("q", "k")}, ["q_bias", "k_bias"]),
        ("LayerNormLinear", {}, ["bias"]),
        ("LayerNormMLP", {}, ["fc1_bias", "fc2_bias"]),
    ],
)
def test_missing_bias_is_an_empty_tensor(kind, options, names, device):
    """Not a parameter, not a buffer, not in the state dict; consumers test ``numel() == 0``."""
    module = construct(kind, device, bias=False, params_dtype=torch.bfloat16, **options)
    for name in names:
        bias = getattr(module, name)
        assert type(bias) is torch.Tensor  # pylint: disable=unidiomatic-typecheck
        assert bias.numel() == 0 and bias.dtype == torch.bfloat16
        assert bias.device.type == torch.device(device).type
        assert name not in dict(module.named_parameters()) and name not in module.state_dict()
    assert not module.use_bias and not module.apply_bias


def test_rmsnorm_has_no_norm_bias():
    """The attribute is there and is None."""
    for kind in ("LayerNormLinear", "LayerNormMLP"):
        assert construct(kind, normalization="RMSNorm").layer_norm_bias is None


def test_initializers_are_recorded():
    """Frameworks read ``param_init_meta``; a later registration does not overwrite it."""
    module = construct("LayerNormMLP")
    slots = {name: meta.fp8_meta_index for name, meta in module.param_init_meta.items()}
    assert slots["fc1_weight"] == 1 and slots["fc2_weight"] == 4
    assert slots["fc1_bias"] is None and slots["layer_norm_weight"] is None
    linear = construct("Linear")
    init = linear.param_init_meta["weight"].init_fn
    assert linear.param_init_meta["weight"].fp8_meta_index == 1
    linear.register_parameter("weight", torch.nn.Parameter(linear.weight.detach().clone()))
    assert linear.param_init_meta["weight"].init_fn is init


# --- initialisation ------------------------------------------------------------------------------


def assert_normal(values, sigma):
    """Mean and standard deviation within five standard errors of N(0, sigma)."""
    values, n = values.detach().double(), values.numel()
    assert abs(values.mean().item()) < 5 * sigma / math.sqrt(n)
    assert abs(values.std().item() / sigma - 1) < 5 / math.sqrt(2 * n)


@pytest.mark.parametrize("zero_centered_gamma", [False, True])
def test_initial_values(zero_centered_gamma, device):
    """Weights N(0, 0.023), biases 0, norm weights 1 (0 if zero-centred)."""
    one = 0.0 if zero_centered_gamma else 1.0
    mlp = te.LayerNormMLP(128, 256, zero_centered_gamma=zero_centered_gamma, device=device)
    linear = te.LayerNormLinear(128, 256, zero_centered_gamma=zero_centered_gamma, device=device)
    norm = te.LayerNorm(128, zero_centered_gamma=zero_centered_gamma, device=device)
    for weight in (mlp.fc1_weight, mlp.fc2_weight, linear.weight):
        assert_normal(weight, 0.023)
    for zero in (mlp.fc1_bias, mlp.fc2_bias, mlp.layer_norm_bias, linear.bias, norm.bias):
        assert (zero == 0).all()
    for weight in (mlp.layer_norm_weight, linear.layer_norm_weight, norm.weight):
        assert (weight == one).all()


def test_repeated_reset_keeps_the_statistics(device):
    """``reset_parameters`` draws new values of the same distribution."""
    linear = te.Linear(128, 256, device=device)
    before = linear.weight.detach().clone()
    linear.bias.data.fill_(3.0)
    linear.reset_parameters()
    assert_normal(linear.weight, 0.023)
    assert not torch.equal(before, linear.weight) and (linear.bias == 0).all()
    linear.weight.data.fill_(7.0)
    linear.reset_parameters(defer_init=True)
    assert (linear.weight == 7.0).all()


def test_own_initializers():
    """``init_method`` for every GEMM weight but fc2's, which has its own."""
    constant = torch.nn.init.constant_
    linear = construct("Linear", init_method=lambda w: constant(w, 2.0))
    assert (linear.weight == 2.0).all() and (linear.bias == 0.0).all()
    mlp = construct(
        "LayerNormMLP",
        init_method=lambda w: constant(w, 2.0),
        output_layer_init_method=lambda w: constant(w, 3.0),
    )
    assert (mlp.fc1_weight == 2.0).all() and (mlp.fc2_weight == 3.0).all()
    mlp = construct("LayerNormMLP", init_method=lambda w: constant(w, 2.0))
    assert (mlp.fc1_weight == 2.0).all()
    assert_normal(mlp.fc2_weight, 0.023)


class Tracker:
    """Stands in for a framework's random-number tracker; notes what it was asked for."""

    def __init__(self):
        self.forks = []

    @contextmanager
    def fork(self, *names):
        """Seeds the generator, and restores it at the end."""
        self.forks.append(names)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(99)
            yield


def test_weights_are_drawn_inside_of_the_rng_tracker():
    """One fork per weight, none for biases and norms; the ambient generator is not advanced."""
    tracker = Tracker()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    mlp = construct("LayerNormMLP", get_rng_state_tracker=lambda: tracker)
    assert tracker.forks == [(), ()]
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(99)
    assert torch.equal(mlp.fc1_weight, torch.empty(64, 32).normal_(0, 0.023))


def test_rng_tracker_name():
    """``Linear`` takes it as argument; the base honours an attribute set before construction."""
    tracker = Tracker()
    construct("Linear", get_rng_state_tracker=lambda: tracker, rng_tracker_name="experts")
    assert tracker.forks == [("experts",)]

    class Named(te.LayerNormLinear):
        """As a framework does it."""

        def __init__(self, *args, **kwargs):
            self.rng_tracker_name = "tensor-parallel"
            super().__init__(*args, **kwargs)

    tracker = Tracker()
    Named(32, 48, device="cpu", get_rng_state_tracker=lambda: tracker)
    assert tracker.forks == [("tensor-parallel",)]


def test_subclass_may_set_attributes_before_construction(device):
    """Megatron's wrappers set plain attributes before ``super().__init__``; they survive it."""

    class Wrapper(te.Linear):
        """Shaped like Megatron's ``TELinear``."""

        def __init__(self, config):
            self.config = config
            self.te_return_bias = True
            self.is_first_microbatch = True
            self.disable_parameter_transpose_cache = False
            self.tp_size = 1
            self.symmetric_ar_type = None
            self.rng_tracker_name = "name"
            super().__init__(in_features=32, out_features=48, return_bias=True, device=device)
            for param in self.parameters():
                setattr(param, "allreduce", True)
                setattr(param, "sequence_parallel", False)

        def forward(self, x):
            out = super().forward(x, is_first_microbatch=self.is_first_microbatch)
            self.is_first_microbatch = False
            return out

    config = {"hidden_size": 32}
    module = Wrapper(config)
    assert module.config is config and module.te_return_bias and module.is_first_microbatch
    assert module.rng_tracker_name is None or module.rng_tracker_name == "name"
    x = torch.randn(4, 32, device=device)
    out, bias = module(x)
    assert out.shape == (4, 48) and bias is module.bias and not module.is_first_microbatch
    torch.testing.assert_close(out, x @ module.weight.t())


# --- tensor parallelism --------------------------------------------------------------------------

TP = ("tensor_model_parallel", "partition_dim", "partition_stride")


def tp_attributes(param):
    """Values of the tensor-parallel attributes, None where one is missing."""
    return tuple(getattr(param, name, None) for name in TP)


@pytest.mark.parametrize("mode,dim", [(None, 0), ("column", 0), ("row", 1)])
def test_tp_attributes_of_linear(mode, dim):
    """On the weight always, even with one rank; on the bias as the mode says."""
    linear = construct("Linear", parallel_mode=mode)
    assert tp_attributes(linear.weight) == (True, dim, 1)
    column = (True, 0, 1) if mode == "column" else (None, None, None)
    assert tp_attributes(linear.bias) == column
    assert getattr(linear.bias, "sequence_parallel", None) == (False if mode == "row" else None)


@pytest.mark.parametrize("set_parallel_mode", [False, True])
def test_tp_attributes_of_mlp(set_parallel_mode):
    """fc1 is split by rows, fc2 by columns; the norm's parameters carry ``sequence_parallel``."""
    mlp = construct("LayerNormMLP", set_parallel_mode=set_parallel_mode)
    assert tp_attributes(mlp.fc1_weight) == (True, 0, 1)
    assert tp_attributes(mlp.fc1_bias) == (True, 0, 1)
    assert tp_attributes(mlp.fc2_weight) == (True, 1, 1)
    assert tp_attributes(mlp.fc2_bias) == (None, None, None)
    expected = False if set_parallel_mode else None
    assert getattr(mlp.fc2_bias, "sequence_parallel", None) == expected
    assert mlp.layer_norm_weight.sequence_parallel is False
    assert mlp.layer_norm_bias.sequence_parallel is False


@pytest.mark.parametrize("given", [None, False, True])
def test_sequence_parallel_of_norms(given):
    """The attribute appears only if the argument was given, and after every reset."""
    norm = te.LayerNorm(16, sequence_parallel=given, device="cpu")
    for _ in range(2):
        for param in norm.parameters():
            assert getattr(param, "sequence_parallel", None) == given
        norm.reset_parameters()


def test_attributes_are_set_once():
    """``set_tensor_model_parallel_attributes`` refuses a tensor that has them."""
    linear = construct("Linear")
    with pytest.raises(RuntimeError, match="partition_dim|tensor_model_parallel"):
        te.distributed.set_tensor_model_parallel_attributes(linear.weight, True, 0, 1)


@pytest.mark.parametrize(
    "kind,options,shapes",
    [
        ("Linear", {"parallel_mode": "column"}, {"weight": (24, 32), "bias": (24,)}),
        ("Linear", {"parallel_mode": "row"}, {"weight": (48, 16), "bias": (48,)}),
        ("Linear", {}, {"weight": (48, 32), "bias": (48,)}),
        ("LayerNormLinear", {"parallel_mode": "column"}, {"weight": (24, 32), "bias": (24,)}),
        ("LayerNormMLP", {"set_parallel_mode": True}, {"fc1_weight": (32, 32), "fc1_bias": (32,)}),
        ("LayerNormMLP", {}, {"fc1_weight": (32, 32), "fc2_weight": (32, 32), "fc2_bias": (32,)}),
    ],
)
def test_two_ranks_divide_the_shapes_and_refuse_to_run(kind, options, shapes):
    """Construction works without a group; running says what this version can not do."""
    module = construct(kind, tp_size=2, sequence_parallel=True, **options)
    parameters = dict(module.named_parameters())
    assert {name: tuple(parameters[name].shape) for name in shapes} == shapes
    assert module.tp_size == 2 and module.sequence_parallel
    with pytest.raises(RuntimeError, match=f"{kind}.*tp_size=2"):
        module(torch.randn(4, 32))


def test_sequence_parallel_needs_two_ranks():
    """With one rank it is off, whatever was asked for."""
    module = construct("Linear", sequence_parallel=True, parallel_mode="column")
    assert module.sequence_parallel is False
