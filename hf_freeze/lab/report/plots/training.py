"""Plots of training: learning curves, and what methods schedule."""

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from hf_freeze.lab.report.finished_runs import by_row
from hf_freeze.lab.report.plots.style import SIZE
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.signs import style_of


def curves_figure(report: Report) -> Figure | None:
    """Dev loss after each epoch, a line a run; train loss faint behind it, or alone."""
    if not any(run.log for run in report.runs):
        return None
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    signs = report.signs()
    highest, faint = 0.0, 0.25 if has_dev(report) else 0.7
    for run in report.runs:
        colour, marker = style_of(signs.get(run.row))
        train = [(entry["epoch"], entry["loss"]) for entry in run.log if "loss" in entry]
        # The last evaluation of an epoch may be of the best model, after training; the first is of that epoch.
        dev = {entry["epoch"]: entry["eval_loss"] for entry in reversed(run.log) if "eval_loss" in entry}
        if train:
            axes.plot(*zip(*train, strict=True), color=colour, alpha=faint, linewidth=0.7)
        if dev:
            axes.plot(
                *zip(*sorted(dev.items()), strict=True), color=colour, marker=marker, markersize=3.5, linewidth=1.2
            )
            highest = max(highest, *dev.values())
    axes.set(xlabel="epoch", ylabel="loss (lower is better)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=0)
    if highest:
        axes.set_ylim(top=1.1 * highest)  # the first steps in training would press all that follows together
    axes.grid()
    return figure


def has_dev(report: Report) -> bool:
    """Whether any run was evaluated while it trained."""
    return any("eval_loss" in entry for run in report.runs for entry in run.log)


def schedules_figure(report: Report) -> Figure:
    """What methods scheduled in training, a line for each row that does so: the first run of it."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    signs = report.signs()
    for row, runs in by_row(report.runs).items():
        for what, points in next((run.schedules for run in runs if run.schedules), {}).items():
            colour, label = style_of(signs.get(row))[0], f"{report.name_of(row)}: {what}"
            axes.plot(*zip(*points, strict=True), color=colour, drawstyle="steps-post", label=label)
    axes.set(xlabel="share of training", ylabel="value of the schedule", xlim=(0, 1))
    axes.set_ylim(bottom=0)
    axes.grid()
    figure.legend(loc="outside lower center", ncols=1, fontsize=8)
    return figure
