"""What `import hf_clover` does and does not do, each in a process of its own."""

import pytest
import torch
from helpers.own_process import run
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.utils import GenerationMixin

import hf_clover
from hf_clover import CloverHeads, install_hook, uninstall_hook

# Ways to start a program, all of which must end in the same place.
STARTS = {
    "before transformers": "import hf_clover\nimport transformers",
    "after transformers": "from transformers import AutoConfig, AutoModel, LlamaForCausalLM\nimport hf_clover",
    "with one of its modules": "import hf_clover.network.blocks",
}
CHECK = """
import sys
import hf_clover
from transformers import AutoConfig, AutoModel
from transformers.generation.utils import GenerationMixin
tiny = dict(vocab_size=8, hidden_size=8, num_attention_heads=2, intermediate_size=8)
config = AutoConfig.for_model("clover", **tiny)
heads = AutoModel.from_config(config)
assert type(config) is hf_clover.CloverConfig
assert type(heads) is hf_clover.CloverHeads
assert GenerationMixin.generate.__module__ == "transformers.generation.utils"  # functools.wraps
assert GenerationMixin.generate.__code__.co_filename.endswith("hook.py")
assert not GenerationMixin.generate.__wrapped__.__code__.co_filename.endswith("hook.py")
assert not {"trl", "peft", "datasets", "matplotlib", "fastapi", "hf_clover.engines"} & set(sys.modules)
"""


IMPORTED_EARLY = pytest.mark.long("hf_clover/__init__.py", "hf_clover/_versions.py", "hf_clover/decoding/hook.py")


@IMPORTED_EARLY
@pytest.mark.parametrize("start", STARTS)
def test_auto_classes_and_hook_are_there_whichever_is_imported_first(start):
    run(f"{STARTS[start]}\n{CHECK}")


@IMPORTED_EARLY
def test_versions_are_checked_before_torch_is_imported():
    """In a process of its own, in which only the version's text is changed."""
    script = """
import importlib.metadata as metadata
real = metadata.version
metadata.version = lambda name: {found!r} if name == "transformers" else real(name)
import sys, warnings
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    try:
        import hf_clover
    except ImportError as error:
        print(error)
print(*(str(one.message) for one in seen if "hf_clover" in str(one.message)))
print("torch" in sys.modules)
"""
    refused, _, has_torch = run(script.format(found="5.3.0")).splitlines()
    assert refused.startswith("hf_clover needs transformers 5.17 or later, and transformers 5.3.0 is installed")
    warned, has_torch_too = run(script.format(found="6.2.0")).splitlines()
    assert warned.startswith("hf_clover has not been tried with transformers 5.25 or later")
    assert (has_torch, has_torch_too) == ("False", "True")


def test_every_public_name_is_there():
    for name in hf_clover.__all__:
        assert getattr(hf_clover, name) is not None
    assert {*hf_clover.__all__} <= {*dir(hf_clover)}
    with pytest.raises(AttributeError, match="'hf_clover' has no attribute 'nonsense'"):
        getattr(hf_clover, "nonsense")  # noqa: B009


def test_the_hook_can_be_installed_and_uninstalled_again():
    installed = GenerationMixin.generate
    original = installed.__wrapped__
    assert original.__module__ == "transformers.generation.utils"
    assert not original.__code__.co_filename.endswith("hook.py")
    private = {name: value for name, value in vars(GenerationMixin).items() if name != "generate"}
    try:
        install_hook()
        assert GenerationMixin.generate is installed, "installing twice changes nothing"
        uninstall_hook()
        assert GenerationMixin.generate is original
        assert private == {name: value for name, value in vars(GenerationMixin).items() if name != "generate"}
        uninstall_hook()
        assert GenerationMixin.generate is original, "uninstalling twice changes nothing"
        install_hook()
        assert GenerationMixin.generate.__wrapped__ is original
        install_hook()
        assert GenerationMixin.generate.__wrapped__ is original
    finally:
        install_hook()


def test_a_wrapper_of_another_library_around_ours_survives(monkeypatch):
    """Ours cannot be taken out from under it, so it stays and lets everything through."""
    ours, seen = GenerationMixin.generate, []

    def theirs(*args, **kwargs):
        seen.append(1)
        return ours(*args, **kwargs)

    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    target, ids = LlamaForCausalLM(config), torch.tensor([[1, 2]])
    monkeypatch.setattr(GenerationMixin, "generate", theirs)
    try:
        for change in (install_hook, uninstall_hook, install_hook):
            change()
            assert GenerationMixin.generate is theirs, "no second wrapper around theirs"
            assert target.generate(ids, max_new_tokens=2).shape == (1, 4)
        assert len(seen) == 3
        uninstall_hook()
        with pytest.raises(RuntimeError, match="Clover heads need the hook"):
            target.generate(ids, max_new_tokens=2, assistant_model=CloverHeads.from_target(target))
    finally:
        monkeypatch.undo()
        install_hook()
    assert GenerationMixin.generate is ours
