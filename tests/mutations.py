"""Fourteen lines of walk, state, tree and cache, each broken on purpose: the tests must notice every one.

Contract: the package is copied, one line of the copy is changed, and the tests named beside it run against the copy.
A mutation is killed when one of them fails, which pytest says with exit code 1; anything else (all pass, nothing was
collected, the copy cannot be imported) is a survivor, or a mistake in the list, and the script exits with 1. The
working tree is never written to. A line that is not there exactly once is a mistake in the list too.

Usage: python tests/mutations.py [name ...]
"""

import os
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BROKEN = 99  # the exit code of a copy that cannot be imported


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str  # inside hf_clover/
    line: str  # as it stands there, without the indentation
    broken: str
    tests: tuple[str, ...]  # one of these must fail; inside tests/


MUTATIONS = (
    Mutation(
        name="the greedy walk goes on after the end of a text",
        file="decoding/walk.py",
        line="ends = chosen[node] in text.ends or len(path) >= room",
        broken="ends = len(path) >= room",
        tests=("test_walk.py::test_the_first_of_several_end_tokens_ends_the_walk",),
    ),
    Mutation(
        name="the greedy walk emits one token more than there is room for",
        file="decoding/walk.py",
        line="children, room = _children_of_row(tokens, parents, valid), text.room_of(row)",
        broken="children, room = _children_of_row(tokens, parents, valid), text.room_of(row) + 1",
        tests=("test_walk.py::test_max_length_ends_a_walk_in_the_middle",),
    ),
    Mutation(
        name="a walk steps to children that were never filled",
        file="decoding/walk.py",
        line="return {(parents[n], tokens[n]): n for n in range(len(tokens) - 1, 0, -1) if valid[n]}",
        broken="return {(parents[n], tokens[n]): n for n in range(len(tokens) - 1, 0, -1)}",
        tests=("test_walk.py::test_every_greedy_walk_gives_the_tokens_of_plain_generate",),
    ),
    Mutation(
        name="the walk in a graph emits one token more than there is room for",
        file="decoding/walk.py",
        line="walked = ~(ancestors & ~follows[:, None]).any(-1) & (depths < limits[:, :1])  # [B, n]",
        broken="walked = ~(ancestors & ~follows[:, None]).any(-1) & (depths <= limits[:, :1])  # [B, n]",
        tests=("test_walk.py::test_max_length_ends_a_walk_in_the_middle",),
    ),
    Mutation(
        name="a row that comes later draws other random numbers",
        file="decoding/call.py",
        line="tokens[places] = self._first(probs[places], numbers[[rows[place] for place in places]])",
        broken="tokens[places] = self._first(probs[places], numbers[[0 for place in places]])",
        tests=("test_walk.py::test_the_same_seed_gives_the_same_text[free]",),
    ),
    Mutation(
        name="of several tokens that end a text only the first does",
        file="decoding/call.py",
        line="text.ends = frozenset(token for ending in endings for token in ending.flatten().tolist())",
        broken="text.ends = frozenset(token for ending in endings for token in ending.flatten().tolist()[:1])",
        tests=("test_walk.py::test_the_first_of_several_end_tokens_ends_the_walk",),
    ),
    Mutation(
        name="a child's probability forgets its parent's",
        file="decoding/tree.py",
        line="joint, tokens = (beam[..., None] + log_probs).flatten(1), child_tokens.flatten(1)  # [B, W k]",
        broken="joint, tokens = log_probs.flatten(1), child_tokens.flatten(1)  # [B, W k]",
        tests=("test_tree.py::test_a_global_tree_holds_the_best_of_a_beam_search",),
    ),
    Mutation(
        name="ancestors stop one round early",
        file="decoding/tree.py",
        line="return ancestors_of(self.parents, self.max_depth.bit_length())",
        broken="return ancestors_of(self.parents, self.max_depth.bit_length() - 1)",
        tests=("test_tree.py::test_ancestors_are_all_nodes_up_to_the_root",),
    ),
    Mutation(
        name="ties break toward the child",
        file="decoding/tree.py",
        line="joint, order = joint.sort(dim=1, descending=True, stable=True)",
        broken="joint, order = (part.flip(1) for part in joint.sort(dim=1, stable=True))",
        tests=("test_tree.py::test_ties_break_toward_the_parent",),
    ),
    Mutation(
        name="the budget by levels does not shrink",
        file="decoding/tree.py",
        line="left = left - (joint > -torch.inf).sum(1, keepdim=True)",
        broken="left = left - 0 * (joint > -torch.inf).sum(1, keepdim=True)",
        tests=("test_tree.py::test_levels_stop_when_the_budget_is_used_up",),
    ),
    Mutation(
        name="what a commit moves is moved twice in a static cache",
        file="decoding/cache/static.py",
        line="for buffer in self.buffers:  # [..., B, kv_heads, C, head_dim]",
        broken="for buffer in (*self.buffers, *self.buffers):  # [..., B, kv_heads, C, head_dim]",
        tests=("test_static_cache.py::test_the_static_cache_holds_what_a_list_of_lists_holds",),
    ),
    Mutation(
        name="rows of a static cache leave, and others take their places",
        file="decoding/cache/static.py",
        line="buffer.narrow(dim, 0, len(rows)).copy_(buffer.index_select(dim, kept))",
        broken="buffer.narrow(dim, 0, len(rows)).copy_(buffer.narrow(dim, 0, len(rows)))",
        tests=("test_static_cache.py::test_the_static_cache_is_right_after_rows_leave_and_texts_outgrow_it",),
    ),
    Mutation(
        name="a commit takes the entries of the row before",
        file="decoding/cache/by_row.py",
        line="(row, lengths[row] + entry, lengths[row] + place)",
        broken="(row, lengths[0] + entry, lengths[row] + place)",
        tests=("test_cache.py::test_the_cache_holds_what_a_list_of_lists_holds",),
    ),
    Mutation(
        name="staged entries of uneven rows are written at the first row's length",
        file="decoding/cache/by_row.py",
        line="if slots.lengths and not slots.is_even:",
        broken="if slots.lengths and slots.is_even:",
        tests=("test_cache.py::test_the_cache_holds_what_a_list_of_lists_holds",),
    ),
)


