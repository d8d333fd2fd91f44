"""Build, save and reload the models of the cases, and compare what they compute."""

import copyreg
import functools
import io
import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_freeze import make_variant
from hf_freeze.architectures.base import Architecture, base_name, canonical_parameters
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.methods.registry import method_to_dict
from support.cases import MODEL, Case, native_config

# -- building ----------------------------------------------------------------------------------------------------------------


@functools.cache
def _native(model_type: str, config: str, task: str) -> Any:
    torch.manual_seed(1)
    architecture = ARCHITECTURES[model_type]
    return add_noise(AUTO_CLASSES[task].from_config(native_config(architecture, config)), architecture).eval()


@torch.no_grad()
def perturbed(model):
    """The model with noise on all that is trained, so that no two layers, norms or biases are alike."""
    for parameter in (p for p in model.parameters() if p.requires_grad):  # not constant positions
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def native(case: Case) -> Any:
    """A native model as if trained: no bias is zero, no norm the identity, and its logits are far from uniform."""
    return pickle.loads(_pickled_native(case.architecture.model_type, case.config, case.task))


@functools.cache
def _pickled_native(model_type: str, config: str, task: str) -> bytes:
    return _pickled(_native(model_type, config, task))


def _pickled(model: Any) -> bytes:
    """For copies: `pickle.loads` of it takes a fifth of the time of a deep copy."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(model)
    return file.getvalue()


def _reduce(parameter: nn.Parameter) -> Any:
    """Plain values where nothing else is to be kept: torch's own way writes a file for each."""
    values = parameter.detach()
    whole = values.is_contiguous() and values.untyped_storage().nbytes() == values.nbytes > 0
    if not whole or values.device.type != "cpu" or values.dtype == torch.bfloat16 or vars(parameter):
        return parameter.__reduce_ex__(5)
    return _parameter, (bytearray(values.numpy()), values.dtype, values.shape, parameter.requires_grad)


def _parameter(data: bytearray, dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> nn.Parameter:
    return nn.Parameter(torch.frombuffer(data, dtype=dtype).clone().view(shape), requires_grad)


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {nn.Parameter: _reduce}


def _native_of(case: Case) -> Any:
    return _native(case.architecture.model_type, case.config, case.task)


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


_BUILT: OrderedDict[str, bytes] = OrderedDict()
_KEPT = 64  # models; the tests of a case follow one another


def build(case: Case) -> Any:
    """The variant of a case, in eval mode, with non-degenerate weights whatever its source; built once, then copied."""
    key = f"{case.id} {json.dumps([method_to_dict(method) for method in case.methods])}"
    if key not in _BUILT:
        _BUILT[key] = _pickled(build_anew(case))
    _BUILT.move_to_end(key)
    if len(_BUILT) > _KEPT:
        _BUILT.popitem(last=False)
    return pickle.loads(_BUILT[key])


def build_anew(case: Case) -> Any:
    """As `build`, for a case that is built once only: the copy that is kept takes a third of the time."""
    if case.source == MODEL:
        model = make_variant(_native_of(case), list(case.methods))  # which leaves it as it is
    else:
        init = case.source.removeprefix("init_")
        methods = list(case.methods)
        # What can take over weights takes them over from what had to be made afresh.
        fresh = max((n for n, method in enumerate(methods, 1) if method.facts.from_scratch), default=len(methods))
        model = make_variant(
            native_config(case.architecture, case.config), methods[:fresh], task=case.task, init=init, seed=3
        )
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


def is_scheduled(model: Any) -> bool:
    return getattr(model, "scheduled", False)  # of a native model, nothing is


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
    return problems + differences(outputs(aligned(model), batch), expected)


def aligned(model: Any) -> Any:
    """The model, with its tensors in memory of their own. Those of a file lie at any multiple of 8 bytes, where torch rounds the
    product of a linear with one output otherwise, as multiple choice and regression have one."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def differences(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0) -> list[str]:
    problems = [] if actual.keys() == expected.keys() else [f"outputs {sorted(actual)} instead of {sorted(expected)}"]
    for name in actual.keys() & expected.keys():
        try:
            torch.testing.assert_close(actual[name], expected[name], rtol=tolerance, atol=tolerance)
        except AssertionError as error:
            problems.append(f"{name}: {' '.join(str(error).split())}")
    return problems
