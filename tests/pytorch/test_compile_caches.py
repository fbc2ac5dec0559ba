# SPDX-License-Identifier: Apache-2.0
"""PyTorch's caches of compiled code: a second process compiles nothing, a changed package does."""

import json
import os
import shutil

import pytest
import torch

from transformer_engine.pytorch.dynamo import cache_key

from deployment_support import K, ROOT, python, random, small_model

# Compiles models for inference and for training, compares them with eager copies, and prints
# counters and digests of all results. Arguments: the folder of this file, "recipe mode" pairs.
COMPILING = """
import copy, hashlib, json, sys, torch
sys.path.insert(0, sys.argv[1])
from deployment_support import K, Recipe, build, random, recipe_list
from torch._dynamo.utils import counters

torch.set_num_threads(1)


def results_of(run, model, training):
    x = random(32, K).requires_grad_(training)
    torch.manual_seed(1)  # of stochastic rounding
    with torch.set_grad_enabled(training):
        y = run(x)
    if not training:
        return [y]
    y.backward(random(*y.shape, seed=1))
    return [y, x.grad, *(p.grad for p in model.parameters())]


counts, digests = {}, {}
for name in sys.argv[2:]:
    recipe, mode = name.split()
    torch._dynamo.reset()
    counters.clear()
    module = build("LayerNormMLP", recipe=recipe)
    model = Recipe(module, recipe_list.recipe_of(recipe)).train(mode == "training")
    eager = copy.deepcopy(model)
    found = results_of(torch.compile(model, fullgraph=True), model, mode == "training")
    digest = hashlib.sha256()
    for a, b in zip(found, results_of(eager, eager, mode == "training"), strict=True):
        a, b = (t.detach().contiguous().view(torch.uint8) for t in (a, b))
        assert torch.equal(a, b), name
        digest.update(a.numpy().tobytes())
    digests[name] = digest.hexdigest()
    counts[name] = {
        key: counters[group][key]
        for group, key in (
            ("inductor", "fxgraph_cache_hit"),
            ("inductor", "fxgraph_cache_miss"),
            ("aot_autograd", "autograd_cache_hit"),
            ("aot_autograd", "autograd_cache_miss"),
        )
    }
print(json.dumps([counts, digests]))
"""
CASES = ("delayed inference", "nvfp4 training")


def compile_in_a_process(cache, *cases, package=ROOT, **environment):
    """Counters and digests of a fresh process that uses the given package and cache folder."""
    printed = python(
        COMPILING,
        ROOT / "tests" / "pytorch",
        *cases,
        PYTHONPATH=str(package),
        TORCHINDUCTOR_CACHE_DIR=str(cache),
        **environment,
    )
    return json.loads(printed.splitlines()[-1])


def copied_package(folder, comment=""):
    """A copy of the package, with a comment at the end of one file."""
    target = folder / "transformer_engine"
    shutil.copytree(
        ROOT / "transformer_engine", target, ignore=shutil.ignore_patterns("__pycache__")
    )
    with open(target / "pytorch" / "core" / "module_ops.py", "a", encoding="utf-8") as file:
        file.write(comment)
    return folder


@pytest.mark.feature(
    "compile caches in a second process",
    modes=("compiled",),
    modules=("LayerNormMLP",),
    others="not compiled by Inductor",
    other_modules="independent of the module",
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler for the CPU")
def test_second_process_finds_compiled_code(tmp_path):
    """Equal sources: everything is found, with equal bits. Other sources: nothing is."""
    cache, package = tmp_path / "cache", copied_package(tmp_path / "one")
    first, digests = compile_in_a_process(cache, *CASES, package=package)
    second, found_digests = compile_in_a_process(cache, *CASES, package=package)
    assert digests == found_digests
    for name, counts in second.items():
        fresh = first[name]
        assert fresh["fxgraph_cache_hit"] == fresh["autograd_cache_hit"] == 0, name
        assert fresh["fxgraph_cache_miss"] >= 1, name
        assert counts["fxgraph_cache_miss"] == counts["autograd_cache_miss"] == 0, name
        if "inference" in name:
            # A hit of this cache does not look at the other one.
            assert counts["autograd_cache_hit"] == 1, name
        else:
            assert counts["autograd_cache_hit"] + counts["fxgraph_cache_hit"] >= 1, name

    edited = copied_package(tmp_path / "two", "\n# changed\n")
    case, *_ = CASES
    again, same_digests = compile_in_a_process(cache, case, package=edited)
    assert again[case] == first[case]
    assert same_digests[case] == digests[case]


def test_the_digest_depends_on_every_file(tmp_path, monkeypatch):
    """A changed, a new and a renamed file each make another digest."""
    root = tmp_path / "package"
    (root / "part").mkdir(parents=True)
    (root / "one.py").write_text("1")
    (root / "part" / "two.py").write_text("2")
    monkeypatch.setattr(cache_key, "_PACKAGE", root)

    def digest():
        cache_key.source_digest.cache_clear()
        return cache_key.source_digest()

    seen = [digest()]
    assert digest() == seen[0]
    (root / "part" / "two.py").write_text("3")
    seen.append(digest())
    (root / "part" / "new.py").write_text("")
    seen.append(digest())
    (root / "one.py").rename(root / "other.py")
    seen.append(digest())
    assert len(set(seen)) == 4
    cache_key.source_digest.cache_clear()


@pytest.fixture(name="config")
def compiler_config():
    """torch's configuration, with a tag of the user's, and no flag of ours in the environment."""
    with pytest.MonkeyPatch.context() as patch, torch.compiler.config.patch(cache_key_tag="mine"):
        for name in [name for name in os.environ if name.startswith("NVTE_")]:
            patch.delenv(name)
        yield torch.compiler.config


def test_the_tag(config, monkeypatch):
    """The package's part is added once, renewed when a flag is set, and leaves the user's alone."""
    for _ in range(2):
        cache_key.tag_cache_keys()
    ours = f"transformer_engine={cache_key.source_digest()}"
    assert config.cache_key_tag == f"mine;{ours}"
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    monkeypatch.setenv("NVTE_NORM_FWD_USE_CUDNN", "0")
    cache_key.tag_cache_keys()
    flags = "NVTE_NORM_FWD_USE_CUDNN=0,NVTE_UNFUSED_FP8_UPDATE=1"
    assert config.cache_key_tag == f"mine;{ours},{flags}"
    config.cache_key_tag += ";yours"
    monkeypatch.delenv("NVTE_UNFUSED_FP8_UPDATE")
    cache_key.tag_cache_keys()
    assert config.cache_key_tag == f"mine;yours;{ours},NVTE_NORM_FWD_USE_CUDNN=0"


@pytest.mark.parametrize("recipe", ("none", "delayed"))
def test_each_trace_renews_the_tag(recipe, config, monkeypatch):
    """A flag that was set after the first compilation is in the keys of the next one."""
    for value in "01":
        monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", value)
        torch._dynamo.reset()
        compiled = torch.compile(small_model(recipe), fullgraph=True, backend="eager")
        with torch.no_grad():
            compiled(random(8, K))
        assert config.cache_key_tag.count("transformer_engine=") == 1
        assert f"NVTE_UNFUSED_FP8_UPDATE={value}" in config.cache_key_tag
