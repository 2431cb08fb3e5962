"""Pictures of results: what is drawn of each kind of result, and that everything on a page can be read."""

import json
import runpy
import sys
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from helpers.measured import benchmark_of, row_of
from helpers.own_process import run
from helpers.tiny_text import make_tokenizer
from PIL import Image

from hf_clover.measure import plots
from hf_clover.measure.plots import THEMES, _looks, draw, figure_of, plot, settings
from hf_clover.measure.step_record import StepRecord

pytestmark = pytest.mark.long("examples/quickstart.py", "examples/race_picture.py")

ROOT = Path(__file__).parent.parent
METHODS = ("plain", "clover-2", "medusa", "prompt-lookup", "assistant:my-org/some-model-0.5b")


def row(method, **setting):
    place, of_heads = METHODS.index(method), {"seconds": {"other": 9.0}}
    if method in ("clover-2", "medusa"):
        seconds = {"draft": 1.0, "verify": 6.0, "walk": 1.0, "other": 2.0}
        of_heads = {"seconds": seconds, "acceptance_by_depth": [0.8, 0.5, 0.2]}
    return row_of(method, 100.0 + place, 1.0 + place, 1.0 + place / 2, **of_heads, **setting)


def benchmark(rows):
    command = "hf-clover benchmark " + "--against assistant:my-org/some-model-0.5b " * 5
    return benchmark_of(rows, target="target", max_new_tokens=128, command=command, date="2026-01-01")


def training(evaluated=True):
    log = []
    for step in range(10, 110, 10):
        heads = {f"head_{i}/top{k}": step / 200 - i / 50 for i in range(3) for k in range(1, 6)}
        heads |= {f"acceptance_length/top{k}": 1 + step / 100 for k in range(1, 6)}
        log.append({"step": step, "loss": float("nan") if step == 10 else 100 / step, **heads})
        if evaluated and step % 50 == 0:
            log.append({"step": step, "eval_loss": 110 / step, **{f"eval_{k}": v for k, v in heads.items()}})
            log.append({"step": step, "eval_tokens_per_forward": 2.0, "eval_speedup": 1.5, "eval_efficiency": 0.75})
    return {"log_history": log}


def learning(entries):
    """Of heads that learn: more tokens per forward from one entry to the next, and every third one lower."""
    record = [
        {"tokens": 480 * i, "seconds": 11.0 * (i + 1), "tokens_per_forward": 1.1 + i / entries - (i % 3 == 2) / 9}
        for i in range(entries)
    ]
    return {"kind": "online learning", "record": record}


NAMES = [f"without the part number {i}, as in the second paper" for i in range(10)]
GROUPED = {
    "title": "A title so long that it cannot stand in one line, however small the letters of a title may be made",
    "note": "small print",
    "panels": [
        {
            "kind": "bars", "title": "Accuracy", "ylabel": "share",
            "series": [{"label": f"head {h}", "x": NAMES, "y": [0.5] * 9 + [None]} for h in (1, 2, 3)],
        },
        {"kind": "bars", "title": "Gain", "ylabel": "times", "series": [{"label": "ours", "x": NAMES, "y": [2] * 10}]},
        {
            "kind": "lines", "title": "Rate", "xlabel": "learning rate", "ylabel": "tokens", "xscale": "log10",
            "series": [{"label": "a", "x": [1e-4, 1.1e-4, 1.2e-4, 3e-4, 1e-3], "y": [1, 2, None, 4, 5]}],
        },
    ],
}  # fmt: skip
SWEEP = [row(m, batch_size=b) for b in (1, 2, 4, 8, 16, 32, 48) for m in METHODS[:4]]
NODES = [row("clover-2", nodes=n, tree=t) for n in (2, 4, 8, 16, 32, 64) for t in ("global", "levels", "chain")]
RESULTS = {
    "one setting": benchmark([row(method) for method in METHODS]),
    "batch sizes": benchmark(SWEEP),
    "tree sizes": benchmark([row("plain"), *NODES]),
    "temperatures": benchmark([row(m, temperature=t) for t in (0.0, 0.7, 1.0) for m in METHODS[:2]]),
    "categories": benchmark(
        [
            {**row(m), "questions": 2, "categories": {c: {**row(m), "questions": 1} for c in ("math", "rag")}}
            for m in METHODS
        ]
    ),
    "training": training(),
    "heads that learn": learning(200),
    "heads that began to learn": learning(6),
    "experiment": {"kind": "experiment", "figure": GROUPED},
}


