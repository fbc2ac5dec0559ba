# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the reference package and of torch.nn in modules; what may be unpickled."""

import base64
import io
import pickle
import sys
import types

import hostile_pickles as hostile
import pytest
import reference_payloads as reference
import torch

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import _extra_state as policies

ENV = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP")
NORMS = ("LayerNorm", "RMSNorm")
STATELESS = (
    "Float8CurrentScaling",
    "MXFP8BlockScaling",
    "Float8BlockScaling",
    "NVFP4BlockScaling",
)
K = 64
STATE = ("fwd_scale", "fwd_history", "bwd_scale", "bwd_history")


def build(kind, device="cpu", seed=0):
    torch.manual_seed(seed)
    sizes = {"Linear": (K, K), "LayerNormLinear": (K, K), "LayerNormMLP": (K, 96)}.get(kind, (K,))
    return getattr(te, kind)(*sizes, params_dtype=torch.bfloat16, device=device)


def train(module, recipe, steps):
    """All numbers of some training steps: outputs, gradients, parameters, scales, histories."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    device, numbers = next(module.parameters()).device, []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(32, K, generator=generator) * (step + 1)
        x = x.to(device, torch.bfloat16).requires_grad_()
        with te.autocast(recipe=recipe):
            y = module(x)
        (y.float() ** 2).mean().backward()
        optimizer.step()
        numbers += [y.detach(), x.grad, *(p.detach().clone() for p in module.parameters())]
        numbers += [getattr(module._delayed_scaling, field).clone() for field in STATE]
        optimizer.zero_grad()
    return numbers


def assert_scales(module, values):
    """The module's scaling state is ``values``."""
    for key, got in reference.scales_of(module).items():
        assert got.dtype == torch.float32 and torch.equal(got, values[key])


def untouched(module):
    return module._delayed_scaling is None


# --- resuming ------------------------------------------------------------------------------------

FORMS = {
    "ours": lambda module: module.get_extra_state(),
    "pickle": lambda module: reference.as_tensor(
        reference.dumped(reference.delayed_content(reference.scales_of(module)))
    ),
    "pickle without recipe": lambda module: reference.as_tensor(
        reference.dumped(reference.old_content(reference.scales_of(module)))
    ),
    "file": lambda module: reference.dumped_file(
        reference.delayed_content(reference.scales_of(module))
    ),
    "old file": lambda module: reference.dumped_file(
        reference.old_content(reference.scales_of(module)), archive=False
    ),
}


