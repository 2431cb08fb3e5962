"""What `import hf_clover` does and does not do, each in a process of its own."""

import json

import pytest
import torch
from helpers.own_process import run
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.utils import GenerationMixin

from hf_clover import CloverHeads, install_hook, uninstall_hook

LIGHT = """
import sys, time
import transformers
start = time.perf_counter()
import hf_clover
seconds = time.perf_counter() - start
heavy = {"torch", "trl", "peft", "datasets", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
assert seconds < 0.5, seconds
assert {name for name in sys.modules if name.startswith("hf_clover.")} == {"hf_clover._lazy", "hf_clover._versions"}

from hf_clover import CloverConfig, CloverHeads, TreeCache, install_hook  # lazy attributes
assert CloverHeads.__module__ == "hf_clover.network.modeling_clover"
assert set(hf_clover.__all__) <= set(dir(hf_clover))
try:
    hf_clover.nonsense
except AttributeError as error:
    assert "'hf_clover' has no attribute 'nonsense'" in str(error)
else:
    raise AssertionError
"""


def test_import_loads_no_torch_and_takes_under_half_a_second():
    run(f"{LIGHT}\n{CHECK}")


# Ways to start a program, all of which must end in the same place.
STARTS = {
    "before transformers": "import hf_clover\nimport transformers",
    "before a model class": "import hf_clover\nfrom transformers import LlamaForCausalLM",
    "before another model class": "import hf_clover\nfrom transformers import Qwen3ForCausalLM, LlamaForCausalLM",
    "before a model's module": "import hf_clover\nimport transformers.models.llama.modeling_llama",
    "before what models are made of": "import hf_clover\nimport transformers.modeling_layers",
    "before a task": "import hf_clover\nfrom transformers import pipeline",
    "before generation": "import hf_clover\nfrom transformers.generation.utils import GenerationMixin",
    "before models": "import hf_clover\nfrom transformers import PreTrainedModel",
    "after AutoConfig": "from transformers import AutoConfig\nimport hf_clover",
    "after everything": "from transformers import AutoConfig, AutoModel, LlamaForCausalLM\nimport hf_clover",
    "heads first": "from hf_clover import CloverHeads",
    "what heads are built of first": "import hf_clover.network.blocks",
    "the hook first": "from hf_clover import install_hook",
    "the loop first": "import hf_clover.decoding.loop",
    "private names first": "import hf_clover.targets.private_api",
    "attention first": "import hf_clover.decoding.target.attention",
}
CHECK = """
import sys
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.generation.utils import GenerationMixin
tiny = dict(vocab_size=8, hidden_size=8, num_attention_heads=2, intermediate_size=8)
config = AutoConfig.for_model("clover", **tiny)
heads = AutoModel.from_config(config)
from hf_clover import CloverConfig, CloverHeads
assert type(config) is CloverConfig
assert type(heads) is CloverHeads
assert GenerationMixin.generate.__module__ == "transformers.generation.utils"  # functools.wraps
assert GenerationMixin.generate.__code__.co_filename.endswith("hook.py")
assert not GenerationMixin.generate.__wrapped__.__code__.co_filename.endswith("hook.py")
assert not {"trl", "peft", "datasets", "matplotlib"} & set(sys.modules)
finder = type(sys.modules["hf_clover._lazy"]._finder)
first, second = "transformers.models.auto.modeling_auto", "hf_clover.network.modeling_clover"
for name in (first, second, "transformers.generation.utils"):
    loader = sys.modules[name].__spec__.loader
    assert not type(loader).__module__.startswith("hf_clover"), loader
assert not sys.modules["hf_clover._lazy"]._waiting
"""


# One process loads torch with what transformers needs of it, which takes longest, and forks for each start.
FORKS = """
import json, os, sys, traceback
import torch._dynamo, torch.distributed.tensor, torch.export
answers = {}
for name, script in json.loads(sys.argv[1]).items():
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            assert not [m for m in sys.modules if m.partition(".")[0] in ("transformers", "hf_clover")]
            exec(script, {"__name__": "__main__"})
            os.write(write, b"right")
        except BaseException:
            os.write(write, traceback.format_exc()[-4000:].encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        answers[name] = answer.read()
    os.wait()
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(request) -> dict[str, str]:
    names = {item.callspec.params["start"] for item in request.session.items if "answers" in item.fixturenames}
    return json.loads(run(FORKS, json.dumps({name: f"{STARTS[name]}\n{CHECK}" for name in names})))


# Where nothing has changed that is imported early, these are enough.
SOME = ("before transformers", "before generation", "after everything", "the loop first")
IMPORTED_EARLY = pytest.mark.long(
    "hf_clover/__init__.py",
    "hf_clover/_lazy.py",
    "hf_clover/_versions.py",
    "hf_clover/decoding/target/attention.py",
    "hf_clover/decoding/hook.py",
    "hf_clover/targets/private_api.py",
    "hf_clover/network",
)


@pytest.mark.parametrize(
    "start", [name if name in SOME else pytest.param(name, marks=IMPORTED_EARLY) for name in STARTS]
)
def test_auto_classes_and_hook_are_there_whichever_is_imported_first(start, answers):
    assert answers[start] == "right"


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
