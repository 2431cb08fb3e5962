"""What a forward takes beside its tokens: in a tree what plain generate would pass on at each step."""

from contextlib import nullcontext

import pytest
import torch
from helpers.both_ways import NEW, same_tokens
from helpers.zoo import CASES, build, ragged_batch, redraw
from transformers import BertConfig, BertLMHeadModel, LlamaForCausalLM, RobertaConfig, RobertaForCausalLM

from hf_clover import CloverHeads
from hf_clover.decoding.route import CloverWarning, choose_route
from hf_clover.targets.private_api import cache_name

VOCABULARY = 24
SHAPES = {"one": (7,), "ragged": (5, 9, 3)}


def drafted(target, inputs, more_than=NEW // 3):
    """Our output, with plain generate's tokens and more than so many accepted drafts."""
    return same_tokens(target, CloverHeads.from_target(target), inputs, more_than, num_assistant_tokens=6)


def encoder_as_decoder(model_class, config_class):
    sizes = dict(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96)
    ids = dict(pad_token_id=0, bos_token_id=None, eos_token_id=None)
    counts = dict(vocab_size=VOCABULARY, type_vocab_size=3, max_position_embeddings=64)
    model = model_class(config_class(is_decoder=True, **sizes, **ids, **counts))
    redraw(model, CASES[0], torch.Generator().manual_seed(0))
    return model.eval()


TYPED = {
    "gpt2": lambda: build("gpt2", vocab_size=VOCABULARY),  # whose types are tokens
    "bert": lambda: encoder_as_decoder(BertLMHeadModel, BertConfig),
    "roberta": lambda: encoder_as_decoder(RobertaForCausalLM, RobertaConfig),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TYPED)
def test_new_tokens_have_the_type_of_the_prompts_last_token(name, shape):
    target, inputs = TYPED[name](), ragged_batch(VOCABULARY, SHAPES[shape])
    types = torch.zeros_like(inputs["input_ids"])
    types[:, -2:] = torch.arange(1, len(types) + 1)[:, None].clamp(max=2)
    ours = drafted(target, {**inputs, "token_type_ids": types})
    without = target.generate(**inputs, max_new_tokens=NEW, pad_token_id=0)
    assert not torch.equal(ours.sequences, without), "or the types do not matter"
    assert ours.speculation.method == "tree"


def test_rows_leave_the_batch_with_their_types():
    target, inputs = TYPED["gpt2"](), ragged_batch(VOCABULARY, (5, 9, 3, 7, 6, 2))
    types = torch.arange(1, 7)[:, None].expand(-1, 9).contiguous()
    heads = CloverHeads.from_target(target)
    common = {**inputs, "token_type_ids": types, "max_new_tokens": 60, "eos_token_id": [5, 9], "pad_token_id": 0}
    rows = []
    handle = target.transformer.h[0].register_forward_hook(lambda *seen: rows.append(len(seen[1][0])))
    sequences = target.generate(**common, assistant_model=heads, num_assistant_tokens=4)
    handle.remove()
    assert torch.equal(sequences, target.generate(**common))
    assert rows[-1] < 6, "rows have left"


# ---------------------------------------------------------------------- inputs that a class makes by itself


class Shifting(LlamaForCausalLM):
    """Each token's logits are turned by its `shift`, which the subclasses make."""

    def forward(  # generate looks at the names
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        cache=None,
        past_key_values=None,
        shift=None,
        **kwargs,
    ):
        kept = {cache_name(): past_key_values if cache is None else cache}
        outputs = super().forward(input_ids, attention_mask, position_ids, **kept, **kwargs)
        if shift is not None:
            shift = shift.expand(len(outputs.logits), -1)[:, -outputs.logits.shape[1] :]
            index = (torch.arange(outputs.logits.shape[2]) + shift[..., None]) % outputs.logits.shape[2]
            outputs.logits = outputs.logits.gather(2, index.expand_as(outputs.logits))
        return outputs

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        made = super().prepare_inputs_for_generation(input_ids=input_ids, **kwargs)
        columns = torch.arange(input_ids.shape[1])[None, -made["input_ids"].shape[1] :]
        shift = self.shift_of(columns, **kwargs)
        return made if shift is None else {**made, "shift": shift}


class ByColumn(Shifting):
    """One for each token, made of its column."""

    def shift_of(self, columns, **kwargs):
        return columns // 2 % 5


class ByStep(Shifting):
    """One for a whole forward, so that chains differ too."""

    def shift_of(self, columns, **kwargs):
        return columns[:, -1:] % 7


class ByCaller(Shifting):
    """The caller begins it, each step adds a token's."""

    def shift_of(self, columns, shift=None, **kwargs):
        return None if shift is None else shift[:, -columns.shape[1] :]

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        model_kwargs = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)
        if model_kwargs.get("shift") is not None:
            model_kwargs["shift"] = torch.cat((model_kwargs["shift"], model_kwargs["shift"][:, -1:] + 1), dim=1)
        return model_kwargs


class Constant(Shifting):
    """The same at all steps."""

    def shift_of(self, columns, is_first_iteration=False, **kwargs):
        return None if is_first_iteration else torch.tensor([[3]])


def of_class(kind):
    target = build("llama", vocab_size=VOCABULARY)
    target.__class__ = kind
    return target


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("kind", "method"), [(ByColumn, "chain"), (ByStep, "plain"), (ByCaller, "chain"), (Constant, "tree")]
)
def test_inputs_that_differ_from_step_to_step_exclude_trees(kind, method, shape):
    target, inputs = of_class(kind), ragged_batch(VOCABULARY, SHAPES[shape])
    if kind is ByCaller:
        assert drafted(target, inputs).speculation.method == "tree"
        inputs["shift"] = torch.ones_like(inputs["input_ids"])
    warned = pytest.warns(CloverWarning, match="another `shift` for every step")
    with nullcontext() if method == "tree" else warned:
        ours = drafted(target, inputs, more_than=-1 if method == "plain" else NEW // 3)
    assert ours.speculation.method == method


def test_positions_that_a_class_makes_by_itself_exclude_trees():
    class Slow(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids, **kwargs):
            made = super().prepare_inputs_for_generation(input_ids=input_ids, **kwargs)
            return {**made, "position_ids": made["position_ids"] // 2}

    with pytest.warns(CloverWarning, match="another `position_ids` for every step"):
        ours = drafted(of_class(Slow), ragged_batch(VOCABULARY, (7,)), more_than=-1)
    assert ours.speculation.method != "tree"


def test_a_class_with_a_strict_update_of_kwargs_still_drafts_trees():
    """As mllama's does."""

    class Strict(LlamaForCausalLM):
        def _update_model_kwargs_for_generation(self, outputs, model_kwargs, is_encoder_decoder, **kwargs):
            return super()._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder, **kwargs)

    ours = drafted(of_class(Strict), ragged_batch(VOCABULARY, (5, 9, 3)))
    assert ours.speculation.method == "tree"


def test_a_text_of_codebooks_is_continued_plainly():
    """As CSM's speech is."""
    target = build("llama")
    route = choose_route(target, torch.ones(2, 5, 32, dtype=torch.long), 20, target.generation_config, {})
    assert (route.method, route.reason) == ("plain", "each place of its text holds 32 numbers, and not one token")
