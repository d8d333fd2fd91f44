"""The contract of one family: what `docs/families.md` marks with a tick holds on a tiny model of it.

A cell is a method on a family. It is built from a model with weights, generates with and without cache alike, trains a step, is
saved, opened in a new process with bit-equal outputs, and merged into a native model with outputs equal to 1e-5.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.processes import printed_by
from support.training import training_step, with_teacher

from hf_freeze import make_variant
from hf_freeze.architectures.base import Architecture, read
from hf_freeze.architectures.fields import change
from hf_freeze.architectures.published import default_config
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.architectures.shrink import shrink
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.layer_forward import Replaced
from hf_freeze.methods import FFNPruning, LayerDrop, LayerSelection, LayerSharing, Theseus
from hf_freeze.methods.base import Method
from hf_freeze.methods.registry import METHODS

# Tasks to test on, the most telling first.
_TASKS = ("seq2seq-lm", "causal-lm", "masked-lm", "image-classification", "ctc", "sequence-classification")
_TARGETS = ("labels", "decoder_input_ids")
_RELOAD = """
import json, sys
from pathlib import Path
import torch
torch.manual_seed(99)
import hf_freeze
from hf_freeze.architectures.tasks import AUTO_CLASSES
problems = {}
for folder in sorted(path.parent for path in Path(sys.argv[1]).rglob("outputs.pt")):
    name = folder.relative_to(sys.argv[1]).as_posix()
    expected = torch.load(folder / "outputs.pt")
    try:
        model, info = AUTO_CLASSES[expected["task"]].from_pretrained(folder, output_loading_info=True)
        # Tensors of a file lie at any multiple of 8 bytes, where torch's grouped products of experts round otherwise.
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
        with torch.no_grad():
            outputs = model.eval()(**expected["batch"])[expected["place"]]
        keys = sorted(info["missing_keys"]) + sorted(info["unexpected_keys"])
        if keys:
            problems[name] = f"missing or unexpected keys: {keys[:2]}"
        elif not torch.equal(outputs, expected["outputs"]):
            problems[name] = "a new process computes something else"
    except Exception as error:
        problems[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
print(json.dumps(problems))
"""


def tiny_config(model_type: str) -> Any:
    """A small config without dropout, so that a step can be compared."""
    config = shrink(default_config(model_type))
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # transformers starts with this token where no other is named. T5Gemma's decoder masks the padding, which it must not be.
        begin = getattr(config.get_text_config(decoder=True), "bos_token_id", None)
        config.decoder_start_token_id = 0 if begin is None else begin
    for part in (config, config.get_text_config()):
        if getattr(part, "pad_token_id", None) is None:
            part.pad_token_id = 0
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def task_of(architecture: Architecture) -> str:
    """The task that the contract is tested on."""
    return next((task for task in _TASKS if task in architecture.tasks), architecture.tasks[0])


def native_model(config: Any, task: str) -> Any:
    torch.manual_seed(0)
    return AUTO_CLASSES[task].from_config(config).eval()


def offered(architecture: Architecture) -> dict[str, type[Method]]:
    """The methods that the architecture supports and that can take over weights."""
    return {name: m for name, m in METHODS.items() if m.refusal(architecture) is None and not m.registered.from_scratch}


def problems_of_loading(folder: Path) -> dict[str, str]:
    """Of the variants in `folder` and the folders in it: those that a new process does not open as they were."""
    return json.loads(printed_by(_RELOAD, folder).splitlines()[-1]) if any(folder.iterdir()) else {}


def problems_before_loading(model_type: str, folder: Path, methods: list[str] | None = None) -> dict[str, str]:
    """Method -> what went wrong, for each method (None: all that are offered) that does not fulfil the contract.

    All of it but opening the variants, which are left in `folder`, in a new process.
    """
    config = tiny_config(model_type)
    architecture = architecture_of(config)
    task = task_of(architecture)
    base = native_model(config, task)
    batch = architecture.tiny_inputs(task)
    if "labels" in batch and hasattr(base, "prepare_decoder_input_ids_from_labels"):
        # As DataCollatorForSeq2Seq does: not every forward makes them of the labels.
        batch["decoder_input_ids"] = base.prepare_decoder_input_ids_from_labels(batch["labels"].clone())
    problems: dict[str, str] = {}
    names = [name for name in offered(architecture) if methods is None or name in methods]
    for name in names:
        try:
            _check(base, fitting(METHODS[name].example, architecture, config), batch, task, folder / name)
        except Exception as error:
            if not _is_refusal(error):
                problems[name] = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:200]
    return problems


def problems_of_kinds(model_type: str, folder: Path) -> dict[str, str]:
    """The same for the methods that remove, repeat, share and skip layers, on a deeper model, if its layers are of several kinds.
    Layers that no native config describes may be refused."""
    config = deeper_config(model_type)
    if config is None:
        return {}
    architecture = architecture_of(config)
    task = task_of(architecture)
    base, batch = native_model(config, task), architecture.tiny_inputs(task)
    if "labels" in batch and hasattr(base, "prepare_decoder_input_ids_from_labels"):
        batch["decoder_input_ids"] = base.prepare_decoder_input_ids_from_labels(batch["labels"].clone())
    depths = architecture.depths(config)
    cells: dict[str, Method] = {
        "selection": LayerSelection(keep={stack: [0, 2, 3, 5] for stack in depths}),
        "selection-without-first": LayerSelection(keep={stack: [1, 3, 4] for stack in depths}),
        "sharing": LayerSharing(start="middle"),
        "sharing-deeper": LayerSharing(start="middle", depth=dict.fromkeys(depths, 8)),
        "drop": LayerDrop(p=0.5),
        "theseus": Theseus(successor=dict.fromkeys(depths, 3)),
    }
    problems: dict[str, str] = {}
    for name, method in cells.items():
        if method.refusal(architecture) is not None:
            continue
        try:
            if name == "theseus":
                _check_predecessors(base, make_variant(base, [method]).eval(), batch)
            _check(base, method, batch, task, folder / f"{method.name}-{name}")
        except Exception as error:
            if not _is_refusal(error):
                reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:200]
                problems.setdefault(method.name, f"layers of several kinds, {name}: {reason}")
    return problems


def _check_predecessors(base: Any, variant: Any, batch: dict[str, torch.Tensor]) -> None:
    """As long as only the old layers run, nothing has changed."""
    for layer in variant.methods[0].successor_layers(variant, variant.architecture):
        Replaced.of(layer).active = layer.training = True  # its submodules stay in eval mode
    with torch.no_grad():
        expected, outputs = (next(iter(model(**batch, use_cache=False).values())) for model in (base, variant))
    assert torch.allclose(outputs, expected, atol=1e-5), "the old layers compute something else"


_NOT_NATIVE = (
    r"Theseus\(.*instead of successors of another type|no config of transformers makes|"
    r"this \S+ cannot be merged|LayerSelection\(.*layer 0 of this .* keep it|"
    r"LayerSharing: two layers .* have different shapes"
)


def _is_refusal(error: Exception) -> bool:
    """Whether it says in one line that the layers of a family are of too many kinds for a method."""
    return isinstance(error, ValueError) and re.match(_NOT_NATIVE, str(error)) is not None


def deeper_config(model_type: str) -> Any:
    """A small config of six layers in each stack, of the kinds that the first ones of the default config have; None if these are
    all alike, or if transformers has no such config."""
    config, default = tiny_config(model_type), default_config(model_type)
    stacks = architecture_of(config).stacks.values()
    lists = {name for stack in stacks for name in stack.per_layer}
    changes: dict[str, Any] = {stack.depth: 6 for stack in stacks}
    for name in lists:
        entries, small = list(read(default, name) or ())[:6], read(config, name)
        mixed = len(entries) == 6 and entries != entries[:1] * 6
        changes[name] = entries if mixed else [small[number % len(small)] for number in range(6)]
    try:
        deeper = change(config, **changes)
        stacks = architecture_of(deeper).stacks.values()
    except Exception:  # whatever a config class refuses
        return None
    mixed = any(read(deeper, name) != [read(deeper, name)[0]] * 6 for name in lists)
    return deeper if mixed or any(stack.differ or stack.absent for stack in stacks) else None


def fitting(method: Method, architecture: Architecture, config: Any) -> Method:
    """The example of a method; on attentions where there are no linears in FFNs, as in most mixtures of experts, and without
    the embeddings where their tables are not understood."""
    if isinstance(method, FFNPruning) and architecture.experts(config):
        return replace(method, width=method.width if architecture.ffns(config) else None, expert_width=8)
    components = getattr(method, "components", None)
    if components and not architecture.linears(config, "ffn"):
        return replace(method, components=["attention"])
    if components and "embeddings" in components and not architecture.token_tables:
        return replace(method, components=[name for name in components if name != "embeddings"])
    return method


def _check(base: Any, method: Method, batch: dict[str, torch.Tensor], task: str, folder: Path) -> None:
    """All of a cell but the new process, for which it leaves the variant and its outputs in `folder`."""
    variant = make_variant(base, [method]).eval()
    if variant.can_generate() and task in ("causal-lm", "seq2seq-lm"):
        _check_generation(base, variant, {name: value for name, value in batch.items() if name not in _TARGETS})
    training_step(with_teacher(variant), batch)
    variant.save_pretrained(folder)
    with torch.no_grad():
        result = variant(**batch)
    place = "logits" if "logits" in result else next(n for n, v in result.items() if torch.is_tensor(v) and v.ndim > 1)
    torch.save({"outputs": result[place], "place": place, "batch": batch, "task": task}, folder / "outputs.pt")
    if any(applied.facts.finalizable for applied in variant.methods):
        variant.finalize()
    try:
        native = variant.merge().eval()
    except ValueError as error:
        if "cannot be merged" not in str(error):
            raise
        return
    with torch.no_grad():
        expected, merged = variant(**batch)[place], native(**batch)[place]
    difference = float((expected - merged).abs().max())
    assert difference < 1e-5 * max(1.0, float(expected.abs().max())), (
        f"merge() computes something else, by {difference:.1e}"
    )


def _check_generation(base: Any, variant: Any, batch: dict[str, torch.Tensor]) -> None:
    settings = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    row = {name: value[:1] for name, value in batch.items()}

    def differs(model: Any) -> bool:
        cached, plain = (model.generate(**row, use_cache=use_cache, **settings) for use_cache in (True, False))
        return not torch.equal(cached, plain)

    assert differs(base) or not differs(variant), "generation with a cache differs from generation without one"
