"""transformers' own tests of generation, each call of generate there played once more with heads.

    python tests/transformers_own.py ../transformers                             # tests/generation and FAMILIES
    python tests/transformers_own.py ../transformers --models llama,gpt2         # tests/generation and these
    python tests/transformers_own.py ../transformers --test tests/models/gpt2/test_modeling_gpt2.py -k greedy

`../transformers` is a checkout of transformers, whose tests also want `pip install parameterized httpx
timeout-decorator`, and in part the Hub (`HF_HUB_OFFLINE=0`). Its sources are not used: the transformers that is
installed is tested, whose version may be another. What a test imports and this version lacks fails where it is used.

Contract: a call of `generate` reaches plain generate, whose result the test sees. Where the target is decoder-only and
the call asks for greedy decoding or sampling with no assistant, it is played again from the same random state, on
copies of what it was given, with new heads and with the plain tokens planted in their drafts (helpers/oracle.py). The
two are a pair if drafts were verified. Tokens, the kinds of outputs, scores and logits up to rounding, a streamer's
events, the caches that come back and the random state afterwards must be plain generate's. Where greedy tokens differ,
`hf_clover.measure.losslessness.explain` says whether it was rounding. Every test begins with a seed of its own, so
that a difference comes again when its test is run alone. Exits with 1 where a difference was no rounding, or where
nothing was accepted.
"""

import argparse
import builtins
import copy
import functools
import inspect
import logging
import os
import random
import sys
import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy
import pytest
import torch
import transformers.utils.import_utils
from helpers.noticed import Events, are_near, kept_of
from helpers.oracle import planted
from transformers import GenerationMixin, PreTrainedModel

from hf_clover import CloverHeads, speculations
from hf_clover.decoding import entry
from hf_clover.measure.losslessness import BUG, explain
from hf_clover.targets.private_api import cache_name

FAMILIES = (
    *("llama", "gpt2", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi", "phi3", "gpt_neox", "opt", "bloom"),
    *("falcon", "mixtral", "qwen3_moe", "olmo2", "granite", "cohere", "starcoder2", "stablelm", "mpt", "gptj"),
    *("codegen", "gpt_neo", "gpt_bigcode", "bert", "roberta", "mamba", "jamba", "deepseek_v3", "lfm2"),
)
OTHERS = ("assistant_model", "custom_generate", "max_time")  # who asks for these gets plain generate alone
KEPT = ("streamer", "tokenizer", "assistant_tokenizer")  # not copied
RECORDS = ("output_attentions", "output_hidden_states")  # which heads refuse: a forward covers a tree
REFUSALS = ("Clover heads work with greedy", "without a prompt: every row needs")  # which plain generate does not have


@dataclass
class Found:
    """What came of all calls."""

    pairs: Counter[str] = field(default_factory=Counter)  # by family
    accepted: Counter[str] = field(default_factory=Counter)  # drafts, likewise
    methods: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)  # why calls were not paired
    rounding: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        yield from (f"alone {count} times: {reason}" for reason, count in self.alone.most_common())
        for family, pairs in sorted(self.pairs.items()):
            yield f"{family}: {pairs} pairs, {self.accepted[family]} drafts accepted"
        yield from (f"rounding: {difference}" for difference in self.rounding)
        yield from (f"FAULT: {difference}" for difference in self.faults)
        yield (
            f"{len(self.pairs)} families, {self.pairs.total()} pairs ({dict(self.methods)}), {self.accepted.total()} "
            f"drafts accepted, {len(self.rounding)} rounded otherwise, {len(self.faults)} faults"
        )
        if not self.accepted:
            yield "No draft was accepted: a test that accepts nothing proves nothing."


