"""Panels of one quantity with all runs in the same axes, and the picture of all panels. Not pyplot, which is global."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from hf_lowprec.tools.plotting.colours import LIGHT, Theme, run_colour, run_dash
from hf_lowprec.tools.plotting.measures import MEASURES, Measure
from hf_lowprec.tools.plotting.runs import ALL, Run, Series, kinds_of_all

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "text.parse_math": False,  # names of runs may contain dollar signs
}
WIDE, SMALL = (5.2, 2.5), (2.5, 1.75)
"""Inches of a panel: of the whole model, and of one kind of parameters."""

EVENLY_SPREAD = 1 / math.sqrt(12)
"""Root mean square of numbers that are uniform within half a unit."""
HALF_SPACING = (2.0**-9, 2.0**-8)
"""Half the distance between BF16 numbers, relative to the number: just below a power of two, and at the power."""

_ROUND = [1, 2, 2.5, 5, 10]
"""First digits of distances between ticks."""

POINTS_PER_INCH = 160
"""More points than this of one line cannot be seen."""
FEW, MANY = 16, 250
"""Up to so many points are marked; of more than so many, the line is thin."""

Draw = Callable[[Axes, Sequence[Run], Theme], None]


@dataclass(frozen=True)
class Panel:
    """Axes of one quantity, with all runs.

    Attributes:
        title: the quantity, or the kind of parameters.
        kind: `all`, or a kind of parameters.
        draw: draws the runs.
        size: inches.
    """

    title: str
    kind: str
    draw: Draw
    size: tuple[float, float]


def training_panels(runs: Sequence[Run]) -> list[Panel]:
    """Loss, gradient norm and learning rate, as far as any of the runs has logged them."""
    evaluated = any(run.logged("eval_loss") for run in runs)
    rows: list[tuple[str, Draw, tuple[str, ...]]] = [
        ("Loss (circles: evaluation)" if evaluated else "Loss", draw_loss, ("loss", "eval_loss")),
        ("Gradient norm", draw_gradient_norm, ("grad_norm",)),
        ("Learning rate", draw_learning_rate, ("learning_rate",)),
    ]
    return [Panel(title, ALL, draw, WIDE) for title, draw, keys in rows if _any_logged(runs, keys)]


def measure_panels(measure: Measure, runs: Sequence[Run]) -> list[Panel]:
    """One measure, a panel for each kind of parameters that has it in any of the runs."""
    kinds = [kind for kind in kinds_of_all(runs) if any(run.drawn(kind, measure.name) for run in runs)]
    return [Panel(kind_title(kind), kind, partial(draw_measure, measure=measure, kind=kind), SMALL) for kind in kinds]


def kind_title(kind: str) -> str:
    return "all weights" if kind == ALL else kind


def draw_loss(ax: Axes, runs: Sequence[Run], theme: Theme) -> None:
    """Training loss as lines; evaluation loss as circles, joined by thin lines."""
    for k, run in enumerate(runs):
        _draw_line(ax, theme, k, len(runs), run.logged("loss"))
        evaluation = {"marker": "o", "markersize": 4.5, "markerfacecolor": theme.page, "linewidth": 0.8}
        _draw_line(ax, theme, k, len(runs), run.logged("eval_loss"), **evaluation)
    _choose_scale(ax, log_from=20)


def draw_gradient_norm(ax: Axes, runs: Sequence[Run], theme: Theme) -> None:
    for k, run in enumerate(runs):
        _draw_line(ax, theme, k, len(runs), run.logged("grad_norm"))
    _choose_scale(ax, log_from=10)


def draw_learning_rate(ax: Axes, runs: Sequence[Run], theme: Theme) -> None:
    for k, run in enumerate(runs):
        _draw_line(ax, theme, k, len(runs), run.logged("learning_rate"))
    _choose_scale(ax)
    ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))


def draw_measure(ax: Axes, runs: Sequence[Run], theme: Theme, *, measure: Measure, kind: str) -> None:
    """Lines with bands of two standard errors to each side."""
    for k, run in enumerate(runs):
        series = _thinned(run.drawn(kind, measure.name), ax)
        low, high = (
            [value + sign * 2 * error for value, error in zip(series.values, series.errors, strict=True)]
            for sign in (-1, 1)
        )
        if any(map(math.isfinite, high)):
            band = ax.fill_between(series.steps, low, high, color=run_colour(theme, k), alpha=0.15, linewidth=0)
            band.set_gid(run_id(k))
        _draw_line(ax, theme, k, len(runs), series)
    if measure.name == "compensation_ulps":
        ax.axhline(EVENLY_SPREAD, color=theme.faint, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    if measure.name == "update_to_weight" and any(run.has_bf16_weights() for run in runs):
        ax.axhspan(*HALF_SPACING, color=theme.grid, linewidth=0, zorder=0)
    # The panels of a measure have one axis, so that kinds can be compared.
    everywhere = [run.drawn(other, measure.name).values for run in runs for other in run.kinds()]
    values = [value for column in everywhere for value in column if math.isfinite(value)]
    if measure.scale == "share":
        _set_share_axis(ax, values)
    elif measure.scale == "log":
        _set_ratio_axis(ax, values)
    else:
        _set_compensation_axis(ax, values)


def panel_figure(panel: Panel, runs: Sequence[Run], theme: Theme = LIGHT) -> Figure:
    """A figure of one panel, transparent."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=panel.size)
        figure.patch.set_alpha(0)
        _add_panel(figure, panel, runs, theme, (0, panel.size[1]), panel.size, titled=False)
    return figure


