"""A tiny Llama and its tokenizer written as a GGUF file, as llama.cpp's converter would."""

from pathlib import Path

import gguf
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

NAMES = {  # of a layer's weights in transformers -> in a GGUF
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, architecture: str = "llama"
) -> None:
    """Matrices are rounded to 8 bits."""
    config, writer = target.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)

    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in vocabulary])
    writer.add_token_scores([0.0] * len(vocabulary))
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)

    outside = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, weight in target.state_dict().items():
        if name.startswith("model.layers."):
            _, _, layer, part = name.split(".", 3)
            written = f"blk.{layer}.{NAMES[part.removesuffix('.weight')]}.weight"
        else:
            written = outside.get(name, "output.weight")
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        heads = next((count for part, count in heads.items() if part in written), None)
        if heads is not None:  # llama.cpp rotates neighbours, transformers halves
            weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        data, kind = weight.to(torch.float32).contiguous().numpy(), gguf.GGMLQuantizationType.F32
        if data.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quants.quantize(data, kind)
        writer.add_tensor(written, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=False)
    writer.close()
