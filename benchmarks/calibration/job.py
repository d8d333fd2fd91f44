"""Compressions by one peer, each in a process of its own: `python job.py FOLDERS`, with the Python of the peer's environment.

job.json of a folder names the peer, method, cut, seed and the folders of the model and of the calibration data. The folder gets
the tensors that the method changed (in the shapes of the original; removed parts are zero) and result.json with seconds, peak
memory and versions.
"""

import contextlib
import importlib
import json
import os
import re
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES=""
)

import torch
import transformers
from safetensors.torch import save_file

CLASSES = {
    "minilm": "AutoModel",
    "stories260k": "AutoModelForCausalLM",
    "translator": "AutoModelForSeq2SeqLM",
}


def load_model(model: str, folder: str | Path) -> Any:
    return getattr(transformers, CLASSES[model]).from_pretrained(folder, dtype=torch.float32).eval()


def peak_memory() -> int:
    """The most resident bytes of this process so far, on Linux."""
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) * 1024


def versions(packages: list[str]) -> dict[str, str]:
    numbers = {}
    for package in ["torch", "transformers", *packages]:
        with contextlib.suppress(PackageNotFoundError):
            numbers[package] = version(package)
    return numbers


def padded(tensor: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """`tensor` with zeros behind it in each dimension that the original has more of."""
    larger = torch.zeros_like(original)
    larger[tuple(map(slice, tensor.shape))] = tensor
    return larger


def compress(peer: Any, model: Any, batches: list[Any], job: dict[str, Any], folder: Path) -> None:
    torch.manual_seed(job["seed"])
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loaded = peak_memory()
    wall, cpu = time.perf_counter(), time.process_time()
    state, facts = peer.compress(model, batches, job)
    seconds = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    memory = {"peak_bytes": peak_memory(), "loaded_bytes": loaded}
    state = {name: padded(state[name].float(), tensor) for name, tensor in original.items()}
    changed = {name: tensor for name, tensor in state.items() if not torch.equal(tensor, original[name])}
    save_file(changed, folder / "changed.safetensors")
    result = {**seconds, **memory, "versions": versions(peer.PACKAGES), "facts": facts}
    (folder / "result.json").write_text(json.dumps(result))


def main(folders: list[Path]) -> None:
    """Jobs of one peer, model and calibration: each in a child of this process, which has imported and loaded what they need."""
    jobs = [json.loads((folder / "job.json").read_text()) for folder in folders]
    torch.set_num_threads(1)
    peer = importlib.import_module(jobs[0]["peer"])
    if hasattr(peer, "prepare"):
        peer.prepare()  # imports, which are no part of the seconds
    model = load_model(jobs[0]["model"], jobs[0]["model_folder"])
    batches = torch.load(Path(jobs[0]["inputs"]) / "batches.pt")
    texts = json.loads((Path(jobs[0]["inputs"]) / "texts.json").read_text())
    for folder, job in zip(folders, jobs, strict=True):
        if child := os.fork():
            code = os.waitpid(child, 0)[1]
            if code and not (folder / "error.txt").exists():
                (folder / "error.txt").write_text(f"ended with {os.waitstatus_to_exitcode(code)}")
            continue
        code = 1
        try:
            compress(peer, model, batches, {**job, "texts": texts}, folder)
            code = 0
        except BaseException:
            (folder / "error.txt").write_text(traceback.format_exc())
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