def page_of(figure, mode="light"):
    with settings(THEMES[mode]):
        page = plots.build(figure, THEMES[mode])
        page.canvas.draw()
    return page


@pytest.fixture(scope="module")
def pages():
    return {name: page_of(figure_of(result)) for name, result in RESULTS.items()}


def labels_of(legend):
    return [text.get_text() for text in legend.get_texts()]


def panel(page, title):
    return next(axes for axes in page.axes if axes.get_title(loc="left").replace("\n", " ").startswith(title))


def seen_texts(page):
    """Every word on the page: titles, labels, legends, small print, values, and the ticks inside their panels."""
    legends = [*page.legends, *(axes.get_legend() for axes in page.axes if axes.get_legend())]
    texts = [*page.texts, *(text for legend in legends for text in legend.get_texts())]
    for axes in page.axes:
        texts += [*axes.texts, axes.xaxis.label, axes.yaxis.label, axes._left_title]
        for axis, place, side in ((axes.xaxis, 0, "labelbottom"), (axes.yaxis, 1, "labelleft")):
            if axis.get_tick_params()[side]:
                low, high = sorted(axis.get_view_interval())
                texts += [tick for tick in axis.get_ticklabels() if low <= tick.get_position()[place] <= high]
    return [text for text in texts if text.get_text()]


def assert_readable(page, texts, slack=2):
    """No words on words, up to so many pixels of the room around letters; none over the edge of the page."""
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    for (one, a), (other, b) in combinations(boxes, 2):
        assert min(a.x1, b.x1) - max(a.x0, b.x0) < slack or min(a.y1, b.y1) - max(a.y0, b.y0) < slack, (one, other)
    for words, box in boxes:
        assert min(box.x0, box.y0, page.bbox.x1 - box.x1, page.bbox.y1 - box.y1) >= 0, words


@pytest.mark.parametrize("name", RESULTS)
def test_no_words_overlap_and_none_is_cut_off(pages, name):
    assert_readable(pages[name], seen_texts(pages[name]))


def test_the_check_of_readability_sees_an_overlap():
    page = page_of(GROUPED)
    page.text(*page.transFigure.inverted().transform(page.axes[0]._left_title.get_window_extent().p0), "across")
    with pytest.raises(AssertionError, match="across"):
        assert_readable(page, seen_texts(page))


@pytest.mark.parametrize("name", RESULTS)
def test_every_panel_says_what_it_shows_and_no_legend_covers_it(pages, name):
    page = pages[name]
    for axes in page.axes:
        assert axes.get_title(loc="left")
        assert axes.get_xlabel() or axes.get_ylabel()
        for legend in [*page.legends, axes.get_legend()]:
            assert legend is None or not legend.get_window_extent().shrunk(0.99, 0.9).overlaps(axes.bbox)


def test_results_of_one_setting_are_bars_with_their_values(pages):
    page = pages["one setting"]
    speedup = panel(page, "Speedup")
    assert labels_of(speedup.get_legend()) == ["plain generate"]
    assert {"1.00", "1.50", "2.00", "2.50", "3.00"} <= {text.get_text() for text in speedup.texts}
    assert [text.get_text() for text in speedup.get_yticklabels()][-1] == "assistant:my-org/\nsome-model-0.5b"
    assert len(speedup.lines) == len(METHODS) + 1  # the ranges and the reference
    parts = panel(page, "Where the time")
    assert labels_of(parts.get_legend()) == ["verify", "draft", "walk", "other"]
    ends = [patch.get_x() + patch.get_width() for patch in parts.patches]
    assert max(ends) == pytest.approx(10.0)  # plain: 1000 ms / 100 tokens
    assert labels_of(panel(page, "Acceptance").get_legend()) == ["clover-2", "medusa"]


