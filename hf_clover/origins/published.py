"""Load heads by name: our own, and EAGLE-3 heads in the formats in which others publish them.

Contract: `load_heads` returns heads that are bound to their target and compute what their authors' code computes.
Nothing is guessed: if a format leaves something open, or something does not fit, a `ValueError` names it. Only
safetensors files are read, unless the caller allows a pickle; then only tensors are taken from it.

There are four formats: that of EAGLE's authors, that of SpecForge and ModelOpt, that of `speculators`, and DeepSpec's.
They differ in names, in what they state, and in how they number layers. The network is the same in all of them.

Shapes: V vocabulary, D draft vocabulary, d hidden size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from ..network.configuration_eagle3 import Eagle3Config
from ..network.modeling_eagle3 import Eagle3Heads
from ..network.modeling_heads import DraftHeads
from ..network.packing import plain_weight
from ..network.target_parts import find_decoder, unwrap
from ..network.variants import MODEL_TYPES
from ..targets.loading import check_path
from .from_target import COPIES, identity_of, paper_layers

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# The name of each format in messages.
AUTHORS, SPECFORGE, SPECULATORS, DEEPSPEC = "EAGLE's own", "SpecForge's", "speculators'", "DeepSpec's"
ROPE_BASE = 10000.0  # rotary base in every format if none is stated; never the target's
SKIPPED = ("t2d", "rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq")


def load_heads(
    name: "str | Path",
    target: nn.Module | None = None,
    layer_ids: Sequence[int] | None = None,
    allow_pickle: bool = False,
    dtype: torch.dtype | None = None,
    **hub_arguments: Any,
) -> DraftHeads:
    """
    Loads draft heads from the Hub or a folder: Clover's, or EAGLE-3 in any published format.

    Args:
        name (`str` or `Path`):
            Id on the Hub, or folder.
        target (`PreTrainedModel`, *optional*):
            The model that the heads draft for. Some formats need it to be loaded at all. Without it, other heads are
            bound to the target of their first `generate`.
        layer_ids (`Sequence[int]`, *optional*):
            Layers of the target that EAGLE-3 heads read, if their repository does not state them; numbered as in
            transformers' `hidden_states`.
        allow_pickle (`bool`, *optional*, defaults to `False`):
            Whether to read a `pytorch_model.bin` if there is no safetensors file. Only tensors are taken from it.
        dtype (`torch.dtype`, *optional*):
            Dtype of the heads; the target's by default.
        hub_arguments:
            `revision`, `token`, `cache_dir` and other arguments of `from_pretrained`.

    Returns:
        `DraftHeads`: to be passed to `generate` as `assistant_model`

    Example:

    ```python
    >>> import hf_clover
    >>> from transformers import AutoModelForCausalLM

    >>> target = AutoModelForCausalLM.from_pretrained("org/target")
    >>> heads = hf_clover.load_heads("org/clover-heads", target)
    >>> type(heads).__name__
    'CloverHeads'
    ```
    """
    check_path(name, "heads")
    config, name = _config_of(name, hub_arguments), str(name)
    model = None if target is None else unwrap(target)
    dtype = dtype or (None if model is None else model.dtype)
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if config.get("model_type") in MODEL_TYPES:
        heads = AutoModel.from_pretrained(name, **options, **hub_arguments)
    else:
        folder = _folder(name, allow_pickle, hub_arguments)
        heads = read_eagle3(folder, config, model, layer_ids, allow_pickle, name).to(**options)
    if model is not None:
        heads.to(model.device)
        heads.bind(model)
    return heads.eval()


def _folder(name: str, allow_pickle: bool, hub_arguments: dict[str, Any]) -> Path:
    """The folder of the files. For a repository on the Hub, config and weights are downloaded first."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser() / hub_arguments.get("subfolder", "")
    patterns = ["*.json", "*.safetensors", *(["*.bin"] if allow_pickle else [])]
    options = {key: value for key, value in hub_arguments.items() if key in HUB_ARGUMENTS}
    return Path(snapshot_download(name, allow_patterns=patterns, **options)) / hub_arguments.get("subfolder", "")


def is_of_others(name: Any, hub_arguments: dict[str, Any]) -> bool:
    """Whether the heads `name` are in a format that is not ours."""
    return name is not None and _config_of(name, hub_arguments).get("model_type") not in MODEL_TYPES


