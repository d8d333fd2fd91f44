"""The command line: hf-freeze run | report | inspect | diff | card | push | export | methods | architectures."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from hf_freeze.experiments.report import Report

app = typer.Typer(
    help="Freeze, randomise, factorise, prune, share or replace parts of a Hugging Face transformer.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)
console = Console()
_FOR_WIDE_TERMINALS = ("chrF", "dev ppl", "seeds", "best epoch", "epochs", "total k", "parameters", "train min")


class _one_line_errors:
    """What the user got wrong is one line and exit code 2, not a traceback."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from huggingface_hub.errors import StrictDataclassError

        from hf_freeze.experiments.grid import FailedRuns

        if isinstance(error, (ValueError, OSError, FailedRuns, StrictDataclassError)):
            message = escape(" ".join(str(error).split()))
            Console(stderr=True).print(f"[red]Error:[/red] {message}", soft_wrap=True, highlight=False)
            raise typer.Exit(2) from error


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe, such as recipes/freeze_ablation/recipe.yaml.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the runs; runs/NAME if not given.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Run seeds 1 to N instead of the recipe's.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="The recipe's quick version: does everything work?")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each in a process of its own.")] = 1,
    resume_anyway: Annotated[
        bool, typer.Option("--resume-anyway", help="Go on with a checkpoint of other code, device or threads.")
    ] = False,
    on: Annotated[
        str, typer.Option(help="local; ray; or slurm, which prints a script of job arrays and runs nothing.")
    ] = "local",
    sbatch: Annotated[str, typer.Option(help="With --on slurm: options of sbatch, such as '--gres=gpu:1'.")] = "",
    address: Annotated[
        str | None,
        typer.Option(
            help="With --on ray: HOST:PORT, or auto; RAY_ADDRESS or else a Ray of this machine's own if not given."
        ),
    ] = None,
    cpus: Annotated[
        float | None, typer.Option(help="With --on ray: CPUs, so threads, of a run; 1 if not given.")
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(help="With --on ray: GPUs of a run, 0 to 1, such as 0.5; 1 if not given where there are any."),
    ] = None,
    retries: Annotated[
        int | None, typer.Option(help="With --on ray: how often a run goes on that lost its node; 3 if not given.")
    ] = None,
) -> None:
    """Run a grid: every row and seed of a recipe. Finished runs are skipped, killed ones go on where they were.

    Example: hf-freeze run recipes/freeze_ablation/multi30k.yaml --set data.root=data/multi30k --seeds 3

    Example: hf-freeze run recipes/freeze_ablation/recipe.yaml --on slurm --sbatch "--gres=gpu:1 --time=4:00:00" > jobs.sh

    Example: hf-freeze run recipes/freeze_ablation/recipe.yaml --on ray --address auto --gpus 0.5 --out /shared/runs
    """
    from hf_freeze.experiments.grid import FailedRuns, is_first_process, is_launched, leave_processes, run_grid
    from hf_freeze.experiments.recipe import load_recipe

    settings = settings or []
    with _one_line_errors():
        seeded = [*settings, f"seeds={list(range(1, seeds + 1))}"] if seeds else settings
        loaded = load_recipe(recipe, seeded, smoke=smoke)
        folder = out or Path("runs") / (loaded["name"] + ("-smoke" if smoke else ""))
        if on not in ("local", "ray", "slurm"):
            raise ValueError(f"--on {on!r}: choose from ['local', 'ray', 'slurm']")
        if sbatch and on != "slurm":
            raise ValueError(f"--sbatch {sbatch!r} is of --on slurm, not of --on {on}")
        of_ray = {"address": address, "cpus": cpus, "gpus": gpus, "retries": retries}
        of_ray = {name: value for name, value in of_ray.items() if value is not None}
        if of_ray and on != "ray":
            raise ValueError(f"--{next(iter(of_ray))} {next(iter(of_ray.values()))} is of --on ray, not of --on {on}")
        if on == "slurm":
            from hf_freeze.experiments.slurm import job_script

            words = ["hf-freeze", "run", str(recipe), *(word for setting in seeded for word in ("--set", setting))]
            words += ["--smoke"] * smoke + ["--resume-anyway"] * resume_anyway + ["--out", str(folder)]
            typer.echo(job_script(loaded, words, folder, sbatch), nl=False)
            return
        # Where the data lies is not part of what was run.
        options = [f"--set {shlex.quote(s)}" for s in settings if not s.startswith("data.root=")]
        options += [f"--seeds {seeds}"] * bool(seeds) + ["--smoke"] * smoke + [f"--jobs {jobs}"] * (jobs > 1)
        ray = None
        if on == "ray":
            from hf_freeze.experiments.on_ray import RayOptions

            ray = RayOptions(**of_ray)
            # Nor is where the nodes are.
            options += ["--on ray", *(f"--{name} {value}" for name, value in of_ray.items() if name != "address")]
        command = " ".join(["hf-freeze run", str(recipe), *options])
        if is_first_process():
            console.print(escape(f"{loaded['name']}: preset {loaded['preset']}, runs in {folder}"))
        failed: Exception | None = None
        try:
            run_grid(loaded, folder, jobs=jobs, console=console, command=command, resume_anyway=resume_anyway, ray=ray)
        except FailedRuns as error:  # what is finished is reported all the same
            failed = error
    if is_launched():
        leave_processes()
        if not is_first_process():  # the first process reports
            return
    if failed is None or (folder / "results.jsonl").stat().st_size:
        report([folder])
    if failed is not None:
        with _one_line_errors():
            raise failed


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders that `hf-freeze run` wrote.")],
    out: Annotated[Path | None, typer.Option(help="Folder of the report; the first FOLDER if not given.")] = None,
) -> None:
    """Compare the rows of one or several grids, finished or not: table, plots, and which differences are real. Grids may be of
    any recipes: only rows of one test set, metric and training data are compared, and other rows are a section of their own.

    Example: hf-freeze report runs/freeze-ablation

    Example: hf-freeze report runs/freeze-ablation runs/ffn-compression runs/head-pruning --out runs/all
    """
    from hf_freeze.experiments.report import write_reports

    with _one_line_errors():
        found = write_reports(*folders, out=out, say=lambda text: console.print(escape(text), soft_wrap=True))
    for each in found:
        if len(found) > 1:
            console.print(escape(f"\n{each.title}"), soft_wrap=True)
        _print_rows(each)
    files = ", ".join(str((out or folders[0]) / f"report.{kind}") for kind in ("html", "md", "png"))
    console.print(escape(f"Written: {files}"), soft_wrap=True)


