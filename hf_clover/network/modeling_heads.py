"""What all draft heads have in common: parts borrowed from the target, saving and loading, and ways to generate.

Contract: a subclass makes its layers in `build`; its `forward` returns what each head feeds into lm_head. The
target's lm_head, embedding and final norm are borrowed with `bind(target)` and never stored: a checkpoint holds head
weights only. `feature_layers` names the target's layers whose states are read. `new_drafter` makes the object that
drafts with the heads in one call of `generate`. This module does not know trees, walks, losses or the Hub. It is
pushed to the Hub as remote code, so it imports only torch, transformers and its flat siblings.

Shapes: B batch, T positions, d hidden size, V vocabulary, K heads, `...` any leading dimensions.
"""

import contextlib
import importlib
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.utils import ModelOutput

from .checkpoint_checks import check_checkpoint
from .configuration_heads import HeadsConfig
from .packing import is_packed, linear
from .target_parts import BorrowedParts, borrow, gather_rows, is_plain, unwrap

Rope = tuple[torch.Tensor, torch.Tensor]  # cosines and sines


@dataclass
class CloverOutput(ModelOutput):
    """`head_outputs` [K, B, T, d]: the input of lm_head from each head; `state` [B, T, d]: the start of head 0."""

    head_outputs: torch.Tensor | None = None
    state: torch.Tensor | None = None