class Pairs:
    """The plug-in for pytest."""

    def __init__(self, checkout: Path) -> None:
        self.checkout, self.found = checkout, Found()
        self.playing = threading.local()  # some tests call generate in a thread
        self.test, self.calls = "", 0

    # ------------------------------------------------------------------ what pytest calls

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if not _generates(item)])
        items[:] = filter(_generates, items)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.test, self.calls = item.nodeid, 0
        seed = zlib.crc32(item.nodeid.encode())
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        for name, module in sys.modules.items():
            if name.startswith("tests.") and isinstance(getattr(module, "global_rng", None), random.Random):
                module.global_rng.seed(seed)  # which draws a test's inputs

    # ------------------------------------------------------------------ what the tests call

    def generate(self, original: Callable[..., Any], model: PreTrainedModel, args: tuple, kwargs: dict) -> Any:
        names = list(inspect.signature(original).parameters)[1:]
        call = {**dict(zip(names, args)), **kwargs}
        if getattr(self.playing, "is_on", False):
            return original(model, *args, **kwargs)
        self.calls += 1
        reason = _why_alone(model, call)
        try:
            copies = [] if reason else [_copy(call), _copy(call)]
        except Exception as error:
            reason = f"no copy of its arguments ({type(error).__name__})"
        if reason:
            self.found.alone[reason] += 1
            return self._alone(original, model, call)
        streamer = call.get("streamer")
        heard, state = Tee(streamer), torch.get_rng_state()
        plain = self._alone(original, model, {**call, "streamer": heard} if streamer else call)
        after = torch.get_rng_state()
        try:
            self._pair(original, model, call, copies, plain, state, heard.seen if streamer else None)
        finally:
            torch.set_rng_state(after)
        return plain

    def _alone(self, original: Callable[..., Any], model: PreTrainedModel, call: dict[str, Any]) -> Any:
        self.playing.is_on = True
        try:
            return original(model, **call)
        finally:
            self.playing.is_on = False

    def _pair(
        self,
        original: Callable[..., Any],
        model: PreTrainedModel,
        call: dict[str, Any],
        copies: list[dict[str, Any]],
        plain: Any,
        state: torch.Tensor,
        heard: list[Any] | None,
    ) -> None:
        """Plays it with heads and notes what differs. Never raises."""
        after, family = torch.get_rng_state(), _family(self.test)
        seed = zlib.crc32(f"{self.test} {self.calls}".encode())
        place = f"call {self.calls} of {self.test}"
        self.playing.is_on = True
        try:
            with _in_silence(), speculations() as records:
                try:
                    heads = CloverHeads.from_target(model)
                except Exception as error:
                    self.found.alone[f"no heads for it: {type(error).__name__}: {error}"] += 1
                    return
                streamer, given = Events(), {}
                ours = copies[0]
                ours |= {"assistant_model": heads, "num_assistant_tokens": random.Random(seed).choice((2, 5, 9, 24))}
                ours |= {} if heard is None else {"streamer": streamer}
                ours |= dict.fromkeys(RECORDS, False)
                torch.set_rng_state(state)
                with _planting(_sequences(plain), seed, given):
                    result = original(model, **ours)  # some classes have a generate of their own around it
                if not given:
                    self.found.alone[f"plain route: {records[0].reason}"] += 1
                    return
                self.found.pairs[family] += 1
                self.found.accepted[family] += records[0].accepted_tokens
                self.found.methods[records[0].method] += 1
                if not torch.equal(_sequences(plain), _sequences(result)):
                    self._judge_tokens(model, place, copies[1], given, _sequences(plain), _sequences(result))
                    return
                caches = (call.get(cache_name()), ours.get(cache_name()))
                what = _what_differs(plain, result, caches, model.dtype)
                if heard is not None and heard != streamer.seen:
                    what = f"a streamer saw {streamer.seen} instead of {heard}"
                if not torch.equal(after, torch.get_rng_state()):
                    what = "another random state is left"
                if what:
                    self.found.faults.append(self._repeat(place, what))
        except Exception as error:
            if any(words in str(error) for words in REFUSALS):
                self.found.alone[str(error)] += 1
            elif _can_be_played_again(original, model, copies[1]):
                self.found.faults.append(self._repeat(place, f"{type(error).__name__}: {error}"))
            else:
                self.found.alone["plain generate cannot be played twice either"] += 1
        finally:
            self.playing.is_on = False

    def _judge_tokens(
        self, model: PreTrainedModel, place: str, call: dict, given: dict, its: torch.Tensor, mine: torch.Tensor
    ) -> None:
        what = f"tokens {mine.tolist()} instead of {its.tolist()}"
        if given["do_sample"] or not given["input_ids"].shape[1]:
            self.found.faults.append(self._repeat(place, what))
            return
        inputs = ("inputs", "input_ids", "attention_mask", "stopping_criteria", "streamer")
        for name in (*inputs, *RECORDS, "return_dict_in_generate", "output_scores", "output_logits"):
            call.pop(name, None)
        batch = {name: given[name] for name in ("input_ids", "attention_mask")}
        differences = explain(model, batch, its, mine, call)
        bugs = [difference for difference in differences if difference.verdict == BUG]
        where = self.found.faults if bugs else self.found.rounding
        where.append(self._repeat(place, f"{what}: {(bugs or differences)[0]}"))

    def _repeat(self, place: str, what: str) -> str:
        words = f"python tests/transformers_own.py {self.checkout} --test '{self.test}'"
        return f"{place}: {what}\n    `{words}` repeats it"


