"""Published grids: docs/results keeps what their figures were computed from, and every figure can be computed again.

    python docs/tooling/results.py keep GRID NAME    # the folder of a grid -> NAME_runs.tar.gz and its pictures
    python docs/tooling/results.py add GRID NAME     # further rows and seeds of that grid, from another folder
    python docs/tooling/results.py write             # from the archives: pictures and the generated parts of the pages
    python docs/tooling/results.py check             # whether these parts are those that the archives give: make results-check
    python docs/tooling/results.py html FOLDER       # from the archives: their HTML pages, NAME.html; the site has them too

`check` also looks for each interval that the rest of such a page states, as (0.1 to 1.7; three seeds), "interval −0.1 to +1.7" or
(0.1 lost to 1.7 gained), among those of its tables.

An archive holds settings, records, logs, test items and outputs of each run, and no weights; `hf-freeze report` makes the
page of an unpacked one, too. In a page, what stands between `<!-- table NAME -->` and `<!-- end -->` is written from the archive
NAME, between `<!-- claims -->` and `<!-- end -->` from claims.yaml, whose comparisons are computed from the archives, after
`<!-- published findings -->` and `<!-- published tables -->` from published_rows.yaml (published_rows.py), and after
`<!-- statements NAME -->` from statements.yaml (statements.py). kept_records.py says what `check` reads of pages without an
archive.
"""

import argparse
import gzip
import io
import json
import math
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import published_rows
import yaml
from kept_records import with_outputs, wrong_cells
from published_rows import verdict
from statements import compare, filled

from hf_freeze.lab.report.build import make_report
from hf_freeze.lab.report.findings import interval, quality, seeds_in_words
from hf_freeze.lab.report.markdown import markdown
from hf_freeze.lab.report.report import Report
from hf_freeze.lab.report.write import write_pages
from hf_freeze.lab.runs.precision import noted_precision
from hf_freeze.run_folder import COMMANDS, HEAD_SCORES, HEAD_TESTS, LATENCY, MAPS, PRECISION, run_folder

RESULTS = Path(__file__).parents[1] / "results"
CLAIMS = RESULTS / "claims.yaml"
ENDING = "_runs.tar.gz"
KEPT = (COMMANDS, PRECISION, "results.jsonl")  # of a grid
SETTINGS = ("run.json", "environment.json", "model/config.json")
FIGURES = ("metrics.json", "log.jsonl", "items.npy", "translations.txt", HEAD_SCORES, HEAD_TESTS, MAPS, LATENCY)
# Picture of a report -> how the name of its file ends here
PICTURES = {"report": ""} | {name: f"_{name}" for name in ("heads", "attention", "embeddings", "schedules")}
TABLE = re.compile(r"(?s)(<!-- table (\w+) -->\n).*?(<!-- end -->\n)")
CLAIMED = re.compile(r"(?s)(<!-- claims -->\n).*?(<!-- end -->\n)")
STATED = re.compile(r"(?s)(<!-- statements (\w+) -->\n).*?(<!-- end -->\n)")
PUBLISHED = re.compile(r"(?s)(<!-- published (findings|tables) -->\n).*?(<!-- end -->\n)")
# Its two ends, in parentheses, after "interval" or with signs after a comma; and the difference, where it stands just before
INTERVAL = re.compile(
    r"(?:([\d.]*\d)(?:\s%)?\s)?(?:\(|interval\s|,\s(?=[−+]))([−+]?[\d.]*\d) to ([−+]?[\d.]*\d)(?=[),;:]|\.(?!\d)|\s\()"
)
LOST = re.compile(r"([\d.]+)(?: points)? lost to\s([\d.]+) gained")
ABSOLUTE = re.compile(r'"/\w[\w.-]*/[^"]*"')