def _print_rows(report: "Report") -> None:
    from hf_freeze.experiments.report import table_cells
    from hf_freeze.experiments.text import legend

    headings, cells = table_cells(report)
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    # A narrow terminal shows what matters most; the report has the rest.
    shown = [i for i, heading in enumerate(headings) if console.width >= 110 or heading not in _FOR_WIDE_TERMINALS]
    for column in shown:
        table.add_column(headings[column], no_wrap=column < 2, justify="left" if column < 2 else "right")
    for row in cells:
        table.add_row(*(escape(row[column]) for column in shown))
    console.print(table)
    console.print(escape("\n".join(legend(report))), soft_wrap=True, highlight=False)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of a variant or a native model.")],
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence, for the products of attention.")] = 32,
    latency: Annotated[
        bool, typer.Option("--latency", help="Load the weights too, and measure the linears on this machine.")
    ] = False,
    tokens: Annotated[
        tuple[int, int], typer.Option(metavar="FEW MANY", help="Tokens of the forwards that --latency measures.")
    ] = (1, 64),
) -> None:
    """Count parameters, stored bytes and multiply-adds per component, without loading any weight.

    Example: hf-freeze inspect Helsinki-NLP/opus-mt-tr-en

    Example: hf-freeze inspect runs/freeze-ablation/row-3-seed-1/model --latency --tokens 1 64
    """
    from hf_freeze.analysis.accounting import count_parameters, multiply_adds, stored_bytes
    from hf_freeze.model.make import empty_model
    from hf_freeze.publish.cards import shortened

    with _one_line_errors():
        built = empty_model(model)
        parameters, operations = count_parameters(built), multiply_adds(built, length=length)
        timed = _latency_table(type(built), model, tokens) if latency else None
    table = Table(
        "component", "parameters", "trainable", "stored", "forward", "backward", title=f"{type(built).__name__} {model}"
    )
    rows = [(c, parameters.by_component[c], operations.by_component[c]) for c in parameters.by_component]
    for name, count, macs in [*rows, ("all", parameters, operations)]:
        numbers = (count.total, count.trainable, count.stored, round(macs.forward), round(macs.backward))
        table.add_row(name, *(f"{number:,}" for number in numbers), end_section=name == rows[-1][0])
    console.print(table)
    console.print(f"stored: {stored_bytes(built):,} bytes; forward, backward: multiply-adds a token at length {length}")
    for method in getattr(built.config, "methods", ()):
        console.print(f"method: { {name: shortened(value) for name, value in method.items()} }")
    if timed is not None:
        console.print(timed)


