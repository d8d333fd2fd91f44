"""What encode.py, translate.py, predict.py, classify.py and see.py share: `PEER make|use MODEL TEXTS FOLDER`, a tool's two
steps, with the Python of its environment.

They need numpy and that tool alone. `make` writes a smaller model to FOLDER/model from MODEL and, where the tool
learns, from the texts of TEXTS/learnt.json; `use` opens it in a new process, on one core, and answers those of
TEXTS/asked.json. Both write make.json or use.json there. `side_by_side.py` calls them.
"""

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", CUDA_VISIBLE_DEVICES="")

import numpy as np

Answer = Callable[[list[str]], Any]  # texts -> a vector, a text or what it costs for each
# What two environments need that most kinds have
ONNX = ["torch==2.13.0", "optimum-onnx[onnxruntime]==0.1.0", "transformers==4.57.6"]
OPENVINO = ["torch==2.13.0", "optimum-intel[openvino]==2.2.0", "nncf==3.4.0", "transformers==4.57.6", "datasets<5"]
ONE_BY_ONE, FIRST = 300, 64  # texts that are timed, each alone; texts answered before and after saving


@dataclass(frozen=True)
class Peer:
    title: str
    make: Callable[[str, list[str], Path], Answer]
    open: Callable[[Path], Answer]
    environment: str = ""  # none: the environment that runs side_by_side.py
    learns: bool = False


def one_thread() -> Any:
    """For ONNX Runtime, which starts a thread for each core of the machine: where it may use one, they wait for each other."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    return settings


def compressed(
    share: str, open_folder: Callable[[Path], Answer], heal: int | str = 0, samples: int = 512
) -> Callable[[str, list[str], Path], Answer]:
    """Of hf_freeze: `compress` to a share of the bytes."""

    def make(model: str, texts: list[str], out: Path) -> Answer:
        from hf_freeze.compression import Budget, compress

        budget = Budget(max_bytes=share)
        made = compress(model, texts=texts, budget=budget, heal=heal, samples=samples, out=out.parent / "work")
        made.after.folder.rename(out)
        (out.parent / "seconds").write_text(f"{made.seconds}")  # those before a stop, too
        return open_folder(out)

    return make


def made(peer: Peer, model: str, texts: Path, folder: Path) -> dict[str, Any]:
    learnt = json.loads((texts / "learnt.json").read_text()) if peer.learns else []
    begun = time.perf_counter()
    answer = peer.make(model, learnt, folder / "model")
    counted = folder / "seconds"
    seconds = float(counted.read_text()) if counted.exists() else time.perf_counter() - begun
    np.save(folder / "first.npy", np.asarray(answer(json.loads((texts / "asked.json").read_text())[:FIRST])))
    return {"seconds": seconds}


def used(peer: Peer, model: str, texts: Path, folder: Path) -> dict[str, Any]:
    if hasattr(os, "sched_setaffinity"):  # not every engine reads OMP_NUM_THREADS
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    asked = json.loads((texts / "asked.json").read_text())
    answer = peer.open(folder / "model")
    answer(asked[:1])
    ms = milliseconds(answer, asked)
    memory = peak_memory()
    same = np.array_equal(np.asarray(answer(asked[:FIRST])), np.load(folder / "first.npy"))
    found = [np.asarray(answer(asked[at : at + FIRST])) for at in range(0, len(asked), FIRST)]
    np.save(folder / "answers.npy", np.concatenate(found))
    # Other work on the machine only adds to times, for some seconds: the second turn is after all that is answered between.
    return {"ms": min(ms, milliseconds(answer, asked)), "memory": memory, "same": bool(same)}


def milliseconds(answer: Answer, asked: list[str]) -> float:
    """Of the core, for a text alone: the median of many."""
    times = []
    for text in asked[:ONE_BY_ONE]:
        begun = time.process_time()  # not what other processes take of the core
        answer([text])
        times.append(time.process_time() - begun)
    return 1000 * statistics.median(times)


def peak_memory() -> int:
    """Bytes, of this process alone: `getrusage` would count the one that started it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main(peers: dict[str, Peer]) -> None:
    name, step, model, texts, folder = *sys.argv[1:4], Path(sys.argv[4]), Path(sys.argv[5])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        result = {"make": made, "use": used}[step](peers[name], model, texts, folder)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]}
    (folder / f"{step}.json").write_text(json.dumps(result))
