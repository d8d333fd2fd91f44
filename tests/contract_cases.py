"""What the contract tests share: every cell of METHODS x ARCHITECTURES, how to build it, and what holds for a cell.

No name of a method or architecture appears here or in the tests: a new one is tested by being registered.
"""

import contextlib
import copy
import functools
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from transformers import AutoConfig, Trainer, TrainingArguments

from hf_freeze import VariantCallback, make_variant
from hf_freeze.architectures.base import TRAINED, Architecture, base_name, canonical_parameters
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.experiments.grid import leave_processes
from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import Schedule, SeededValues, parts_of
from hf_freeze.methods.registry import METHODS, method_to_dict
from hf_freeze.model.config import INITS
from hf_freeze.seeded.tensor import digest

MODEL = "trained"  # the source that is a native model with weights; the others are a config, with that init
SOURCES = (MODEL, *(f"init_{init}" for init in INITS))
BATCH_ROWS = 4


@dataclass(frozen=True)
class Case:
    """Methods applied, in order, to a backbone. No methods: the baseline, which all that makes sense holds for as well."""

    architecture: Architecture
    task: str
    source: str
    methods: tuple[Method, ...]
    finalized: bool = False  # what `finalize()` leaves, where a method has something to end training with

    @property
    def id(self) -> str:
        names = "+".join(method.name for method in self.methods) or "baseline"
        return f"{self.architecture.model_type}-{self.task}-{self.source}-{names}{'-finalized' * self.finalized}"

    @property
    def exact(self) -> bool:
        return all(method.exact for method in self.methods)

    @property
    def finalizable(self) -> bool:
        return not self.finalized and any(method.finalizable for method in self.methods)

    @property
    def stochastic(self) -> bool:
        """Whether two forwards in training mode differ."""
        return not self.finalized and any(method.stochastic for method in self.methods)

    @property
    def skips(self) -> bool:
        """Whether a step of training may leave without a gradient what is trainable."""
        return not self.finalized and any(part.skips for _, part in parts_of(self.methods, Schedule))

    @property
    def seeded(self) -> bool:
        """Whether a part of it is regenerated from a seed, and not stored."""
        return any(seeds(method, component) for method in self.methods for component in TRAINED)

    @property
    def thorough(self) -> bool:
        """Whether every test takes it: the baseline wherever it is, and each method on the first task, from trained weights.

        The other tasks differ in the head alone, the other sources in values alone: what is saved, opened, trained and merged
        shows a method that goes wrong there.
        """
        return not self.methods or (self.of_first_source and self.task == self.architecture.tasks[0])

    @property
    def of_first_source(self) -> bool:
        """Whether it starts as most are tested: from trained weights, or, of methods that cannot, from fresh ones."""
        return self.source == sources(self.methods)[0]

    @property
    def auto_class(self) -> Any:
        return AUTO_CLASSES[self.task]

    @property
    def native_class(self) -> Any:
        return self.auto_class._model_mapping[type(AutoConfig.for_model(self.architecture.model_type))]

    @property
    def trained_by_trainer(self) -> bool:
        """Whether the tests with a Trainer, the slowest, take it: each method on one task, the baseline on each with a loss."""
        if not self.of_first_source or self.finalized:
            return False
        with_loss = [task for task in self.architecture.tasks if _has_loss(self.architecture.model_type, task)]
        return self.task in (with_loss[:1] if self.methods else with_loss)

    def batch(self) -> dict[str, torch.Tensor]:
        return self.architecture.tiny_inputs(self.task)


def seeds(method: Method, component: str) -> bool:
    """Whether a seed regenerates weights of this component."""
    part = method.part(SeededValues)
    return part is not None and component in part.components


def supports(method: type[Method], architecture: Architecture) -> bool:
    return method.supports(architecture.model_type)


def sources(methods: tuple[Method, ...]) -> tuple[str, ...]:
    """Those that these methods can be applied to."""
    return SOURCES[1:] if any(method.from_scratch for method in methods) else SOURCES


def _cases() -> Iterator[Case]:
    for architecture in ARCHITECTURES.values():
        applied: list[tuple[Method, ...]] = [()]
        applied += [(method.example,) for method in METHODS.values() if supports(method, architecture)]
        # The first task from every source; the other tasks differ in the head alone, which one source shows.
        for (number, task), methods in itertools.product(enumerate(architecture.tasks), applied):
            for source in sources(methods) if number == 0 else sources(methods)[:1]:
                case = Case(architecture, task, source, methods)
                yield case
                if case.thorough and case.finalizable:
                    yield replace(case, finalized=True)


