"""Push with the real client over real HTTP, then load in fresh processes in every way there is, and generate.

The lines that a reader finds on a card are among those ways: they are run as they stand there.
"""

import json
import re

import pytest
from datasets import Dataset
from hub_models import RESULTS
from hub_server import TOKEN
from hub_xet import CLIENT
from huggingface_hub import ModelCard

from hf_clover.hub.custom_generate import generate
from hf_clover.hub.push import write_results

pytestmark = pytest.mark.long("hub_cards", "hf_clover/network")

HEADS = "org/clover-heads"


@pytest.fixture(scope="module")
def pushed(hub, client, folders, tmp_path_factory):
    """All that the tests load, from one process; the revision that the target had before."""
    plot = tmp_path_factory.mktemp("plots") / "speed.png"
    plot.write_bytes(b"a picture")
    before = hub.repositories["org/target"].branches["main"]
    out = client(f"""
from hf_clover import CloverHeads
from hf_clover.hub.push import push_folder, write_card
heads = CloverHeads.from_pretrained({str(folders.heads)!r})
first = heads.push_to_hub({HEADS!r}, results={RESULTS!r}, plots=[{str(plot)!r}], license="apache-2.0")
print(first.oid)
heads.push_to_hub("org/private", private=True, revision="v1", commit_message="Trained for longer")
heads.push_to_hub("org/target", subfolder="clover")
write_card({str(folders.adapter)!r}, heads)
push_folder({str(folders.adapter)!r}, "org/clover-adapter")
""").stdout
    assert out.split()[-1] == hub.repositories[HEADS].branches["main"]
    commits = {name: len(repository.commits) for name, repository in hub.repositories.items()}
    assert commits == {"org/target": 2, HEADS: 2, "org/private": 2, "org/clover-adapter": 2}  # one, and the creation
    return before


@pytest.fixture(scope="module")
def checks(folders) -> str:
    """Lines that a process begins with: what `generate` must give, and the target."""
    return f"""
import sys
TOKENS, FORWARDS, TOKEN = {folders.tokens}, {folders.forwards}, {TOKEN!r}

def check(out, forwards=FORWARDS):
    assert out.sequences.tolist() == TOKENS, out
    assert out.speculation.target_forwards == forwards, out.speculation

def prepare():
    from transformers import AutoModelForCausalLM, AutoTokenizer
    inputs = AutoTokenizer.from_pretrained("org/target")("The quick brown fox", return_tensors="pt")
    options = dict(inputs, max_new_tokens=64, return_dict_in_generate=True)
    return AutoModelForCausalLM.from_pretrained("org/target"), options
"""


