"""A caller's code that breaks off in the middle of a call, and what of the target must be as it was."""

from transformers import LogitsProcessor
from transformers.generation.streamers import BaseStreamer


def state_of(model):
    """Everything of the target that speculation touches for a while."""
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    return hooks, model.config._attn_implementation, model.training, dict(vars(model.generation_config))


class Breaks(LogitsProcessor, BaseStreamer):
    """Goes well a few times and then not."""

    def __init__(self, error, after=6):
        self.error, self.left = error, after

    def count(self):
        self.left -= 1
        if self.left < 0:
            raise self.error

    def __call__(self, input_ids, scores):
        self.count()
        return scores

    def put(self, value):
        self.count()

    def end(self):
        raise AssertionError("a streamer that broke off must not be ended")
