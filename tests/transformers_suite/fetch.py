"""Fetch the model tests of transformers, in the version that is installed.

Only the source distribution holds them. pip downloads it and checks its hash; the file goes to `build/`, which git ignores.
`make test` runs this file before the tests.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

TESTS = "test_modeling_common.py"
CACHE = Path(__file__).resolve().parents[2] / "build"


def model_tests() -> Path:
    """The file with transformers' `ModelTesterMixin`, downloaded unless it is there. Raises OSError where it cannot be had."""
    release = f"transformers-{version('transformers')}"
    file = CACHE / release / TESTS
    if not file.exists():
        with tempfile.TemporaryDirectory() as folder:
            content = _downloaded(release, Path(folder))
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")  # two test processes may fetch at once
        unfinished.write_bytes(content)
        unfinished.replace(file)
    return file


def _downloaded(release: str, folder: Path) -> bytes:
    requirement = release.replace("-", "==", 1)
    options = ["--no-deps", "--no-binary", "transformers", "--retries", "1", "--timeout", "15", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", requirement, *options, "--dest", str(folder)]
    process = subprocess.run(command, capture_output=True, text=True)
    archives = list(folder.glob("*.tar.gz"))
    if process.returncode != 0 or not archives:
        reason = process.stderr.strip().splitlines() or ["pip said nothing"]
        raise OSError(f"pip cannot download the source distribution of {requirement}: {reason[-1]}")
    with tarfile.open(archives[0]) as archive:
        member = archive.extractfile(f"{release}/tests/{TESTS}")
        assert member is not None
        return member.read()


if __name__ == "__main__":
    try:
        print(f"transformers' model tests: {model_tests()}")
    except OSError as error:
        sys.exit(f"WARNING: transformers' model tests will be skipped: {error}")