def _config_of(name: Any, hub_arguments: dict[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in hub_arguments.items() if key in (*HUB_ARGUMENTS, "subfolder")}
    config, _ = PreTrainedConfig.get_config_dict(name, **options)
    if not config:
        raise ValueError(f"`{name}` has no config.json: these are no heads.")
    return config


def format_of(config: dict[str, Any], name: Any) -> str:
    """The EAGLE-3 format of heads with this `config`."""
    kind, architectures = config.get("speculators_model_type"), config.get("architectures") or [None]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if kind == "eagle3":
        return SPECULATORS
    if kind is None and architecture == "Qwen3Eagle3Model":
        return DEEPSPEC
    if kind is None and architecture == "LlamaForCausalLMEagle3":
        return SPECFORGE
    if kind is None and architecture == "LlamaForCausalLM" and "draft_vocab_size" in config:
        return AUTHORS
    what = f"speculators_model_type={kind!r}" if kind is not None else f"architectures={architecture!r}"
    raise ValueError(
        f"`{name}` holds no heads that are known here ({what}, model_type={config.get('model_type')!r}): Clover's and "
        "EAGLE-3 are, the latter in the formats of its authors, SpecForge, ModelOpt, speculators and DeepSpec."
    )


def read_eagle3(
    folder: Path,
    config: dict[str, Any],
    model: PreTrainedModel | None,
    layer_ids: Sequence[int] | None,
    allow_pickle: bool,
    name: str,
) -> Eagle3Heads:
    form = format_of(config, name)
    tensors = _renamed(_tensors(folder, allow_pickle, name), config, name)
    fields = _fields(form, config, tensors, name)
    if model is not None:
        identity = identity_of(model)
        _check_fits(fields, identity, name)
        fields |= {key: value for key, value in identity.items() if key != "hidden_size"}
        tensors = _without_copies(tensors, model)
    fields["source_name_or_path"] = Path(name).name if Path(name).is_dir() else name
    fields["layer_ids"] = _layers(form, config, model, layer_ids, name)
    fields["own_embedding"], fields["own_lm_head"] = ("embed_tokens.weight" in tensors), ("lm_head.weight" in tensors)
    wide = tensors["fc.weight"].shape[1] / len(fields["layer_ids"])
    if wide != fields["target_hidden_size"]:
        raise ValueError(
            f"`{name}` fuses {tensors['fc.weight'].shape[1]} numbers (`fc.weight`), but layers {fields['layer_ids']} "
            f"of a target with hidden size {fields['target_hidden_size']} have {len(fields['layer_ids'])} times the "
            "hidden size: pass the `layer_ids` and the target that these heads were trained with."
        )
    ids = tensors.pop("draft_ids", None)
    with torch.device("meta"):
        heads = Eagle3Heads(Eagle3Config(**fields))
    _check_tensors(heads, tensors, f"`{name}` ({form} format)")
    loaded = {key: value.float() for key, value in tensors.items()}
    if (count := heads.config.draft_vocab_size) is not None:
        loaded["draft_ids"] = torch.arange(count) if ids is None else ids
    heads.load_state_dict(loaded, assign=True)
    heads.rotary_emb = type(heads.rotary_emb)(heads.config)  # no file has its tensors
    for part in ("embed_tokens", "lm_head"):  # trained by others; further training does not change them
        if hasattr(heads, part):
            getattr(heads, part).requires_grad_(False)
    return heads


# ---------------------------------------------------------------------- tensors


def _tensors(folder: Path, allow_pickle: bool, name: str) -> dict[str, torch.Tensor]:
    whole = folder / "model.safetensors"  # otherwise there are parts
    safe = [whole] if whole.exists() else sorted(folder.glob("model-*.safetensors"))
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if not safe and not pickles:
        raise ValueError(f"`{name}` has no weights: neither safetensors nor, with `allow_pickle=True`, a .bin file.")
    if not safe and not allow_pickle:
        raise ValueError(
            f"`{name}` keeps its weights in a pickle ({pickles[0].name}), and only safetensors is read: pass "
            "`allow_pickle=True` if you trust it (only tensors are taken from it), or convert it."
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in safe or pickles:
        try:
            tensors |= load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
        except (SafetensorError, RuntimeError, EOFError) as error:
            raise ValueError(f"`{name}` holds a damaged file, {file.name} ({error}): download it again.") from error
    return tensors


def _renamed(tensors: dict[str, torch.Tensor], config: dict[str, Any], name: str) -> dict[str, torch.Tensor]:
    """The tensors under our names, with `draft_ids` in place of offsets."""
    found = {}
    for key, value in tensors.items():
        key = key.removeprefix("model.")
        found[f"layers.0.{key.removeprefix('midlayer.')}" if key.startswith("midlayer.") else key] = value
    offsets, mask = found.pop("d2t", None), found.get("t2d")
    found = {key: value for key, value in found.items() if key not in SKIPPED}
    if "fc.weight" not in found or "layers.0.self_attn.q_proj.weight" not in found:
        raise ValueError(f"`{name}` has no `fc` and no layer, such as EAGLE-3 has: it holds {sorted(tensors)[:4]}.")
    if offsets is not None:
        found["draft_ids"] = _draft_ids(offsets.long(), mask, config, name)
    return found


def _draft_ids(offsets: torch.Tensor, mask: torch.Tensor | None, config: dict[str, Any], name: str) -> torch.Tensor:
    """The target's id of each draft id [D]. `offsets` [D] is the target's id minus the draft id."""
    ids = torch.arange(len(offsets)) + offsets
    shape = config.get("transformer_layer_config") or config
    vocabulary = shape.get("vocab_size") or (int(ids.max()) + 1 if mask is None else len(mask))
    rises = bool((ids[1:] > ids[:-1]).all()) and int(ids[0]) >= 0 and int(ids[-1]) < vocabulary
    agrees = mask is None or (int(mask.bool().sum()) == len(ids) and rises and bool(mask.bool()[ids].all()))
    if not rises or not agrees:
        problem = "agree with its `t2d`" if rises else f"rise, and are from 0 to {vocabulary - 1}"
        raise ValueError(
            f"`{name}` has a `d2t` that is not a list of offsets. Added to 0, 1, 2 and so on, it should give ids that "
            f"{problem}; it gives {ids[:3].tolist()} to {int(ids[-1])}. If it holds the target's ids themselves, "
            "subtract `torch.arange(len(d2t))` from it and save it again."
        )
    return ids


def _check_tensors(heads: Eagle3Heads, tensors: dict[str, torch.Tensor], what: str) -> None:
    wanted = {key: tuple(value.shape) for key, value in heads.state_dict().items() if key != "draft_ids"}
    found = {key: tuple(value.shape) for key, value in tensors.items()}
    for problem, keys in (
        ("lacks", wanted.keys() - found.keys()),
        ("has, beside what its config asks for,", found.keys() - wanted.keys()),
        ("has in another shape", {key for key in wanted.keys() & found.keys() if wanted[key] != found[key]}),
    ):
        if keys:
            first = min(keys)
            shapes = f" as {found[first]} and not as {wanted[first]}" if first in wanted and first in found else ""
            raise ValueError(
                f"{what} {problem} {len(keys)} tensors, such as {first!r}{shapes}: it is damaged, or of a kind of "
                "EAGLE-3 that is not known here."
            )


def _without_copies(tensors: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors, without an embedding or an lm_head that equals the target's bit for bit: those are borrowed."""
    parts = {"embed_tokens.weight": model.get_input_embeddings(), "lm_head.weight": model.get_output_embeddings()}
    kept = dict(tensors)
    for key, module in parts.items():
        mine, theirs = kept.get(key), plain_weight(module)
        if key == "lm_head.weight" and "draft_ids" in kept:
            continue
        if mine is None or theirs is None or mine.shape != theirs.shape:
            continue
        if torch.equal(mine.to(theirs.dtype), theirs.detach().cpu()):
            del kept[key]
    return kept


# ---------------------------------------------------------------------- what the config says


def _fields(form: str, config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str) -> dict[str, Any]:
    shape = config.get("transformer_layer_config") if form == SPECULATORS else config
    if not isinstance(shape, dict):
        raise ValueError(f"`{name}` has no `transformer_layer_config`, where {form} format keeps the layers' sizes.")
    switches = config if form == SPECULATORS else {**(config.get("eagle_config") or {}), **config}
    windows = [kind for kind in shape.get("layer_types") or () if kind != "full_attention"]
    if windows and (shape.get("sliding_window") or shape.get("use_sliding_window")):
        raise ValueError(f"`{name}` has layers of the kind {windows[0]!r}: heads here attend to the whole text.")
    size, has = _of(shape, "hidden_size", name), tensors.keys()
    ids = tensors.get("draft_ids")
    vocabulary = _of(shape, "vocab_size", name)
    scored = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else vocabulary
    return {
        "vocab_size": vocabulary,
        "hidden_size": size,
        "target_hidden_size": config.get("target_hidden_size") or size,
        "num_hidden_layers": shape.get("num_hidden_layers", 1),
        "num_attention_heads": _of(shape, "num_attention_heads", name),
        "num_key_value_heads": shape.get("num_key_value_heads"),
        "head_dim": shape.get("head_dim"),
        "intermediate_size": _of(shape, "intermediate_size", name),
        "hidden_act": shape.get("hidden_act", "silu"),
        "rms_norm_eps": shape.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": shape.get("max_position_embeddings", 2048),
        "rope_parameters": _rope(shape),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in has,
        "attention_output_bias": "layers.0.self_attn.o_proj.bias" in has,
        "mlp_bias": "layers.0.mlp.gate_proj.bias" in has,
        "qk_norm": "layers.0.self_attn.q_norm.weight" in has,
        "norm_before_residual": bool(switches.get("norm_before_residual", False)),
        "norm_before_fc": bool(switches.get("norm_before_fc", False)),
        "fc_norm": bool(switches.get("fc_norm", False)),
        # In SpecForge's format `norm_output` means the norm before lm_head, which is always there; drafts go on from
        # the state before that norm.
        "norm_output": form == SPECULATORS and bool(switches.get("norm_output", False)),
        "draft_vocab_size": None if ids is None and scored == vocabulary else (scored if ids is None else len(ids)),
        "draft_copies": COPIES,
        "target_name_or_path": _verifier(config),
        "dtype": None,
    }


def _of(shape: dict[str, Any], field: str, name: str) -> Any:
    if shape.get(field) is None:
        raise ValueError(f"`{name}` does not state `{field}` in its config.json: it is damaged.")
    return shape[field]


def _rope(shape: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` as in transformers 5, made from that field or from the two fields of earlier versions."""
    given = shape.get("rope_parameters")
    if given is None:
        given = {**(shape.get("rope_scaling") or {}), "rope_theta": shape.get("rope_theta") or ROPE_BASE}
    rope = {key: value for key, value in given.items() if key != "type"}
    return {"rope_theta": ROPE_BASE, "rope_type": given.get("type", "default"), **rope}


def _verifier(config: dict[str, Any]) -> str | None:
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    found = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return found if isinstance(found, str) else None


def _layers(
    form: str, config: dict[str, Any], model: PreTrainedModel | None, given: Sequence[int] | None, name: str
) -> list[int]:
    """The layers of the target that the heads read, numbered as in transformers' `hidden_states`."""
    nested = (config.get("eagle_config") or {}).get(LAYER_IDS)
    stated = config.get(LAYER_IDS) or nested
    if form == DEEPSPEC and config.get("target_layer_ids"):
        stated = [one + 1 for one in config["target_layer_ids"]]  # numbers of layers, from 0
    if nested and stated != nested:
        raise ValueError(
            f"`{name}` says twice which layers of the target it reads, and differently ({stated} and {nested}): pass "
            "`layer_ids=` as the heads were trained."
        )
    if given is not None:
        return list(given)
    if stated:
        return list(stated)
    _, layers, _ = (None, None, None) if model is None else find_decoder(model)
    rule = None if layers is None else paper_layers(len(layers))
    if form == AUTHORS and rule is not None:  # they never state layers: the rule is part of their format
        return rule
    if form == AUTHORS:
        raise ValueError(f"`{name}`: pass `target=` too, since which layers are read follows from how many it has.")
    raise ValueError(
        f"`{name}` does not state which layers of the target it reads (`{LAYER_IDS}`), and with the wrong ones it "
        f"drafts rubbish: pass `layer_ids=` as it was trained, such as {tuple(rule or (2, 16, 29))}, which EAGLE-3's "
        "authors would take, and see `hf-clover verify` for how much is accepted."
    )


def _check_fits(fields: dict[str, Any], identity: dict[str, Any], name: str) -> None:
    theirs = {"vocab_size": identity["vocab_size"], "target_hidden_size": identity["hidden_size"]}
    for field, value in theirs.items():
        if fields[field] != value:
            raise ValueError(
                f"`{name}` was made for another target: its {field} is {fields[field]}, and that of "
                f"{identity['target_name_or_path'] or 'the target'} is {value}."
            )


__all__ = ["is_of_others", "load_heads"]
