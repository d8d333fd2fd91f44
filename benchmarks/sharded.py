"""Memory and losses of training in shards, by `load_sharded` on two processes, against one process with the whole model.

    python benchmarks/sharded.py                                 # Llamas of 0.3 billion parameters in fp32, 20 steps
    python benchmarks/sharded.py --sizes 0.1 --steps 5           # quick

Claims: each of two processes has at most 0.6 times the peak of one process; the losses are those of one process (to 1e-4); one
process and three processes go on from the distributed checkpoint of two with the same losses.

"variant" has seeded FFNs and factorised attention: `Freeze(ffn="random"), LowRank(rank=..., components=["attention"])`. All
processes are on this machine, without a GPU, with gloo and one thread each. A step has 6 rows of 16 random tokens; AdamW trains
all that is not frozen. Memory is the peak of a process less what it has after its imports; with the imports, the ratio is larger,
and it is given too. Limit: half of everything, and what is put together at the time: a layer, or a table of tokens, its gradient
and the copies of both that are sent. A table of 32,000 tokens is as large as three layers here; "small-tables" has 8,000.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _shared
import torch
from torch import distributed
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from hf_freeze import make_variant
from hf_freeze.methods import Freeze, LowRank
from hf_freeze.model.loading import load_model
from hf_freeze.training import load_sharded

SIZES = {  # billions of parameters -> (hidden size, FFN width, layers, heads, vocabulary)
    "0.1": (768, 2048, 12, 12, 32_000),
    "0.3": (1024, 2816, 24, 16, 32_000),
    "0.3-small-tables": (1024, 2816, 26, 16, 8_000),
}
MODELS: dict[str, Callable[[Any], list[Any]]] = {
    "native": lambda config: [],
    "variant": lambda config: [
        Freeze(ffn="random", seed=13),
        LowRank(rank=config.hidden_size // 4, components=["attention"], solver="randomized"),
    ],
}
ROWS, LENGTH = 6, 16  # rows for one, two and three processes
GROUP = 2
RESUMED_ON = (1, 3)
RESUMED_STEPS = 5
TOLERANCE = 1e-4


def write_model(folder: str, size: str, name: str) -> dict[str, int]:
    """Write a sharded checkpoint of fp32 with fresh weights; returns the numbers of its parameters."""
    hidden, width, layers, heads, vocabulary = SIZES[size]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    if methods := MODELS[name](config):
        model = make_variant(model, methods, copy=False)
    model.save_pretrained(folder, max_shard_size="500MB")
    parameters = list(model.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }


class Training:
    """AdamW on a model, on this process's rows of every step."""

    def __init__(self, model: Any) -> None:
        self.model = model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)

    def losses(self, first: int, last: int) -> list[float]:
        """Of the steps from `first` on, before `last`; over the rows of all processes."""
        grouped = distributed.is_initialized()
        rank, world = (distributed.get_rank(), distributed.get_world_size()) if grouped else (0, 1)
        losses = []
        for step in range(first, last):
            rows = torch.randint(self.model.config.vocab_size, (ROWS, LENGTH), generator=_generator(step))[rank::world]
            loss = self.model(input_ids=rows, labels=rows, use_cache=False).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach()
            if grouped:
                distributed.all_reduce(total)
            losses.append(float(total) / world)
        return losses

    def save(self, folder: str) -> None:
        state_dict_saver.save(self._state(), checkpoint_id=folder)

    def resume(self, folder: str) -> None:
        state = self._state()
        state_dict_loader.load(state, checkpoint_id=folder)
        options = StateDictOptions(strict=False)  # what is frozen is not in it: `load_sharded` has it
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )

    def _state(self) -> dict[str, Any]:
        state = get_state_dict(self.model, self.optimizer, options=StateDictOptions(ignore_frozen_params=True))
        return dict(zip(("model", "optimizer"), state, strict=True))


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(step % 4)  # four batches, so that the loss falls


def whole(folder: str, steps: int) -> dict[str, Any]:
    """Of one process with the whole model: its losses, and of the steps after them."""
    torch.set_num_threads(1)
    before = _shared.resident("VmRSS")
    training = Training(load_model(folder))
    loaded = _shared.resident("VmHWM")
    losses = training.losses(0, steps)
    peak = _shared.resident("VmHWM")
    return {
        "before": before,
        "loaded": loaded,
        "peak": peak,
        "losses": losses,
        "later": training.losses(steps, steps + RESUMED_STEPS),
    }


