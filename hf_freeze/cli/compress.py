"""`hf-freeze compress`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_freeze import terminal
from hf_freeze.cli import laboratory, options

_MOST = 200_000  # texts that are taken of the files
_NO_TRAININGS = "there are no trial trainings any more; --heal, such as 30min or 2epochs, limits the one that is left"
_INSTEAD = {
    "min-score": "give --max-loss, in points below the model's score",
    "targets": "models that write always learn from what the original writes",
}


def _refuse_gone(option: typer.CallbackParam, value: Any) -> None:
    name = str(option.name).replace("_", "-")
    if value:
        with terminal.one_line_errors():
            raise ValueError(f"--{name} is gone: {_INSTEAD.get(name, _NO_TRAININGS)}")


_Gone = Annotated[str | None, typer.Option(hidden=True, callback=_refuse_gone)]  # of an earlier version


def compress(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of a trained model, with its tokenizer.")],
    out: Annotated[Path, typer.Option(help="Folder for the smaller model and all that leads to it.")],
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            help="What the model reads, without labels: a text per line, or a table, such as CSV; for vision and speech a folder "
            "of images or WAV files; repeatable."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="With labels, which give a score: files, a folder with train*, dev* and test*, or a recipe. Without a dev or "
            "test file, a tenth of the training data is taken."
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            "--column",
            "--columns",
            help="Column of the texts in tables; with --data two are a pair, such as source,target.",
        ),
    ] = None,
    label: Annotated[str | None, typer.Option(help="With --data: column of the labels; label if not given.")] = None,
    samples: options.Samples = 512,
    max_bytes: Annotated[
        str | None,
        typer.Option(
            help="Bytes of the folder that is served, tokenizer included, such as 2MB or 500kB; or a share of the model's, "
            "such as 33%."
        ),
    ] = None,
    max_ms: Annotated[
        str | None,
        typer.Option(help="Milliseconds of one text alone, on one thread; or a share of the model's, such as 50%."),
    ] = None,
    max_loss: Annotated[
        float | None,
        typer.Option(
            help="Points of the score that may be lost, or of fidelity in % without labels. Without other limits, bytes are then "
            "as few as possible."
        ),
    ] = None,
    front: Annotated[
        int | None, typer.Option(min=1, help="Without limits: so many sizes at once, as a table and a picture.")
    ] = None,
    min_fidelity: Annotated[float | None, typer.Option(min=0, max=1, help="What the result must reach.")] = None,
    heal: Annotated[
        str,
        typer.Option(
            help="Short training by the outputs of the original: 0 for none, 10min, 1epoch; by default a tenth of the time of an "
            "epoch, at least a minute."
        ),
    ] = "default",
    engine: Annotated[
        str | None,
        typer.Option(
            help="What serves the model: ctranslate2, onnx, openvino or gguf, in int8; or torch. By default one for the task."
        ),
    ] = None,
    native: Annotated[
        bool, typer.Option("--native", help="Equal widths in all layers, and no code of hf_freeze in the folder.")
    ] = False,
    keep_vocabulary: Annotated[bool, typer.Option("--keep-vocabulary", help="All tokens stay.")] = False,
    layer_by_layer: Annotated[
        bool,
        typer.Option(
            "--layer-by-layer",
            help="For language models that are larger than the memory: a layer or two of a folder is in memory at a time. With "
            "--texts and --max-bytes; --engine compressed-tensors (the default), torch or gguf; heals only with --heal.",
        ),
    ] = False,
    heal_int8: Annotated[
        bool,
        typer.Option(
            "--heal-int8",
            help="With --layer-by-layer and --heal: adapters train on weights in 8 bits, a byte each, and are merged into those "
            "that were not rounded.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn, and of healing.")] = 1,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="With a recipe in --data: change a setting; may be repeated."),
    ] = None,
    min_score: _Gone = None,
    hours: _Gone = None,
    epochs: _Gone = None,
    targets: _Gone = None,
    jobs: _Gone = None,
    report_to: _Gone = None,
    smoke: Annotated[bool, typer.Option("--smoke", hidden=True, callback=_refuse_gone)] = False,
) -> None:
    """Make a trained model small enough for a budget of bytes and milliseconds, and say what that costs.

    Finds what layers, heads, neurons, tokens and bits are worth on the texts. Cuts with calibration, heals for a short time by
    the outputs of the original, exports, and compares with it on inputs that nothing was chosen by.

    Needs no labels (--texts). With labels (--data), the score of the task is told too, with the interval of the difference. The
    same command resumes a stopped one.

    Example: hf-freeze compress sentence-transformers/all-MiniLM-L6-v2 --texts passages.txt --max-bytes 30% --out small

    Example: hf-freeze compress MODEL --data reviews.csv --max-bytes 25% --max-loss 1 --out small

    Example: hf-freeze compress llama-7b --layer-by-layer --texts passages.txt --samples 128 --max-bytes 4GB --out small
    """
    with terminal.one_line_errors():
        if (data is None) == (texts is None):
            raise ValueError("give --texts, or --data with labels")
        for name, value in (("--label", label), ("--set", settings)):
            if texts is not None and value is not None:
                raise ValueError(f"{name} is for --data: leave it out")
        has_limits = (max_bytes, max_ms, max_loss) != (None, None, None)
        if front is not None and has_limits:
            raise ValueError("--front chooses the sizes itself: leave --max-bytes, --max-ms and --max-loss out")
        if front is None and not has_limits:
            raise ValueError(
                "what is the limit? give --max-bytes, --max-ms or --max-loss, or --front for several sizes"
            )
        command = " ".join(["hf-freeze", *map(shlex.quote, sys.argv[1:])])
        if layer_by_layer:
            without = {"--data": data, "--max-ms": max_ms, "--max-loss": max_loss, "--front": front}
            without |= {"--native": native or None, "--min-fidelity": min_fidelity}
            for name, value in without.items():
                if value is not None:
                    raise ValueError(f"{name}: not with --layer-by-layer, which takes --texts and --max-bytes")
            from hf_freeze.compression.large import compress_large

            compress_large(
                Path(model),
                texts=options.sampled_texts(texts or [], column or "text", _MOST),
                max_bytes=str(max_bytes),
                out=out,
                engine=engine or "compressed-tensors",
                samples=samples,
                heal=0 if heal in ("0", "default") else heal,
                heal_int8=heal_int8,
                seed=seed,
                command=command,
                say=terminal.say,
            )
            return
        if heal_int8:
            raise ValueError("--heal-int8 is for weights in files: give --layer-by-layer, or leave it out")
        from hf_freeze.compression.budget import Budget

        budget = Budget(max_bytes=max_bytes, max_ms=max_ms, max_loss=max_loss) if front is None else None
        if texts is not None:
            inputs = {"texts": _signals(model, texts) or options.sampled_texts(texts, column or "text", _MOST)}
        else:
            columns = None if column is None else [name.strip() for name in column.split(",")]
            given = laboratory.inputs_and_labels(model, data or "", columns, label, settings)
            inputs = dict(zip(("texts", "labels"), given, strict=True))
        further: dict[str, Any] = inputs | {
            "out": out,
            "engine": engine,
            "samples": samples,
            "heal": 0 if heal == "0" else heal,
            "native": native,
            "keep_vocabulary": keep_vocabulary,
            "min_fidelity": min_fidelity,
            "seed": seed,
            "command": command,
            "console": terminal.console,
        }
        from hf_freeze.compression import run

        if budget is None:
            run.front(model, count=front or 0, **further)
        else:
            run.compress(model, budget=budget, **further)


def _signals(model: str, paths: list[Path]) -> list[Any]:
    """The images or sounds in these files and folders; none where they are texts."""
    from hf_freeze.data.files import matching_files
    from hf_freeze.data.signals import kind_of_signals, read_image, read_sound

    files = matching_files(paths)
    kind = kind_of_signals(files)
    if kind == "sounds":
        from transformers import AutoFeatureExtractor

        rate = AutoFeatureExtractor.from_pretrained(model).sampling_rate
        return [read_sound(file, rate) for file in files]
    return [read_image(file) for file in files] if kind == "images" else []
