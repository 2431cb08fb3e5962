"""A cache as a list of lists: the entries of each row by their numbers, and whether a cache holds just those."""

import torch

HEADS, DIM = 2, 3


def states(entries, layer):
    """Keys and values [B, HEADS, T, DIM] that tell the entry's number, head, dimension and layer apart."""
    numbers = torch.tensor(entries, dtype=torch.float32)[:, None, :, None] * 100  # [B, 1, T, 1]
    keys = numbers + torch.arange(HEADS)[:, None, None] * 10 + torch.arange(DIM) + layer * 0.25
    return keys, -keys


class Model:
    """What the cache must be: per row, the numbers of the entries it holds."""

    def __init__(self, batch):
        self.rows, self.count = [[] for _ in range(batch)], 0

    def new(self, length):
        """Numbers for `length` new entries of every row."""
        start = self.count
        self.count += length * len(self.rows)
        return [list(range(start + row * length, start + (row + 1) * length)) for row in range(len(self.rows))]


def assert_rows(got, expected, layer):
    """`got` (keys, values) begins, row by row, with the expected entries; the rest must not poison attention."""
    for row, entries in enumerate(expected):
        for buffer, wanted in zip(got, states([entries], layer)):
            assert torch.equal(buffer[row, :, : len(entries)], wanted[0])
            assert buffer[row].isfinite().all()


def assert_holds(cache, model):
    assert cache.lengths == [len(row) for row in model.rows]
    longest = max(cache.lengths)
    for layer in range(len(cache.layers)):
        keys, values = cache.export(layer, longest)
        assert keys.shape == values.shape == (len(model.rows), HEADS, longest, DIM)
        assert_rows((keys, values), model.rows, layer)


def fill(cache, model, length):
    new = model.new(length)
    for row, entries in zip(model.rows, new):
        row.extend(entries)
    for layer in range(len(cache.layers)):
        assert cache.get_mask_sizes(length, layer) == (len(model.rows[0]), 0)
        got = cache.update(*states(new, layer), layer)
        assert got[0].shape[2] == len(model.rows[0])
        assert_rows(got, model.rows, layer)
    assert cache.get_seq_length() == len(model.rows[0])


def stage(cache, model, entries):
    """Write `entries` per row -> their numbers."""
    new = model.new(entries)
    lengths = [len(row) for row in model.rows]
    with cache.staged(entries):
        for layer in range(len(cache.layers)):
            assert cache.get_seq_length(layer) == max(lengths)
            assert cache.get_mask_sizes(entries, layer) == (max(lengths) + entries, 0)
            got = cache.update(*states(new, layer), layer)
            assert got[0].shape == (len(lengths), HEADS, max(lengths) + entries, DIM)
            assert_rows(got, [old + staged for old, staged in zip(model.rows, new)], layer)
    return new


def commit(cache, model, new, paths):
    cache.commit(paths)
    for row, (path, entries) in enumerate(zip(paths, new)):
        model.rows[row] += [entries[place] for place in path]