@pytest.mark.feature(
    "checkpoints of the reference package",
    modes=("eager",),
    others="loaded outside of compiled and exported code; see state_dict",
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_training_resumes_bit_by_bit(kind, form, device):
    """With the scales of the checkpoint; without them the numbers are others."""
    recipe = recipes.DelayedScaling(amax_history_len=3)
    module = build(kind, device)
    train(module, recipe, range(5))
    state = module.state_dict()
    state["_extra_state"] = FORMS[form](module)
    twin, other = build(kind, device, seed=1), build(kind, device, seed=1)
    result = twin.load_state_dict(state, strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    other.load_state_dict({k: v for k, v in state.items() if k != "_extra_state"})
    want = train(module, recipe, range(5, 9))
    for got, expected in zip(train(twin, recipe, range(5, 9)), want, strict=True):
        assert torch.equal(got, expected)
    assert not torch.equal(train(other, recipe, range(5, 9))[0], want[0])


def test_a_model_on_meta_takes_its_scales_along():
    """Loading with ``assign=True`` into a model without memory."""
    module, recipe = build("LayerNormMLP"), recipes.DelayedScaling(amax_history_len=2)
    train(module, recipe, range(2))
    state = {key: value.clone() for key, value in module.state_dict().items()}
    state["_extra_state"] = FORMS["pickle"](module)
    twin = build("LayerNormMLP", device="meta")
    twin.load_state_dict(state, assign=True)
    for got, want in zip(train(twin, recipe, [2]), train(module, recipe, [2]), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("protocol", (3, 4, 5))
@pytest.mark.parametrize("length", (1, 5, 1024))
def test_scales_and_histories_of_a_pickle_arrive(length, protocol, device):
    """The history takes the length of the checkpoint, whatever the module had before."""
    module = build("LayerNormLinear", device)
    train(module, recipes.DelayedScaling(amax_history_len=4), [0])
    values = reference.scales(length=length)
    payload = reference.dumped(reference.delayed_content(values), protocol)
    module.set_extra_state(reference.as_tensor(payload).to(device))
    assert_scales(module, values)
    assert module._delayed_scaling.fwd_scale.device.type == device


def test_the_order_of_slots_is_the_references():
    """Two GEMMs: 3 forward slots each (input, weight, output), 2 backward (output's, input's)."""
    values = reference.scales(6, 4)
    values["scale_fwd"] = torch.tensor([2.0, 4.0, 1.0, 8.0, 16.0, 1.0])
    values["scale_bwd"] = torch.tensor([32.0, 1.0, 64.0, 1.0])
    module = build("LayerNormMLP")
    module.set_extra_state(reference.as_tensor(reference.dumped(reference.old_content(values))))
    quantizers = module.quantizers
    assert [float(q.scale) for q in quantizers["scaling_fwd"]] == [2, 4, 1, 8, 16, 1]
    assert [float(q.scale) for q in quantizers["scaling_bwd"]] == [32, 1, 64, 1]


# A state of a Linear with the scales 2, 4, 8 and 16, 32 and histories of two rows (below), written
# by Python 3.11 with protocol 4. It has to stay readable.
GOLDEN = """
gASV4AYAAAAAAAB9lCiMBnJlY2lwZZSMIHRyYW5zZm9ybWVyX2VuZ2luZS5jb21tb24ucmVjaXBllIwORGVsYXllZFNjYWxp
bmeUk5QpgZR9lCiMBm1hcmdpbpRLAIwKZnA4X2Zvcm1hdJRoAowGRm9ybWF0lJOUaAKMDV9Gb3JtYXRIZWxwZXKUk5RNwAFN
AOCGlIGUhZRSlIwQYW1heF9oaXN0b3J5X2xlbpRLAowRYW1heF9jb21wdXRlX2FsZ2+UjANtYXiUjBtzY2FsaW5nX2ZhY3Rv
cl9jb21wdXRlX2FsZ2+UTowLcmVkdWNlX2FtYXiUiIwHZnA4X2RwYZSJjAdmcDhfbWhhlImMEWJhY2t3YXJkX292ZXJyaWRl
lE51YowJc2NhbGVfZndklIwMdG9yY2guX3V0aWxzlIwSX3JlYnVpbGRfdGVuc29yX3YylJOUKIwNdG9yY2guc3RvcmFnZZSM
EF9sb2FkX2Zyb21fYnl0ZXOUk5RCBwEAAIACigps/JxG+SBqqFAZLoACTekDLoACfXEAKFgQAAAAcHJvdG9jb2xfdmVyc2lv
bnEBTekDWA0AAABsaXR0bGVfZW5kaWFucQKIWAoAAAB0eXBlX3NpemVzcQN9cQQoWAUAAABzaG9ydHEFSwJYAwAAAGludHEG
SwRYBAAAAGxvbmdxB0sEdXUugAIoWAcAAABzdG9yYWdlcQBjdG9yY2gKRmxvYXRTdG9yYWdlCnEBWA4AAAA5NDE4NDI1NjM4
ODk0NHECWAMAAABjcHVxA0sDTnRxBFEugAJdcQBYDgAAADk0MTg0MjU2Mzg4OTQ0cQFhLgMAAAAAAAAAAAAAQAAAgEAAAABB
lIWUUpRLAEsDhZRLAYWUiYwLY29sbGVjdGlvbnOUjAtPcmRlcmVkRGljdJSTlClSlHSUUpSMEGFtYXhfaGlzdG9yeV9md2SU
aBwoaB9CEwEAAIACigps/JxG+SBqqFAZLoACTekDLoACfXEAKFgQAAAAcHJvdG9jb2xfdmVyc2lvbnEBTekDWA0AAABsaXR0
bGVfZW5kaWFucQKIWAoAAAB0eXBlX3NpemVzcQN9cQQoWAUAAABzaG9ydHEFSwJYAwAAAGludHEGSwRYBAAAAGxvbmdxB0sE
dXUugAIoWAcAAABzdG9yYWdlcQBjdG9yY2gKRmxvYXRTdG9yYWdlCnEBWA4AAAA5NDE4NDI1NjM4OTA4OHECWAMAAABjcHVx
A0sGTnRxBFEugAJdcQBYDgAAADk0MTg0MjU2Mzg5MDg4cQFhLgYAAAAAAAAAAACAPwAAAEAAAEBAAACAQAAAoEAAAMBAlIWU
UpRLAEsCSwOGlEsDSwGGlIloJylSlHSUUpSMCXNjYWxlX2J3ZJRoHChoH0IDAQAAgAKKCmz8nEb5IGqoUBkugAJN6QMugAJ9
cQAoWBAAAABwcm90b2NvbF92ZXJzaW9ucQFN6QNYDQAAAGxpdHRsZV9lbmRpYW5xAohYCgAAAHR5cGVfc2l6ZXNxA31xBChY
BQAAAHNob3J0cQVLAlgDAAAAaW50cQZLBFgEAAAAbG9uZ3EHSwR1dS6AAihYBwAAAHN0b3JhZ2VxAGN0b3JjaApGbG9hdFN0
b3JhZ2UKcQFYDgAAADk0MTg0MTcwMDM0NTEycQJYAwAAAGNwdXEDSwJOdHEEUS6AAl1xAFgOAAAAOTQxODQxNzAwMzQ1MTJx
AWEuAgAAAAAAAAAAAIBBAAAAQpSFlFKUSwBLAoWUSwGFlIloJylSlHSUUpSMEGFtYXhfaGlzdG9yeV9id2SUaBwoaB9CCwEA
AIACigps/JxG+SBqqFAZLoACTekDLoACfXEAKFgQAAAAcHJvdG9jb2xfdmVyc2lvbnEBTekDWA0AAABsaXR0bGVfZW5kaWFu
cQKIWAoAAAB0eXBlX3NpemVzcQN9cQQoWAUAAABzaG9ydHEFSwJYAwAAAGludHEGSwRYBAAAAGxvbmdxB0sEdXUugAIoWAcA
AABzdG9yYWdlcQBjdG9yY2gKRmxvYXRTdG9yYWdlCnEBWA4AAAA5NDE4NDE3MDAzNDY1NnECWAMAAABjcHVxA0sETnRxBFEu
gAJdcQBYDgAAADk0MTg0MTcwMDM0NjU2cQFhLgQAAAAAAAAAAAAAPwAAgD4AAAA+AACAPZSFlFKUSwBLAksChpRLAksBhpSJ
aCcpUpR0lFKUjBNleHRyYV9mcDhfdmFyaWFibGVzlH2UKIwOZnA4X2NoZWNrcG9pbnSUiIwJbnVtX2dlbW1zlEsBjAtmcDhf
bWF4X2Z3ZJRHQHwAAAAAAACMC2ZwOF9tYXhfYndklEdA7AAAAAAAAHV1Lg==
"""
GOLDEN_VALUES = {
    "scale_fwd": torch.tensor([2.0, 4.0, 8.0]),
    "amax_history_fwd": torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
    "scale_bwd": torch.tensor([16.0, 32.0]),
    "amax_history_bwd": torch.tensor([[0.5, 0.25], [0.125, 0.0625]]),
}


def test_a_stored_pickle_stays_readable():
    module = build("Linear")
    module.set_extra_state(reference.as_tensor(base64.b64decode(GOLDEN)))
    assert_scales(module, GOLDEN_VALUES)


# --- variants of the payload ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    (
        {"amax_compute_algo": "most_recent", "margin": 2, "fp8_format": reference.Format.E4M3},
        {"interval": 1, "override_linear_precision": (False, False, False)},
        {"override_linear_precision": reference.CLASSES["_OverrideLinearPrecision"]()},
        {"_cached_repr": "DelayedScaling()", "__pydantic_fields_set__": {"margin"}},
    ),
)
def test_recipes_of_other_releases_are_read(fields):
    values, module = reference.scales(), build("Linear")
    content = reference.delayed_content(values, **fields)
    module.set_extra_state(reference.as_tensor(reference.dumped(content)))
    assert_scales(module, values)


@pytest.mark.parametrize(
    "path",
    (
        "megatron.core.extensions.transformer_engine",
        "megatron.core.transformer.custom_layers.transformer_engine",
    ),
)
def test_the_recipe_of_megatron_is_read(path, monkeypatch):
    """A subclass of DelayedScaling; Megatron is not imported."""
    values, module = reference.scales(), build("Linear")
    content = reference.delayed_content(values)
    derived = type("TEDelayedScaling", (reference.CLASSES["DelayedScaling"],), {})
    derived.__module__ = path
    content["recipe"] = derived(**content["recipe"].__dict__)
    with monkeypatch.context() as patch:
        parts = path.split(".")
        for end in range(len(parts)):
            module_path = ".".join(parts[: end + 1])
            patch.setitem(sys.modules, module_path, types.ModuleType(module_path))
        sys.modules[path].TEDelayedScaling = derived
        payload = reference.dumped(content)
    assert path.encode() in payload
    module.set_extra_state(reference.as_tensor(payload))
    assert_scales(module, values)


def test_our_own_recipes_are_read_in_pickles():
    """Frameworks pickle recipes of this package under the same names."""
    values, module = reference.scales(), build("Linear")
    content = {"recipe": recipes.DelayedScaling(margin=1), **values}
    module.set_extra_state(reference.as_tensor(pickle.dumps(content)))
    assert_scales(module, values)


def test_bytes_are_read_like_tensors():
    values, module = reference.scales(), build("Linear")
    module.set_extra_state(reference.dumped(reference.delayed_content(values)))
    assert_scales(module, values)


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("wrap", (reference.dumped, reference.dumped_file))
def test_states_of_recipes_without_state_are_ignored(name, wrap):
    """The scales that a module has stay."""
    content = {"recipe": reference.stateless_recipe(name), "extra_fp8_variables": reference.EXTRA}
    state = wrap(content)
    state = reference.as_tensor(state) if isinstance(state, bytes) else state
    module = build("Linear")
    module.set_extra_state(state)
    assert untouched(module)
    train(module, recipes.DelayedScaling(amax_history_len=2), [0])
    before = {key: value.clone() for key, value in reference.scales_of(module).items()}
    module.set_extra_state(state)
    assert_scales(module, before)


EMPTY = {
    "None": None,
    "empty": torch.empty(0, dtype=torch.uint8),
    "empty dictionary": reference.as_tensor(pickle.dumps({})),
    "no recipe": reference.as_tensor(pickle.dumps({"recipe": None, "extra_fp8_variables": {}})),
    "list": reference.as_tensor(pickle.dumps([1, "two", (3.0,)])),
    "file": reference.dumped_file({"extra_fp8_variables": {}}),
    "operations": reference.as_tensor(pickle.dumps({"forward": {}, "backward": {}})),
    "operations with a recipe": reference.as_tensor(
        reference.dumped(
            {
                "forward": {"recipe": reference.stateless_recipe("MXFP8BlockScaling")},
                "backward": {"extra_fp8_variables": {}},
            }
        )
    ),
}


@pytest.mark.parametrize("what", EMPTY)
@pytest.mark.parametrize("kind", KINDS + NORMS)
def test_states_with_nothing_to_restore_are_ignored(kind, what):
    module = build(kind)
    module.load_state_dict({**module.state_dict(), "_extra_state": EMPTY[what]}, strict=True)
    assert kind in NORMS or untouched(module)


@pytest.mark.parametrize("kind", NORMS)
def test_norms_accept_the_state_of_operations(kind, tmp_path):
    """They have nothing to restore, and do not look into it."""
    module = build(kind)
    nested = {"forward": reference.scales(), "backward": reference.scales()}
    attack = hostile.running(tmp_path / "mark")["GLOBAL"][0]
    for payload in (reference.dumped(nested), attack):
        state = {**module.state_dict(), "_extra_state": reference.as_tensor(payload)}
        assert not module.load_state_dict(state, strict=True).unexpected_keys
    assert not (tmp_path / "mark").exists()


def test_a_custom_recipe_without_scales_is_ignored():
    """The factory is never looked up, so any is harmless."""
    recipe = reference.CLASSES["CustomRecipe"](qfactory=torch.nn.Linear)
    payload = reference.dumped({"recipe": recipe, "extra_fp8_variables": {}})
    module = build("Linear")
    module.set_extra_state(reference.as_tensor(payload))
    assert untouched(module)


# --- what is refused -----------------------------------------------------------------------------


def without(key):
    content = reference.delayed_content(reference.scales())
    del content[key]
    return content


def with_(**changes):
    return {**reference.delayed_content(reference.scales()), **changes}


WRONG = {
    "no scales": ({"recipe": reference.delayed_recipe()}, "no tensor as 'scale_fwd'"),
    "a scale missing": (without("scale_bwd"), "no tensor as 'scale_bwd'"),
    "a history missing": (without("amax_history_fwd"), "no tensor as 'amax_history_fwd'"),
    "a number": (with_(scale_fwd=1.0), "no tensor as 'scale_fwd'"),
    "integers": (with_(scale_fwd=torch.ones(3, dtype=torch.int64)), "'scale_fwd'"),
    "dims": (with_(scale_fwd=torch.ones(3, 1)), r"shape \(3, 1\) as 'scale_fwd'"),
    "slots": (with_(scale_fwd=torch.ones(4)), r"4 slots in 'scale_fwd'.*\(4, 3\)"),
    "lengths": (with_(amax_history_bwd=torch.ones(5, 2)), "4 and 5 rows"),
    "no rows": (with_(amax_history_bwd=torch.ones(0, 2)), r"\(0, 2\)"),
    "no recipe": (with_(recipe="delayed"), "recipe that is none"),
    "unknown field": (with_(recipe=reference.delayed_recipe(tomorrow=1)), "field 'tomorrow'"),
    "algorithm": (
        with_(recipe=reference.delayed_recipe(amax_compute_algo=torch.nn.functional.relu)),
        "torch.nn.functional.relu",
    ),
    "custom": (
        with_(recipe=reference.CLASSES["CustomRecipe"](qfactory=torch.nn.Linear)),
        "scales of a CustomRecipe",
    ),
    "operations": ({"forward": reference.scales(), "backward": {}}, "module made of operations"),
    "operations of nothing": ({"forward": torch.ones(2)}, "something else than a dictionary"),
    "a tensor": (torch.ones(3), "no dictionary"),
    "another module": (
        reference.delayed_content(reference.scales(6, 4)),
        "6 forward and 4 backward slots, but the module has 3 and 2",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("wrap", (reference.dumped, reference.dumped_file))
def test_incomplete_states_are_refused(what, wrap):
    """The error names the module and the cure; the module stays as it is."""
    content, match = WRONG[what]
    module = build("Linear")
    state = wrap(content)
    state = reference.as_tensor(state) if isinstance(state, bytes) else state
    with pytest.raises(RuntimeError, match=match) as caught:
        module.set_extra_state(state)
    assert module.name in str(caught.value) and "rop the key" in str(caught.value)
    assert ENV in str(caught.value) or what == "another module"
    assert untouched(module)


@pytest.mark.parametrize(
    "state", (7, [1], {"scale_fwd": torch.ones(3)}, "text", torch.ones(3), io.StringIO("x"))
)
def test_other_kinds_of_states_are_refused(state):
    with pytest.raises(RuntimeError, match="must be a uint8 tensor.*Drop the key"):
        build("Linear").set_extra_state(state)


@pytest.mark.parametrize("attack", hostile.running(""))
@pytest.mark.parametrize("wrap", (reference.as_tensor, io.BytesIO, bytes))
def test_modules_execute_nothing(attack, wrap, tmp_path):
    mark = tmp_path / "mark"
    payload, named = hostile.running(mark)[attack]
    module = build("Linear")
    with pytest.raises(RuntimeError, match=ENV) as caught:
        module.load_state_dict({**module.state_dict(), "_extra_state": wrap(payload)})
    assert named in str(caught.value) or wrap is io.BytesIO  # whose first pickle is a number
    assert not mark.exists() and untouched(module)


@pytest.mark.parametrize("size", range(0, 1400, 41))
def test_cut_pickles_are_refused(size):
    payload = reference.dumped(reference.delayed_content(reference.scales()))
    assert len(payload) > 1400
    with pytest.raises(RuntimeError, match=ENV):
        build("Linear").set_extra_state(reference.as_tensor(payload[: size or 1]))


# --- the environment variable --------------------------------------------------------------------


def harmless():
    """Called by a pickle below, which only unpickling for real does."""
    CALLS.append(1)
    return 448.0


CALLS: list = []


class Calls:
    def __reduce__(self):
        return harmless, ()


@pytest.mark.parametrize("wrap", (reference.dumped, reference.dumped_file))
def test_unpickling_for_real_has_to_be_asked_for(wrap, monkeypatch):
    CALLS.clear()
    values, module = reference.scales(), build("Linear")
    state = wrap({"extra_fp8_variables": {"fp8_max_fwd": Calls()}, **values})
    state = reference.as_tensor(state) if isinstance(state, bytes) else state
    for off in (None, "0"):
        if off is not None:
            monkeypatch.setenv(ENV, off)
        with pytest.raises(RuntimeError, match=f"test_extra_state.harmless.*{ENV}=1"):
            module.set_extra_state(state)
        assert not CALLS and untouched(module)
    monkeypatch.setenv(ENV, "1")
    module.set_extra_state(state)
    assert CALLS == [1]
    assert_scales(module, values)


def test_readable_states_are_not_unpickled_even_if_allowed(monkeypatch):
    monkeypatch.setenv(ENV, "1")
    monkeypatch.setattr(pickle, "loads", None)
    values, module = reference.scales(), build("Linear")
    module.set_extra_state(reference.dumped(reference.delayed_content(values)))
    assert_scales(module, values)


def test_unpickled_states_have_to_fit_too(monkeypatch):
    monkeypatch.setenv(ENV, "1")
    payload = pickle.dumps({"recipe": Calls(), **reference.scales()})
    with pytest.raises(RuntimeError, match="was unpickled.*recipe that is none.*Drop the key"):
        build("Linear").set_extra_state(payload)


# --- names of the reference ----------------------------------------------------------------------


def subclasses(cls):
    for sub in cls.__subclasses__():
        yield sub
        yield from subclasses(sub)


def test_every_recipe_has_a_policy():
    ours = {
        (cls.__module__, cls.__name__)
        for cls in subclasses(recipes.Recipe)
        if cls.__module__.startswith("transformer_engine.")
    }
    assert set(policies._RECIPE_POLICIES) == ours
    policy = policies.CheckpointExtraStatePolicy
    for (_, name), value in policies._RECIPE_POLICIES.items():
        expected = {
            "DelayedScaling": policy.STATEFUL_FP8_DELAYED_SCALING,
            "CustomRecipe": policy.DYNAMIC,
        }
        assert value is expected.get(name, policy.STATELESS)


class Derived(recipes.MXFP8BlockScaling):
    pass


def test_is_stateless_recipe():
    for name in STATELESS:
        assert policies.is_stateless_recipe(getattr(recipes, name)())
    assert policies.is_stateless_recipe(Derived())
    assert not policies.is_stateless_recipe(recipes.DelayedScaling())
    assert not policies.is_stateless_recipe(recipes.CustomRecipe(qfactory=print))
    assert not policies.is_stateless_recipe(None)


def test_the_variable(monkeypatch):
    assert policies.UNSAFE_PICKLE_EXTRA_STATE_ENV == ENV
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(ENV, value)
        assert policies.unsafe_pickle_extra_state_enabled() is expected
    monkeypatch.delenv(ENV)
    assert policies.unsafe_pickle_extra_state_enabled() is False
    assert f"{ENV}=1" in policies.extra_state_pickle_advisory("layer 7")
    assert "layer 7" in policies.extra_state_pickle_advisory("layer 7")


IGNORED = [{}, {"recipe": None}, [1, 2]]
IGNORED += [{"recipe": reference.CLASSES["CustomRecipe"](qfactory=print)}]
IGNORED += [{"recipe": reference.stateless_recipe(name)} for name in STATELESS]


@pytest.mark.parametrize("content", IGNORED)
@pytest.mark.parametrize("allowed", (False, True))
def test_payloads_without_state_need_not_be_unpickled(content, allowed, monkeypatch):
    monkeypatch.setenv(ENV, str(int(allowed)))
    payload = reference.dumped(content)
    assert policies.should_load_extra_state_pickle(payload, "layer") is False


@pytest.mark.parametrize(
    "payload",
    (
        reference.dumped({"recipe": reference.delayed_recipe()}),
        reference.dumped(reference.delayed_content(reference.scales())),
        reference.dumped(reference.old_content(reference.scales())),
        pickle.dumps({"recipe": recipes.DelayedScaling()}),
        hostile.running("/nowhere/mark")["GLOBAL"][0],
        b"\x80\x04garbage",
        b"",
    ),
    ids=("delayed", "scales", "old", "ours", "attack", "garbage", "nothing"),
)
def test_payloads_with_state_need_permission(payload, monkeypatch):
    with pytest.raises(RuntimeError, match=f"layer 7.*{ENV}=1"):
        policies.should_load_extra_state_pickle(payload, "layer 7")
    monkeypatch.setenv(ENV, "1")
    assert policies.should_load_extra_state_pickle(payload, "layer 7") is True


# --- torch.nn ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind,plain",
    (
        ("Linear", lambda: torch.nn.Linear(K, K)),
        ("LayerNorm", lambda: torch.nn.LayerNorm(K)),
        ("RMSNorm", lambda: torch.nn.RMSNorm(K)),
    ),
)
def test_strict_loading_from_and_to_torch_modules(kind, plain, device):
    """To: without the keys of extra states, which torch.nn does not know."""
    ours = torch.nn.Sequential(build(kind, device), build(kind, device))
    theirs = torch.nn.Sequential(plain(), plain()).to(device, torch.bfloat16)
    with torch.no_grad():
        for param in theirs.parameters():
            param.normal_()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, two)
        torch.nn.init.normal_(one)
    state = ours.state_dict()
    with pytest.raises(RuntimeError, match="0._extra_state"):
        theirs.load_state_dict(state, strict=True)
    state = {key: value for key, value in state.items() if not key.endswith("_extra_state")}
    theirs.load_state_dict(state, strict=True)
    for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, two)
