"""Cards say what was measured, under which conditions, and nothing else; and nothing that should stay private."""

import ast
import copy
import functools
import json
import operator
import re
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hub_models import RESULTS
from huggingface_hub import DatasetCard, ModelCard

from hf_clover import CloverConfig
from hf_clover.hub import push as hub
from hf_clover.hub.cards import is_hub_id, public_name, render
from hf_clover.measure.provenance import provenance

REPOSITORY = Path(__file__).parents[2]
CONFIG = {
    "variant": "clover-2",
    "num_heads": 5,
    "vocab_size": 32000,
    "draft_vocab_size": 8000,
    "target_name_or_path": "org/target",
    "target_revision": "a" * 40,
    "target_fingerprint": "0f" * 16,
}
ADAPTER = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": "org/clover-heads", "revision": None}
REGENERATION = {
    "model": "org/target",
    "source": "org/prompts",
    "samples": 1234,
    "failed": 5,
    "settings": {"temperature": 0.7},
    "command": "hf-clover regenerate --model org/target",
    "versions": {"transformers": "5.23.0"},
}
FULL = {
    "heads": dict(config=CONFIG, results=RESULTS, parameters=123456, plots=["speed.png"]),
    "adapter": dict(config=CONFIG, adapter=ADAPTER, results=RESULTS, parameters=1234),
    "dataset": dict(results={"regeneration": REGENERATION}),
}
BARE = {
    "heads": dict(config={"variant": "medusa", "num_heads": 3}),
    "adapter": dict(adapter={"peft_type": "LORA"}),
    "dataset": dict(),
}
CASES = [(kind, facts[kind]) for facts in (FULL, BARE) for kind in facts]


@pytest.fixture(params=CASES, ids=[f"{kind}, {size}" for size in ("full", "bare") for kind in FULL])
def card(request):
    kind, facts = request.param
    return render(kind, "org/name", **copy.deepcopy(facts), metadata={"license": "mit", "tags": ["mine"]})


def test_no_card_has_a_placeholder_left(card):
    text = str(card)
    for leftover in ("{{", "{%", "}}", "%}", "Undefined", "None", "[More Information Needed]"):
        assert leftover not in text
    assert "\n\n\n" not in text


def test_a_card_is_the_same_after_saving_and_loading(card, tmp_path):
    card.save(tmp_path / "README.md")
    again = type(card).load(tmp_path / "README.md")
    assert str(again) == str(card)
    assert again.data.to_dict() == card.data.to_dict()
    block = yaml.safe_load(str(card).split("---\n")[1])
    assert block["license"] == "mit"
    assert {"clover", "speculative-decoding", "mine"} <= set(block["tags"])


def test_code_on_a_card_is_python_and_names_the_repository(card):
    blocks = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    assert blocks
    for block in blocks:
        ast.parse(block)
        assert '"org/name"' in block


def test_cards_have_their_base_model_tags_and_datasets():
    heads, adapter, dataset = (render(kind, "org/name", **facts) for kind, facts in FULL.items())
    relation = ("base_model", "base_model_relation", "library_name")
    assert [heads.data[name] for name in relation] == ["org/target", "adapter", "transformers"]
    assert [adapter.data[name] for name in relation] == ["org/clover-heads", "adapter", "peft"]
    assert heads.data.tags == ["clover", "speculative-decoding", "custom_generate"]
    assert (heads.data.datasets, dataset.data.source_datasets) == (["org/data"], ["org/prompts"])
    assert type(dataset) is DatasetCard
    assert dataset.data.configs[0]["data_files"] == [{"split": "train", "path": "train.parquet"}]


def test_speeds_are_in_the_model_index_with_their_conditions():
    """To two decimals, as in the table; what was measured while training stays on the card alone."""
    figures = copy.deepcopy(FULL["heads"])
    figures["results"]["benchmarks"][0]["rows"][0]["speedup"] = 1.4963577
    card = ModelCard(str(render("heads", "org/name", **figures)))
    found = {result.metric_name: result for result in card.data.eval_results}
    assert {result.metric_type for result in card.data.eval_results} == {"tokens_per_forward", "speedup", "efficiency"}
    assert len(found) == 4
    speedup = found["speedup, batch size 1"]
    assert (speedup.metric_value, speedup.dataset_name) == (1.5, "org/prompts")
    conditions = {"machine": "a machine | with 2 cores", "precision": "float32", "batch_size": 1}
    assert conditions.items() <= speedup.metric_args.items()


