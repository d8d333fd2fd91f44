"""The page of a compression, one HTML file that needs no network, and its picture: while it runs, and after."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from markupsafe import Markup

from hf_freeze.compression.budget import Budget, in_bytes
from hf_freeze.compression.progress import duration
from hf_freeze.experiments.compress.compress import Compressed, Compression
from hf_freeze.experiments.compress.pictures import curves_figure, draw_picture, front_figures, parts_figure
from hf_freeze.experiments.compress.progress import Step
from hf_freeze.experiments.compress.result import about, rows_of, sentences
from hf_freeze.experiments.compress.scores import Scoring
from hf_freeze.experiments.compress.shapes import Part
from hf_freeze.experiments.compress.trials import Trial
from hf_freeze.experiments.report.page import ENVIRONMENT, template_text
from hf_freeze.experiments.report.plots.draw import svg
from hf_freeze.experiments.report.plots.style import STYLE
from hf_freeze.io import write_whole

FILES = ("report.html", "report.png")


@dataclass(frozen=True, kw_only=True)
class Story:
    """What the page shows. `chosen`: what is kept, in words, and `parts` as bars; empty until a candidate is chosen. `result`:
    None until the end. `stopped`: why it has ended without one. `examples`: of the dev split."""

    name: str
    budget: Budget
    scoring: Scoring
    step: Step
    trials: list[Trial]
    chosen: str
    parts: list[Part]
    command: str
    phases: dict[str, float]
    result: Compressed | None = None
    stopped: str = ""
    examples: int = 0


def write_page(compression: Compression, result: Compressed | None = None, *, stopped: str = "") -> None:
    """Write `FILES` into the folder of the compression, as far as it is."""
    shape = compression.chosen
    story = Story(
        name=Path(compression.trainings.source).name,
        budget=compression.budget,
        scoring=compression.scoring,
        step=compression.progress.last,
        trials=compression.progress.trials(),
        chosen=shape.words(compression.whole) if shape is not None else "",
        parts=compression.parts(),
        command=compression.command,
        phases=compression.phases.seconds_by_phase,
        result=result,
        stopped=stopped,
        examples=len(compression.trainings.splits["dev"]),
    )
    write_story(story, compression.out)


def write_story(story: Story, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / FILES[0], page(story))
    if story.trials:
        draw_picture(out / FILES[1], story.trials, story.budget, story.scoring.name, story.parts)


def page(story: Story) -> str:
    """The whole page. The template escapes what names and commands hold; the SVG is ours, and escaped by matplotlib."""
    step, scoring, finished = story.step, story.scoring, story.result is not None
    findings, answer = [("Budget", f"{story.budget.words()}.")], ""
    if story.result is not None:
        (_, answer), *others = sentences(story.result, scoring, story.examples)
        findings += [("Kept", f"{story.result.words}."), *others]
    elif step.best is not None:
        loss = f", dev loss {step.best.loss:.3f}" if step.best.loss is not None else ""
        answer = f"Best so far: {step.best.label}: {step.best.words}; {in_bytes(step.best.bytes)}{loss}."
    return ENVIRONMENT.get_template("compress.html").render(
        title=f"{story.name}, {'compressed' if finished else 'being compressed'}",
        style=Markup(template_text("page.css")),
        finished=finished,
        stopped=story.stopped,
        now=step.text[:1].upper() + step.text[1:],
        share=f"{step.share:.3f}",
        percent=f"{step.share:.0%}",
        left="" if step.seconds_left is None else duration(step.seconds_left),
        answer=answer,
        findings=findings,
        figures=rows_of(story.result, scoring) if story.result is not None else [],
        score=scoring.name[:1].upper() + scoring.name[1:],
        own=scoring.metric is not None,
        trials=[_row(trial, scoring) for trial in story.trials],
        plots={name: Markup(text) for name, text in _plots(story).items()},
        chosen=story.chosen,
        command=story.command,
        machine=about(),
        phases=story.phases,
    )


def _plots(story: Story) -> dict[str, str]:
    if not story.trials:
        return {}
    with mpl.rc_context(STYLE):
        figures = front_figures(story.trials, story.budget, story.scoring.name)
        if story.parts:
            figures["parts"] = parts_figure(story.parts)
        if (curves := curves_figure(story.trials)) is not None:
            figures["curves"] = curves
        return {name: svg(figure, name) for name, figure in figures.items()}


def _row(trial: Trial, scoring: Scoring) -> dict[str, Any]:
    mark = "~" if trial.estimated else ""
    row = {"model": trial.label, "kept": trial.words, "served folder": f"{mark}{in_bytes(trial.bytes)}"}
    if trial.ms is not None:
        row["ms a text"] = f"{mark}{trial.ms:.2f}"
    row |= {"epochs": f"{trial.epochs:g}", "dev loss": "–" if trial.loss is None else f"{trial.loss:.3f}"}
    return row | {f"{scoring.name}, dev": "–" if trial.score is None else scoring.shown(trial.score)}
