"""Speculative decoding with the Clover heads in the same repository as this file.

Contract: `model.generate(..., custom_generate="org/heads", trust_remote_code=True)` calls `generate` here, with all
the caller's arguments. The heads are `assistant_model`, if that is given. Otherwise they are those of the repository,
at the same `revision` and `subfolder` and with the same `token`, loaded once for each model. This needs the package
hf_clover, which contains this file; on the Hub the file is `custom_generate/generate.py`.
"""

import sys
from typing import Any
from weakref import WeakKeyDictionary

from transformers import AutoModel, PreTrainedModel

import hf_clover  # noqa: F401  (this import lets generate take Clover heads as its assistant)

_HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
_loaded: WeakKeyDictionary[PreTrainedModel, tuple[Any, PreTrainedModel]] = WeakKeyDictionary()


def generate(inputs: Any = None, *args: Any, model: PreTrainedModel, **kwargs: Any) -> Any:
    options = {name: kwargs.pop(name) for name in _HUB_OPTIONS if name in kwargs}
    if kwargs.get("assistant_model") is None:
        # transformers does not pass on the argument that names the repository, and its cache does not name it either.
        repository = sys._getframe(1).f_locals.get("custom_generate")
        if not isinstance(repository, str):
            raise ValueError(
                "`assistant_model` is missing, and the repository to take heads from is not known here: pass "
                "`assistant_model=AutoModel.from_pretrained(...)`."
            )
        source = (repository, options.get("revision"), options.get("subfolder"))
        if _loaded.get(model, (None, None))[0] != source:
            _loaded[model] = source, AutoModel.from_pretrained(repository, **options)
        kwargs["assistant_model"] = _loaded[model][1]
    return model.generate(inputs, *args, **kwargs)  # type: ignore[operator]
