"""Side by side: trained models cut by what a few hundred unlabelled texts show, without any training, here and by other tools.

    python benchmarks/calibration/run.py --install all --environments FOLDER
    python benchmarks/calibration/run.py --models minilm stories260k translator --peers all --seeds 1 2 3 \\
        --out runs/calibration --environments FOLDER --minilm MODEL --captions DATA --stories260k MODEL \\
        --translators MODEL MODEL MODEL --multi30k DATA

Claim: at the same cut, calibrated methods are at least as good as each peer, in at most its seconds.

Every compression runs in its own process with one thread, with the same model and the same texts: MiniLM with 500 captions, a
Llama of 260 thousand parameters with 128 samples of its own, translators (one for each seed) with 1,000 German sentences and
their own translations. Nothing has labels. Then every result is measured here, as a plain model of the original's shapes, in
which removed parts are zero: recall of captions on 5,000 images (whose captions calibration never saw), perplexity of the samples
of the whole model and KL to it, BLEU. Differences from the whole model, and of the calibrated hf_freeze from each other method,
have 95 % intervals of a paired bootstrap over items, and over seeds where there are several. `kept` is counted in the result, not
taken from the method.

Seconds are those of the method alone: without imports and loading; for translators with the time that the model takes to
translate. CPU seconds do not depend on what else runs on the machine. Memory is what the peak lies above the loaded model.

Rows that are done are kept in `--out`: the command continues where it stopped. `--split val` is for choosing settings.
"""

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import job
import measures
import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from hf_freeze.lab.runs.environment import environment

HERE = Path(__file__).parent
PEERS = ["peer_hf_freeze", *sorted(file.stem for file in HERE.glob("peer_*.py") if file.stem != "peer_hf_freeze")]
WHOLE, CALIBRATED, ALLOCATED = "as it was", "hf_freeze, calibrated", "hf_freeze, calibrated and allocated"


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    peers = PEERS if options.peers == ["all"] else [f"peer_{name}" for name in options.peers]
    if options.install:
        for peer in PEERS if options.install == ["all"] else [f"peer_{name}" for name in options.install]:
            install(peer, options.environments)
        return
    table = Table(options.out)
    for model in options.models:
        for seed in options.seeds:
            run_seed(table, model, seed, peers, options)
            table.write(options.split)
    print(table.markdown(options.split))


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.removeprefix("peer_") for peer in PEERS]
    new.add_argument("--models", nargs="+", default=list(measures.TASKS), choices=list(measures.TASKS))
    new.add_argument("--peers", nargs="+", default=["all"], choices=["all", *names])
    new.add_argument("--cuts", nargs="+", help="only these, such as '1/2 of the neurons'")
    new.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="of the choice of texts")
    new.add_argument("--split", default="test", choices=["test", "val"])
    new.add_argument("--out", type=Path, default=Path("runs/calibration"), help="for rows, items and the table")
    new.add_argument("--environments", type=Path, default=Path("runs/calibration/environments"))
    new.add_argument(
        "--install", nargs="+", choices=["all", *names], help="make the environments of these peers, no more"
    )
    new.add_argument("--minilm", type=Path, help="folder of all-MiniLM-L6-v2")
    new.add_argument("--captions", type=Path, help="folder of Multi30k task 2: train.1.en.gz to train.5.en.gz, val")
    new.add_argument("--stories260k", type=Path, help="folder of stories260K as a LlamaForCausalLM")
    new.add_argument(
        "--translators", nargs="+", type=Path, help="for each seed, a trained row 0 of ffn_compression/multi30k"
    )
    new.add_argument("--multi30k", type=Path, help="folder of Multi30k task 1: train, val, test*.de.gz and .en.gz")
    return new


def install(peer: str, environments: Path) -> None:
    """A virtual environment with the packages of a peer."""
    requirements = importlib.import_module(peer).REQUIREMENTS
    if not requirements:
        return
    folder = environments / environment_of(peer)
    print(f"{folder}: {' '.join(requirements)}", flush=True)
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements], check=True)


def environment_of(peer: str) -> str:
    return peer.removeprefix("peer_")


