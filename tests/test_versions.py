"""Versions that the package is not for, and versions of transformers that lack what it relies on."""

import configparser
import importlib.metadata
import re
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import transformers
from helpers.oracle import planted
from helpers.zoo import build, ragged_batch
from transformers import GenerationMixin, LlamaForCausalLM
from typer.testing import CliRunner

import hf_clover
from hf_clover import CloverHeads, _versions, cli
from hf_clover.decoding import hook
from hf_clover.decoding import route as route_module
from hf_clover.decoding.route import CloverWarning
from hf_clover.targets import private_api
from hf_clover.targets.private_api import cache_name

ROOT = Path(__file__).parent.parent
VOCABULARY, NEW = 16, 12


def pretend(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    monkeypatch.setattr(_versions, "version", lambda name: found.get(name) or importlib.metadata.version(name))


def required(*extras: str) -> str:
    """What setup.cfg requires, with these extras."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return "\n".join(
        [setup["options"]["install_requires"], *(setup["options.extras_require"][name] for name in extras)]
    )


def pins(file: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / file).read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize(
    ("package", "found"),
    [("transformers", "5.16.1"), ("transformers", "4.57.6"), ("torch", "2.5.1+cu124"), ("torch", "1.13.1")],
)
def test_a_version_too_old_is_refused_with_the_way_out(package, found, monkeypatch):
    oldest, untried = _versions.SUPPORTED[package]
    pretend(monkeypatch, **{package: found})
    wrong = re.escape(f"needs {package} {oldest} or later, and {package} {found} is installed")
    with pytest.raises(ImportError, match=rf"{wrong}.*pip install.*{package}>={re.escape(oldest)}"):
        _versions.check_versions()
    assert _versions._release(untried) > _versions._release(oldest)


@pytest.mark.parametrize(
    ("package", "found"),
    [("transformers", "5.25.0.dev0"), ("transformers", "5.103.2"), ("transformers", "6.0.0"), ("torch", "3.1.0")],
)
def test_an_untried_version_gives_one_warning(package, found, monkeypatch):
    pretend(monkeypatch, **{package: found})
    wrong = rf"not been tried with {package} .*{package} {found} is installed"
    with pytest.warns(UserWarning, match=rf'{wrong}.*`hf-clover env`.*`pip install "{package}>=') as seen:
        _versions.check_versions()
    assert len(seen) == 1


@pytest.mark.parametrize(
    "found",
    [
        {},  # what is installed
        {"transformers": "5.17.0", "torch": "2.6.0+cpu"},
        {"transformers": "5.17.0.dev0", "torch": "2.20.0a0+git1234"},
        {"transformers": "5.24.9", "torch": "unknown"},
    ],
)
def test_supported_versions_give_no_warning(found, monkeypatch):
    pretend(monkeypatch, **found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _versions.check_versions()


def test_a_missing_package_passes_the_version_check(monkeypatch):
    monkeypatch.setattr(_versions, "version", Mock(side_effect=importlib.metadata.PackageNotFoundError))
    _versions.check_versions()
    assert _versions.installed_version("torch") is None


def test_supported_versions_are_those_of_setup_cfg():
    assert {_versions.wanted(package).strip('"') for package in _versions.SUPPORTED} <= {*required().split()}
    assert {*_versions.SUPPORTED} == {"torch", "transformers"}


def test_pinned_versions_are_within_the_caps_of_setup_cfg():
    """For each package that setup.cfg caps, the tests run with a version from its floor on and below its cap."""
    caps = re.findall(r"^([\w-]+)>=([\d.]+),<([\d.]+)$", required("train"), flags=re.MULTILINE)
    pinned = pins("constraints.txt")
    assert len(caps) >= 8
    for package, floor, cap in caps:
        assert _versions._release(floor) <= _versions._release(pinned[package]) < _versions._release(cap), package


def test_the_oldest_versions_are_the_floors_of_setup_cfg():
    """Except for torch, CI's oldest versions are the oldest ones that setup.cfg says will do."""
    floors = dict(re.findall(r"^([\w-]+)>=([\d.]+)", required("train", "plot", "test"), flags=re.MULTILINE))
    oldest = pins("constraints-oldest.txt")
    floors.pop("torch"), oldest.pop("torch")
    assert floors
    for package, floor in floors.items():
        assert (oldest[package] + ".").startswith(floor + "."), f"{package}: {oldest[package]}, and {floor} will do"


# ---------------------------------------------------------------------- names that transformers may drop


@pytest.fixture(
    params=[
        ({"_renamed_since": ()}, r"no `_renamed_since`"),
        ({"_prefill": ("input_ids", "renamed")}, r"no parameter `renamed` of `_prefill`"),
    ],
    ids=["a name", "a parameter"],
)
def lost(request, monkeypatch):
    """Another version of transformers; what it lacks."""
    names, message = request.param
    hf_clover.uninstall_hook()
    monkeypatch.setattr(private_api, "PRIVATE_NAMES", {**private_api.PRIVATE_NAMES, **names})
    with pytest.warns(UserWarning, match=rf"this version of transformers has {message}.*plain `generate`"):
        hf_clover.install_hook()
    yield message
    hf_clover.uninstall_hook()
    monkeypatch.undo()
    hf_clover.install_hook()
    assert hook.is_installed()


@pytest.fixture
def target():
    return build("llama", vocab_size=VOCABULARY)


@pytest.mark.parametrize("way", ["hook", "prompt by name", "custom_generate"])
def test_heads_fall_back_to_plain_where_transformers_lacks_a_name(way, lost, target):
    inputs = ragged_batch(VOCABULARY, (5, 9, 3))
    heads, plain = CloverHeads.from_target(target), target.generate(**inputs, max_new_tokens=NEW)
    ids = inputs.pop("input_ids") if way == "hook" else None
    positional = () if ids is None else (ids,)
    door = {"custom_generate": heads.generate_with} if way == "custom_generate" else {"assistant_model": heads}
    settings = {**door, "num_assistant_tokens": 3, "max_new_tokens": NEW}
    with planted(heads, plain, 9):
        out = target.generate(*positional, **inputs, **settings, return_dict_in_generate=True)
        tokens = target.generate(*positional, **inputs, **settings)
    assert torch.equal(out.sequences, plain)
    assert torch.equal(tokens, plain)
    assert (out.speculation.method, out.speculation.accepted_tokens) == ("plain", 0)
    assert re.search(lost, out.speculation.reason)
    assert out.speculation.target_forwards == NEW
    assert not hook.is_installed()


def test_other_calls_are_unchanged_where_transformers_lacks_a_name(lost, target):
    ids = torch.tensor([[1, 2, 3]])
    plain = target.generate(ids, max_new_tokens=NEW)
    assert torch.equal(target.generate(ids, max_new_tokens=NEW, assistant_model=target), plain)
    hf_clover.uninstall_hook()
    assert not GenerationMixin.generate.__code__.co_filename.endswith("hook.py")


# ---------------------------------------------------------------------- a version that decoding does not understand


@pytest.fixture
def renamed(monkeypatch):
    """A transformers whose Llama calls its cache by a name that nobody has heard of."""
    theirs = LlamaForCausalLM.forward

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, key_store=None, **kwargs):
        return theirs(self, input_ids, attention_mask, position_ids, key_store, **kwargs)

    def prepare(self, *args, **kwargs):
        prepared = theirs_prepare(self, *args, **kwargs)
        prepared["key_store"] = prepared.pop(cache_name(), None)
        return prepared

    theirs_prepare = LlamaForCausalLM.prepare_inputs_for_generation
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    monkeypatch.setattr(LlamaForCausalLM, "prepare_inputs_for_generation", prepare)
    route_module.why_not_understood.cache_clear()
    yield
    route_module.why_not_understood.cache_clear()