CASES = list(_cases())
BASELINES = [  # one variant without methods for each architecture
    case for case in CASES if case.source == MODEL and not case.methods and case.task == case.architecture.tasks[0]
]


def pairs(architecture: Architecture) -> Iterator[Case]:
    """Every ordered pair of methods, one with itself included: under another seed, if it takes one."""
    supported = [method for method in METHODS.values() if supports(method, architecture)]
    for first, second in itertools.product(supported, repeat=2):
        example = second.example
        if first is second and "seed" in {field.name for field in fields(second)}:
            example = replace(example, seed=example.seed + 1)
        methods = (first.example, example)
        yield Case(architecture, architecture.tasks[0], sources(methods)[0], methods)


@functools.cache
def _has_loss(model_type: str, task: str) -> bool:
    case = Case(ARCHITECTURES[model_type], task, MODEL, ())
    return native(case)(**case.batch()).get("loss") is not None


# -- building ----------------------------------------------------------------------------------------------------------------


def native_config(architecture: Architecture) -> Any:
    """The tiny config without dropout, so that two forwards in training mode can be compared."""
    config = AutoConfig.for_model(architecture.model_type, **architecture.tiny)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


@functools.cache
def _native(model_type: str, task: str) -> Any:
    torch.manual_seed(1)
    architecture = ARCHITECTURES[model_type]
    return add_noise(AUTO_CLASSES[task].from_config(native_config(architecture)), architecture).eval()


@torch.no_grad()
def perturbed(model):
    """The model with noise on all that is trained, so that no two layers, norms or biases are alike."""
    for parameter in (p for p in model.parameters() if p.requires_grad):  # not constant positions
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def native(case: Case) -> Any:
    """A native model as if trained: no bias is zero, no norm the identity, and its logits are far from uniform."""
    return copy.deepcopy(_native(case.architecture.model_type, case.task))


@torch.no_grad()
def add_noise(model: Any, architecture: Architecture) -> Any:
    """Stand-in for training: moves every trainable value (and the output bias, where it is a buffer) by N(0, 0.3)."""
    generator = torch.Generator().manual_seed(2)
    moved = [
        parameter
        for name, parameter in canonical_parameters(model)
        if parameter.requires_grad and architecture.component(base_name(model, name)) != "constant"
    ]
    moved += [buffer for name, buffer in model.named_buffers() if name == architecture.output_bias]
    for tensor in moved:
        tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    return model


_BUILT: dict[str, Any] = {}


def build(case: Case) -> Any:
    """The variant of a case, in eval mode, with non-degenerate weights whatever its source; made once, then copied."""
    key = f"{case.id} {json.dumps([method_to_dict(method) for method in case.methods])}"
    if key not in _BUILT:
        _BUILT[key] = _build(case)
    return copy.deepcopy(_BUILT[key])


def _build(case: Case) -> Any:
    if case.source == MODEL:
        model = make_variant(native(case), list(case.methods))
    else:
        init = case.source.removeprefix("init_")
        methods = list(case.methods)
        # What can take over weights takes them over from what had to be made afresh.
        fresh = max((n for n, method in enumerate(methods, 1) if method.from_scratch), default=len(methods))
        model = make_variant(native_config(case.architecture), methods[:fresh], task=case.task, init=init, seed=3)
        add_noise(model, case.architecture)
        if methods[fresh:]:
            model = make_variant(model, methods[fresh:])
    if case.finalized:
        model.finalize()
    return model.eval()


def finished(model: Any) -> Any:
    """As at the end of training: what only training needs is dropped."""
    if getattr(model, "finalizable", False):
        model.finalize()
    return model


def reload(case: Case, folder: Path) -> tuple[Any, dict[str, Any]]:
    """From disk, under another global seed."""
    torch.manual_seed(4321)
    return case.auto_class.from_pretrained(folder, output_loading_info=True)


def merge_or_none(model: Any) -> Any:
    """The merged model, or None where a method refuses by its name, which the design allows."""
    try:
        return model.merge()
    except ValueError as error:
        message = str(error)
    names = [method["method"] for method in model.config.methods]
    assert any(name in message for name in names), f"{message} names none of {names}"
    assert "\n" not in message
    return None


# -- looking -----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def outputs(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every tensor that the forward returns in eval mode: logits, loss, hidden states."""
    return {name: value for name, value in model.eval()(**batch).items() if torch.is_tensor(value)}