def test_the_reference_line_is_hidden_behind_values_that_it_would_cross(pages):
    speedup = panel(pages["one setting"], "Speedup")
    reference = max(speedup.lines, key=lambda line: line.get_ydata()[-1] - line.get_ydata()[0])
    assert reference.get_linestyle() == "--"
    for value in speedup.texts:
        assert value.get_bbox_patch().get_facecolor() == speedup.get_facecolor()
        assert value.get_zorder() > reference.get_zorder()


def test_a_sweep_is_lines_with_one_legend_and_a_tick_for_each_value(pages):
    page = pages["batch sizes"]
    assert labels_of(page.legends[0]) == list(METHODS[:4])
    speed = panel(page, "Speed")
    assert speed.get_legend() is None
    assert speed.get_xlabel() == "batch size"
    assert [t.get_text() for t in speed.get_xticklabels()] == ["1", "2", "4", "8", "16", "32", "48"]
    assert len(speed.collections) == 4  # the ranges
    assert labels_of(panel(page, "Speedup").get_legend()) == ["plain generate"]


def test_tree_sizes_are_a_line_for_each_tree_shape_beside_plain(pages):
    page = pages["tree sizes"]
    builders = [f"clover-2, {tree}" for tree in ("global tree", "levels tree", "chain")]
    assert labels_of(page.legends[0]) == ["plain", *builders]
    plain, *rest = panel(page, "Speed").lines
    assert plain.get_xdata().tolist() == [2, 64]
    assert all(line.get_xdata().tolist() == [2, 4, 8, 16, 32, 64] for line in rest)


def test_categories_are_dots_of_every_method_but_plain(pages):
    page = pages["categories"]
    speedup = panel(page, "Speedup by category")
    assert [text.get_text() for text in speedup.get_yticklabels()] == ["all (2)", "math (1)", "rag (1)"]
    assert labels_of(speedup.get_legend()) == [*METHODS[1:], "plain generate"]
    dots = [line for line in speedup.lines if line.get_marker() not in ("None", None)]
    assert [line.get_xdata()[0] for line in dots] == [1.5, 2.0, 2.5, 3.0]
    assert panel(page, "Tokens per forward by category").get_xlabel() == "tokens per forward"


def test_training_shows_held_out_figures_where_there_are_some(pages):
    page = pages["training"]
    assert labels_of(panel(page, "Loss").get_legend()) == ["training", "held-out"]
    assert panel(page, "Loss").lines[0].get_xdata()[0] == 20  # the loss that was no number is left out
    accuracy = panel(page, "Top-1 accuracy, held-out text")
    assert labels_of(accuracy.get_legend()) == ["head 0", "head 1", "head 2"], "as the log counts them"
    assert accuracy.lines[0].get_xdata().tolist() == [50, 100]
    assert "measured" in labels_of(panel(page, "Tokens per forward").get_legend())
    without = figure_of(training(evaluated=False))
    titles = ["Loss", "Top-1 accuracy, training text", "Tokens per forward, training text"]
    assert [panel["title"] for panel in without["panels"]] == titles


def test_heads_that_learn_are_shown_over_tokens_and_over_time(pages):
    tokens, time = pages["heads that learn"].axes
    assert (tokens.get_xlabel(), time.get_xlabel(), tokens.get_ylabel()) == ("tokens", "minutes", "tokens per forward")
    assert [axes.lines[0].get_xdata()[-1] for axes in (tokens, time)] == [480 * 199, 11 * 200 / 60]
    assert "100,000" in [label.get_text() for label in tokens.get_xticklabels()] or tokens.get_xlim()[1] < 100_000
    figure = figure_of(RESULTS["heads that learn"])
    series, entries = figure["panels"][0]["series"][0], RESULTS["heads that learn"]["record"]
    last = [entry["tokens_per_forward"] for entry in entries[-10:]]
    assert (series["y"][-1], series["low"][-1], series["high"][-1]) == (sum(last) / 10, min(last), max(last))
    few = figure_of(RESULTS["heads that began to learn"])["panels"]
    assert [panel["xlabel"] for panel in few] == ["tokens", "seconds"]
    shown = RESULTS["heads that began to learn"]["record"]
    assert few[0]["series"][0]["y"] == [entry["tokens_per_forward"] for entry in shown]
    assert few[0]["reference"] == {"y": 1.0, "label": "plain generate"}