def _latency_table(model_class: Any, name: str, tokens: tuple[int, int]) -> Table:
    import torch

    from hf_freeze.analysis import linear_latencies
    from hf_freeze.analysis.latency import check_tokens

    numbers = [check_tokens(number) for number in dict.fromkeys(tokens)]
    model = model_class.from_pretrained(name).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    where = f"{model.device.type}, {model.dtype}".replace("torch.", "")
    table = Table(
        title=f"Linears of attention and FFN: median of a forward ({where}, {torch.get_num_threads()} threads)"
    )
    for heading in ("linear", "number", "tokens", "computed", "ms", "plain ms", "ratio"):
        table.add_column(heading, justify="right" if heading in ("number", "ms", "plain ms", "ratio") else "left")
    for found in linear_latencies(model, numbers):
        what = f"{found.layer} {found.inputs} to {found.outputs}" + f", {found.setting}" * bool(found.setting)
        if found.tokens != numbers[0]:
            what = ""  # as in the row above
        ratio = "" if found.path == "plain" else f"{found.ms / found.plain_ms:.2f}"
        cells = (what, found.count, found.tokens, found.path, f"{found.ms:.3f}", f"{found.plain_ms:.3f}", ratio)
        table.add_row(*(escape(str(cell)) for cell in cells), end_section=found.tokens == numbers[-1])
    return table


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="Directory or Hub id of a variant or a native model.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another of the same architecture.")],
    top: Annotated[int, typer.Option(min=0, help="Tensors to list, those first that differ most.")] = 10,
) -> None:
    """Compare two models: settings and methods, and which components and tensors differ by how much.

    Example: hf-freeze diff runs/freeze-ablation/row-0-seed-1/model runs/freeze-ablation/row-3-seed-1/model
    """
    from hf_freeze.analysis.diff import CHANGED, KINDS, SAME, compare
    from hf_freeze.model.make import load_model
    from hf_freeze.publish.cards import shortened

    with _one_line_errors():
        found = compare(load_model(first), load_model(second))
    for name, one, other in found.settings:
        console.print(escape(f"{name}: {shortened(one)} -> {shortened(other)}"), soft_wrap=True, highlight=False)
    table = Table(
        "component", *(f"tensors {kind}" for kind in KINDS), "|b - a| / |a|", title="A is the first, B the second"
    )
    for component, (numbers, relative) in found.by_component().items():
        table.add_row(component, *(str(numbers[kind]) for kind in KINDS), f"{relative:.3g}")
    console.print(table)
    different = [each for each in found.tensors if each.kind != SAME]
    if not different:
        console.print("All tensors are bit-equal.")
    elif top:
        table = Table("tensor", "what", "A", "B", "|b - a| / |a|", "largest |b - a|")
        # Those with the largest change first, then those that have none to measure.
        for each in sorted(different, key=lambda each: (each.kind != CHANGED, -each.relative))[:top]:
            numbers = (f"{each.relative:.3g}", f"{each.largest:.3g}") if each.kind == CHANGED else ("", "")
            shapes = ("" if shape is None else " x ".join(map(str, shape)) for shape in each.shapes)
            table.add_row(escape(each.name), each.kind, *shapes, *numbers)
        console.print(table)
        if len(different) > top:
            console.print(f"... and {len(different) - top} more: --top {len(different)}")


_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a model or of a finished run.")]
_Datasets = Annotated[
    list[str] | None, typer.Option("--dataset", help="Id on the Hub of what it was trained on; may be repeated.")
]
_Languages = Annotated[list[str] | None, typer.Option("--language", help="ISO 639 code; may be repeated.")]
_License = Annotated[str | None, typer.Option(help="Such as apache-2.0.")]
_BaseModel = Annotated[str | None, typer.Option(help="Id on the Hub of the model that it was made from.")]
_RemoteCode = Annotated[
    bool, typer.Option("--remote-code", help="With the code to load it by trust_remote_code, without hf_freeze.")
]