def trainability(model: Any) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def trainability_before_training(model: Any) -> dict[str, bool]:
    """What opening the saved model must give, whatever a schedule has frozen just now."""
    if is_scheduled(model):
        model.rewind()
    return trainability(model)


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def seeded_names(model: Any) -> set[str]:
    """The seeded tensors under every name they have."""
    seeded = {id(model.get_parameter(name)) for name in model.seeded_tensors}
    return {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in seeded}


def file_sizes(folder: Path) -> tuple[int, int]:
    """(bytes of the tensors, bytes of the header) of a saved model, by the file itself."""
    with (folder / "model.safetensors").open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    return (folder / "model.safetensors").stat().st_size - header, header


def reload_problems(
    model: Any, info: dict[str, Any], expected: dict[str, torch.Tensor], grads: dict[str, bool], batch: dict
) -> list[str]:
    """Invariant 1, as what is wrong with a reloaded model; shared with the child process."""
    problems = [f"{kind}: {sorted(info[kind])}" for kind in ("missing_keys", "unexpected_keys") if info[kind]]
    problems += [f"{kind}: {info[kind]}" for kind in ("mismatched_keys", "error_msgs") if info[kind]]
    if differ := sorted({name for name, _ in trainability(model).items() ^ grads.items()}):
        problems.append(f"requires_grad differs: {differ}")
    return problems + differences(outputs(model, batch), expected)