class Tee(Events):
    """Tells a streamer what it is told."""

    def __init__(self, streamer: Any) -> None:
        super().__init__()
        self.streamer = streamer

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        self.streamer.put(value)

    def end(self) -> None:
        super().end()
        self.streamer.end()


# ---------------------------------------------------------------------- a call


def _why_alone(model: PreTrainedModel, call: dict[str, Any]) -> str | None:
    if model.config.is_encoder_decoder:
        return "encoder-decoder"
    asked = [name for name in OTHERS if call.get(name, getattr(call.get("generation_config"), name, None)) is not None]
    return f"`{asked[0]}`" if asked else None


def _copy(call: dict[str, Any]) -> dict[str, Any]:
    """What a call may change, such as a cache or a processor that remembers, once more."""
    kept = {name: call[name] for name in KEPT if name in call}
    with mock.patch.object(torch.Tensor, "__deepcopy__", lambda self, memo: self.detach().clone()):  # also with grads
        return {**copy.deepcopy({name: value for name, value in call.items() if name not in kept}), **kept}


def _can_be_played_again(original: Callable[..., Any], model: PreTrainedModel, call: dict[str, Any]) -> bool:
    """Some targets keep a state of their own, and refuse the same call a second time."""
    try:
        original(model, **call)
    except Exception:
        return False
    return True


@contextmanager
def _planting(truth: torch.Tensor, seed: int, given: dict[str, Any]) -> Iterator[None]:
    """Plants `truth` [B, L] in the drafts of a call, and notes in `given` what reached the loop."""
    speculate = entry.speculate

    def with_the_truth(target: Any, heads: Any, input_ids: torch.Tensor, text: Any, inputs: dict, *rest, **options):
        mask = inputs.get("attention_mask", torch.ones_like(input_ids))
        given.update(input_ids=input_ids, attention_mask=mask, do_sample=text.config.do_sample)
        with planted(heads, truth, input_ids.shape[1], seed):
            return speculate(target, heads, input_ids, text, inputs, *rest, **options)

    with mock.patch.object(entry, "speculate", with_the_truth):
        yield


def _sequences(result: Any) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result.sequences


def _what_differs(plain: Any, ours: Any, caches: tuple[Any, Any], dtype: torch.dtype) -> str | None:
    """Where the tokens are the same. `caches`: what the caller passed."""
    its, mine = map(kept_of, caches)
    if its != mine:
        return f"the caller's cache holds {mine} instead of {its}"
    if isinstance(plain, torch.Tensor) or isinstance(ours, torch.Tensor):
        return None if type(plain) is type(ours) else f"a {type(ours).__name__} instead of a {type(plain).__name__}"
    wanted, there = set(plain) - {"attentions", "hidden_states"}, set(ours)
    if wanted != there:
        return f"the outputs {sorted(there)} instead of {sorted(wanted)}"
    off = max(5e-3, torch.finfo(dtype).eps ** 0.5)  # Mamba's kernels, over one token and over several: up to 1.4e-3
    for name in wanted & {"scores", "logits"}:
        if not are_near(plain[name], ours[name], off):
            worst = max(float((a - b).nan_to_num().abs().max()) for a, b in zip(plain[name], ours[name]))
            return f"recorded {name} differ by up to {worst:.1e}"
    its, mine = (kept_of(result.get(cache_name())) for result in (plain, ours))
    return None if its == mine else f"the cache that comes back holds {mine} instead of {its}"