def run_seed(table: "Table", model: str, seed: int, peers: list[str], options: argparse.Namespace) -> None:
    """All rows of one model and one choice of texts."""
    jobs = [job for job in jobs_of(model, seed, peers, options) if not table.has(job)]
    if not jobs:
        return
    source, data = source_of(model, seed, options)
    inputs = options.out / "inputs" / f"{model}-{seed}"
    inputs.mkdir(parents=True, exist_ok=True)
    task = measures.TASKS[model](source, data, options.split, inputs.parent)
    whole = {**blank(model, seed, options), "cut": "", "method": WHOLE}
    if not table.has(whole):
        table.add(whole, task.measure(task.whole))
    if not (inputs / "seconds.json").exists():
        start = time.process_time()
        measures.save_inputs(inputs, *task.calibration(seed, measures.CALIBRATION_TEXTS[model]))
        (inputs / "seconds.json").write_text(json.dumps(time.process_time() - start))
    for name in dict.fromkeys(new["peer"] for new in jobs):
        peer, of_peer = importlib.import_module(name), [new for new in jobs if new["peer"] == name]
        reasons = [why_not(peer, new) for new in of_peer]
        for new, reason in zip(of_peer, reasons, strict=True):
            if reason:
                table.add({**new, "cannot": reason}, {})
        able = [new for new, reason in zip(of_peer, reasons, strict=True) if not reason]
        print(f"{model}, seed {seed}, {environment_of(name)}: {len(able)} compressions", flush=True)
        errors = compress(peer, able, task, inputs, options) if able else {}
        for new in able:
            if error := errors.get(slug(new)):
                row, items = {**new, "error": error}, {}
            else:
                row, items = measured(peer, new, task, inputs, options)
            table.add(row, items)
            result = error or f"{task.main} {row['scores'][task.main]:.4f}, {row['cpu_seconds']:.1f} CPU seconds"
            print(f"  {new['cut']}, {new['method']}: {result}", flush=True)
        table.write(options.split)


