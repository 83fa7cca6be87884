"""What is drawn is what was logged, run by run, and axes show it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from hf_lowprec.tools.plotting import figures
from hf_lowprec.tools.plotting.colours import DARK, LIGHT
from hf_lowprec.tools.plotting.measures import MEASURES
from hf_lowprec.tools.plotting.run_records import RunRecords
from hf_lowprec.tools.plotting.runs import Run
from tests.support.training.metrics_file import run_record, step_records

RUNS = [
    Run(mode, RunRecords(Path(mode), run_record(mode), step_records(mode, steps, seed=steps), []))
    for mode, steps in (("kahan", 2000), ("nearest", 1000), ("stochastic", 1500))
]
KINDS = ("all", "embeddings", "attention", "mlp", "norms", "head")


def run_of(name: str, steps: list[dict[str, Any]]) -> Run:
    return Run(name, RunRecords(Path(name), {}, steps, []))


def axes_of(panel: figures.Panel, runs: list[Run]) -> Axes:
    (ax,) = figures.panel_figure(panel, runs).axes
    return ax


def lines(ax: Axes, run: int) -> list[list[tuple[float, float]]]:
    """Steps and values of the lines that were drawn of a run."""
    return [
        list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))
        for line in ax.lines
        if line.get_gid() == f"run-{run}"
    ]


def of_key(run: Run, key: str) -> list[tuple[float, float]]:
    return [(record["step"], record[key]) for record in run.records.steps if key in record]


def of_kind(run: Run, kind: str, name: str) -> list[tuple[float, float]]:
    precision = [(record["step"], record["precision"].get(kind, {})) for record in run.records.steps]
    return [(step, values[name]) for step, values in precision if name in values]


def test_training_panels_draw_what_was_logged() -> None:
    loss, norm, rate = figures.training_panels(RUNS)
    for k, run in enumerate(RUNS):
        assert lines(axes_of(loss, RUNS), k) == [of_key(run, "loss"), of_key(run, "eval_loss")]
        assert lines(axes_of(norm, RUNS), k) == [of_key(run, "grad_norm")]
        assert lines(axes_of(rate, RUNS), k) == [of_key(run, "learning_rate")]


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name)
def test_measures_are_drawn_by_kind_with_their_errors(measure: Any) -> None:
    panels = {panel.kind: panel for panel in figures.measure_panels(measure, RUNS)}
    expected = [kind for kind in KINDS if any(of_kind(run, kind, measure.name) for run in RUNS)]
    assert list(panels) == expected != []
    for kind, panel in panels.items():
        ax = axes_of(panel, RUNS)
        for k, run in enumerate(RUNS):
            values, errors = of_kind(run, kind, measure.name), of_kind(run, kind, f"{measure.name}_error")
            assert lines(ax, k) == ([values] if values else [])
            bands = [c for c in ax.collections if isinstance(c, PolyCollection) and c.get_gid() == f"run-{k}"]
            assert len(bands) == bool(errors)
            for band in bands:
                drawn = {tuple(map(float, point)) for point in band.get_paths()[0].vertices}
                assert {(s, v + sign * 2 * e) for (s, v), (_, e) in zip(values, errors, strict=True) for sign in (-1, 1)
                        } <= drawn  # fmt: skip


def test_lines_whose_error_hides_what_they_say_are_not_drawn() -> None:
    """A line is left out if most of its errors are 0.5. One with a few such errors is drawn with its band."""

    def run(name: str, uncertain: int) -> Run:
        errors = [0.5] * uncertain + [0.1] * (9 - uncertain)
        values = [{"lost_updates": 0.0, "lost_updates_error": e, "never_moved": 0.5} for e in errors]
        return run_of(name, [{"step": k, "precision": {"all": v, "head": v}} for k, v in enumerate(values)])

    runs = [run("noise", 6), run("known", 3)]
    panel, _ = figures.measure_panels(MEASURES[0], runs)
    assert [len(lines(axes_of(panel, runs), k)) for k in range(2)] == [0, 1]
    assert figures.measure_panels(MEASURES[0], runs[:1]) == []
    assert {ax.get_title(loc="left") for ax in figures.overview(runs[:1]).axes} == {"all weights", "head"}


def test_the_overview_has_every_panel_with_the_same_lines() -> None:
    figure = figures.overview(RUNS)
    panels = [*figures.training_panels(RUNS), *(p for m in MEASURES for p in figures.measure_panels(m, RUNS))]
    assert [ax.get_title(loc="left") for ax in figure.axes] == [panel.title for panel in panels]
    for ax, panel in zip(figure.axes, panels, strict=True):
        for k in range(len(RUNS)):
            assert lines(ax, k) == lines(axes_of(panel, RUNS), k)
    texts = {text.get_text() for text in figure.texts}
    assert {run.name for run in RUNS} | {measure.title for measure in MEASURES} <= texts


def test_nothing_in_the_overview_overlaps_or_leaves_it() -> None:
    runs = [Run(f"experiment-{k}/" + "long-name-" * (k % 7), run.records) for k, run in enumerate(RUNS * 4)]
    for chosen in (runs, RUNS[:1]):
        figure = figures.overview(chosen)
        boxes = [text.get_window_extent() for text in figure.texts]
        boxes += [ax.get_tightbbox() for ax in figure.axes]
        width, height = figure.bbox.width, figure.bbox.height
        for k, box in enumerate(boxes):
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height
            assert not any(box.overlaps(other) for other in boxes[:k])


def test_a_run_has_one_colour_in_all_panels() -> None:
    many = [Run(str(k), RUNS[0].records) for k in range(8)]
    panels = [*figures.training_panels(many), *figures.measure_panels(MEASURES[0], many)]
    drawn = [line for panel in panels for line in axes_of(panel, many).lines]
    for k in range(8):
        styles = {(line.get_color(), line.get_linestyle()) for line in drawn if line.get_gid() == f"run-{k}"}
        assert styles == {(LIGHT.runs[k % 6], "-" if k < 6 else "--")}


def test_coinciding_lines_get_thinner() -> None:
    rate = figures.training_panels(RUNS)[2]
    widths = [line.get_linewidth() for line in axes_of(rate, RUNS).lines]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3


def test_shares_have_an_axis_from_0_to_1_unless_values_scatter_beyond() -> None:
    def limits(*values: float) -> tuple[float, float]:
        steps = [{"step": k, "precision": {"all": {"lost_updates": v}}} for k, v in enumerate(values)]
        (panel,) = figures.measure_panels(MEASURES[0], runs := [run_of("run", steps)])
        return axes_of(panel, runs).get_ylim()

    assert limits(0.0, 0.5) == pytest.approx((-0.04, 1.04))
    assert limits(-0.15, 0.1) == pytest.approx((-0.19, 1.04))
    assert limits(-8.0, 9.0) == pytest.approx((-0.54, 1.54))


def test_single_peaks_do_not_stretch_the_axis_of_the_compensation() -> None:
    measure = next(m for m in MEASURES if m.name == "compensation_ulps")

    def top(*values: float) -> float:
        steps = [{"step": k, "precision": {"all": {measure.name: v}}} for k, v in enumerate(values)]
        (panel,) = figures.measure_panels(measure, runs := [run_of("run", steps)])
        return axes_of(panel, runs).get_ylim()[1]

    assert top(*[0.29] * 20) == top(*[0.29] * 19, 26.0) == 0.52
    assert top(0.29, 2.0) > 2.0


def test_axes_are_logarithmic_where_values_span_decades() -> None:
    def scale(*values: float) -> str:
        runs = [run_of("run", [{"step": k, "loss": v} for k, v in enumerate(values)])]
        return axes_of(figures.training_panels(runs)[0], runs).get_yscale()

    assert [scale(2.0, 10.8), scale(0.01, 10.8), scale(-1.0, 50.0), scale(0.0, 0.0), scale(1.0)] == [
        "linear", "log", "linear", "linear", "linear"
    ]  # fmt: skip


def test_gaps_single_steps_and_late_starts() -> None:
    gap = run_of("gap", [{"step": 1000 + k, "loss": v} for k, v in enumerate([1.0, math.nan, 2.0])])
    one = run_of("one", [{"step": 5, "loss": 1.0}])
    (panel,) = figures.training_panels([gap])
    ax = axes_of(panel, [gap])
    assert ax.get_xlim() == (1000, 1002)
    assert [math.isfinite(y) for _, y in lines(ax, 0)[0]] == [True, False, True]
    assert ax.lines[0].get_marker() == "o"
    assert axes_of(panel, [one]).get_xlim() == (4, 6)
    assert axes_of(panel, [gap, one]).get_xlim() == (0, 1002)
    assert figures.overview([gap, one]).axes


def test_long_runs_keep_their_extremes() -> None:
    values = np.random.default_rng(0).normal(2, 0.1, 50_000)
    values[31_234], values[40_000] = 9.0, -3.0
    runs = [run_of("long", [{"step": k, "loss": float(v)} for k, v in enumerate(values)])]
    (panel,) = figures.training_panels(runs)
    (drawn,) = lines(axes_of(panel, runs), 0)
    assert len(drawn) < 1000
    assert {(31_234, 9.0), (40_000, -3.0), (0, values[0]), (49_999, values[-1])} <= set(drawn)
    assert all(values[int(step)] == value for step, value in drawn)


def test_only_bf16_runs_show_bf16s_spacing() -> None:
    measure = next(m for m in MEASURES if m.name == "update_to_weight")
    without = [Run("fp32", RunRecords(Path("fp32"), {}, RUNS[0].records.steps, []))]
    for runs, count in ((RUNS, 1), (without, 0)):
        assert len(axes_of(figures.measure_panels(measure, runs)[0], runs).patches) == count


def test_colours_are_distinct_and_can_be_read() -> None:
    """A contrast of 4.5 is what WCAG asks of text."""

    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for theme in (LIGHT, DARK):
        assert len(set(theme.variables().values())) == len(theme.variables())
        for colour in (theme.ink, theme.faint, *theme.runs):
            low, high = sorted((luminance(colour), luminance(theme.page)))
            assert (high + 0.05) / (low + 0.05) >= 4.5, colour


def test_numbers_are_short() -> None:
    texts = [figures.number_text(value) for value in (1e-5, 1e-4, 0.5, 2.0, 1234.5678, 12345.678, 1e10, -0.5, 0)]
    assert texts == ["1e-5", "1e-4", "0.5", "2", "1235", "1.235e4", "1e10", "−0.5", "0"]
    assert [figures.step_text(step) for step in (0, 2000, 15_000)] == ["0", "2000", "15k"]
