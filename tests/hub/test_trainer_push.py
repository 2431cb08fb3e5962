"""`trainer.push_to_hub()` over HTTP: what is trained is a whole repository, in one commit."""

import json

import pytest
from hub_server import TOKEN
from huggingface_hub import ModelCard

pytestmark = pytest.mark.long("hf_clover/hub", "hub_cards", "hf_clover/network")

TRAIN = """
from datasets import Dataset
from hf_clover import CloverTrainer, CloverTrainingConfig
texts = Dataset.from_dict({{"input_ids": [list(range(2, 20))] * 8}})
args = CloverTrainingConfig(
    "trained", hub_model_id="org/trained", hub_token={token!r}, max_steps=1, per_device_train_batch_size=2,
    report_to=[], bf16=False, use_cpu=True, model_init_kwargs=dict(num_heads=2), eval_strategy="steps", eval_steps=1,
)
trainer = CloverTrainer(teacher_model={target!r}, args=args, train_dataset=texts, eval_dataset=texts)
trainer.train()
trainer.push_to_hub(dataset_name="org/data")
"""


def test_the_trainer_pushes_a_whole_repository_in_one_commit(hub, client, folders):
    done = client(TRAIN.format(token=TOKEN, target=str(folders.target)), HF_TOKEN=None)
    repository = hub.repositories["org/trained"]
    files = repository.files()
    assert len(repository.commits) == 2  # its creation, and one more
    assert {"config.json", "model.safetensors", "modeling_clover.py", "custom_generate/generate.py"} <= set(files)
    assert not [path for path in files if path.endswith(".bin") or "checkpoint-" in path]
    assert json.loads(files["clover_results.json"])["training"]["steps"] == 1
    card = ModelCard(files["README.md"].decode())
    assert 'AutoModel.from_pretrained("org/trained")' in card.text
    assert "## Acceptance by head" in card.text
    assert {"clover", "speculative-decoding", "custom_generate"} <= set(card.data.tags)
    everything = b"".join(files.values()) + (done.stdout + done.stderr).encode()
    assert TOKEN.encode() not in everything
    assert str(folders.target).encode() not in b"".join(files.values())


def test_a_failed_push_of_the_trainer_leaves_the_card(client, folders, tmp_path):
    code = TRAIN.format(token=TOKEN, target=str(folders.target))
    code = code.replace('"trained", hub', f"{str(tmp_path)!r}, hub")
    written = "trainer.save_model()\ntrainer.create_model_card(model_name='mine')\n"
    code = code.replace("trainer.push_to_hub(", f"{written}trainer.hub_model_id = None\ntrainer.push_to_hub(")
    done = client(code, fails=True, HF_TOKEN=None, HF_ENDPOINT="http://127.0.0.1:9")
    assert "ConnectionError: the Hub at http://127.0.0.1:9 does not answer" in done.stderr
    assert 'from_pretrained("mine")' in (tmp_path / "README.md").read_text()
    assert "datasets" not in json.loads((tmp_path / "clover_results.json").read_text())["training"]
    code = code.replace('hub_model_id="org/trained"', 'push_to_hub=True, hub_model_id="org/trained"')
    done = client(code, fails=True, HF_TOKEN=None, HF_ENDPOINT="http://127.0.0.1:9")
    assert "ConnectionError: the Hub at http://127.0.0.1:9 does not answer" in done.stderr, "before training"
