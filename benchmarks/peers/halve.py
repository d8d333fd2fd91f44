"""One tool and several models: `python halve.py PEER halve|open MODELS FOLDERS`, with the Python of the tool's environment.

It needs torch, transformers and that tool alone. `halve` removes half of the FFN neurons of MODELS/NAME and saves the result in
FOLDER/NAME; `open` opens it. Both write halve.json or open.json there, with an error if there was one. `accepted.py` calls this.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", CUDA_VISIBLE_DEVICES="")

import torch
from transformers import AutoModel

_COMMON = ["torch==2.13.0", "transformers==5.23.0"]


def _hf_freeze(model: Any, inputs: dict[str, Any], ffns: list[list[str]]) -> Any:
    from hf_freeze import make_variant, methods

    return make_variant(model, [methods.FFNPruning(share=0.5)], calibration=[inputs])


def _torch_pruning(model: Any, inputs: dict[str, Any], ffns: list[list[str]]) -> Any:
    import torch_pruning as tp

    roots = [model.get_submodule(name) for names in ffns for name in names]
    others = [module for module in model.modules() if not list(module.children()) and module not in roots]
    pruner = tp.pruner.BasePruner(
        model,
        example_inputs=inputs,
        importance=tp.importance.GroupMagnitudeImportance(),
        pruning_ratio_dict=dict.fromkeys(roots, 0.5),
        ignored_layers=others,
        forward_fn=lambda module, inputs: module(**inputs),
        output_transform=lambda output: output[0],
    )
    pruner.step()
    return model


def _optipfair(model: Any, inputs: dict[str, Any], ffns: list[list[str]]) -> Any:
    import optipfair

    return optipfair.prune_model(model, "MLP_GLU", pruning_percentage=50, show_progress=False)


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)


def _open(folder: Path) -> Any:
    return AutoModel.from_pretrained(folder)


def _open_variant(folder: Path) -> Any:
    import hf_freeze  # noqa: F401

    return AutoModel.from_pretrained(folder)


def _pickle(model: Any, folder: Path) -> None:
    """As the documentation of Torch-Pruning says: the whole module."""
    model.zero_grad()
    torch.save(model, folder / "model.pt")


def _unpickle(folder: Path) -> Any:
    return torch.load(folder / "model.pt", weights_only=False)


@dataclass(frozen=True)
class Peer:
    title: str
    halve: Callable[[Any, dict[str, Any], list[list[str]]], Any]
    requirements: list[str] = field(default_factory=list)  # none: the environment that runs accepted.py
    save: Callable[[Any, Path], None] = _save
    open: Callable[[Path], Any] = _open
    saved: str = "a folder for `from_pretrained`"


PEERS = {
    "hf_freeze": Peer("hf_freeze, `FFNPruning`", _hf_freeze, open=_open_variant),
    "torch_pruning": Peer(
        "Torch-Pruning 1.6.1, told which matrices",
        _torch_pruning,
        [*_COMMON, "torch-pruning==1.6.1"],
        _pickle,
        _unpickle,
        "a pickle",
    ),
    "optipfair": Peer("optipfair 0.4.2", _optipfair, [*_COMMON, "optipfair==0.4.2"]),
}


@torch.no_grad()
def outputs(model: Any, source: Path) -> torch.Tensor:
    for parameter in model.parameters():  # of files, they lie at any address, by which products round the last bit
        parameter.data = parameter.data.clone()
    return model.eval()(**torch.load(source / "inputs.pt"))[0]


def halved(peer: Peer, source: Path, folder: Path) -> dict[str, Any]:
    """Removes and saves. Raises ValueError where the result is no smaller model that computes; an error of saving is returned."""
    facts = json.loads((source / "facts.json").read_text())
    model = AutoModel.from_pretrained(source).eval()
    before = outputs(model, source)
    smaller = peer.halve(model, torch.load(source / "inputs.pt"), facts["ffns"])
    count = sum(parameter.numel() for parameter in smaller.parameters())
    gone = (facts["parameters"] - count) / facts["ffn_parameters"]
    after = outputs(smaller, source)
    if gone < 0.4:
        raise ValueError(f"{gone:.0%} of the FFN parameters are gone")
    if after.shape != before.shape or not after.isfinite().all():
        raise ValueError(f"outputs {tuple(after.shape)}, were {tuple(before.shape)}, or not finite")
    torch.save(after, folder / "outputs.pt")
    try:
        peer.save(smaller, folder)
    except Exception as error:  # the model is smaller all the same
        return {"gone": round(gone, 3), "not saved": in_a_line(error)}
    return {"gone": round(gone, 3)}


def opened(peer: Peer, source: Path, folder: Path) -> dict[str, Any]:
    """Raises ValueError where the saved model computes something else."""
    expected = torch.load(folder / "outputs.pt")
    found = outputs(peer.open(folder), source)
    if found.shape != expected.shape or not torch.equal(found, expected):
        raise ValueError("another output")
    return {}


def main(name: str, step: str, models: Path, folders: list[Path]) -> None:
    torch.set_num_threads(1)
    importlib.import_module(name)  # once, for all children
    work = {"halve": halved, "open": opened}[step]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        if child := os.fork():
            code = os.waitpid(child, 0)[1]
            if not (folder / f"{step}.json").exists():
                write(folder, step, {"error": f"ended with {os.waitstatus_to_exitcode(code)}"})
            continue
        try:
            write(folder, step, work(PEERS[name], models / folder.name, folder))
        except BaseException as error:
            write(folder, step, {"error": in_a_line(error)})
        os._exit(0)


def in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:300]


def write(folder: Path, step: str, result: dict[str, Any]) -> None:
    (folder / f"{step}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), [Path(folder) for folder in sys.argv[4:]])