def blocks(hub, repository: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", hub.repositories[repository].files()["README.md"].decode(), re.DOTALL)


def test_a_push_holds_weights_config_code_results_and_card(hub, pushed, folders):
    files = hub.repositories[HEADS].files()
    assert set(files) == {
        *(".gitattributes", "README.md", "config.json", "generation_config.json", "model.safetensors"),
        *("blocks.py", "checkpoint_checks.py", "configuration_clover.py", "modeling_clover.py", "packing.py"),
        *("configuration_heads.py", "modeling_heads.py", "target_parts.py", "variants.py"),
        *("custom_generate/generate.py", "custom_generate/requirements.txt", "clover_results.json", "speed.png"),
    }
    assert files["model.safetensors"] == (folders.heads / "model.safetensors").read_bytes()
    assert json.loads(files["clover_results.json"]) == RESULTS
    assert json.loads(files["generation_config.json"])["num_assistant_tokens"] == 6
    assert json.loads(files["config.json"])["target_name_or_path"] == "org/target"
    card = ModelCard(files["README.md"].decode())
    assert card.data.license == "apache-2.0"
    assert "![speed.png](speed.png)" in card.text


def test_the_code_on_the_hub_is_that_of_the_package(pushed, hub, site):
    files = hub.repositories[HEADS].files()
    for path in (path for path in files if path.endswith(".py")):
        name = "hub/custom_generate.py" if path.startswith("custom_generate/") else f"network/{path}"
        assert files[path] == (site / "hf_clover" / name).read_bytes()


def test_private_and_revision_are_passed_on(hub, pushed):
    repository = hub.repositories["org/private"]
    assert repository.private
    assert "config.json" in repository.files("v1")
    assert "config.json" not in repository.files("main")


def test_a_push_to_a_subfolder_keeps_other_files_and_puts_code_at_the_root(hub, pushed):
    repository = hub.repositories["org/target"]
    old, new = repository.files(pushed), repository.files()
    assert {path: new[path] for path in old} == old
    added = set(new) - set(old)
    assert {"clover/config.json", "clover/model.safetensors", "clover/README.md"} <= added
    assert {"modeling_clover.py", "custom_generate/generate.py"} <= added
    assert b'AutoModel.from_pretrained("org/target", subfolder="clover")' in new["clover/README.md"]


def test_pushed_heads_load_and_generate_with_the_package(hub, client, pushed, checks):
    """The card's first lines; then private with a token at a revision, in a subfolder, and an adapter."""
    client(
        f"""{checks}
exec({blocks(hub, HEADS)[0]!r})
check(out)

import hf_clover, pytest
from transformers import AutoModel
assert type(heads) is hf_clover.CloverHeads
model, options = prepare()
heads = AutoModel.from_pretrained("org/private", revision="v1", token=TOKEN)
check(model.generate(**options, assistant_model=heads))
heads = AutoModel.from_pretrained("org/target", subfolder="clover")
check(model.generate(**options, assistant_model=heads))

for name in ("org/nothing", "org/private"):  # which somebody without a token cannot tell apart
    with pytest.raises(OSError, match=f"{{name}} is not a local folder and is not a valid model identifier"):
        AutoModel.from_pretrained(name)

exec({blocks(hub, "org/clover-adapter")[0]!r})
assert out.speculation.target_forwards != FORWARDS  # the adapter is random, and at work
check(model.generate(**options, assistant_model=heads.merge_and_unload()), out.speculation.target_forwards)
""",
        HF_TOKEN=None,
    )


def test_pushed_heads_load_as_remote_code_only_where_trusted(hub, client, pushed, checks, tmp_path):
    """Only where it is trusted; where the package is not installed, then not imported, then imported."""
    mark, hostile = tmp_path / "was here", dict(hub.repositories[HEADS].files())
    for path in ("modeling_clover.py", "configuration_clover.py", "custom_generate/generate.py"):
        hostile[path] = f"open({str(mark)!r}, 'w')\n".encode() + hostile[path]
    hub.put("org/hostile", hostile)
    client(
        f"""{checks}
import pytest
from transformers import AutoModel
model, options = prepare()
with pytest.raises(ValueError, match="trust_remote_code=True"):
    AutoModel.from_pretrained("org/hostile")
with pytest.raises(ValueError, match="trust_remote_code=True"):
    model.generate(**options, custom_generate="org/hostile")

class NotInstalled:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "hf_clover":
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, NotInstalled())
heads = AutoModel.from_pretrained("org/clover-heads", trust_remote_code=True)
for door, message in (
    (dict(custom_generate=heads.generate_with), "needs the hf_clover package"),
    (dict(assistant_model=heads), "`import hf_clover` first"),
    (dict(custom_generate="org/clover-heads", trust_remote_code=True), "hf_clover"),
):
    with pytest.raises((ImportError, RuntimeError), match=message):
        model.generate(**options, **door)
del sys.meta_path[0]

in_subfolder = AutoModel.from_pretrained("org/target", subfolder="clover", trust_remote_code=True)
assert "hf_clover" not in sys.modules and type(heads).__module__.startswith("transformers_modules")
check(model.generate(**options, custom_generate=heads.generate_with))
check(model.generate(**options, custom_generate=in_subfolder.generate_with))

import hf_clover
check(model.generate(**options, assistant_model=heads))
check(model.generate(**options, assistant_model=AutoModel.from_pretrained("org/hostile")))
AutoModel.from_pretrained("org/hostile", trust_remote_code=True)  # the imported package's own class all the same
""",
        HF_TOKEN=None,
    )
    assert not mark.exists()


def test_custom_generate_of_a_repository_gives_the_same_tokens(hub, client, pushed, checks):
    """The card's second lines; then with a streamer, heads of the caller's, from elsewhere and from a folder."""
    client(
        f"""{checks}
exec({blocks(hub, HEADS)[1]!r})
assert out.tolist() == TOKENS
own = next(module for name, module in sys.modules.items() if name.endswith("custom_generate.generate"))
heads = own._loaded[model][1]

from transformers import TextStreamer
inputs["return_dict_in_generate"] = True
door = dict(inputs, max_new_tokens=64, custom_generate="org/clover-heads", trust_remote_code=True)
check(model.generate(**door, streamer=TextStreamer(tokenizer)))
assert own._loaded[model][1] is heads, "loaded again"
heads.generation_config.num_assistant_tokens = 1
assert model.generate(**door, assistant_model=heads).speculation.tree_sizes[0] == 1
check(model.generate(**door | dict(custom_generate="org/private", revision="v1", token=TOKEN)))
check(model.generate(**door | dict(custom_generate="org/target", subfolder="clover")))
from huggingface_hub import snapshot_download
check(model.generate(**door | dict(custom_generate=snapshot_download("org/clover-heads"))))
""",
        HF_TOKEN=None,
    )


def test_custom_generate_without_a_known_repository_is_refused():
    with pytest.raises(ValueError, match=r"`assistant_model` is missing, and the repository .* is not known here"):
        generate(model=None)


def test_pushed_heads_work_offline_from_the_cache(hub, client, pushed, checks, tmp_path):
    home = str(tmp_path)
    client(f"from huggingface_hub import snapshot_download as get; get({HEADS!r}), get('org/target')", HF_HOME=home)
    before = len(hub.requests)
    client(
        f"""{checks}
from transformers import AutoModel
model, options = prepare()
check(model.generate(**options, custom_generate="org/clover-heads", trust_remote_code=True))
check(model.generate(**options, assistant_model=AutoModel.from_pretrained("org/clover-heads")))
""",
        HF_HOME=home,
        HF_HUB_OFFLINE="1",
    )
    assert hub.requests[before:] == []


def test_a_pushed_dataset_loads_by_the_code_on_its_card(hub, client, tmp_path):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    write_results(tmp_path, regeneration={"model": "org/target", "samples": 2, "failed": 0})
    client(f"from hf_clover.hub.push import push_folder; push_folder({str(tmp_path)!r}, 'org/answers')")
    assert set(hub.repositories["datasets/org/answers"].files()) == {
        *(".gitattributes", "README.md", "clover_results.json", "train.parquet")
    }
    client(f"exec({blocks(hub, 'datasets/org/answers')[0]!r}); assert list(dataset) == {rows}", HF_TOKEN=None)


def test_a_push_through_xet_uploads_the_weights(hub, client, folders):
    """The client uses xet where it can; the other tests use git LFS."""
    lines = f"from hf_clover.hub.push import push_folder; push_folder({str(folders.heads)!r}, 'org/through-xet')"
    client(lines, HF_HUB_DISABLE_XET=None, **CLIENT)
    assert any("/v1/xorbs/" in request for request in hub.requests)
    weights = hub.repositories["org/through-xet"].files()["model.safetensors"]
    assert weights == (folders.heads / "model.safetensors").read_bytes()