def test_the_folder_of_heads_that_learn_may_be_named_in_place_of_its_file(tmp_path):
    with pytest.raises(ValueError, match=r"holds no learning\.json, which heads that learn write"):
        plot(tmp_path)
    (tmp_path / "learning.json").write_text(json.dumps(learning(6)))
    assert [path.name for path in plot(tmp_path)] == ["learning.png", "learning-dark.png"]
    assert plot(tmp_path / "learning.json", tmp_path / "a" / "b")[0] == tmp_path / "a" / "b" / "learning.png"


def test_more_methods_than_colours_can_be_told_apart():
    names = [f"drafter {chr(97 + i)}" for i in range(20)]
    looks = _looks([{"series": [{"label": name} for name in ["clover-x", "medusa", *names]]}], THEMES["light"])
    assert len(set(looks.values())) == len(looks) == 22


def test_a_method_has_the_same_colour_everywhere(pages):
    colours = set()
    for axes in (*pages["batch sizes"].axes, *pages["temperatures"].axes):
        colours |= {line.get_color() for line in axes.lines if line.get_marker() == "o"}
    assert colours == {THEMES["light"]["cycle"][0]}


def test_skipped_methods_and_other_tokens_are_noted_under_the_figure():
    reason = "no batches above 1"
    rows = [row("plain"), row("clover-2", identical=False), {**row("medusa"), "skipped": reason}]
    figure = figure_of(benchmark(rows))
    assert f"medusa ({reason})" in figure["note"]
    assert "other tokens than plain generate: clover-2" in figure["note"]
    assert [series["label"] for series in figure["panels"][0]["series"]] == ["plain", "clover-2"]


def test_plot_writes_a_light_and_a_dark_picture_and_leaves_the_users_settings_as_they_were(tmp_path):
    before = dict(matplotlib.rcParams.copy()), matplotlib.get_backend(auto_select=False)
    source = tmp_path / "result.json"
    source.write_text(json.dumps(RESULTS["one setting"]))
    light, dark = plot(source)
    assert (dict(matplotlib.rcParams.copy()), matplotlib.get_backend(auto_select=False)) == before
    assert (light, dark) == (tmp_path / "result.png", tmp_path / "result-dark.png")
    corners = [Image.open(path).convert("RGB").getpixel((2, 2)) for path in (light, dark)]
    assert corners == [(255, 255, 255), (13, 17, 23)]
    assert all(path.stat().st_size < 200_000 for path in (light, dark))


def test_matplotlib_is_not_imported_before_something_is_drawn():
    code = "import sys, hf_clover.measure.plots; print('matplotlib' in sys.modules)"
    assert run(code) == "False\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", r"thing\.json: there is nothing here to draw.*benchmark.*experiments.*trainer_state\.json.*--learn"),
        ("[1]", r"thing\.json: there is nothing here to draw"),
        ("no", r"thing\.json is not JSON"),
        ('{"kind": "online learning", "record": []}', r"nothing has been generated with these heads since they began"),
        ('{"log_history": [{"step": 1, "loss": 2.0}]}', r"thing\.json: .* not written by CloverTrainer"),
        (
            '{"kind": "benchmark", "rows": [{"method": "plain", "skipped": "too large"}]}',
            r"thing\.json: no method of this benchmark could be measured.*too large",
        ),
    ],
)
def test_a_file_that_cannot_be_drawn_is_refused_by_name(tmp_path, content, said):
    path = tmp_path / "thing.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=said):
        plot(path)


def test_an_unknown_panel_is_refused(tmp_path):
    figure = {"panels": [{"kind": "pie", "title": "Shares", "series": []}]}
    with pytest.raises(ValueError, match=r"`kind='pie'` of the panel 'Shares'.*'lines', 'bars' or 'dots'"):
        draw(figure, tmp_path / "x.png")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-clover\[plot\]'"):
        draw(GROUPED, tmp_path / "x.png")


