"""Which models each tool takes: half of the FFN neurons of 40 families, removed, saved, and opened again in a new process.

    python benchmarks/peers/accepted.py --install all --environments FOLDER
    python benchmarks/peers/accepted.py --environments FOLDER --out runs/accepted

Claim: hf_freeze takes at least 1.5 times as many of the families as each other tool. It does not hold for Torch-Pruning.

The families are those of MODELS, listed before any tool was run on them: encoders, decoders, mixtures of experts, encoders with
decoders, models of images and of speech. Each has the default config of its type in transformers with small sizes, and random
weights. A tool *takes* a model if the result has lost at least 40 % of the parameters of its FFNs and computes finite outputs of
the same shape, and the result *opens again* if a new process, with what the tool's documentation says, computes exactly the same.
Torch-Pruning is told which matrices are the first ones of FFNs, since it takes any module and knows no FFNs; the others are not.

Each tool runs in an environment of its own, each model in a process of its own, with one thread. Models that are done are kept in
`--out`: the command continues where it stopped.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import halve
import torch
from transformers import AutoModel

from hf_freeze import count_parameters
from hf_freeze.architectures.examples import probe_inputs
from hf_freeze.architectures.published import default_config
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.architectures.shrink import shrink
from hf_freeze.lab.runs.environment import environment

MODELS = (
    *("albert", "bert", "camembert", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet", "roberta", "xlm-roberta"),
    *("bloom", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "gpt_neox", "gptj", "granite", "llama"),
    *("mistral", "olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "stablelm", "starcoder2"),
    *("mixtral", "qwen2_moe"),
    *("bart", "m2m_100", "marian", "mt5", "t5"),
    *("vit", "wav2vec2", "whisper"),
)  # fmt: skip
HERE = Path(__file__).parent


def main() -> None:
    options = parser().parse_args()
    peers = list(halve.PEERS) if options.peers == ["all"] else options.peers
    if options.install:
        for peer in halve.PEERS if options.install == ["all"] else options.install:
            install(options.environments / peer, halve.PEERS[peer].requirements)
        return
    for name in options.models:
        make(name, options.out / "models" / name)
    for peer in peers:
        folders = [options.out / peer / name for name in options.models]
        for step in ("halve", "open"):
            left = [folder for folder in folders if not (folder / f"{step}.json").exists()]
            run(peer, step, left, options)
    print(table(peers, options))


def parser() -> argparse.ArgumentParser:
    new = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    new.add_argument("--peers", nargs="+", default=["all"], choices=["all", *halve.PEERS])
    new.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, metavar="TYPE")
    new.add_argument("--install", nargs="+", choices=["all", *halve.PEERS], help="make their environments, no more")
    new.add_argument("--environments", type=Path, default=Path("runs/accepted/environments"))
    new.add_argument("--out", type=Path, default=Path("runs/accepted"), help="for models, results and records.json")
    return new


def install(folder: Path, requirements: list[str]) -> None:
    """A virtual environment with what a tool needs; none for hf_freeze, which runs in this one."""
    if requirements:
        print(f"{folder}: {' '.join(requirements)}", flush=True)
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", *requirements], check=True)


def make(name: str, folder: Path) -> None:
    """A small random model, its inputs, and what its FFNs are."""
    if (folder / "facts.json").exists():
        return
    torch.manual_seed(0)
    config = shrink(default_config(name))
    model = AutoModel.from_config(config).eval()
    model.save_pretrained(folder)
    torch.save(probe_inputs(config, model), folder / "inputs.pt")
    architecture = architecture_of(config)
    facts = {
        "ffns": [names[:-1] for names in architecture.ffns(config).values()],
        "ffn_parameters": count_parameters(model).by_component["ffn"].total,
        "parameters": model.num_parameters(),
    }
    (folder / "facts.json").write_text(json.dumps(facts))


def run(peer: str, step: str, folders: list[Path], options: argparse.Namespace) -> None:
    """One step of one tool on several models, in its environment."""
    if not folders:
        return
    own = options.environments / peer / "bin" / "python"
    python = own if halve.PEERS[peer].requirements else Path(sys.executable)
    if not python.exists():
        raise SystemExit(f"{python} is missing: run this with --install {peer}")
    command = [python, HERE / "halve.py", peer, step, options.out / "models", *folders]
    subprocess.run([str(part) for part in command], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def table(peers: list[str], options: argparse.Namespace) -> str:
    """Markdown: a line for each tool, and what it does not take. Writes records.json, too."""
    records: dict[str, Any] = {"environment": environment(), "models": options.models, "peers": {}}
    lines = [
        "| | takes | opens again | saved as | lines of code | does not take |",
        "| --- | ---: | ---: | --- | ---: | --- |",
    ]
    for peer in peers:
        done = {
            name: {
                step: json.loads((options.out / peer / name / f"{step}.json").read_text()) for step in ("halve", "open")
            }
            for name in options.models
        }
        takes = [name for name, steps in done.items() if "error" not in steps["halve"]]
        opens = [name for name, steps in done.items() if "error" not in steps["open"]]
        missing = ", ".join(name for name in options.models if name not in takes) or "–"
        count = len(inspect.getsource(halve.PEERS[peer].halve).splitlines()) - 1  # without the line of `def`
        tool = halve.PEERS[peer]
        lines.append(f"| {tool.title} | {len(takes)} | {len(opens)} | {tool.saved} | {count} | {missing} |")
        records["peers"][peer] = {"lines": count, "models": done}
    (options.out / "records.json").write_text(json.dumps(records, indent=1) + "\n")
    return "\n".join([f"Of {len(options.models)} families:", "", *lines])


if __name__ == "__main__":
    main()
