"""`make versions`: run a sample of the tests with the oldest and newest versions that pyproject.toml allows.

    python tests/versions.py                               # every combination, one after the other
    python tests/versions.py py3.10-oldest py3.13-newest   # some; the rows of the others stay as they are
    UV_TORCH_BACKEND=cpu python tests/versions.py          # with PyTorch's CPU builds, several GB smaller

Each combination gets an environment of its own, build/versions/NAME. uv makes it, and fetches a missing Python where it can;
pyenv hides its own unless you name them: PYENV_VERSION=3.13:3.10. The first run downloads several GB for each version of torch;
then a sample takes two minutes of one core. Results go to docs/versions.json and, as a table, to docs/versions.md. The exit
status is 1 unless all tests passed in all chosen environments.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "versions"
RESULTS = ROOT / "docs" / "versions.json"
SHOWN = ("torch", "transformers", "accelerate", "numpy")

# What depends most on transformers, torch and Python, in two minutes of one core.
CONTRACT = "tests/contract"
SAMPLE = {
    "tests/compat/test_private_names.py": "the private names of transformers and PEFT that hf_freeze uses",
    "tests/regression": "checkpoints of earlier releases",
    f"{CONTRACT}/test_saving.py::test_a_saved_variant_reloads_bit_equal": "every method on every architecture, saved and loaded",
    f"{CONTRACT}/test_training_step.py::test_a_step_changes_what_is_trainable_and_nothing_else": "the same, a training step",
    f"{CONTRACT}/test_forward.py::test_generate_is_the_same_with_a_cache_and_with_padding": "`generate`",
    f"{CONTRACT}/test_forward.py::test_merged_is_a_native_model": "`merge`",
    f"{CONTRACT}/test_processes.py::test_a_new_process_opens_the_same_models": "loading in a new process",
    "tests/model/test_loading.py": "shards, `device_map`, dtypes",
    "tests/lab/training/test_training.py": "`Trainer`",
    "tests/training/test_sharding.py": "`load_sharded` in two and three processes",
    "tests/compat/test_pipelines.py": "`pipeline`",
    "tests/publish/test_export_onnx.py": "exports to ONNX Runtime",
    "tests/publish/test_export_int4.py": "the same, in four bits",
    "tests/publish/test_export_recurrent.py": "exports to ONNX Runtime and `torch.export` of models with a state",
    "tests/cli/test_inspect.py": "the command line: `inspect`",
    "tests/cli/test_cli.py::test_a_method_is_explained": "the command line: `methods`",
    "tests/cli/test_cli.py::test_the_installed_program_is_as_quick": "the command line as installed",
}


@dataclass(frozen=True)
class Combination:
    """`oldest`: each direct dependency has the oldest allowed version with a wheel for this Python. Otherwise it has the newest
    that `pins` allow."""

    python: str
    label: str
    oldest: bool = False
    pins: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"py{self.python}-{self.label}"


def lower_bound(package: str) -> str:
    """The oldest version of a dependency that pyproject.toml allows. Raises ValueError if it gives none."""
    found = re.search(rf'^ *"{package}>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    if found is None:
        raise ValueError(
            f'pyproject.toml gives no lower bound of {package!r}: write "{package}>=VERSION" in dependencies'
        )
    return found[1]


def combinations() -> dict[str, Combination]:
    """Name -> combination, in the order of the table."""
    old_torch, old_transformers = (f"{name}=={lower_bound(name)}.*" for name in ("torch", "transformers"))
    listed = (
        Combination("3.10", "oldest", oldest=True),
        Combination("3.10", "newest"),
        Combination("3.13", "oldest", oldest=True),
        Combination("3.13", "oldest-torch", pins=(old_torch,)),
        Combination("3.13", "oldest-transformers", pins=(old_transformers,)),
        Combination("3.13", "newest"),
    )
    return {combination.name: combination for combination in listed}


def make_environment(combination: Combination) -> Path:
    """Make it anew and return its Python. Raises CalledProcessError, with what uv said in `stderr`."""
    folder = ENVIRONMENTS / combination.name
    _uv("venv", "--clear", "--python", combination.python, str(folder))
    install = ("pip", "install", "--python", str(folder))
    resolution = "lowest-direct" if combination.oldest else "highest"
    # Without wheels, old numerical packages would be compiled for hours.
    chosen = (
        "--resolution",
        resolution,
        "--only-binary",
        ":all:",
        "--requirements",
        "pyproject.toml",
        "--extra",
        "test",
    )
    _uv(*install, *chosen, *combination.pins)
    _uv(*install, "--no-deps", "--editable", ".")
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _uv(*arguments: str) -> None:
    command = [sys.executable, "-m", "uv", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def installed_versions(python: Path) -> dict[str, str]:
    code = "import json, platform, sys; from importlib.metadata import version; print(json.dumps(\
        {'python': platform.python_version()} | {name: version(name) for name in sys.argv[1:]}))"
    return json.loads(subprocess.check_output([python, "-c", code, *SHOWN], text=True))


def run_sample(python: Path, report: Path) -> dict[str, Any]:
    """Run the sample, with pytest's progress on the terminal. Returns what `counts` returns, and the CPU seconds."""
    report.unlink(missing_ok=True)
    environment = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    before = os.times()
    subprocess.run(
        [python, "-m", "pytest", "-q", "--tb=short", f"--junit-xml={report}", *SAMPLE],
        cwd=ROOT,
        env=environment,
        check=False,
    )
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return counts(report) | {"cpu_seconds": round(seconds)}


