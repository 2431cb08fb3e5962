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


def test_a_trained_repository(hub, client, folders):
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