def in_shards(folder: str, steps: int, saved: str) -> dict[str, Any]:
    """Of one process of a group, which saves a distributed checkpoint at the end."""
    torch.set_num_threads(1)
    before = _shared.resident("VmRSS")
    training = Training(load_sharded(folder, init_device_mesh("cpu", (distributed.get_world_size(),))))
    loaded = _shared.resident("VmHWM")
    losses = training.losses(0, steps)
    peak = _shared.resident("VmHWM")
    training.save(saved)
    return {"before": before, "loaded": loaded, "peak": peak, "losses": losses, "saved": _shared.resident("VmHWM")}


def resumed(folder: str, steps: int, saved: str) -> list[float]:
    """The losses of the steps after those of a checkpoint."""
    torch.set_num_threads(1)
    training = Training(load_sharded(folder, init_device_mesh("cpu", (distributed.get_world_size(),))))
    training.resume(saved)
    return training.losses(steps, steps + RESUMED_STEPS)


def furthest(losses: list[list[float]], expected: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(x - y) / abs(y) for run in losses for x, y in zip(run, expected, strict=True))


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument(
        "--sizes", nargs="+", default=["0.3", "0.3-small-tables"], choices=SIZES, help="billions of parameters"
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    lines, memory, differences, later = [], [], [], []
    for size in options.sizes:
        for name in options.models:
            with tempfile.TemporaryDirectory() as root:
                folder, saved = f"{root}/model", f"{root}/saved"
                count = _shared.in_new_process(write_model, folder, size, name, OMP_NUM_THREADS="1")
                alone = _shared.in_new_process(whole, folder, options.steps, OMP_NUM_THREADS="1")
                group = _shared.in_new_group(in_shards, GROUP, folder, options.steps, saved, OMP_NUM_THREADS="1")
                kept = sum(path.stat().st_size for path in Path(saved).iterdir())
                for processes in RESUMED_ON:
                    losses = _shared.in_new_group(resumed, processes, folder, options.steps, saved, OMP_NUM_THREADS="1")
                    case = f"{size} {name}, {processes} processes"
                    later.append((furthest(losses, alone["later"]), case))
            start = [f"{count['parameters'] / 1e6:,.0f}", f"{count['trained'] / 1e6:,.0f}"]
            lines.append(
                [f"{size} {name}", *start, "one", *_cells(alone), "", "", "", f"{alone['losses'][-1]:.4f}", ""]
            )
            for rank, run in enumerate(group):
                own, all_of_it = _peak(run) / _peak(alone), run["peak"] / alone["peak"]
                apart = furthest([run["losses"]], alone["losses"])
                rest = [f"{own:.2f}", f"{all_of_it:.2f}", f"{(run['saved'] - run['before']) / 1e9:.2f}"]
                rest += [f"{run['losses'][-1]:.4f}", f"{apart:.1e}"]
                lines.append([f"{size} {name}", *start, f"{rank + 1} of {GROUP}", *_cells(run), *rest])
                memory.append((own, f"{size} {name}, process {rank + 1}"))
                differences.append((apart, f"{size} {name}, process {rank + 1}"))
            print(json.dumps({"losses of one": alone["losses"], "checkpoint bytes": kept}), flush=True)
    header = ["", "10⁶ parameters", "trained", "process", "after imports GB", "loaded GB", "peak GB", "peak / one"]
    header += ["with imports", "peak with saving GB", "last loss", "furthest loss"]
    summary = (
        f"peak at most 0.6 of one process: {_shared.verdict(memory, lambda x: x <= 0.6)}; losses to {TOLERANCE}: "
        f"{_shared.verdict(differences, lambda x: x <= TOLERANCE)}; {RESUMED_STEPS} steps resumed to {TOLERANCE}: "
        f"{_shared.verdict(later, lambda x: x <= TOLERANCE)} ({', '.join(f'{case} {x:.1e}' for x, case in later)})"
    )
    _shared.report(options, _shared.markdown(header, lines), summary)


def _peak(run: dict[str, Any]) -> int:
    """Less the imports."""
    return run["peak"] - run["before"]


def _cells(run: dict[str, Any]) -> list[str]:
    figures = (run["before"], run["loaded"] - run["before"], _peak(run))
    return [f"{figure / 1e9:.2f}" for figure in figures]


if __name__ == "__main__":
    main()