def overview(runs: Sequence[Run], theme: Theme = LIGHT) -> Figure:
    """The figure of all panels: the training above, then a row for each measure, with a column for each kind."""
    width, header, heading, margin = 13.0, 0.62, 0.42, 0.2
    training = training_panels(runs)
    rows = [(measure, panels) for measure in MEASURES if (panels := measure_panels(measure, runs))]
    kinds = [kind for kind in kinds_of_all(runs) if any(panel.kind == kind for _, panels in rows for panel in panels)]
    wide = ((width - 2 * margin) / max(len(training), 2), WIDE[1])
    small = ((width - 2 * margin) / max(len(kinds), 4), SMALL[1])
    legend_rows = _legend_rows(runs, width - 2 * margin) if len(runs) > 1 else []
    header += 0.24 * len(legend_rows)
    height = header + 0.24 + (wide[1] if training else 0) + len(rows) * (heading + small[1]) + margin
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), facecolor=theme.page)

        def write(x: float, top: float, text: str, **options: Any) -> Any:
            return figure.text(x / width, 1 - top / height, text, va="top", **options)

        write(margin + 0.1, 0.2, page_title(runs), color=theme.ink, fontsize=14, weight="bold")
        _add_legend(figure, legend_rows, theme, (margin + 0.1, height - 0.62))
        if len(runs) == 1:
            write(margin + 0.1, 0.5, run_description(runs[0]), color=theme.faint)
        top = header + (0.2 if legend_rows else 0.24)
        for k, panel in enumerate(training):
            _add_panel(figure, panel, runs, theme, (margin + k * wide[0], height - top), wide)
        top += wide[1] if training else 0
        for measure, panels in rows:
            title = write(margin + 0.1, top + 0.17, measure.title, color=theme.ink, fontsize=11.5, weight="bold")
            end = title.get_window_extent().x1 / figure.dpi
            write(end + 0.15, top + 0.185, measure.meaning, color=theme.faint)
            top += heading
            for panel in panels:
                place = (margin + kinds.index(panel.kind) * small[0], height - top)
                _add_panel(figure, panel, runs, theme, place, small)
            top += small[1]
    return figure


def page_title(runs: Sequence[Run]) -> str:
    """The title of a plot of these runs."""
    return f"Training of {shortened(runs[0].name)}" if len(runs) == 1 else f"{len(runs)} training runs"


def run_description(run: Run) -> str:
    """Model, optimizer and number of steps of a run, as far as they are known."""
    record = run.records.run
    known = [str(record[key]) for key in ("model", "optim") if record.get(key)]
    return ", ".join([*map(shortened, known), f"{run.last_step} steps"])