MISUNDERSTOOD = (
    rf"transformers {re.escape(transformers.__version__)} is not understood: any Llama should give a tree the logits "
    r'of its paths.*Install "transformers>=5\.17,<5\.\d+"'
)


def test_a_warning_blames_the_version_where_no_llama_verifies_trees(renamed, target):
    """It does not blame the target, whose text is plain generate's all the same."""
    ids, heads = torch.tensor([[1, 2, 3]]), CloverHeads.from_target(target)
    plain = target.generate(ids, max_new_tokens=NEW)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out = target.generate(ids, max_new_tokens=NEW, assistant_model=heads, return_dict_in_generate=True)
    said = [str(one.message) for one in seen if issubclass(one.category, CloverWarning)]
    assert len(said) == 1
    until_then = r"Until then (plain `generate` is used|chains are drafted)\."
    assert re.match(rf"hf_clover: {MISUNDERSTOOD}.*{until_then}", said[0])
    assert "LlamaForCausalLM" not in said[0]
    assert torch.equal(out.sequences, plain)
    assert out.speculation.method != "tree"
    assert re.match(MISUNDERSTOOD, out.speculation.reason)


def test_env_exits_with_1_for_a_version_that_is_not_understood(renamed):
    printed = CliRunner().invoke(cli.app, ["env"])
    assert printed.exit_code == 1
    for where in ("trees", "a batch", "a static cache"):
        assert re.search(rf"^- drafts in {where}: no: \S.*{MISUNDERSTOOD}", printed.stdout, re.MULTILINE)
    assert re.search(r"^- drafts in chains: yes", printed.stdout, re.MULTILINE)


def test_a_warning_blames_the_target_where_another_llama_verifies_trees(target, monkeypatch):
    """Where a Llama that is made on the spot verifies trees, the warning names the target."""
    theirs = type(target).forward
    target.__class__ = type("Odd", (type(target),), {"forward": lambda self, *a, **k: theirs(self, *a, **k)})
    ids, heads = torch.tensor([[1, 2, 3]]), CloverHeads.from_target(target)
    with pytest.warns(CloverWarning, match=r"`Odd` cannot verify .*takes no `(cache|past_key_values)`"):
        target.generate(ids, max_new_tokens=NEW, assistant_model=heads)


def test_the_trial_of_a_version_leaves_random_numbers_alone():
    route_module.why_not_understood.cache_clear()
    before = torch.get_rng_state()
    assert route_module.why_not_understood() is None
    assert torch.equal(torch.get_rng_state(), before)


def test_the_installed_transformers_lacks_no_name_with_a_wrapper_of_another_library_or_without(monkeypatch):
    """The wrapper came before ours and takes any argument: its parameters say nothing about transformers'."""
    assert private_api.why_unavailable() is None
    hf_clover.uninstall_hook()
    theirs = GenerationMixin._prefill
    monkeypatch.setattr(GenerationMixin, "_prefill", lambda *args, **kwargs: theirs(*args, **kwargs))
    try:
        assert private_api.why_unavailable() is None
    finally:
        monkeypatch.undo()
        hf_clover.install_hook()
