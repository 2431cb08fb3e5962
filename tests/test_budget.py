"""How many nodes a tree gets: the defaults, what a cache has room for, and the refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_clover.decoding.budget import DEFAULT_NODES, FEWEST_NODES, resolve_budget

steady = settings(derandomize=True, deadline=None, max_examples=100)


@pytest.mark.parametrize(
    ("batch_size", "nodes"), [(1, 24), (2, 12), (3, 8), (4, 6), (5, 4), (6, 4), (7, 4), (24, 4), (500, 4)]
)
def test_the_default_is_shared_by_the_rows(batch_size, nodes):
    assert resolve_budget(None, batch_size) == nodes


@steady
@given(st.integers(1, 200), st.integers(-50, 50))
def test_the_default_fits_the_room(batch_size, room):
    free = resolve_budget(None, batch_size)
    assert FEWEST_NODES <= free <= DEFAULT_NODES
    assert resolve_budget(None, batch_size, room) == max(0, min(free, room))


@steady
@given(st.integers(1, 10_000), st.integers(1, 64), st.none() | st.integers(-5, 10_000))
def test_what_is_asked_is_given_or_refused(asked, batch_size, room):
    """Never a silent change of a number that the user chose; the batch size does not count."""
    if room is None or asked <= room:
        assert resolve_budget(asked, batch_size, room) == asked
    else:
        with pytest.raises(ValueError, match="is more than the cache can hold"):
            resolve_budget(asked, batch_size, room)


@pytest.mark.parametrize("asked", [0, -1, -24, True, False, 2.0, 2.5, "4", "auto", [4], torch.tensor(4)])
def test_what_is_no_tree_size_is_refused(asked):
    with pytest.raises(
        ValueError, match=r"`num_assistant_tokens=.*` is no tree size: .*positive integer.*None"
    ) as error:
        resolve_budget(asked, 1)
    assert repr(asked) in str(error.value)


@pytest.mark.parametrize(("asked", "room", "nodes"), [(5, 4, 4), (1, 0, 0), (24, -3, 0)])
def test_more_than_the_cache_holds_is_refused(asked, room, nodes):
    message = (
        rf"`num_assistant_tokens={asked}` is more than the cache can hold: .* room for {nodes} nodes\. "
        r"Lower `num_assistant_tokens`, or raise `max_cache_len`"
    )
    with pytest.raises(ValueError, match=message):
        resolve_budget(asked, 1, room)


def test_the_exact_room_is_enough():
    assert resolve_budget(4, 1, 4) == 4
    assert resolve_budget(None, 1, 24) == 24
    assert resolve_budget(None, 1, 23) == 23