def run_id(run: int) -> str:
    """The id, in an SVG, of what is drawn of a run."""
    return f"run-{run}"


def shortened(name: str, length: int = 48) -> str:
    """A name on one line, with its middle left out if it is too long for a legend."""
    name = "".join(char for char in " ".join(name.split()) if char.isprintable())
    return name if len(name) <= length else f"{name[: length // 2]}…{name[-(length // 2) :]}"


def number_text(value: float) -> str:
    """A number with up to four digits: 1e-5 instead of 1e-05 or 0.00001."""
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    plain = value == 0 or 1e-3 <= abs(value) < 1e4
    text = f"{value:.4g}" if plain else f"{float(mantissa):g}e{int(exponent)}"
    return text.replace("-", "−", 1) if text.startswith("-") else text


def step_text(step: float) -> str:
    """A number of steps, in thousands from ten thousand on."""
    return f"{step:g}" if step < 10_000 else f"{step / 1000:g}k"


def _add_panel(
    figure: Figure,
    panel: Panel,
    runs: Sequence[Run],
    theme: Theme,
    corner: tuple[float, float],
    size: tuple[float, float],
    titled: bool = True,
) -> Axes:
    """Draw a panel into a rectangle of `size` inches whose upper left corner is at `corner`, from the lower left."""
    left, right, above, below = 0.46, 0.14, 0.34 if titled else 0.1, 0.46 if panel.size == WIDE else 0.3
    width, height = figure.get_size_inches()
    box = (corner[0] + left, corner[1] - size[1] + below, size[0] - left - right, size[1] - above - below)
    ax = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height))
    ax.patch.set_alpha(0)
    panel.draw(ax, runs, theme)
    ax.set_xlim(_step_range(runs))
    ax.xaxis.set_major_locator(MaxNLocator(3 if panel.size == SMALL else 5, integer=True, steps=_ROUND))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda step, _: step_text(step)))
    if titled:
        ax.set_title(shortened(panel.title, 26), color=theme.ink, pad=7)
    if panel.size == WIDE:
        ax.set_xlabel("step", color=theme.faint, labelpad=2)
    ax.tick_params(colors=theme.faint, length=2.5, width=0.8)
    ax.grid(axis="y", color=theme.grid, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_color(theme.faint)
    ax.spines["bottom"].set_linewidth(0.8)
    ax.tick_params(axis="y", length=0)
    return ax


def _step_range(runs: Sequence[Run]) -> tuple[float, float]:
    """From the first to the last logged step; from 0 if logging began early."""
    first = min(run.records.steps[0]["step"] for run in runs)
    last = max(run.last_step for run in runs)
    first = 0 if first <= 0.2 * last else first
    return (first, last) if last > first else (first - 1, last + 1)


def _draw_line(ax: Axes, theme: Theme, run: int, runs: int, series: Series, **options: Any) -> None:
    """A run's line. Of lines that coincide, all can be seen: the first is broad and pale, later ones are thinner."""
    if not series:
        return
    series = _thinned(series, ax)
    style: dict[str, Any] = {"linestyle": run_dash(run), "color": run_colour(theme, run)}
    width = 1.6 if runs == 1 else 3.0 - 2.0 * run / (runs - 1)
    if len(series.steps) > MANY:
        width = min(width, 1.0)
    elif runs > 1 and run == 0:
        width, style["alpha"] = 6.0, 0.4
    style["linewidth"] = width
    if len(series.steps) <= FEW:
        style |= {"marker": "o", "markersize": 3 + 0.5 * width}
    (line,) = ax.plot(series.steps, series.values, **{**style, **options})
    line.set_gid(run_id(run))


def _thinned(series: Series, ax: Axes) -> Series:
    """The same line with as many points as can be seen: of each short stretch, its smallest and its largest value."""
    count, seen = len(series.steps), round(POINTS_PER_INCH * ax.get_window_extent().width / ax.figure.dpi)
    if count <= seen:
        return series
    kept = {0, count - 1}
    stretches = (seen - 2) // 2
    for k in range(stretches):
        inside = range(count * k // stretches, count * (k + 1) // stretches)
        finite = [i for i in inside if math.isfinite(series.values[i])] or inside[:1]
        kept |= {min(finite, key=series.values.__getitem__), max(finite, key=series.values.__getitem__)}
    order = sorted(kept)
    return Series(
        [series.steps[i] for i in order], [series.values[i] for i in order], [series.errors[i] for i in order]
    )


def _drawn_values(ax: Axes) -> list[float]:
    """The finite values of all lines."""
    return [value for line in ax.lines for value in map(float, line.get_ydata()) if math.isfinite(value)]


def _choose_scale(ax: Axes, log_from: float = math.inf) -> None:
    """A logarithmic axis if the largest value is at least `log_from` times the smallest positive one."""
    values = _drawn_values(ax)
    low, high = min((value for value in values if value > 0), default=math.inf), max(values, default=1.0)
    if min(values, default=-1) >= 0 and high >= log_from * low:
        ax.set_yscale("log")
        decades = math.log10(high / low)
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 1.5 else (1,), numticks=5))
        ax.yaxis.set_minor_locator(NullLocator())
    else:
        ax.yaxis.set_major_locator(MaxNLocator(4, steps=_ROUND))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))