def counts(report: Path) -> dict[str, Any]:
    """How many tests of a JUnit file passed and were skipped, and the names of those that failed."""
    if not report.exists():
        return {"passed": 0, "skipped": 0, "failed": ["pytest itself, before any test"]}
    cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
        "failed": [f"{case.get('classname')}.{case.get('name')}" for case in failed],
    }


def examine(combination: Combination) -> dict[str, Any]:
    """One row of the table. An environment that cannot be made is a row as well, with the reason."""
    row: dict[str, Any] = {"date": datetime.date.today().isoformat()}
    try:
        python = make_environment(combination)
    except subprocess.CalledProcessError as error:
        return row | {"not_run": " ".join(error.stderr.split())[:300]}
    return row | installed_versions(python) | run_sample(python, ENVIRONMENTS / f"{combination.name}.xml")


def page(rows: dict[str, dict[str, Any]]) -> str:
    """docs/versions.md: the table of `rows`, by name of their combination. One without a row was not run."""
    bounds = ", ".join(f"{name} {lower_bound(name)}" for name in ("torch", "transformers"))
    columns = ("environment", "Python", *SHOWN, "passed", "failed", "skipped", "CPU seconds", "run on")
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    notes = []
    for name, combination in combinations().items():
        row = rows.get(name, {"not_run": "not run yet"})
        if "not_run" in row:
            cells = [combination.python, *[""] * (len(columns) - 2)]
            notes.append(f"- `{name}` was not run: {row['not_run']}")
        else:
            numbers = (row["passed"], len(row["failed"]), row["skipped"], row["cpu_seconds"], row["date"])
            cells = [row["python"], *(row[package] for package in SHOWN), *map(str, numbers)]
            notes += [f"- `{name}` fails `{test}`" for test in row["failed"]]
        lines.append("| " + " | ".join((f"`{name}`", *cells)) + " |")
    return PAGE.format(
        bounds=bounds,
        table="\n".join(lines),
        notes="".join(f"{note}\n" for note in notes) + "\n" * bool(notes),
        sample="\n".join(f"- `{path}`: {about}" for path, about in SAMPLE.items()),
    )


PAGE = """\
# Tested versions

<!-- Written by `make versions`; do not edit. -->

The lower bounds in `pyproject.toml` ({bounds}, and those of the other dependencies) are tested, and so are the newest versions.
`make versions` makes an environment for each row and runs the same sample of the tests in it. CI runs all tests with the versions
of `constraints.txt`.

{table}

- `oldest`: each direct dependency has the oldest version that `pyproject.toml` allows and that has a wheel for this Python
- `newest`: the newest version of everything that supports this Python
- `oldest-torch`, `oldest-transformers`: that one is the oldest, and the rest is as new as it lets it be
- skipped: tests that an older version cannot pass count here too; each gives its reason, and fails once it passes

{notes}The sample:

{sample}
"""


def choice(name: str) -> Combination:
    known = combinations()
    if name not in known:
        raise argparse.ArgumentTypeError(f"no combination {name!r}; choose from {', '.join(known)}")
    return known[name]


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", type=choice, metavar="NAME", help=", ".join(combinations()))
    chosen = parser.parse_args(arguments).names or list(combinations().values())
    rows: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for number, combination in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {combination.name}: making the environment", flush=True)
        row = rows[combination.name] = examine(combination)
        RESULTS.write_text(json.dumps({name: rows[name] for name in combinations() if name in rows}, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(page(rows))
        print(f"[{number}/{len(chosen)}] {combination.name}: {summary(row)}", flush=True)
    return int(any(row.get("failed", True) for row in (rows[combination.name] for combination in chosen)))


def summary(row: dict[str, Any]) -> str:
    if "not_run" in row:
        return f"not run: {row['not_run']}"
    return f"{row['passed']} passed, {len(row['failed'])} failed, {row['skipped']} skipped, {row['cpu_seconds']} CPU seconds"


if __name__ == "__main__":
    sys.exit(main())