@app.command()
def card(
    folder: _Folder,
    out: Annotated[
        Path | None, typer.Option(help="The file; README.md in the folder of the model if not given.")
    ] = None,
    datasets: _Datasets = None,
    language: _Languages = None,
    license: _License = None,
    base_model: _BaseModel = None,
    repo_id: Annotated[str | None, typer.Option(help="The repository that it is for.")] = None,
) -> None:
    """Write a model card from what a run left: methods, sizes, scores, settings, limits; its record and pictures go beside
    it. `push` takes it, edited or not.

    Example: hf-freeze card runs/freeze-ablation/row-3-seed-1 --license mit
    """
    from hf_freeze.publish.cards import model_card, read_made
    from hf_freeze.publish.hub import write_record

    with _one_line_errors():
        made = read_made(folder)
        path = out or made.model / "README.md"
        text = model_card(
            made, repo_id, datasets=datasets or (), language=language or (), license=license, base_model=base_model
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        text.save(path)
        write_record(made, path.parent)
    console.print(escape(f"Written: {path}"), soft_wrap=True)


@app.command()
def push(
    folder: _Folder,
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Such as me/my-small-translator.")],
    private: Annotated[bool | None, typer.Option("--private/--public", help="Of a new repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="A branch; made if it is not there.")] = None,
    remote_code: _RemoteCode = False,
    datasets: _Datasets = None,
    language: _Languages = None,
    license: _License = None,
    base_model: _BaseModel = None,
) -> None:
    """Push a model to the Hub: weights, tokenizer, results and card, in one commit.

    Example: hf-freeze push runs/freeze-ablation/row-3-seed-1 me/frozen-ffn --private
    """
    from hf_freeze.publish import hub

    with _one_line_errors():
        done = hub.push(
            folder,
            repo_id,
            private=private,
            revision=revision,
            remote_code=remote_code,
            datasets=datasets or (),
            language=language or (),
            license=license,
            base_model=base_model,
        )
    console.print(escape(f"Pushed: {done.repo_url}, commit {done.oid[:8]}"), soft_wrap=True)


@app.command()
def export(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of a variant or a native model.")],
    format: Annotated[str, typer.Option(help="ctranslate2, onnx or dense (native, without hf_freeze).")],
    quantization: Annotated[str | None, typer.Option(help="Of the weights, such as int8; fp32 if not given.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; MODEL-FORMAT-QUANTIZATION if not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder that is no earlier export.")] = False,
) -> None:
    """Write a model for another engine, with its tokenizer: merged, converted and compared with PyTorch.

    Example: hf-freeze export runs/small-translator/row-tt-seed-1/model --format ctranslate2 --quantization int8
    """
    from hf_freeze.publish.export import export_model

    with _one_line_errors():
        folder = export_model(
            *(model, format),
            quantization=quantization,
            out=out,
            force=force,
            say=lambda text: console.print(escape(text), soft_wrap=True),
        )
        size = sum(file.stat().st_size for file in folder.iterdir())
        console.print(escape(f"Written: {folder} ({size / 1e6:.2f} MB)"), soft_wrap=True)


@app.command()
def methods(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Methods by architectures, as the README shows them.")
    ] = False,
) -> None:
    """List the methods, what each takes and on which architectures it works.

    Example: hf-freeze methods
    """
    from dataclasses import fields

    from hf_freeze.architectures.registry import ARCHITECTURES
    from hf_freeze.methods.registry import METHODS

    if markdown:
        typer.echo(methods_by_architectures())
        return
    table = Table("method", "fields", "architectures")
    for name, method in METHODS.items():
        supported = sorted(filter(method.supports, ARCHITECTURES))
        table.add_row(name, ", ".join(f.name for f in fields(method)), ", ".join(supported))
    console.print(table)


def methods_by_architectures() -> str:
    """The Markdown table of which method works on which architecture, from the registries."""
    from hf_freeze.architectures.registry import ARCHITECTURES
    from hf_freeze.methods.registry import METHODS

    lines = ["| method | " + " | ".join(ARCHITECTURES) + " |", "| --- |" + " :-: |" * len(ARCHITECTURES)]
    for method in METHODS.values():
        marks = ["✓" if method.supports(name) else "–" for name in ARCHITECTURES]
        lines.append(f"| `methods.{method.__name__}` | " + " | ".join(marks) + " |")
    return "\n".join(lines)


@app.command()
def architectures() -> None:
    """List the backbone families and their tasks.

    Example: hf-freeze architectures
    """
    from hf_freeze.architectures.registry import ARCHITECTURES

    table = Table("architecture", "tasks", "stacks")
    for name, architecture in ARCHITECTURES.items():
        table.add_row(name, ", ".join(architecture.tasks), ", ".join(architecture.stacks))
    console.print(table)
