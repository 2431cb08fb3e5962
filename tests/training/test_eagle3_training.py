"""EAGLE-3 heads by the trainer: new ones, and published ones that go on."""

import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from training.tiny import make_target, make_trainer, own_text
from transformers import LlamaConfig, LlamaForCausalLM

from hf_clover import CloverTrainer, Eagle3Heads, load_heads

pytestmark = pytest.mark.long("hf_clover/training", "hf_clover/network", "hf_clover/origins")

VECTORS = Path(__file__).parents[1] / "reference_vectors" / "eagle3" / "llama_reduced" / "heads"


def trainer_of(heads, target, texts, folder, peft_config=None, **settings) -> CloverTrainer:
    options = {"model": heads, "peft_config": peft_config}
    settings = {"per_device_train_batch_size": 8, "model_init_kwargs": None, **settings}
    return make_trainer(folder, target, Dataset.from_dict({"input_ids": texts}), options=options, **settings)


def accepted(target, heads, prompt: list[int]) -> int:
    """Drafts, of 40 tokens that are plain generate's."""
    options = {"max_new_tokens": 40, "eos_token_id": None, "return_dict_in_generate": True}
    out = target.generate(torch.tensor([prompt]), **options, assistant_model=heads, num_assistant_tokens=8)
    assert torch.equal(out.sequences, target.generate(torch.tensor([prompt]), **options).sequences)
    return out.speculation.accepted_tokens


@pytest.mark.parametrize("settings", [{}, {"packing": True, "max_length": 64}, {"precompute_targets": True}])
def test_new_eagle3_heads_learn_to_draft(settings, tmp_path):
    target = make_target()
    texts = own_text(target)
    torch.manual_seed(0)
    heads = Eagle3Heads.from_target(target)
    heads.config.draft_copies = 0
    before = accepted(target, heads.eval(), texts[0][:3])
    trainer = trainer_of(heads, target, texts, tmp_path, max_steps=60, learning_rate=1e-2, **settings)
    trainer.train()
    assert accepted(target, trainer.heads.eval(), texts[0][:3]) > before + 8


@pytest.mark.parametrize("own", [False, True], ids=["borrowed", "own lm_head and embedding"])
def test_an_adapter_on_eagle3_heads_drafts_the_same_after_loading(own, tmp_path):
    """Trained, saved, loaded, merged: plain generate's tokens, and the same drafts are accepted."""
    target = make_target()
    texts = own_text(target)
    torch.manual_seed(0)
    heads = Eagle3Heads.from_target(target, draft_copies=0, own_lm_head=own, own_embedding=own)
    if own:
        heads.lm_head.load_state_dict(target.lm_head.state_dict())
        heads.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    heads.save_pretrained(tmp_path / "heads")
    before = accepted(target, heads.eval(), texts[0][:3])
    settings = {"max_steps": 40, "learning_rate": 2e-2}
    trainer = trainer_of(heads, target, texts, tmp_path / "adapter", LoraConfig(r=16), **settings)
    trainer.train()
    trainer.save_model()
    trained = accepted(target, trainer.heads.eval(), texts[0][:3])
    assert trained > before + 8
    adapted = PeftModel.from_pretrained(load_heads(tmp_path / "heads", target), tmp_path / "adapter").eval()
    parameters = adapted.get_base_model().named_parameters()
    names = {name.split(".lora_")[0] for name, _ in parameters if "lora_" in name}
    assert "fc" in names
    assert "layers.0.self_attn.q_proj" in names
    assert "lm_head" not in names, "which stays as it is, and is scored in chunks that need that"
    for kind in (adapted.get_base_model(), adapted.merge_and_unload()):
        assert type(kind) is Eagle3Heads
        assert accepted(target, kind, texts[0][:3]) == trained


def test_published_heads_keep_their_own_lm_head_and_embedding_in_training(tmp_path):
    torch.manual_seed(0)
    target = LlamaForCausalLM(
        LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4)
    ).eval()
    folder = Path(shutil.copytree(VECTORS, tmp_path / "published"))
    own = load_file(folder / "model.safetensors")
    texts = torch.randint(3, 32, (16, 24)).tolist()
    trainer = trainer_of(str(folder), target, texts, tmp_path / "more", max_steps=2, learning_rate=1e-2)
    trainer.train()
    trainer.save_model()
    heads = load_heads(tmp_path / "more", target)
    assert torch.equal(heads.lm_head.weight, own["lm_head.weight"])
    assert torch.equal(heads.embed_tokens.weight, own["embed_tokens.weight"])
    assert not torch.equal(heads.fc.weight, own["fc.weight"])