def blank(model: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    return {"model": model, "seed": seed, "split": options.split}


def jobs_of(model: str, seed: int, peers: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Cut by cut, each method of each peer. Methods that see no texts give the same for all seeds of one model."""
    jobs = []
    for cut in measures.CUTS[model]:
        if options.cuts and cut not in options.cuts:
            continue
        for name in peers:
            peer = importlib.import_module(name)
            for method, kinds in peer.METHODS.items():
                if kinds is not None and set(measures.CUTS[model][cut]) - set(kinds):
                    continue
                once = method in getattr(peer, "BLIND", ()) and model != "translator"
                if once and seed != options.seeds[0]:
                    continue
                jobs.append({**blank(model, seed, options), "cut": cut, "peer": name, "method": method})
    return jobs


def why_not(peer: Any, job: dict[str, Any]) -> str | None:
    """Why the method cannot cut this model so."""
    kinds = " and ".join(measures.CUTS[job["model"]][job["cut"]])
    for key in ((job["method"], job["model"], kinds), (job["method"], job["model"]), (job["method"], kinds)):
        if key in peer.CANNOT:
            return peer.CANNOT[key]
    return None


def source_of(model: str, seed: int, options: argparse.Namespace) -> tuple[Path, Path]:
    """The folder of a model that plain transformers can read, and that of its data."""
    if model == "minilm":
        needed, source, data = ("minilm", "captions"), options.minilm, options.captions
    elif model == "stories260k":
        needed, source, data = ("stories260k",), options.stories260k, Path()
    else:
        needed, source, data = ("translators", "multi30k"), options.translators, options.multi30k
    for name in needed:
        if getattr(options, name) is None:
            raise SystemExit(f"--models {model} needs --{name}")
    return (native(source, seed, options), data) if model == "translator" else (source, data)


def native(translators: list[Path], seed: int, options: argparse.Namespace) -> Path:
    """The translator of a seed as a native model."""
    from hf_freeze.model.loading import load_tokenizer

    index = options.seeds.index(seed)
    if index >= len(translators):
        raise SystemExit(f"--translators has {len(translators)} folders for {len(options.seeds)} seeds")
    folder = options.out / "models" / f"translator-{seed}"
    if not (folder / "config.json").exists():
        model = job.load_model("translator", translators[index])
        (model.merge() if hasattr(model, "merge") else model).save_pretrained(folder)
        load_tokenizer(translators[index]).save_pretrained(folder)
    return folder


def folder_of(new: dict[str, Any], options: argparse.Namespace) -> Path:
    return (options.out / "jobs" / slug(new)).absolute()


def compress(
    peer: Any, jobs: list[dict[str, Any]], task: measures.Task, inputs: Path, options: argparse.Namespace
) -> dict[str, str]:
    """Have a peer do its jobs. Returns the errors by the slug of a job."""
    name = environment_of(peer.__name__)
    python = (options.environments / name / "bin" / "python").absolute() if peer.REQUIREMENTS else Path(sys.executable)
    if not python.exists():
        return {slug(new): f"no environment {python}: --install {name}" for new in jobs}
    for new in jobs:
        folder = folder_of(new, options)
        folder.mkdir(parents=True, exist_ok=True)
        for file in ("result.json", "error.txt"):
            (folder / file).unlink(missing_ok=True)
        cut = measures.CUTS[new["model"]][new["cut"]]
        settings = {"cut": cut, "model_folder": str(task.model_folder.absolute()), "inputs": str(inputs.absolute())}
        (folder / "job.json").write_text(json.dumps({**new, **settings}))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    command = [str(python), str(HERE / "job.py"), *(str(folder_of(new, options)) for new in jobs)]
    log = inputs.parent / f"{inputs.name}-{name}.log"
    with log.open("w") as file:
        subprocess.run(command, env={**os.environ, **threads}, stdout=file, stderr=subprocess.STDOUT)
    errors = {}
    for new in jobs:
        error = folder_of(new, options) / "error.txt"
        if error.exists():
            errors[slug(new)] = error.read_text().strip().splitlines()[-1]
        elif not (folder_of(new, options) / "result.json").exists():
            errors[slug(new)] = f"see {log}"
    return errors


def measured(
    peer: Any, new: dict[str, Any], task: measures.Task, inputs: Path, options: argparse.Namespace
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The row and the items of one compression that is done."""
    folder = folder_of(new, options)
    result = json.loads((folder / "result.json").read_text())
    sees_translations = new["method"] not in {*getattr(peer, "OWN_TRANSLATIONS", ()), *getattr(peer, "BLIND", ())}
    if new["model"] == "translator" and sees_translations:
        extra = json.loads((inputs / "seconds.json").read_text())
        result["seconds"], result["cpu_seconds"] = result["seconds"] + extra, result["cpu_seconds"] + extra
    model = job.load_model(new["model"], task.model_folder)
    unknown = model.load_state_dict(load_file(folder / "changed.safetensors"), strict=False).unexpected_keys
    assert not unknown, unknown
    items = task.measure(model)
    scores = {name: float(measures.score_of(name)(values.sum(0))) for name, values in items.items()}
    kept = measures.share_kept(model, measures.CUTS[new["model"]][new["cut"]])
    (folder / "changed.safetensors").unlink()
    return {**new, **result, "scores": scores, "kept": kept, "load": os.getloadavg()[0]}, items


def slug(row: dict[str, Any]) -> str:
    text = "-".join(str(row[key]) for key in ("model", "split", "cut", "method", "seed"))
    return "".join(letter if letter.isalnum() or letter in "-." else "_" for letter in text)


class Table:
    """Rows in `rows.json`, their items in `items/`; the table in `table.md`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "items").mkdir(parents=True, exist_ok=True)
        self.rows = self.read()

    def read(self) -> dict[str, dict[str, Any]]:
        path = self.folder / "rows.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def has(self, job: dict[str, Any]) -> bool:
        """Whether a row is done; one that failed is tried again."""
        return "error" not in self.rows.get(slug(job), {"error": "not run"})

    def add(self, row: dict[str, Any], items: dict[str, np.ndarray]) -> None:
        if row["method"] == WHOLE:
            scores = {name: float(measures.score_of(name)(values.sum(0))) for name, values in items.items()}
            row = {**row, "scores": scores}
        if items:
            arrays: Any = items
            np.savez_compressed(self.folder / "items" / f"{slug(row)}.npz", **arrays)
        self.rows = {**self.read(), slug(row): row}  # with what another run has added meanwhile
        temporary = self.folder / "rows.json.tmp"
        temporary.write_text(json.dumps(self.rows, indent=1))
        temporary.replace(self.folder / "rows.json")

    @functools.cache  # noqa: B019 (one table lives as long as the process)
    def items(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.folder / "items" / f"{name}.npz") as file:
            return dict(file)

    def write(self, split: str) -> None:
        (self.folder / "table.md").write_text(self.markdown(split), encoding="utf-8")

    def markdown(self, split: str) -> str:
        parts = [f"`python benchmarks/calibration/run.py {' '.join(sys.argv[1:])}`", str(environment())]
        for model in measures.TASKS:
            rows = [row for row in self.rows.values() if (row["model"], row["split"]) == (model, split)]
            if any(row["method"] != WHOLE for row in rows):
                parts.append(self.of_model(model, rows))
        used = [row.get("versions", {}) for row in self.rows.values()]
        every = sorted({f"{name} {number}" for numbers in used for name, number in numbers.items()})
        return "\n\n".join([*parts, f"Versions: {', '.join(every)}."]) + "\n"

    def of_model(self, model: str, rows: list[dict[str, Any]]) -> str:
        names = list(next(row["scores"] for row in rows if "scores" in row))
        differences = [f"{names[0]} − whole (95 %)", "hf_freeze, calibrated − this (95 %)"]
        head = ["cut", "method", "seeds", *names, *differences, "kept", "s", "CPU s", "MB"]
        whole = [row for row in rows if row["method"] == WHOLE]
        text = [f"### {model}", "| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
        cells = [mean([row["scores"][name] for row in whole]) for name in names]
        text.append("| " + " | ".join(["", WHOLE, str(len(whole)), *cells, "", "", "1", "", "", ""]) + " |")
        for cut in measures.CUTS[model]:
            groups: dict[str, list[dict[str, Any]]] = {}
            for row in rows:
                if row["cut"] == cut:
                    groups.setdefault(row["method"], []).append(row)
            ours = next((groups[name] for name in (ALLOCATED, CALIBRATED) if name in groups), [])
            for method, group in groups.items():
                text.append("| " + " | ".join([cut, method, *self.cells(group, names, whole, ours, cut)]) + " |")
        return "\n".join(text)

    def cells(
        self,
        group: list[dict[str, Any]],
        names: list[str],
        whole: list[dict[str, Any]],
        ours: list[dict[str, Any]],
        cut: str,
    ) -> list[str]:
        """What follows the cut and the method of some rows; `ours` are those of the calibrated hf_freeze, allocated over layers
        where it can be."""
        done = [row for row in group if "scores" in row]
        if not done:
            said = group[0].get("cannot") or group[0]["error"]
            return ["0", said.replace("|", "/")[:160], *["–"] * (len(names) + 5)]
        cells = [mean([row["scores"][name] for row in done]) for name in names]
        if done[0]["model"] == "translator":
            pairs = [(other, row) for row in done for other in whole if other["seed"] == row["seed"]]
        else:
            pairs = [(whole[0], row) for row in done]  # one model: its items do not depend on the seed
        against = [(row, own) for row in done for own in ours if own["seed"] == row["seed"] and "scores" in own]
        same = not against or done[0]["method"] == against[0][1]["method"]
        differences = [self.difference(pairs, names[0]), "" if same else self.difference(against, names[0])]
        shares = [row["kept"] for row in done if row["kept"] is not None]
        kept = f"{max(shares):.3f}" if shares else "–"
        limit = measures.limit_of(measures.CUTS[done[0]["model"]][cut])
        if shares and max(shares) > limit + 0.005:
            kept += f" (above {limit:g})"
        memory = max(row["peak_bytes"] - row["loaded_bytes"] for row in done) / 1e6
        seconds = [f"{np.mean([row[key] for row in done]):.1f}" for key in ("seconds", "cpu_seconds")]
        return [str(len(done)), *cells, *differences, kept, *seconds, f"{memory:.0f}"]

    def difference(self, pairs: list[tuple[dict[str, Any], dict[str, Any]]], name: str) -> str:
        """Of the second rows from the first, with its interval."""
        before, after = ([self.items(slug(pair[side]))[name] for pair in pairs] for side in (0, 1))
        middle, low, high = map(measures.rounded, measures.interval(before, after, measures.score_of(name)))
        return f"{middle} ({low} to {high})"


def mean(values: list[float]) -> str:
    return measures.rounded(float(np.mean(values)))


if __name__ == "__main__":
    main()
