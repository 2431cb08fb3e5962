"""
A zoo of tiny random targets: one causal language model per architecture family, built from its config, no download.

Contract:
- `ZOO[name]` has a target's config, the attention implementations that it runs with, and the route by which Clover may
  decode it. "tree": one forward over a masked tree equals one forward per token. "chain": a tree's forward does not,
  but a forward over several tokens in order equals one forward per token, and the cache can be cropped. "replayed
  chain": the same for a state that cannot be cropped, so it is copied and run again. "plain": one token at a time
  only. The routes were seen to hold with transformers 5.23.
- `build(name)` is deterministic in `seed`: the same weights whatever the attention implementation or dtype (before
  rounding), without touching torch's global random state.
- Windows, chunks and local attention span 6 to 8 tokens, so they matter within a 40-token generation.
- The weights are redrawn so that the models behave. Greedy continuations use the whole vocabulary and depend on the
  prompt. The best two logits are 0.5 to 2 apart (median), and closer than 1e-3 in fewer than one step of 200; rounding
  changes a logit by at most 1e-4 in float32. Biases and norm weights are random: code that drops them fails.
- Token 0 is padding; its embedding row is zero, so greedy decoding does not choose it. No token ends a generation
  unless the caller passes `eos_token_id`.
- Plain generate itself has exceptions, which no test may assume away. A left-padded row of rwkv, recurrent_gemma or
  llama4_tuned differs from the same prompt alone. falcon_alibi differs between sdpa and eager, which adds its bias
  twice.

This module uses transformers only, and nothing of Clover.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

Route = Literal["tree", "chain", "replayed chain", "plain"]

BOTH = ("sdpa", "eager")
EAGER = ("eager",)


@dataclass(frozen=True)
class Case:
    """One target: `config_class` is a class name in transformers, `config` its keyword arguments.

    `gain` scales the blocks' matrices, `logit_gain` scales the output embedding, and `norm_shift` is added to the
    norms' weights. A family has its own values if continuations repeat one token with the defaults.
    """

    name: str
    config_class: str
    config: dict[str, Any]
    attn: tuple[str, ...] = BOTH
    route: Route = "tree"
    gain: float = 2.0
    logit_gain: float = 1.5
    norm_shift: float = 1.0

    @property
    def available(self) -> bool:
        """Whether the installed transformers has this architecture."""
        return hasattr(transformers, self.config_class)


# Shared parts of configs: the names that most families use, GPT-2's names, and parts that several cases repeat.
NARROW = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
LLAMA = NARROW | dict(intermediate_size=96, num_key_value_heads=2, max_position_embeddings=256)
DEEP = LLAMA | dict(num_hidden_layers=4)
GPT = dict(n_embd=64, n_layer=3, n_head=4, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
UNTIED = dict(tie_word_embeddings=False)
EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
SLIDING = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"] * 2)
GEMMA = DEEP | SLIDING | dict(head_dim=16, query_pre_attn_scalar=16)
GEMMA_GAINS = dict(gain=1.5, logit_gain=0.5, norm_shift=3.0)
LLAMA4 = DEEP | dict(
    head_dim=16,
    intermediate_size_mlp=96,
    num_local_experts=4,
    num_experts_per_tok=1,
    interleave_moe_layer_step=2,
    no_rope_layers=[1, 0, 1, 0],
    attention_chunk_size=8,
)
MLA = dict(q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
DEEPSEEK = dict(n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1)
YARN = dict(
    rope_type="yarn",
    rope_theta=150000.0,
    factor=4.0,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=64,
)

CASES = [
    # the same mask in every layer
    Case("llama", "LlamaConfig", LLAMA),
    Case("llama_bias", "LlamaConfig", LLAMA | dict(attention_bias=True, mlp_bias=True)),
    Case("llama_tied", "LlamaConfig", LLAMA | dict(tie_word_embeddings=True)),
    Case("qwen2", "Qwen2Config", LLAMA),
    Case("qwen3", "Qwen3Config", LLAMA | dict(head_dim=16)),
    Case("smollm3", "SmolLM3Config", DEEP | dict(no_rope_layer_interval=2)),
    Case("mistral", "MistralConfig", LLAMA | dict(sliding_window=6)),
    Case("mixtral", "MixtralConfig", LLAMA | EXPERTS),
    Case(
        "qwen3_moe",
        "Qwen3MoeConfig",
        LLAMA | EXPERTS | dict(head_dim=16, moe_intermediate_size=48, norm_topk_prob=True),
    ),
    Case("phi", "PhiConfig", LLAMA),
    Case("phi3", "Phi3Config", LLAMA | dict(original_max_position_embeddings=256)),
    Case(
        "opt",
        "OPTConfig",
        NARROW | dict(word_embed_proj_dim=64, ffn_dim=96, max_position_embeddings=256, dropout=0.0),
    ),
    Case("gpt2", "GPT2Config", GPT),
    Case("gpt_neox", "GPTNeoXConfig", NARROW | dict(intermediate_size=96, max_position_embeddings=256)),
    Case("gpt_bigcode", "GPTBigCodeConfig", GPT | dict(multi_query=True)),
    Case("starcoder2", "Starcoder2Config", LLAMA),
    Case("stablelm", "StableLmConfig", LLAMA | dict(use_qkv_bias=True)),
    Case("olmo2", "Olmo2Config", LLAMA),
    Case(
        "granite",
        "GraniteConfig",
        LLAMA | dict(embedding_multiplier=2.0, logits_scaling=1.5, residual_multiplier=0.8, attention_multiplier=0.3),
    ),
    Case("falcon", "FalconConfig", NARROW | dict(multi_query=True, alibi=False, bias=True)),
    Case("glm4", "Glm4Config", LLAMA | dict(head_dim=16)),
    Case(
        "deepseek_v3",
        "DeepseekV3Config",
        LLAMA | MLA | DEEPSEEK | dict(num_key_value_heads=4, n_shared_experts=1, moe_intermediate_size=48),
    ),
    Case("cohere", "CohereConfig", DEEP | UNTIED | dict(logit_scale=1.0, use_qk_norm=True), gain=2.5),
    Case("gptj", "GPTJConfig", GPT | dict(rotary_dim=8), attn=EAGER),
    # masks that differ from layer to layer
    Case(
        "qwen2_window",
        "Qwen2Config",
        DEEP | dict(use_sliding_window=True, sliding_window=6, max_window_layers=2),
    ),
    Case(
        "gemma2",
        "Gemma2Config",
        GEMMA | dict(attn_logit_softcapping=20.0, final_logit_softcapping=10.0),
        attn=EAGER,
        **GEMMA_GAINS,
    ),
    Case("gemma3", "Gemma3TextConfig", GEMMA, **GEMMA_GAINS),
    Case(
        "cohere2",
        "Cohere2Config",
        DEEP | SLIDING | dict(logit_scale=1.0),
        gain=2.5,
        logit_gain=3.0,
        norm_shift=0.0,
    ),
    Case("exaone4", "Exaone4Config", DEEP | SLIDING),
    Case("gpt_oss", "GptOssConfig", DEEP | SLIDING | EXPERTS | dict(head_dim=16, rope_parameters=YARN), attn=EAGER),
    Case("llama4", "Llama4TextConfig", LLAMA4),
    # positions or distances are counted in cache slots: a tree's nodes would get wrong ones
    Case(  # llama4 beyond its first `floor_scale` tokens, where it scales queries by their slot's index
        "llama4_tuned",
        "Llama4TextConfig",
        LLAMA4 | dict(floor_scale=4, attn_scale=0.5),
        route="chain",
    ),
    Case(
        "mpt",
        "MptConfig",
        UNTIED | dict(d_model=64, n_heads=4, n_layers=4, max_seq_len=256, use_cache=True),
        attn=EAGER,
        route="chain",
        norm_shift=0.0,
    ),
    Case(
        "gpt_neo",
        "GPTNeoConfig",
        dict(
            hidden_size=64,
            num_layers=4,
            num_heads=4,
            intermediate_size=96,
            attention_types=[[["global", "local"], 2]],
            window_size=6,
            max_position_embeddings=256,
        ),
        attn=EAGER,
        route="chain",
    ),
    Case(
        "bloom",
        "BloomConfig",
        UNTIED | dict(hidden_size=64, n_layer=4, n_head=4),
        attn=EAGER,
        route="chain",
    ),
    Case(
        "falcon_alibi",
        "FalconConfig",
        NARROW | UNTIED | dict(num_hidden_layers=4, multi_query=True, alibi=True, bias=True),
        route="chain",
        gain=1.5,
        norm_shift=0.0,
    ),
    # a convolution's state: transformers' cache can crop it, but it follows no mask
    Case("lfm2", "Lfm2Config", DEEP | dict(layer_types=["conv", "full_attention"] * 2), route="chain"),
    # a recurrent state
    Case(
        "qwen3_next",
        "Qwen3NextConfig",
        DEEP
        | dict(
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            shared_expert_intermediate_size=48,
            layer_types=["linear_attention", "full_attention"] * 2,
        ),
        route="replayed chain",
    ),
    Case(
        "mamba",
        "MambaConfig",
        dict(hidden_size=64, num_hidden_layers=3, state_size=8, time_step_rank=4),
        attn=EAGER,
        route="replayed chain",
    ),
    Case(
        "rwkv",
        "RwkvConfig",
        dict(hidden_size=64, attention_hidden_size=64, intermediate_size=96, num_hidden_layers=3, context_length=256),
        attn=EAGER,
        route="replayed chain",
    ),
    Case(
        "recurrent_gemma",
        "RecurrentGemmaConfig",
        NARROW | dict(intermediate_size=96, num_key_value_heads=2, lru_width=64, attention_window_size=8),
        route="plain",
    ),
    Case(
        "jamba",
        "JambaConfig",
        DEEP
        | dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1)
        | dict(num_experts=4, num_experts_per_tok=2, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False),
        route="replayed chain",
    ),
    Case(
        "bamba",
        "BambaConfig",
        DEEP | dict(attn_layer_indices=[1, 3], mamba_n_heads=4, mamba_d_head=32, mamba_d_state=8, mamba_chunk_size=16),
        route="replayed chain",
    ),
]
ZOO: dict[str, Case] = {case.name: case for case in CASES if case.available}


def build(
    name: str,
    attn_implementation: str | None = None,
    vocab_size: int = 32,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """The target `name`, in eval mode; by default with sdpa if it supports sdpa, else with eager attention."""
    case = ZOO[name]
    ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    config = getattr(transformers, case.config_class)(vocab_size=vocab_size, **ids, **case.config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation or case.attn[0]
        )
        redraw(model, case, torch.Generator().manual_seed(seed))
    model.generation_config.update(**ids, do_sample=False)
    for parameter in model.parameters():  # but not the buffers: transformers keeps rotary frequencies in float32
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    if dtype == torch.float64:  # experts use a grouped product by default, which has no double precision
        model.set_experts_implementation("eager")
    return model.eval()


@torch.no_grad()
def redraw(model: PreTrainedModel, case: Case, generator: torch.Generator) -> None:
    """Replace the initial weights by more varied ones, in place. Parameters of a recurrence are not changed."""
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter is outputs.weight:
            parameter.copy_(noise * case.logit_gain * parameter.shape[-1] ** -0.5)
        elif parameter is inputs:
            parameter.copy_(noise)
        elif parameter.ndim == 1 or "norm" in name or name.endswith("bias"):
            is_norm = name.endswith("weight") and ("norm" in name or "ln_" in name)
            parameter.add_(0.2 * noise + (case.norm_shift if is_norm else 0.0))  # norms start at 1, Gemma's at 0
        elif name.endswith(("weight", "_proj")):  # linear, convolution, experts
            if parameter.shape[-2] > 1:  # centred, so that an activation's mean does not become a fixed output
                noise -= noise.mean(-1, keepdim=True)
                noise -= noise.mean(-2, keepdim=True)
            parameter.copy_(noise * case.gain * parameter.shape[-1] ** -0.5)
    if outputs.weight is not inputs:  # makes the token just read less likely, so that no token repeats forever
        outputs.weight.sub_(0.2 * inputs)
    inputs[0] = 0
    outputs.weight[0] = 0
    if outputs.bias is not None:
        outputs.bias[0] = 0


def ragged_batch(vocab_size: int, lengths: tuple[int, ...] = (5, 9, 3), seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of unequal lengths, padded on the left with 0; their ids are drawn from 1 to `vocab_size` - 1."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        input_ids[row, -length:] = torch.randint(1, vocab_size, (length,), generator=generator)
        attention_mask[row, -length:] = 1
    return dict(input_ids=input_ids, attention_mask=attention_mask)
