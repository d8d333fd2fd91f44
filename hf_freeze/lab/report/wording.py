"""What columns, marks, pictures and tests of a report mean, in words."""

from hf_freeze.analysis.ablation import HEAD_LEVEL
from hf_freeze.analysis.significance import LEVEL, REPLICATES, TOO_FEW, enough_replicates
from hf_freeze.lab.report.convergence import FEWEST, scores_of
from hf_freeze.lab.report.findings import p_value
from hf_freeze.lab.report.report import Report


def legend(report: Report) -> list[str]:
    """What the columns and marks of the table mean."""
    first, task = report.rows[0]["row"], report.task
    what = f"mean {task.name} minus that of row {first}"
    if task.signed(0).startswith("×"):
        what = f"{task.name} divided by that of row {first} (means over seeds are geometric); more than 1 is worse"
    lines = [f"vs row {first}: {what}."]
    if report.differences:
        lines[0] = lines[0][:-1] + f". * marks a significant difference (corrected p < {LEVEL}); {unmarked(report)}."
    if len(report.seeds) > 1:
        lines.append("± is the standard deviation over seeds.")
    lines.append(_steps(report))
    stored = task.columns["stored"][0]
    if "fewer" in task.columns:
        lines.append(
            f"parameters: of the whole network, biases too; {stored}: tensors of the file, with the places of weights that are "
            f"left; times fewer, times smaller: row {first} divided by this row."
        )
        return lines
    share = "share %: trained parameters of all; " if "share" in report.columns else ""
    total = "total k: all parameters, in thousands; " if "total" in report.columns else ""
    work = "macs k: thousands of multiply-adds for a token at length 32; " if "work" in report.columns else ""
    lines.append(f"{share}{total}{work}{stored}: tensors that the checkpoint holds.")
    return lines


def _steps(report: Report) -> str:
    """What "steps to 90 %" are."""
    heading = report.task.columns["steps"][0]
    if "steps" not in report.columns:
        return f"{heading} of the final score: not known, for fewer than {FEWEST} evaluations in training were kept."
    evaluations = [entry for run in report.runs for entry in run.log if "eval_loss" in entry]
    name = next(name for name in scores_of(report.task.quality) if any(name in entry for entry in evaluations))
    own, score = report.task.quality, name.removeprefix("eval_")
    goal = "at most 1/0.9 of" if score == "perplexity" else "at least 90 % of"
    what = report.task.name if score == own else score
    return f"{heading}: of training, until the {what} of an evaluation on the dev set was {goal} the final one."


def unmarked(report: Report) -> str:
    """What a difference without a mark means in this report."""
    with_seeds = {test.seeds for test in report.differences}
    if with_seeds == {False}:
        return f"others: {TOO_FEW}"
    return "others are not significant" + f"; with one seed: {TOO_FEW}" * (False in with_seeds)


_SETTINGS = {"heads.fraction": "fraction of heads removed", "layer_selection.share": "share of layers kept"}


def setting_in_words(report: Report) -> str:
    """Such as "rank of factorized embedding"; empty where no setting is drawn."""
    if report.setting in _SETTINGS:
        return _SETTINGS[report.setting]
    name, _, setting = (report.setting or "").partition(".")
    return f"{setting} of {name}".replace("_", " ") if setting else ""


def head_scores(report: Report) -> str:
    """What the heat-maps of heads show; empty where no heads were measured."""
    run = report.measured
    if run is None:
        return ""
    meanings = {
        "importance": "Importance is that of Michel et al. (2019) on the training set, divided by its norm over the attention.",
        "ablation": f"Ablation is what {report.task.name} on the dev set loses without the head.",
        "one_head": f"One head is what {report.task.name} on the dev set loses where it alone is left of its attention.",
    }
    shown = [meaning for name, meaning in meanings.items() if name in run.head_scores]
    tested = (
        f" Underlined: significant, p < {HEAD_LEVEL} after Holm's correction over all heads." if run.head_tests else ""
    )
    return f"Of row {run.row}, seed {run.record['seed']}. {' '.join(shown)}{tested}"


def map_captions(report: Report) -> dict[str, tuple[str, str]]:
    """Picture -> its title and what it shows, for the pictures that a row has."""
    attention = (
        "Where the heads look",
        "Mean share of each head's attention by relative position, over the dev set, a line a head; darker is more.",
    )
    embeddings = (
        "Which embeddings are alike",
        "Cosine similarities of the most frequent tokens in training, similar ones side by side, and those of a random table.",
    )
    captions = {"attention": attention, "embeddings": embeddings}
    return {
        picture: (title, f"{text} Row {', '.join(rows)}, the first seed.")
        for picture, (title, text) in captions.items()
        if (rows := report.mapped(picture))
    }


def one_head_cells(report: Report) -> list[list[str]]:
    """A line an attention: its best head alone, and what is lost with it; empty where it was not measured."""
    scores = report.measured.head_scores.get("one_head", {}) if report.measured else {}
    best = {name: min(enumerate(values), key=lambda pair: pair[1]) for name, values in scores.items()}
    return [[name, str(head), f"{0.0 - lost:+.2f}".replace("-", "−")] for name, (head, lost) in best.items()]


def method(report: Report) -> str:
    """How significance was tested."""
    if not report.differences:
        return "No difference was tested."
    times = enough_replicates(len(report.differences))
    middle = "its values" if times == REPLICATES else f"its first {REPLICATES:,} values"
    item, several = report.task.item, any(d.seeds for d in report.differences)
    return (
        f"A paired bootstrap: {times:,} times, {report.items:,} {report.split} {item} were drawn with replacement from the "
        f"{report.items:,}, and all rows were scored on the same draw. The 95 % interval of a difference holds the middle 95 % "
        f"of {middle}; p (two-sided) is the probability that chance alone gives a difference as large. "
        + ("For rows with several seeds, Student's t adds the spread between seeds. " if several else "")
        + "Among many comparisons some differ by luck, so p is corrected by Holm's method: over the comparisons with row "
        f"{report.rows[0]['row']}" + (" for these, and over all pairs for the others." if report.all_pairs else ".")
    )


def signatures(report: Report) -> list[str]:
    """Which version of a metric gave the scores, as sacrebleu writes it."""
    pairs = [sign for run in report.runs for sign in run.record.get("signatures", {}).items()]
    return list(dict.fromkeys(f"{name}: {signature}" for name, signature in pairs))


def machines(report: Report) -> list[str]:
    return [
        f"Code {e['commit'] or 'version ' + e['hf_freeze']}, torch {e['torch']}, transformers {e['transformers']}; "
        f"{e['device']}, {e['threads']} of {e['cores']} cores for each run{'; ' * bool(e['precision'])}{e['precision']}."
        for e in report.environments
    ]


def pair_cells(report: Report) -> tuple[list[str], list[list[str]]]:
    """Headings and formatted rows of the table of all pairs."""
    signed, cells = report.task.signed, []
    for d in report.differences:
        low, high = signed(d.low, 2), signed(d.high, 2)
        verdict = "significant *" if d.significant else d.unmarked
        # With many test items, or where both models give nonsense, such as one word for every sentence:
        if (d.significant and not report.shows(d.difference)) or low == high == signed(0.0, 2):
            verdict = "too small to show"
        numbers = signed(d.difference, 2), f"{low} to {high}", p_value(d.p), p_value(d.p_corrected)
        cells.append([d.row, d.base, *numbers, verdict])
    return ["row", "against", "difference", "95 % interval", "p", "p corrected", ""], cells