def _set_ratio_axis(ax: Axes, values: Sequence[float]) -> None:
    """Logarithmic, up to BF16's spacing at least, and over four decades at most: a schedule may end at 0."""
    top = max(2 * HALF_SPACING[1], 2 * max(values, default=0))
    low = min((value for value in values if value > 1e-4 * top), default=0.1 * top)
    ax.set_yscale("log")
    ax.set_ylim(low / 2, top)
    ax.yaxis.set_major_locator(LogLocator(numticks=4))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"1e{round(math.log10(value))}"))


def _set_compensation_axis(ax: Axes, values: Sequence[float]) -> None:
    """From 0 to half a spacing, or to the largest value if most exceed that.

    A compensation is within half a spacing when it is stored. Later the weight can come close to 0, where numbers are
    dense, and few such weights make a peak of the root mean square.
    """
    half = 0.5  # of a spacing, the unit of the axis
    if median(values or [0]) <= half:
        ax.set_ylim(0, 1.04 * half)
        ax.set_yticks([0, 0.25, 0.5], ["0", "0.25", "0.5"])
    else:
        ax.set_ylim(0, 1.05 * max(values))
        ax.yaxis.set_major_locator(MaxNLocator(3, steps=_ROUND))


def _set_share_axis(ax: Axes, values: Sequence[float]) -> None:
    """From 0 to 1; wider where stochastic rounding scatters beyond, up to half as wide again."""
    low, high = max(min(values, default=0), -0.5), min(max(values, default=1), 1.5)
    ax.set_ylim(min(low, 0) - 0.04, max(high, 1) + 0.04)
    ax.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])


def _legend_rows(runs: Sequence[Run], width: float) -> list[list[tuple[int, str, float]]]:
    """Number, name and place in inches of each run, in rows of up to `width` inches."""
    rows: list[list[tuple[int, str, float]]] = []
    place = math.inf
    for k, run in enumerate(runs):
        name = shortened(run.name)
        needed = 0.75 + 0.085 * len(name)
        if place + needed > width:
            rows.append([])
            place = 0.0
        rows[-1].append((k, name, place))
        place += needed
    return rows


def _add_legend(
    figure: Figure, rows: Iterable[Sequence[tuple[int, str, float]]], theme: Theme, corner: tuple[float, float]
) -> None:
    width, height = figure.get_size_inches()
    for row, entries in enumerate(rows):
        y = (corner[1] - 0.24 * row) / height
        for run, name, place in entries:
            x = corner[0] + place
            style: dict[str, Any] = {"color": run_colour(theme, run), "linestyle": run_dash(run), "linewidth": 2.4}
            figure.add_artist(Line2D([x / width, (x + 0.35) / width], [y, y], **style))
            figure.text((x + 0.45) / width, y, name, color=theme.ink, va="center_baseline")


def _any_logged(runs: Sequence[Run], keys: Sequence[str]) -> bool:
    return any(run.logged(key) for run in runs for key in keys)
