"""EAGLE-3 heads by the trainer: new ones, and published ones that go on."""

import shutil
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from training.tiny import make_target, make_tokenizer, own_text
from transformers import LlamaConfig, LlamaForCausalLM

from hf_clover import CloverTrainer, CloverTrainingConfig, Eagle3Heads, load_heads

VECTORS = Path(__file__).parents[1] / "reference_vectors" / "eagle3" / "llama_reduced" / "heads"


def trainer_of(heads, target, texts, folder, **settings) -> CloverTrainer:
    args = CloverTrainingConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **settings,
    )
    data = Dataset.from_dict({"input_ids": texts})
    return CloverTrainer(
        model=heads, teacher_model=target, args=args, train_dataset=data, processing_class=make_tokenizer()
    )


@pytest.mark.parametrize("settings", [{}, {"packing": True, "max_length": 64}, {"precompute_targets": True}])
def test_new_ones_learn(settings, tmp_path):
    target = make_target()
    texts = own_text(target)
    torch.manual_seed(0)
    heads = Eagle3Heads.from_target(target)
    prompt = torch.tensor([texts[0][:3]])
    options = {"max_new_tokens": 40, "eos_token_id": None, "return_dict_in_generate": True}

    def accepted(heads) -> int:
        out = target.generate(prompt, **options, assistant_model=heads, num_assistant_tokens=8)
        assert torch.equal(out.sequences, target.generate(prompt, **options).sequences)
        return out.speculation.accepted_tokens

    heads.config.draft_copies = 0
    before = accepted(heads.eval())
    trainer = trainer_of(heads, target, texts, tmp_path, max_steps=60, learning_rate=1e-2, **settings)
    trainer.train()
    assert accepted(trainer.heads.eval()) > before + 8


def test_published_ones_go_on_with_what_they_have_of_their_own(tmp_path):
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
