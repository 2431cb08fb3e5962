"""Clover heads: the network alone.

Contract: `heads(hidden_states, input_ids)` takes the target's hidden states *before* its final norm at positions
0..T-1 and the tokens that follow them (`input_ids[:, t]` is the token at position t+1). `out.head_outputs[i]` is what
head i feeds into the target's lm_head, teacher-forced, valid for the first T-i positions and zero after; head i
guesses the token at position t+2+i. `heads.score(x)` applies the borrowed lm_head. Decoding uses the same parts one
at a time: `encode` (once per token of the target), `recall` and `step` (once per level of a draft).

The target's lm_head, embedding and final norm are borrowed with `bind(target)` and never stored: a checkpoint holds
head weights only. This module does not know trees, walks, losses or the Hub. It travels to the Hub as remote code, so
it imports torch, transformers and its flat siblings only.

Shapes: B batch, T positions, d hidden size, V vocabulary, K heads, `...` any leading dimensions.
"""

import contextlib
import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.utils import ModelOutput

from .blocks import (
    AttentionDecoder,
    AugmentingLayer,
    CloverAttention,
    CloverMLP,
    CloverRMSNorm,
    EntryProjector,
    GatedDecoder,
    MLPDecoder,
    ResidualBlock,
    places_along,
    started_linear,
    values_at,
)
from .checkpoint_checks import check_checkpoint
from .configuration_clover import CloverConfig
from .packing import is_packed, linear
from .target_parts import BorrowedParts, borrow, gather_rows, is_plain, unwrap

INIT_NOISE = 0.01  # of the matrices that the papers start near the identity or near zero


@dataclass
class CloverOutput(ModelOutput):
    """`head_outputs` [K, B, T, d]: what each head feeds into lm_head; `state` [B, T, d]: what head 0 starts from."""

    head_outputs: torch.Tensor | None = None
    state: torch.Tensor | None = None