def test_figures_are_in_the_text_with_their_conditions():
    text = render("heads", "org/name", **FULL["heads"]).text
    assert "| 1 | 2.25 | 1.50 | 0.67 |" in text
    assert "| 4 | 2.50 |  |  |" in text
    assert "| 0 | 50.0% | 87.5% |" in text
    assert "| 1 | 25.0% |  |" in text
    for words in ("float32", "plain generate, dynamic cache", "a machine | with 2 cores", "org/prompts"):
        assert words in text.replace("\\|", "|")
    for command in (RESULTS["benchmarks"][0]["command"], RESULTS["training"]["command"]):
        assert f"```bash\n{command}\n```" in text
    for fact in ("a" * 40, "0f" * 16, "8000 of 32000", "123,456", "65,536", "transformers 5.23.0"):
        assert fact in text


def test_a_card_without_results_has_no_figures():
    text = str(render("heads", "org/name", **BARE["heads"]))
    assert "model-index" not in text
    body = text.split("## What they are")[1]
    assert re.findall(r"\d+\.\d+|\d+ ?%", body) == []
    for heading in ("## How they were trained", "## Acceptance by head", "## Speed"):
        assert heading not in text
    assert "No speed has been measured" in text


def test_categories_are_rows_of_one_table_and_not_of_the_model_index():
    results = copy.deepcopy(RESULTS)
    whole = results["benchmarks"][0]["rows"][0]
    results["benchmarks"][0]["rows"] = [whole, {**whole, "category": "coding", "speedup": 7.77}]
    text = str(render("heads", "org/name", **{**BARE["heads"], "results": results}))
    assert "| category | batch size | tokens per forward | speedup | efficiency |" in text
    assert f"| all | {whole['batch_size']} |" in text
    assert re.search(r"\| coding \| .* \| 7.77 \|", text)
    assert "7.77" not in text.split("---")[1]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        *(
            (("benchmarks", 0, field), None, rf"benchmarks\[0\] has no `{field}`")
            for field in ("prompts", "machine", "precision", "baseline", "command")
        ),
        (("benchmarks", 0, "rows", 0, "speedup"), float("nan"), "speedup=nan"),
        (("benchmarks", 0, "rows", 0, "speedup"), "1.5", "speedup='1.5'"),
        (("benchmarks", 0, "rows", 0, "tokens_per_forward"), -1.0, "tokens_per_forward=-1.0"),
        (("benchmarks", 0, "rows", 0, "efficiency"), None, "efficiency=None"),
        (("benchmarks", 0, "rows", 0), {"speedup": 1.0}, "row without `batch_size`"),
        (("acceptance", "by_head", 0, "top1"), 1.5, r"acceptance.by_head\[0\] has `top1=1.5`"),
    ],
)
def test_speeds_without_conditions_and_values_that_are_no_measurement_are_refused(path, value, message, tmp_path):
    results = copy.deepcopy(RESULTS)
    functools.reduce(operator.getitem, path[:-1], results)[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        hub.write_results(tmp_path, **results)
    assert not list(tmp_path.iterdir())


def test_written_results_are_added_to_earlier_ones(tmp_path):
    hub.write_results(tmp_path, training=RESULTS["training"])
    hub.write_results(tmp_path, acceptance=RESULTS["acceptance"])
    written = json.loads((tmp_path / hub.RESULTS).read_text())
    assert written == {name: RESULTS[name] for name in ("training", "acceptance")}


# All that a card needs of heads that are not in the folder.
HEADS = SimpleNamespace(
    config=CloverConfig(vocab_size=24, hidden_size=16, num_attention_heads=4, target_name_or_path="org/target")
)


def test_folders_of_this_machine_are_not_in_the_results(tmp_path):
    made = {"model": "/home/me/models/target", "settings": {"model": "/home/me/models/target", "data": ["/data/x", 3]}}
    hub.write_results(tmp_path, regeneration=made)
    kept = json.loads((tmp_path / hub.RESULTS).read_text())["regeneration"]
    assert kept == {"model": "target", "settings": {"model": "target", "data": ["x", 3]}}


def test_a_card_can_be_written_before_the_heads_are_saved(tmp_path):
    card = hub.write_card(tmp_path, HEADS, repo_id="org/name", language="en", tags="mine")
    assert card.data.base_model == "org/target"
    assert card.data.language == "en"
    assert str(ModelCard.load(tmp_path / "README.md")) == str(card)
    again = hub.write_card(tmp_path, HEADS, repo_id="org/name", tags=["clover", "more"])
    assert again.data.tags == ["clover", "speculative-decoding", "custom_generate", "mine", "more"]


def test_the_card_of_an_adapter_keeps_the_name_of_the_target(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    hub.write_card(tmp_path, HEADS, repo_id="org/name")
    assert 'target = "org/target"' in hub.write_card(tmp_path, repo_id="org/name").text
    hub.write_results(tmp_path, target={"name": "org/fine-tuned"})
    assert 'target = "org/fine-tuned"' in hub.write_card(tmp_path, HEADS, repo_id="org/name").text


def test_a_card_written_by_hand_is_not_touched(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nMine.")
    assert hub.write_card(tmp_path, HEADS).text == "Mine."
    assert (tmp_path / "README.md").read_text() == "---\nlicense: mit\n---\nMine."


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("org/target", "org/target"),
        ("gpt2", "gpt2"),
        ("/home/me/models/my target", "my-target"),
        ("../up/target", "target"),
        ('x"); import os; os.remove("y', "x-import-os-os.remove-y"),
        ("org/a](http://elsewhere) [b", "elsewhere-b"),
    ],
)
def test_names_on_a_card_are_repositories_or_bare_words(name, shown):
    assert public_name(name) == shown
    card = render("heads", "org/name", config={**CONFIG, "target_name_or_path": name})
    assert f'from_pretrained("{shown}")' in card.text
    assert card.data.get("base_model") == (name if is_hub_id(name) else None)


def test_a_folder_that_looks_like_a_repository_is_a_folder(tmp_path, monkeypatch):
    (tmp_path / "models" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("models/target")
    assert public_name("models/target") == "target"


# ---------------------------------------------------------------------- secrets


def test_a_command_is_kept_without_tokens_and_folders(monkeypatch):
    token = "hf_" + "Ab3" * 12
    words = ["/opt/bin/hf-clover", "train", "--hub_token", "s3cret with spaces", "--token=s3cret"]
    words += ["--hub-token", token, "--output_dir=/home/me/heads", "--pad_token", "<pad>", "--dataset", "org/data"]
    monkeypatch.setattr(sys, "argv", words)
    made = provenance()
    kept = "hf-clover train --hub_token HIDDEN-TOKEN --token=HIDDEN-TOKEN --hub-token HIDDEN-TOKEN"
    assert made["command"] == f"{kept} --output_dir=heads --pad_token '<pad>' --dataset org/data"
    assert made["versions"]["hf-clover"]
    assert made["versions"]["transformers"]
    assert made["machine"]


def test_the_users_own_token_is_hidden_whatever_its_form(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "no-usual-form")
    hub.write_results(tmp_path, training={"command": "train no-usual-form", "settings": {"hub": "no-usual-form"}})
    hub.write_card(tmp_path, HEADS, repo_id="org/name", author="no-usual-form")
    for file in tmp_path.iterdir():
        assert "no-usual-form" not in file.read_text()
        assert "HIDDEN-TOKEN" in file.read_text()


# ---------------------------------------------------------------------- the wheel

OF_THE_WHEEL = pytest.mark.long("hf_clover/hub", "hub_cards", "MANIFEST.in")


@OF_THE_WHEEL
def test_the_wheel_holds_every_module_and_template(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "hf_clover").rglob("*.py")}
    cards = {f"hf_clover/hub_cards/{path.name}" for path in (REPOSITORY / "hub_cards").glob("*.md")}
    assert held == {*modules, *cards, "hf_clover/py.typed"}


@OF_THE_WHEEL
def test_cards_are_rendered_from_what_the_wheel_installs(site, client):
    rendering = f"cards.render('heads', 'org/name', **{BARE['heads']})"
    code = f"from hf_clover.hub import cards; print(cards.__file__); print({rendering})"
    place, _, text = client(code).stdout.partition("\n")
    assert Path(place).is_relative_to(site)
    assert text.rstrip() == str(render("heads", "org/name", **BARE["heads"])).rstrip()