def test_the_picture_of_how_it_works_is_small_and_readable(tmp_path):
    example = runpy.run_path(str(ROOT / "examples" / "pictures.py"))
    example["main"](["--out", str(tmp_path)])
    for name in ("how_it_works.png", "how_it_works-dark.png"):
        assert (tmp_path / name).stat().st_size < 200_000
        assert (ROOT / "examples" / "pictures" / name).exists()
    tree = example["TREE"]
    assert all(node.parent is None or tree[node.parent].depth == node.depth - 1 for node in tree)
    assert all(node.parent is None or tree[node.parent].agreed for node in tree if node.agreed)
    with settings(THEMES["light"]):
        page = example["how_it_works"]()
        page.canvas.draw()
    assert_readable(page, page.axes[0].texts, slack=5)


def line(x, y, **fields):
    """The axes of a panel with one line."""
    only = {"kind": "lines", "title": "p", "series": [{"label": "a", "x": x, "y": y}], **fields}
    return panel(page_of({"title": "t", "panels": [only]}), "p")


@pytest.mark.parametrize(("values", "begins"), [([2.2, 2.1], 0), ([0.1, 2.0], 0), ([1.0, 2.0], None)])
def test_an_axis_begins_at_zero_where_another_beginning_would_mislead(values, begins):
    bottom = line([1, 2], values).get_ylim()[0]
    assert bottom == begins if begins is not None else 0 < bottom < min(values)


def test_the_reference_line_is_inside_the_axis():
    low, high = line([1, 2], [0.31, 0.3], reference={"y": 1.0, "label": "plain generate"}).get_ylim()
    assert low <= 0.3
    assert high > 1.0


def test_the_picture_of_the_race_has_every_token_at_its_time(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = runpy.run_path(str(ROOT / "examples" / "race_picture.py"))
    tokenizer = make_tokenizer()
    ids = tokenizer("a line that has to be broken since it is longer than its column\n\nabc").input_ids
    ours, plain = StepRecord(), StepRecord()
    ours.steps, ours.times, ours.seconds = [ids[:5], ids[5:]], [0.25] * 5 + [1.0] * (len(ids) - 5), 1.0
    plain.steps, plain.times, plain.seconds = [[token] for token in ids], [0.1 * n for n in range(len(ids))], 8.0
    svg = ElementTree.fromstring(example["picture"](ours, plain, tokenizer, example["THEMES"]["-dark"]))
    tag = "{http://www.w3.org/2000/svg}"
    groups = [(group.findall(f"{tag}text"), group.find(f"{tag}set")) for group in svg.iter(f"{tag}g")]
    of_ours, of_plain = groups[:2], groups[3 : 3 + len(ids)]
    assert [moment.get("dur") for _, moment in of_ours] == ["0.25s", "1.00s"]
    assert "".join(text.text for text in of_ours[0][0]) == "a lin"
    assert [text.get("fill") == "#3fb950" for text in of_ours[0][0]] == [True] * 4 + [False]
    assert "".join(text.text for texts, _ in of_plain for text in texts) == tokenizer.decode(ids).replace("\n", "")
    lines = {float(text.get("y")) for texts, _ in of_plain for text in texts}
    assert len(lines) == 3, "two of the first, and one behind an empty one"
    assert max(float(text.get("x")) + float(text.get("textLength")) for texts, _ in of_plain for text in texts) < 937
    assert any("8.0 times as fast, the same" in (text.text or "") for text in svg.iter(f"{tag}text"))
    for name in ("race.svg", "race-dark.svg"):
        assert (ROOT / "examples" / "pictures" / name).stat().st_size < 200_000


@pytest.mark.parametrize(("value", "said"), [(1_000_000, "1,000,000"), (0.003, "0.003"), (16, "16")])
def test_ticks_say_every_number_in_full(value, said):
    axes = line([value, 10 * value], [1.0, 2.0], xlabel="tokens", xscale="log10")
    assert axes.get_xticklabels()[0].get_text() == said
