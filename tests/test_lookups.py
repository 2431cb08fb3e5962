"""`lookups.py`: what counts as found in the text before, and that drafters are asked the same."""

import importlib
import json
from types import ModuleType

import pytest
import torch
from test_learning import EXPERIMENTS, SIZES, folder  # noqa: F401, the fixture

pytestmark = pytest.mark.long("examples/experiments", "hf_clover/measure")

pytest.importorskip("matplotlib")

#       0  1  2  3  4  5  6  7  8  9
TEXT = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 6, 3, 4]


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    return importlib.import_module("lookups")


@pytest.mark.parametrize(
    ("place", "right", "where"),
    [
        (5, 1, "at all places"),  # 1 2 stood once, and 3 came
        (9, 1, "at all places"),  # twice, and 3 both times
        (9, 2, "at some places"),  # once 4 came then, once 5
        (5, 2, "nowhere"),  # 4 had come, 5 is right: and 3 5 is new
        (11, 1, "nowhere"),  # after 3 4 came 1, and now 6
        (11, 3, "elsewhere"),  # 3 4 1 is not 3 4 6, but 3 4 has stood before
        (9, 0, "at all places"),
        (3, 1, "nowhere"),  # 3 4 is new, and 4 1 as well
    ],
)
def test_found_by_hand(lookups, place, right, where):
    assert lookups.found(TEXT, place, right) == where


def test_a_place_whose_next_token_is_not_settled_tells_nothing(lookups):
    ids = [7, 7, 7, 7, 7]
    assert lookups.found(ids, 1, 1) == "elsewhere"  # 7 7 itself, one token on: its next is drafted, not settled
    assert lookups.found(ids, 3, 1) == "at all places"


def test_only_drafts_count_before_which_both_are_right(lookups, folder, tmp_path, monkeypatch):  # noqa: F811
    words = [*SIZES, "--targets", str(folder / "tiny"), "--work", str(folder / "work"), "--output", str(tmp_path)]
    words += ["--drafters", *lookups.PAIR, "--budgets", "64"]
    with pytest.raises(ValueError, match=r"`--work`: there is no clover-x that was trained on 64 tokens with seed 0"):
        lookups.main(words)
    assert not (tmp_path / "learning.json").exists()  # it reads what another script writes
    importlib.import_module("learning").main(words)
    lookups.main(words)  # with what they draft, which is next to nothing

    three, two = torch.arange(8) < 3, torch.arange(8) < 2
    answers = iter([three, two])  # clover-x, then eagle-1
    monkeypatch.setattr(
        lookups, "right_drafts", lambda heads, target, rows, *sizes: next(answers).expand(len(rows), 4, -1)
    )
    monkeypatch.setattr(lookups, "found", lambda ids, place, right: lookups.FOUND[right])
    lookups.main(words)
    result = json.loads((tmp_path / "lookups.json").read_text(encoding="utf-8"))
    asked = {row["found"]: (row["drafts"], row["right"]) for row in result["rows"]}
    count = asked["at some places"][0]
    assert count > 0
    assert count % 4 == 0
    assert asked["at some places"] == (count, {"clover-x": count, "eagle-1": count})  # both have the second right
    assert asked["elsewhere"] == (count, {"clover-x": count, "eagle-1": 0})  # one the third
    assert asked["nowhere"] == (0, {"clover-x": 0, "eagle-1": 0})  # so nobody is asked for the fourth
    assert str(folder) not in json.dumps(result)
    assert (tmp_path / "lookups-dark.png").exists()
