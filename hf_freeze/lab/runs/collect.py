"""`results.jsonl`: the records of all finished runs of a grid."""

import json
from pathlib import Path
from typing import Any

from hf_freeze.io import write_whole
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.run_folder import LATENCY


def write_results(out: Path, runs: list[Run]) -> list[dict[str, Any]]:
    """Collect the finished runs of `out` into `results.jsonl`: `runs` in their order, then those of other seeds or recipes."""
    paths = [run.folder(out) / "metrics.json" for run in runs]
    paths += sorted(set(out.glob("row-*-seed-*/metrics.json")) - set(paths))
    records = [_record(path) for path in paths if path.exists()]
    write_whole(out / "results.jsonl", "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return records


def _record(path: Path) -> dict[str, Any]:
    """Of a finished run, with what was measured of its model since."""
    record, latency = json.loads(path.read_text(encoding="utf-8")), path.with_name(LATENCY)
    return record | ({"latency": json.loads(latency.read_text(encoding="utf-8"))} if latency.exists() else {})