def differences(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0) -> list[str]:
    problems = [] if actual.keys() == expected.keys() else [f"outputs {sorted(actual)} instead of {sorted(expected)}"]
    for name in actual.keys() & expected.keys():
        try:
            torch.testing.assert_close(actual[name], expected[name], rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            problems.append(f"{name}: {' '.join(str(error).split())}")
    return problems


# -- training ----------------------------------------------------------------------------------------------------------------


def is_scheduled(model: Any) -> bool:
    return getattr(model, "scheduled", False)  # of a native model, nothing is


def with_teacher(model: Any) -> Any:
    """The model, with a copy of itself that was trained differently as its teacher, where it needs one and has none."""
    if getattr(model, "needs_teacher", False) and model.get_teacher() is None:
        teacher = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(parameter)
        model.set_teacher(teacher)
    return model


def begin_training(model: Any, step: int = 0, total_steps: int = 1) -> Any:
    """The model in training mode, at a step of what it schedules; what it draws there is the same at every call."""
    with_teacher(model)
    if is_scheduled(model):
        model.advance(step, total_steps)
    torch.manual_seed(6)
    return model.train()


@contextlib.contextmanager
def without_noise(case: Case) -> Iterator[None]:
    """For equalities over different batches: in training mode, what a stochastic method draws by `torch.randn_like` is zero.

    What it adds to the loss is not.
    """
    if not case.stochastic:
        yield
        return
    with mock.patch.object(torch, "randn_like", torch.zeros_like):
        yield


def objective(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The model's loss; of a model without one, a fixed weighting of its outputs (a plain sum of a norm's is constant)."""
    result = model(**batch)
    if result.get("loss") is not None:
        return result["loss"]
    values = [value for value in result.values() if torch.is_tensor(value) and value.requires_grad]
    return torch.stack([(v.flatten() * torch.linspace(-1, 1, v.numel())).mean() for v in values]).sum()


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients in training mode; the model has none afterwards."""
    loss = objective(begin_training(model), batch)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


def training_step(model: Any, batch: dict[str, torch.Tensor], step: int = 0, total_steps: int = 1) -> None:
    """One step of AdamW with weight decay on all of `parameters()`, as a hand-written loop does it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    objective(begin_training(model, step, total_steps), batch).backward()
    optimizer.step()
    model.eval()


def training_rows(case: Case) -> list[dict[str, torch.Tensor]]:
    """BATCH_ROWS rows with different numbers of labels: the tiny batch, then it again with its first tokens reversed."""
    batch = case.batch()
    again = {name: value.clone() for name, value in batch.items()}
    for ids, mask in zip(again["input_ids"], again["attention_mask"], strict=True):
        first = int(mask.sum()) - 1
        ids[:first] = ids[:first].flip(0)
    rows = [{name: value[i] for name, value in half.items()} for half in (batch, again) for i in range(2)]
    assert len(rows) == BATCH_ROWS
    return rows


def stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def sgd_step_of_trainer(
    model: Any,
    rows: list[dict[str, torch.Tensor]],
    folder: Path,
    *,
    batch_size: int,
    accumulate: int,
    max_steps: int = 1,
    compute_loss_func: Any = None,
    **arguments: Any,
) -> Trainer:
    """One optimiser step by the Trainer whose update is the gradient: SGD, learning rate 1, no clipping."""
    settings = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulate,
        max_steps=max_steps,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **arguments,
    )
    callbacks = [VariantCallback()] if is_scheduled(model) else []
    trainer = Trainer(
        model=with_teacher(model),
        args=settings,
        train_dataset=rows,
        callbacks=callbacks,
        compute_loss_func=compute_loss_func,
    )
    trainer.train()
    return trainer


def plain_update(model: Any, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The parameters after the same step without a Trainer, on all rows at once: the native mean over their labels."""
    before = snapshot(model)
    _, grads = gradients(model, stack(rows))
    return {name: before[name] - grads[name] if name in grads else before[name] for name, _ in model.named_parameters()}


def ranks_disagree(tensors: dict[str, torch.Tensor]) -> list[str]:
    """Of the two processes of a group: the problem that their tensors are not bit-equal, if they are not."""
    digests: list[Any] = [None, None]
    dist.all_gather_object(digests, {name: digest(tensor) for name, tensor in tensors.items()})
    return ["the ranks disagree"] if digests[0] != digests[1] else []


def changed_though_frozen(model: Any, before: dict[str, torch.Tensor]) -> list[str]:
    return [
        f"{name} is frozen but changed"
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and (parameter != before[name]).any()
    ]


def left_processes() -> list[str]:
    """Leave the group of processes, at the end of a child of `two_processes`; what of the group is left."""
    leave_processes()
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
    return [f"after the end there is a thread {name}" for name in names if "gloo" in name]


def two_processes(script: Path, folder: Path) -> list[Any]:
    """Run `script RESULT RANK` as a group of two processes on the CPU; the JSON that each wrote to RESULT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children, logs = [], []
    try:
        for rank in range(2):
            environment = (
                os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"}
            )
            logs.append(folder / f"log-{rank}")
            with logs[-1].open("w") as log:
                command = [sys.executable, script, folder / f"result-{rank}", str(rank)]
                children.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        deadline = time.monotonic() + 300
        while any(child.poll() is None for child in children) and time.monotonic() < deadline:
            if any(child.poll() for child in children):
                break
            time.sleep(0.1)
    finally:
        codes = [child.poll() for child in children]
        for child in children:  # where one failed, the other waits for it
            child.kill()
            child.wait()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(2)]


# -- generating --------------------------------------------------------------------------------------------------------------


def generation_problems(model: Any, batch: dict[str, torch.Tensor]) -> list[str]:
    """Invariant 5 of `generate`: the cache and the padding change nothing, in greedy and in beam search."""
    model.eval()
    sentences = [
        ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]  # of unequal lengths
    problems: list[str] = []
    for beams in (1, 3):
        cached = _generate(model, sentences, num_beams=beams)
        for name, other in {
            "without cache": _generate(model, sentences, num_beams=beams, use_cache=False),
            "alone": torch.cat([_generate(model, [sentence], num_beams=beams) for sentence in sentences], dim=1),
        }.items():
            problems += [
                f"{beams} beams, {name}: {p}" for p in differences({"scores": other}, {"scores": cached}, 1e-4)
            ]
    return problems


def _generate(model: Any, sentences: list[torch.Tensor], **arguments: Any) -> torch.Tensor:
    """Scores of the tokens of `generate`, (tokens, sentences, vocabulary); of beams, the best one's tokens and score."""
    length = max(map(len, sentences))
    pad = model.config.pad_token_id or 0
    rows, masks = [], []
    for sentence in sentences:
        fill, ones = torch.full((length - len(sentence),), pad), torch.ones(len(sentence), dtype=torch.long)
        left = not model.config.is_encoder_decoder  # the last token of each prompt must be a real one
        rows.append(torch.cat([fill, sentence] if left else [sentence, fill]))
        masks.append(torch.cat([0 * fill, ones] if left else [ones, 0 * fill]))
    result = model.generate(
        torch.stack(rows),
        attention_mask=torch.stack(masks),
        pad_token_id=pad,
        do_sample=False,
        min_new_tokens=6,
        max_new_tokens=6,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **({"use_cache": True} | arguments),
    )
    assert (result.past_key_values is not None) == arguments.get("use_cache", True), "the cache was not switched"
    new = result.sequences[:, -6:].T  # (tokens, sentences)
    if arguments["num_beams"] == 1:
        return torch.cat([new[..., None].float(), torch.stack(result.logits)], dim=-1)
    return torch.stack([new.float(), result.sequences_scores.expand_as(new)], dim=-1)