@contextmanager
def _in_silence() -> Iterator[None]:
    """A test may listen to what plain generate says."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


# ---------------------------------------------------------------------- transformers' tests


def _generates(item: pytest.Item) -> bool:
    """Whether a test is about generation: by its folder, its name, or as one that every family has of it."""
    name = getattr(item, "originalname", item.name)
    mixin = getattr(sys.modules.get("tests.generation.test_utils"), "GenerationTesterMixin", None)
    return "tests/generation/" in item.nodeid or "generat" in name or hasattr(mixin, name)


def _family(test: str) -> str:
    folders = Path(test.partition("::")[0]).parts
    return folders[2] if folders[:2] == ("tests", "models") else folders[1]


class Lost:
    """In the place of a name that this version of transformers does not have."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.name} is not in this version of transformers")


@contextmanager
def _with_names_of_other_versions() -> Iterator[None]:
    """Tests of another version can be imported: what they name and is gone is `Lost`."""
    real = builtins.__import__

    def imports(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        is_asked_by_a_test = (globals or {}).get("__name__", "").startswith("tests.")
        if not is_asked_by_a_test or name.partition(".")[0] != "transformers":
            return real(name, globals, locals, fromlist, level)
        try:
            module = real(name, globals, locals, fromlist, level)
        except ModuleNotFoundError:
            module = ModuleType(name)
        for wanted in fromlist or ():
            if not hasattr(module, wanted):
                setattr(module, wanted, Lost(f"{name}.{wanted}"))
        return module

    # Some load transformers from the checkout beside the one that is installed.
    utils = transformers.utils
    with (
        mock.patch.object(builtins, "__import__", imports),
        mock.patch.object(utils, "direct_transformers_import", return_value=transformers, create=True),
    ):
        yield


def play(checkout: Path, tests: list[str], options: list[str]) -> Found:
    """All tests of generation in these files of the checkout, or these tests."""
    pairs, original = Pairs(checkout), GenerationMixin.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        return pairs.generate(original, self, args, kwargs)

    os.chdir(checkout)
    os.environ.pop("PYTEST_ADDOPTS", None)  # meant for this project's tests, such as the --since of .ci/run
    quietly = ["-q", "--tb=no", "-rE", "--continue-on-collection-errors", "-p", "no:cacheprovider", "-W", "ignore"]
    quietly += [f"--rootdir={checkout}", "-o", "log_cli=false"]
    with _with_names_of_other_versions(), mock.patch.object(GenerationMixin, "generate", generate):
        pytest.main([*quietly, *options, *tests], plugins=[pairs])
    return pairs.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="of transformers, with its `tests`, `utils` and `conftest.py`")
    parser.add_argument("--models", default=",".join(FAMILIES), help="folders of tests/models, with commas between")
    parser.add_argument("--test", action="append", help="a file, or a test as pytest names it, in place of all")
    parser.add_argument("-k", dest="named", help="of these, tests whose names match, as for pytest")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkout = arguments.checkout.resolve()
    tests = [f"tests/models/{name}/test_modeling_{name}.py" for name in arguments.models.split(",")]
    named = ["-k", arguments.named] if arguments.named else []
    found = play(checkout, arguments.test or ["tests/generation/test_utils.py", *tests], named)
    print(*found.lines(), sep="\n")
    raise SystemExit(bool(found.faults) or not found.accepted)


if __name__ == "__main__":
    main()