def keep(grid: Path, name: str) -> None:
    """Archive what the figures of a grid come from, and draw its pictures. Paths of this machine are left out."""
    if not re.fullmatch(r"\w+", name):
        raise ValueError(f"{name!r}: a name is letters, digits and _")
    if not (grid / "results.jsonl").exists():
        raise ValueError(f"{grid} has no results.jsonl: it is not the folder of a grid")
    files = {file: text for file in KEPT if (text := _read(grid / file)) is not None}
    for run in sorted(path.parent for path in grid.glob("row-*/metrics.json")):
        files |= {f"{run.name}/{file}": text for file in SETTINGS + FIGURES if (text := _read(run / file)) is not None}
    _write_archive(RESULTS / f"{name}{ENDING}", files)
    Reports(pictures=RESULTS)[name]


def add(grid: Path, name: str) -> None:
    """Archive the runs of a grid that the archive of its name lacks, beside those that it has.

    Raises ValueError if there are none, and for runs in another precision.
    """
    with _unpacked(name) as kept:
        precisions = [noted_precision(folder) or "fp32" for folder in (kept, grid)]
        if len(set(precisions)) > 1:
            raise ValueError(f"{name} has runs in {precisions[0]}, {grid} in {precisions[1]}")
        records = (grid / "results.jsonl").read_text(encoding="utf-8").splitlines()
        runs = {run_folder(grid, json.loads(record)): record for record in records}
        new = {run: record for run, record in runs.items() if not (kept / run.name).exists()}
        if not new:
            raise ValueError(f"{name} has all runs of {grid}")
        for run in new:
            shutil.copytree(run, kept / run.name, ignore=shutil.ignore_patterns("checkpoints", "*.safetensors"))
        for file, lines in (("results.jsonl", new.values()), (COMMANDS, _lines(grid / COMMANDS))):
            text = "\n".join(dict.fromkeys([*_lines(kept / file), *lines]))
            (kept / file).write_text(f"{text}\n", encoding="utf-8")
        keep(kept, name)


def _lines(path: Path) -> list[str]:
    return (_read(path) or b"").decode().splitlines()


def publish(report: Report, name: str, *, html: Path | None = None, pictures: Path | None = None) -> None:
    """Write the page of a report to the folder `html`, and its pictures to the folder `pictures`."""
    with tempfile.TemporaryDirectory() as out:
        write_pages([report], Path(out))
        if html is not None:
            shutil.copy(Path(out, "report.html"), html / f"{name}.html")
        for picture, end in PICTURES.items():
            if pictures is not None and Path(out, f"{picture}.png").exists():
                shutil.copy(Path(out, f"{picture}.png"), pictures / f"{name}{end}.png")


def _read(path: Path) -> bytes | None:
    """None where there is no such file. Of settings and commands, folders of this machine are named by what they are."""
    if not path.exists():
        return None
    if path.suffix == ".npy":
        return path.read_bytes()
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"""("root": )"[^"]*\"""", r'\1"DIRECTORY"', text)
    text = re.sub(r"""("pretrained": )"/[^"]*\"""", r'\1"FOLDER"', text)
    text = re.sub(r"(data\.root=)\S+", r"\1DIRECTORY", text)
    text = re.sub(r"(backbone\.pretrained=)/\S+", r"\1FOLDER", text)
    if path.suffix != ".txt" and (found := ABSOLUTE.search(text)):
        raise ValueError(f"{path} names a folder of this machine, which nobody else has: {found[0]}")
    return text.encode()