class DraftHeads(PreTrainedModel):
    """Base class of heads that draft for one target."""

    config: HeadsConfig
    base_model_prefix = "heads"
    main_input_name = "hidden_states"
    _supports_sdpa = True
    supports_gradient_checkpointing = False
    text_memory: Any = None  # a `TextMemory` of the package, to copy drafts from
    learner: Any = None  # an `OnlineLearner` of the package, while it is open
    draft_ids: torch.Tensor  # [draft V] ids of the target; only if there is a draft vocabulary
    rotary_emb: nn.Module  # only if the config has rope
    _borrowed: BorrowedParts | None

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        self.build(config)
        if config.draft_vocab_size is not None:
            self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))
        self.generation_config = GenerationConfig()  # num_assistant_tokens None: measured speed chooses
        object.__setattr__(self, "_borrowed", None)
        self.post_init()

    def build(self, config: Any) -> None:
        """Make the layers."""
        raise NotImplementedError

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DraftHeads) and self.config.draft_vocab_size is not None:
            init.copy_(module.draft_ids, torch.arange(self.config.draft_vocab_size))

    # ------------------------------------------------------------------ the network

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., d]: rows of the target's lm_head or of its input embedding, as the config says."""
        rows = F.embedding(input_ids.to(self.borrowed.embedding.device), self.borrowed.embedding)
        return rows.to(device=input_ids.device, dtype=self.dtype)

    def rope_and_mask(
        self,
        x: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        past_key_values: Cache | None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor | None]:
        """Cosines and sines of the positions, and the mask that the attention layers take, from `encode`'s inputs."""
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]  # [1, T]
        if attention_mask is None or attention_mask.ndim == 2:
            made: Any = create_causal_mask(self.config, x, attention_mask, past_key_values, position_ids)
            attention_mask = made  # a tensor; only flex attention gets another type
        return self.rotary_emb(x, position_ids), attention_mask

    def score(self, x: torch.Tensor) -> torch.Tensor:
        """Logits from the target's lm_head, or from the heads' own.

        Args:
            x (`torch.Tensor` of shape `[..., d]`):
                Outputs of a head.

        Returns:
            `torch.Tensor` of shape `[..., V]`, or `[..., draft V]` if there is a draft vocabulary
        """
        return self.target_score(x)

    def target_score(self, x: torch.Tensor) -> torch.Tensor:
        """As `score`, always with the target's lm_head, even if the heads have one of their own."""
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
        """None: the target's are borrowed. FSDP calls this method."""

    def bind(self, target: nn.Module) -> Self:
        """Lend the target's lm_head, embedding and final norm to these heads. `generate` does this by itself.

        Args:
            target (`PreTrainedModel`):
                The model that these heads were made for; another is refused.

        Returns:
            `DraftHeads`: these heads
        """
        target = unwrap(target)
        lm_head = target.get_output_embeddings()
        kept = self._borrowed
        if kept is None or kept.source is not lm_head or kept.is_packed != is_packed(lm_head):
            object.__setattr__(self, "_borrowed", kept := borrow(self.config, target))
        if self.config.draft_vocab_size is not None:
            ids = self.draft_ids
            if kept.packed_ids is None or not torch.equal(kept.packed_ids, ids):  # plain rows may have been trained
                kept.draft_rows = gather_rows(kept.lm_head, ids)
                kept.packed_ids = ids.clone() if kept.is_packed else None
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles hold neither the target's parts nor the text memory nor the learner."""
        return {**self.__dict__, "_borrowed": None, "text_memory": None, "learner": None}

    # ------------------------------------------------------------------ generating, saving

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The target's layers whose states these heads read side by side, numbered as in transformers'
        `hidden_states`. Empty: heads read the input of the target's final norm."""
        return ()

    def new_drafter(
        self, network: "DraftHeads", prompt_mask: torch.Tensor | None = None, block: int | None = None
    ) -> Any:
        """A new `Drafter` of the package, which drafts with these heads in one call of `generate`.

        `network`: these heads, or the copy of them that a CPU runs faster; `prompt_mask` [B, T]: False at padding of
        the prompt; `block`: most positions that are encoded at once, None for no limit.
        """
        raise NotImplementedError

    def generate_with(
        self, model: PreTrainedModel, input_ids: torch.Tensor, num_assistant_tokens: int | None = None, **kwargs: Any
    ) -> Any:
        """For `model.generate(..., custom_generate=heads.generate_with)`, which works without the hook in `generate`.

        Args:
            model (`PreTrainedModel`):
                The target; `generate` passes it, like the arguments below.
            input_ids (`torch.Tensor` of shape `[B, T]`):
                The prompt.
            num_assistant_tokens (`int`, *optional*):
                Nodes of each tree; chosen by measured speed by default.
            kwargs:
                The arguments that transformers passes to a custom loop.

        Returns:
            what `generate` returns
        """
        generate_with = package("decoding.entry").generate_with
        return generate_with(self, model, input_ids, num_assistant_tokens=num_assistant_tokens, **kwargs)

    def _supports_logits_to_keep(self) -> bool:
        """transformers' own assisted generation calls this first; it gets Clover heads only if the hook is missing."""
        raise RuntimeError(
            "`assistant_model`: Clover heads need the hook of the hf_clover package. `import hf_clover` first, or "
            "pass `custom_generate=heads.generate_with` in place of `assistant_model`."
        )

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As `PreTrainedModel.save_pretrained`, with every file that `push_to_hub` uploads except the model card. The
        folder can be uploaded as it is."""
        os.makedirs(save_directory, exist_ok=True)
        self.generation_config.save_pretrained(save_directory)
        super().save_pretrained(save_directory, *args, **kwargs)
        with contextlib.suppress(ImportError):  # remote code may run without the package
            package("hub.code").write_generation_code(save_directory)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As `PreTrainedModel.from_pretrained`. Only safetensors files are read unless `use_safetensors=False`. A
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
            with contextlib.suppress(OSError):  # no such file: the defaults stay
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
        """As in transformers, after a check of the files. `expected_keys` is not None when an adapter is loaded."""
        is_trusted = not load_config.use_safetensors or load_config.ignore_mismatched_sizes
        if checkpoint_files and expected_keys is None and not is_trusted and not load_config.is_quantized:
            check_checkpoint(model, checkpoint_files, load_config.pretrained_model_name_or_path)
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:  # type: ignore[override]
        """Publish these heads with their model card in one commit.

        Args:
            repo_id (`str`):
                The repository, which is created if it does not exist.
            kwargs:
                `private`, `token`, `revision`, `create_pr`, `commit_message` and `commit_description` as for
                `huggingface_hub.HfApi.create_commit`; `results` and `plots`, measured figures and pictures for the
                card; any other name is a field of the card's metadata, such as `license`.

        Returns:
            `huggingface_hub.CommitInfo`

        Example:

        ```python
        >>> heads.push_to_hub("org/clover-heads", license="apache-2.0")  # doctest: +SKIP
        ```
        """
        return package("hub.push").push_heads(self, repo_id, **kwargs)


class PathHeads(DraftHeads):
    """Heads whose layers attend over the drafted path: for drafted tokens, their own states replace the target's."""

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's states, as the heads read them -> the features [B, T, d] beside the text's tokens."""
        raise NotImplementedError

    def advance(
        self,
        features: torch.Tensor,
        input_ids: torch.Tensor,
        rope: Rope,
        mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        """Features [B, T, d] and the tokens after them [B, T] -> the states [B, T, d] that predict the next token."""
        raise NotImplementedError

    def recycled(self, states: torch.Tensor) -> torch.Tensor:
        """[..., d] -> [..., d]: states as they replace features beside drafted tokens."""
        return states

    def output(self, states: torch.Tensor) -> torch.Tensor:
        """[..., d] -> [..., d]: the input of lm_head."""
        return states

    def encode(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> torch.Tensor:
        """The input of `features` and the tokens after it [B, T] -> the states [B, T, d] from which drafts start."""
        features = self.features(hidden_states)
        rope, attention_mask = self.rope_and_mask(features, attention_mask, position_ids, past_key_values)
        return self.advance(features, input_ids, rope, attention_mask, past_key_values)

    def new_drafter(
        self, network: DraftHeads, prompt_mask: torch.Tensor | None = None, block: int | None = None
    ) -> Any:
        return package("decoding.draft.path_drafter").PathDrafter(network, prompt_mask, block)


def package(module: str) -> ModuleType:
    """A module of the installed package. As remote code this file may run without the package."""
    try:
        return importlib.import_module(f"hf_clover.{module}")
    except ImportError as error:
        raise ImportError("This needs the hf_clover package: `pip install hf-clover`.") from error


__all__ = ["CloverOutput", "DraftHeads", "PathHeads"]