class CloverHeads(PreTrainedModel):
    """
    Draft heads for one target, made by `from_target`, `from_pretrained` (or `AutoModel`) or
    `from_reference_checkpoint`.

    Given to the target's `generate` as `assistant_model`, they draft what it verifies. The target's lm_head, embedding
    and final norm are borrowed, and a checkpoint holds the heads' own weights only. Two attributes say how they draft:
    `generation_config.num_assistant_tokens`, the nodes of a tree (the machine chooses by default), and `text_memory`,
    a `TextMemory` to copy from.

    Args:
        config ([`CloverConfig`]):
            What they are built from.

    Example:

    ```python
    >>> import hf_clover
    >>> from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    >>> tokenizer = AutoTokenizer.from_pretrained("org/target")
    >>> model = AutoModelForCausalLM.from_pretrained("org/target")
    >>> heads = AutoModel.from_pretrained("org/clover-heads")

    >>> inputs = tokenizer("def f(x):", return_tensors="pt")
    >>> plain = model.generate(**inputs, max_new_tokens=16)
    >>> drafted = model.generate(**inputs, assistant_model=heads, max_new_tokens=16)
    >>> bool((drafted == plain).all())
    True
    ```
    """

    config: CloverConfig
    config_class = CloverConfig
    base_model_prefix = "heads"
    main_input_name = "hidden_states"
    _no_split_modules = ["AugmentingLayer"]
    _supports_sdpa = True
    supports_gradient_checkpointing = False
    text_memory: Any = None  # a `TextMemory` of the package, to copy drafts from
    draft_ids: torch.Tensor  # [draft V] ids of the target, where there is a draft vocabulary
    _borrowed: BorrowedParts | None

    def __init__(self, config: CloverConfig) -> None:
        super().__init__(config)
        decoders = {"attention": AttentionDecoder, "mlp": MLPDecoder, "gated": GatedDecoder, "none": None}
        decoder = decoders[config.decoder]
        size, eps, projector = config.hidden_size, config.rms_norm_eps, config.output_projector
        if decoder is not None and config.has_entry_decoder:
            self.entry_decoder = decoder(config) if config.entry == "decoder" else EntryProjector(config)
        if config.has_augmenting_block:
            self.layers = nn.ModuleList(AugmentingLayer(config, i) for i in range(config.num_augmenting_layers))
            from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # which may be loading us

            self.rotary_emb = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]  # it reads what any config has
        # Otherwise nothing was changed, and the target's own norm closes, or what was changed is normed already.
        if (config.has_augmenting_block or config.has_entry_decoder) and not config.normalize_hidden_states:
            self.norm = CloverRMSNorm(size, eps)
        if decoder is not None and config.num_later_heads > 0:
            self.decoder = decoder(config)
        if config.recall:
            values_size = config.num_key_value_heads * config.head_dim
            self.recalled = started_linear(values_size, 2 * config.decoder_width, False, "even")
        if projector == "fc":
            if self._head_0_has_no_decoder:
                self.first_fc = started_linear(size, size, True, "identity")
            # One for all later heads; without the Regressive Connection they would all say the same, so one each.
            count = 1 if config.can_draft_beyond_heads else config.num_later_heads
            self.fc = nn.ModuleList(started_linear(2 * size, size, True, "identity") for _ in range(count))
        if projector == "residual":
            self.residual_blocks = nn.ModuleList(ResidualBlock(size) for _ in range(config.num_heads))
        else:
            self.head_norm = CloverRMSNorm(size, eps)
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))
        self.generation_config = GenerationConfig()  # num_assistant_tokens None: the machine chooses
        object.__setattr__(self, "_borrowed", None)
        self.post_init()

    # ------------------------------------------------------------------ the network

    @property
    def _head_0_has_no_decoder(self) -> bool:
        return self.config.decoder_position == "before"

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the target's lm_head or input embedding, as the config says.

        Args:
            input_ids (`torch.Tensor` of shape `[...]`):
                Tokens.

        Returns:
            `torch.Tensor` of shape `[..., d]`
        """
        rows = F.embedding(input_ids.to(self.borrowed.embedding.device), self.borrowed.embedding)
        rows = rows.to(device=input_ids.device, dtype=self.dtype)
        if self.config.normalize_embeddings:
            rows = F.normalize(rows, dim=-1)
        return rows if self.config.embedding_scale == 1.0 else rows * self.config.embedding_scale

    def encode(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        """The states that head 0 starts from, once per token of the target.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, T, d]`):
                The target's, before its final norm.
            input_ids (`torch.Tensor` of shape `[B, T]`):
                The tokens after them.
            attention_mask (`torch.Tensor`, *optional*):
                2-D (padding) or, with a cache, 4-D as `scaled_dot_product_attention` takes it.
            position_ids (`torch.Tensor` of shape `[1 or B, T]`, *optional*):
                Positions go on from the cache's length unless they are given.
            past_key_values (`Cache`, *optional*):
                Of `config.num_cache_layers` layers.

        Returns:
            `torch.Tensor` of shape `[B, T, d]`
        """
        return self._encode(hidden_states, input_ids, attention_mask, position_ids, past_key_values)[0]

    def _encode(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        past_key_values: Cache | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None]:
        """The states, and of the text they look at the tokens [B, C], the last layer's values and its mask."""
        x, to_recall = hidden_states.to(self.dtype), None
        if self.config.normalize_hidden_states:
            x = self._target_norm(x) * self.config.hidden_state_scale
        if self.config.has_entry_decoder:
            x = self.entry_decoder(x, self.embed(input_ids))
        if self.config.has_augmenting_block:
            rope, attention_mask = self.rope_and_mask(x, attention_mask, position_ids, past_key_values)
            for layer in self.layers:
                x, values = layer(x, rope, attention_mask, past_key_values)
            if self.config.recall:
                tokens = input_ids[:, None, :, None]  # [B, 1, T, 1], as a cache takes them
                if past_key_values is not None:
                    tokens, _ = past_key_values.update(tokens, tokens, len(self.layers))  # [B, 1, C, 1]
                to_recall = tokens[:, 0, :, 0], values, attention_mask
        if hasattr(self, "norm"):
            x = self.norm(x)
        elif not self.config.normalize_hidden_states:
            x = self._target_norm(x)
        return x, to_recall

    def recall(self, values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """What `step` is told where the text may go on as it did before.

        Args:
            values (`torch.Tensor` of shape `[B, kv_heads, C, head_dim]`):
                Of the block's last attention.
            places (`torch.Tensor` of shape `[B, T]`):
                Of the text, from which it may go on.

        Returns:
            `torch.Tensor` of shape `[B, T, 2 w]`
        """
        return self.recalled(values_at(values, places))

    def rope_and_mask(
        self,
        x: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        past_key_values: Cache | None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
        """What layers over the sequence take, from what `encode` is given."""
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]  # [1, T]
        if attention_mask is None or attention_mask.ndim == 2:
            made: Any = create_causal_mask(self.config, x, attention_mask, past_key_values, position_ids)
            attention_mask = made  # a tensor; another kind is flex attention's
        return self.rotary_emb(x, position_ids), attention_mask

    def _target_norm(self, x: torch.Tensor) -> torch.Tensor:
        """The target's final norm, in its own dtype and on its own device."""
        norm = self.borrowed.norm
        like = [*norm.parameters(), x][0]  # torch 2.6 does not compile `next` with a default
        return norm(x.to(like)).to(x)

    def step(
        self, level: int, state: torch.Tensor, input_ids: torch.Tensor, recalled: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One head, once per level of a draft.

        Args:
            level (`int`):
                Which head, from 0.
            state (`torch.Tensor` of shape `[..., d]`):
                What `encode` gave at level 0, and without the Regressive Connection at every level; else what the
                level before gave.
            input_ids (`torch.Tensor` of shape `[...]`):
                The token before its guess: the target's own at level 0, and without the Regressive Connection at every
                level.
            recalled (`torch.Tensor` of shape `[..., 2 w]`, *optional*):
                What `recall` gave, for heads that recall.

        Returns:
            `tuple` of two `torch.Tensor`: what goes into lm_head and the next state, both of shape `[..., d]`
        """
        embedding = None
        if not (level == 0 and self._head_0_has_no_decoder):
            if self.config.decoder != "none" or self.config.output_projector == "fc":
                embedding = self.embed(input_ids)
            if self.config.decoder != "none":
                decoded = self.decoder(state, embedding, *(() if recalled is None else (recalled,)))
                return self._project(level, decoded, embedding), decoded if self.config.regressive else state
        return self._project(level, state, embedding), state

    def _project(self, level: int, state: torch.Tensor, embedding: torch.Tensor | None) -> torch.Tensor:
        if self.config.output_projector == "residual":
            return self.residual_blocks[level](state)
        if self.config.output_projector == "none":
            return self.head_norm(state)
        if embedding is None:
            return self.head_norm(self.first_fc(state))
        fc = self.fc[0] if self.config.can_draft_beyond_heads else self.fc[level - self._head_0_has_no_decoder]
        return self.head_norm(fc(torch.cat((state, embedding), dim=-1)))

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        return_dict: bool = True,
    ) -> CloverOutput | tuple[torch.Tensor, ...]:
        """All heads over a text that is known already, as in training.

        Args:
            hidden_states (`torch.Tensor` of shape `[B, T, d]`):
                The target's, before its final norm.
            input_ids (`torch.Tensor` of shape `[B, T]`):
                The tokens after them.
            attention_mask (`torch.Tensor`, *optional*):
                As for `encode`.
            position_ids (`torch.Tensor`, *optional*):
                As for `encode`.
            past_key_values (`Cache`, *optional*):
                As for `encode`.
            return_dict (`bool`, *optional*, defaults to `True`):
                Off, a tuple in place of the dictionary.

        Returns:
            `CloverOutput`: `head_outputs` of shape `[K, B, T, d]`, of which head i has the first T - i places, and
            `state`
        """
        if hidden_states.shape[:2] != input_ids.shape:
            raise ValueError(
                f"`input_ids` {tuple(input_ids.shape)} must have one token per position of `hidden_states` "
                f"{tuple(hidden_states.shape)}: input_ids[:, t] is the token that follows hidden_states[:, t]."
            )
        first, to_recall = self._encode(hidden_states, input_ids, attention_mask, position_ids, past_key_values)
        state, length, outputs, places = first, input_ids.shape[1], [], None
        if to_recall is not None and length:
            text, values, mask = to_recall
            places = places_along(text, mask, input_ids, self.config.num_heads)  # of each level [B, T]
        for level in range(self.config.num_heads):
            valid = max(length - level, 0)
            tokens = input_ids[:, level:] if self.config.regressive else input_ids[:, :valid]  # [B, T - level]
            recalled = () if places is None else (self.recall(values, places[level][:, :valid]),)  # [B, T - level, .]
            out, state = self.step(level, state[:, :valid], tokens, *recalled)  # [B, T - level, d]
            outputs.append(F.pad(out, (0, 0, 0, length - valid)))
        output = CloverOutput(head_outputs=torch.stack(outputs), state=first)
        return output if return_dict else output.to_tuple()

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """The borrowed lm_head.

        Args:
            x (`torch.Tensor` of shape `[..., d]`):
                What a head gave.

        Returns:
            `torch.Tensor` of shape `[..., V]`, or `[..., draft V]` where there is a draft vocabulary
        """
        borrowed = self.borrowed
        if borrowed.draft_rows is not None:
            rows, bias = borrowed.draft_rows
            logits = linear(x.to(rows.dtype), rows, bias)
        elif self.config.draft_vocab_size is None:
            weight = getattr(borrowed.lm_head, "weight", None)
            logits = borrowed.lm_head(x.to(weight.dtype if is_plain(weight) else x.dtype))
        else:
            logits = borrowed.lm_head(x)[..., self.draft_ids]
        return borrowed.scale(logits)

    # ------------------------------------------------------------------ the target's parts

    @property
    def borrowed(self) -> BorrowedParts:
        if self._borrowed is None:
            raise RuntimeError("These heads are not bound to a target: call `heads.bind(target)` first.")
        return self._borrowed

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """None of their own: the target's are borrowed. FSDP asks."""

    def bind(self, target: nn.Module) -> "CloverHeads":
        """Lend the target's lm_head, embedding and final norm to these heads. `generate` does it by itself.

        Args:
            target (`PreTrainedModel`):
                The one that these heads were made for; another is refused.

        Returns:
            `CloverHeads`: these heads
        """
        target = unwrap(target)
        lm_head = target.get_output_embeddings()
        kept = self._borrowed
        if kept is None or kept.source is not lm_head or kept.is_packed != is_packed(lm_head):
            object.__setattr__(self, "_borrowed", kept := borrow(self.config, target))
        if self.config.draft_vocab_size is not None:
            ids = self.draft_ids
            if kept.packed_ids is None or not torch.equal(kept.packed_ids, ids):  # plain rows may have learned since
                kept.draft_rows = gather_rows(kept.lm_head, ids)
                kept.packed_ids = ids.clone() if kept.is_packed else None
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave the target behind, and the texts of others."""
        return {**self.__dict__, "_borrowed": None, "text_memory": None}

    # ------------------------------------------------------------------ making, saving, generating

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, CloverHeads) and self.config.draft_vocab_size is not None:
            init.copy_(module.draft_ids, torch.arange(self.config.draft_vocab_size))
        if not isinstance(module, nn.Linear):
            return
        start = getattr(module, "start", None)
        if start == "zero":
            init.zeros_(module.weight)
        elif start == "noise":
            init.uniform_(module.weight, 0.0, INIT_NOISE)
        elif start == "even":
            init.normal_(module.weight, 0.0, module.in_features**-0.5)
        elif start == "beside":
            weight = torch.empty_like(module.weight).normal_(0.0, module.out_features**-0.5)
            nn.init.eye_(weight[:, : module.out_features])
            init.copy_(module.weight, weight)
        elif start in ("identity", "gaussian identity"):
            noise = torch.empty_like(module.weight)
            noise = noise.normal_(0.0, INIT_NOISE) if "gaussian" in start else noise.uniform_(0.0, INIT_NOISE)
            init.copy_(module.weight, noise + torch.eye(*noise.shape, device=noise.device, dtype=noise.dtype))

    @classmethod
    def from_target(cls, target: nn.Module, variant: str = "clover-x", **fields: Any) -> "CloverHeads":
        """New heads, on the target's device and in its dtype.

        Args:
            target (`PreTrainedModel`):
                A decoder-only model, whole.
            variant (`str`, *optional*, defaults to `"clover-x"`):
                As in `CloverConfig`.
            fields:
                Any other field of `CloverConfig`.

        Returns:
            `CloverHeads`: heads that change no token and guess few of them, until they are trained

        Example:

        ```python
        >>> from hf_clover import CloverHeads
        >>> from transformers import AutoModelForCausalLM

        >>> model = AutoModelForCausalLM.from_pretrained("org/target")
        >>> CloverHeads.from_target(model, num_heads=3).config.num_heads
        3
        ```
        """
        return _package("making.from_target").heads_from_target(cls, target, variant, fields)

    @classmethod
    def from_reference_checkpoint(
        cls, folder: str | os.PathLike, target: PreTrainedModel, allow_pickle: bool = False
    ) -> "CloverHeads":
        """Heads trained with the papers' public reference, computing what the reference computes.

        Args:
            folder (`str` or `os.PathLike`):
                The checkpoint's.
            target (`PreTrainedModel`):
                The one that they were trained for.
            allow_pickle (`bool`, *optional*, defaults to `False`):
                Read torch files where there is no safetensors file, of which weights alone are read.

        Returns:
            `CloverHeads`: bound to the target
        """
        return _package("making.reference").heads_from_reference_checkpoint(cls, folder, target, allow_pickle)

    def generate_with(
        self, model: PreTrainedModel, input_ids: torch.Tensor, num_assistant_tokens: int | None = None, **kwargs: Any
    ) -> Any:
        """For `model.generate(..., custom_generate=heads.generate_with)`: the door that needs no hook.

        Args:
            model (`PreTrainedModel`):
                The target; `generate` gives it, and all that follows.
            input_ids (`torch.Tensor` of shape `[B, T]`):
                The prompt.
            num_assistant_tokens (`int`, *optional*):
                Nodes of each tree; the machine chooses by default.
            kwargs:
                What transformers gives to a custom loop.

        Returns:
            what `generate` returns
        """
        generate_with = _package("decoding.entry").generate_with
        return generate_with(self, model, input_ids, num_assistant_tokens=num_assistant_tokens, **kwargs)

    def _supports_logits_to_keep(self) -> bool:
        """transformers' own assisted generation asks this first, and gets heads only where the hook is missing."""
        raise RuntimeError(
            "`assistant_model`: Clover heads need the hook of the hf_clover package. `import hf_clover` first, or "
            "pass `custom_generate=heads.generate_with` in place of `assistant_model`."
        )

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As `PreTrainedModel.save_pretrained`, and with all that a push would bring but the card: the folder can be
        uploaded as it is."""
        os.makedirs(save_directory, exist_ok=True)
        self.generation_config.save_pretrained(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)
        with contextlib.suppress(ImportError):  # remote code may run without the package
            _package("hub.code").write_generation_code(save_directory)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As `PreTrainedModel.from_pretrained`. Safetensors alone is read unless `use_safetensors=False`, and a
        checkpoint that does not fit its configuration is refused before memory is taken for it."""
        hub_options = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
        hub_kwargs = {name: kwargs[name] for name in hub_options if kwargs.get(name) is not None}
        if kwargs.get("use_safetensors") is None:
            kwargs["use_safetensors"] = True
        try:
            loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        except SafetensorError as error:
            raise ValueError(
                f"`{pretrained_model_name_or_path}` holds a safetensors file that is damaged or cut short ({error}): "
                "save or download it again."
            ) from error
        heads = loaded[0] if isinstance(loaded, tuple) else loaded
        if pretrained_model_name_or_path is not None:
            with contextlib.suppress(OSError):  # no such file: the defaults stand
                heads.generation_config = GenerationConfig.from_pretrained(pretrained_model_name_or_path, **hub_kwargs)
        return loaded

    @staticmethod
    def _load_pretrained_model(
        model: PreTrainedModel,
        state_dict: dict[str, torch.Tensor] | None,
        checkpoint_files: list[str] | None,
        load_config: Any,
        expected_keys: list[str] | None = None,
    ) -> Any:
        """transformers' own, after a look at the files; `expected_keys` are given where it loads an adapter's."""
        is_trusted = not load_config.use_safetensors or load_config.ignore_mismatched_sizes
        if checkpoint_files and expected_keys is None and not is_trusted and not load_config.is_quantized:
            check_checkpoint(model, checkpoint_files, load_config.pretrained_model_name_or_path)
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:  # type: ignore[override]
        """Publish these heads with their model card in one commit.

        Args:
            repo_id (`str`):
                The repository, which is made where it does not exist.
            kwargs:
                `private`, `token`, `revision`, `create_pr`, `commit_message` and `commit_description` as for
                `huggingface_hub.HfApi.create_commit`; `results` and `plots`, measured figures and pictures for the
                card; and what else the card's metadata is to have, such as `license`.

        Returns:
            `huggingface_hub.CommitInfo`

        Example:

        ```python
        >>> heads.push_to_hub("org/clover-heads", license="apache-2.0")  # doctest: +SKIP
        ```
        """
        return _package("hub.push").push_heads(self, repo_id, **kwargs)


def _package(module: str) -> ModuleType:
    """A module of the installed package: this file may be running as remote code, which has the network alone."""
    try:
        return importlib.import_module(f"hf_clover.{module}")
    except ImportError as error:
        raise ImportError("This needs the hf_clover package: `pip install hf-clover`.") from error


CloverHeads.register_for_auto_class("AutoModel")

__all__ = [
    "AttentionDecoder",
    "AugmentingLayer",
    "CloverAttention",
    "CloverHeads",
    "CloverMLP",
    "CloverOutput",
    "CloverRMSNorm",
    "MLPDecoder",
    "ResidualBlock",
]