def _write_archive(path: Path, files: dict[str, bytes]) -> None:
    """The same bytes for the same files."""
    with (
        path.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


@contextmanager
def _unpacked(name: str) -> Iterator[Path]:
    path = RESULTS / f"{name}{ENDING}"
    if not path.exists():
        raise ValueError(f"{path.name} does not exist; choose from {', '.join(archives())}")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
        yield Path(folder)


def archives() -> list[str]:
    return sorted(path.name.removesuffix(ENDING) for path in RESULTS.glob(f"*{ENDING}"))


class Reports:
    """The report of each archive and its Markdown, made once, while the archive is unpacked: a report reads folders late. Its
    HTML page and pictures are written then, too, to the folders that are given."""

    def __init__(self, *, html: Path | None = None, pictures: Path | None = None) -> None:
        self._made: dict[str, tuple[Report, str]] = {}
        self._folders = {"html": html, "pictures": pictures}

    def _make(self, name: str) -> tuple[Report, str]:
        if name not in self._made:
            with _unpacked(name) as folder:
                report = make_report([folder], lambda _: None)
                self._made[name] = report, markdown(report)
                if any(self._folders.values()):
                    publish(report, name, **self._folders)
        return self._made[name]

    def __getitem__(self, name: str) -> Report:
        return self._make(name)[0]

    def text(self, name: str) -> str:
        """As Markdown, without its title, with the pictures that are kept."""
        _, body = self._make(name)[1].split("\n", 1)
        pictures = "|".join(PICTURES)
        named = re.sub(rf"\]\(({pictures})\.png\)", lambda found: f"]({name}{PICTURES[found[1]]}.png)", body)
        return re.sub(r"(?m)^#", "##", named).strip()


def pages(reports: Reports) -> dict[Path, str]:
    """Every page with generated parts, as it should be."""
    made = {}
    for path in [
        *sorted(RESULTS.glob("*.md")),
        *sorted(RESULTS.parent.glob("*.md")),
        *RESULTS.parents[1].glob("README.md"),
    ]:
        text = path.read_text(encoding="utf-8")
        text, tables = TABLE.subn(lambda found: f"{found[1]}\n{reports.text(found[2])}\n\n{found[3]}", text)
        text, lists = CLAIMED.subn(lambda found: f"{found[1]}\n{claims(reports)}\n\n{found[2]}", text)
        text, rows = PUBLISHED.subn(lambda found: f"{found[1]}\n{published(found[2], reports)}\n\n{found[3]}", text)
        text, said = STATED.subn(lambda found: f"{found[1]}{statements(found[2], reports)}\n{found[3]}", text)
        text, outputs = with_outputs(text, RESULTS)
        if tables or lists or rows or said or outputs:
            made[path] = text
    return made


def published(part: str, reports: Reports) -> str:
    """The findings or the tables of published_rows.yaml."""
    return (published_rows.findings if part == "findings" else published_rows.tables)(reports, RESULTS)


def statements(name: str, reports: Reports) -> str:
    """The text of that name in statements.yaml, with its figures."""
    known = yaml.safe_load((RESULTS / "statements.yaml").read_text(encoding="utf-8"))
    if name not in known:
        raise ValueError(f"statements.yaml has no {name!r}; choose from {[*known]}")
    return filled(known[name], reports, RESULTS)


def unknown_intervals(text: str, reports: Reports) -> list[str]:
    """The intervals in the text of a page that no two rows have, or not with the difference (without its sign) that stands just
    before them: rows of its tables, or of all archives if it has none. These have losses and gains, of perplexities also in %."""
    known: list[tuple[float, ...]] = []
    for name in dict.fromkeys(found[2] for found in TABLE.finditer(text)) or archives():
        for found in reports[name].differences:
            gain, loss = (found.difference, found.low, found.high), (-found.difference, -found.high, -found.low)
            if reports[name].task.scale is math.log:
                ratios = [tuple(map(math.exp, values)) for values in (gain, loss)]
                known += ratios + [tuple(100 * ratio - 100 for ratio in values) for values in ratios]
            else:
                known += [gain, loss]
    written = LOST.sub(r"−\1 to +\2", STATED.sub("", PUBLISHED.sub("", CLAIMED.sub("", TABLE.sub("", text)))))
    stated = [found.groups() for found in INTERVAL.finditer(written)]
    return [
        f"{low} to {high}"
        for *values, low, high in stated
        if not any(_rounds_to([*values, low, high], [abs(size), *ends]) for size, *ends in known)
    ]


def _rounds_to(stated: Sequence[str | None], known: Sequence[float]) -> bool:
    return all(
        shown is None or abs(float(shown.replace("−", "-")) - value) < 0.5001 * 10 ** -len(shown.partition(".")[2])
        for shown, value in zip(stated, known, strict=True)
    )


def claims(reports: Reports) -> str:
    """The tables of claims.yaml, with what was measured and whether the claim holds."""
    lines = []
    for group in yaml.safe_load(CLAIMS.read_text(encoding="utf-8")):
        lines += [
            f"### {group['question']}",
            "",
            "| claim | published | measured here | holds? |",
            "| --- | --- | --- | --- |",
        ]
        for claim in group["claims"]:
            unknown = claim.keys() - {"claim", "source", "published", "compare", "expects"}
            if unknown:
                raise ValueError(f"{claim['claim']!r}: unknown {sorted(unknown)}")
            measured, holds = "–", "not tested"
            if "compare" in claim:
                measured, holds = measure(reports, **claim["compare"], expects=claim["expects"])
            lines.append(f"| {claim['claim']} ({claim['source']}) | {claim['published']} | {measured} | {holds} |")
        lines.append("")
    return "\n".join(lines).strip()


def measure(
    reports: Reports, *, grid: str, row: str, base: str = "0", expects: str, fewer: float | None = None
) -> tuple[str, str]:
    """The difference of a row from another in words, and whether it is as a claim expects: no loss, a loss or a gain. `fewer`:
    how many times fewer parameters it says; with more of them it does not hold."""
    report = reports[grid]
    found = compare(report, row, base)
    if found is None:
        raise ValueError(f"{grid} does not compare row {row} with row {base}")
    first, second = (next(one for one in report.rows if one["row"] == name) for name in (base, row))
    words = f"{report.task.signed(found.difference)} {report.task.unit} of {quality(report, first)}"
    words += f" ({interval(report, found)}; {seeds_in_words(first, second)})"
    holds = verdict(report.task, found, expects) + " (one seed)" * (not found.seeds)
    if fewer is not None:
        times = first["total"][0] / second["total"][0]
        words += f", with 1/{times:.3g} of the parameters"
        holds = holds if times >= fewer else "does not hold"
    return f"{words}, row {row} of [{grid}]({page_of(grid)})", holds


def page_of(name: str) -> str:
    """The page that has the table of an archive, or else the archive itself."""
    texts = ((path.name, path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.md")))
    return next((page for page, text in texts if f"<!-- table {name} -->" in text), f"{name}{ENDING}")


def write_html(folder: Path) -> None:
    """NAME.html of each archive."""
    folder.mkdir(parents=True, exist_ok=True)
    reports = Reports(html=folder)
    for name in archives():
        reports[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, what in (("keep", "the folder of a grid"), ("add", "further runs of a grid that has an archive")):
        kept = commands.add_parser(command, help=f"archive {what}")
        kept.add_argument("grid", type=Path)
        kept.add_argument("name")
    commands.add_parser("write", help="write the tables and pictures of all pages from the archives")
    commands.add_parser("check", help="compare what they say with the archives")
    commands.add_parser("html", help="write the HTML page of each archive").add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "html":
        write_html(arguments.folder)
        return
    if arguments.command in ("keep", "add"):
        (keep if arguments.command == "keep" else add)(arguments.grid, arguments.name)
        return
    wrong, reports = [], Reports(pictures=RESULTS if arguments.command == "write" else None)
    for path, text in pages(reports).items():
        if arguments.command == "write":
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            wrong.append(f"{path.name} (run: python docs/tooling/results.py write)")
        from_archives = any(part.search(text) for part in (TABLE, CLAIMED, PUBLISHED))
        if from_archives and (unknown := unknown_intervals(text, reports)):
            wrong.append(f"{path.name}: no two rows have the interval {', '.join(unknown)}")
    for path in sorted(RESULTS.glob("*.md")):
        wrong += [f"{path.name}: {cell}" for cell in wrong_cells(path.read_text(encoding="utf-8"), RESULTS)]
    if wrong:
        sys.exit("\n".join(["Not what the records give:", *wrong]))
    print(f"{len(archives())} archives: every table and claim is what they give")


if __name__ == "__main__":
    main()