def broken_copy(mutation: Mutation, folder: Path) -> None:
    """The package in `folder`, with that one line changed."""
    shutil.copytree(ROOT / "hf_clover", folder / "hf_clover", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "hf_clover" / mutation.file
    lines = file.read_text().splitlines(keepends=True)
    places = [number for number, line in enumerate(lines) if line.strip() == mutation.line]
    if len(places) != 1:
        raise ValueError(
            f"`{mutation.line}` stands {len(places)} times in {mutation.file}: mend {Path(__file__).name}."
        )
    lines[places[0]] = lines[places[0]].replace(mutation.line, mutation.broken)
    file.write_text("".join(lines))


def outcome(mutation: Mutation) -> str:
    """What became of it: "killed", or why not. In a fork, so that torch and transformers are imported only once."""
    import hypothesis  # noqa: F401
    import pytest
    import torch._dynamo  # noqa: F401
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    assert not any(name.partition(".")[0] == "hf_clover" for name in sys.modules), "the copy must be the first"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        broken_copy(mutation, folder)
        log = folder / "log"
        child = os.fork()
        if child == 0:
            code = BROKEN
            try:
                output = os.open(log, os.O_WRONLY | os.O_CREAT)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.chdir(folder)
                sys.path.insert(0, str(folder))  # before the package that is installed; the tests are the real ones
                from hypothesis import Phase, settings

                import hf_clover

                # One example that fails is enough: none is made smaller.
                settings.register_profile("first", phases=(Phase.explicit, Phase.generate))
                settings.load_profile("first")
                assert Path(hf_clover.__file__).is_relative_to(folder.resolve()), hf_clover.__file__
                options = ("-q", "-x", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"))
                code = int(pytest.main([*options, *(str(ROOT / "tests" / test) for test in mutation.tests)]))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = log.read_text()
    if code == pytest.ExitCode.TESTS_FAILED and " failed" in said:
        return "killed"
    if code == pytest.ExitCode.OK:
        return f"SURVIVED {', '.join(mutation.tests)}"
    return f"could not be tried (exit code {code}): {said[-3000:]}"


def main(names: list[str]) -> int:
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    survivors = 0
    for mutation in chosen:
        start = time.perf_counter()
        result = outcome(mutation)
        survivors += result != "killed"
        print(f"{result}: {mutation.name} ({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} broken lines were noticed")
    return int(survivors > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
