"""Healing of models whose weights lie in files: with adapters, and activations that are computed again for the gradient."""

import hashlib
from typing import Any

import pytest
import torch
from support.small import small_config
from transformers import AutoModelForCausalLM

from hf_freeze import make_variant
from hf_freeze.methods import FFNPruning
from hf_freeze.model import paging
from hf_freeze.model.loading import load_model
from hf_freeze.model.paging import Paged
from hf_freeze.model.samples import samples_of
from hf_freeze.seeded.tensor import fingerprint
from hf_freeze.training import healing
from hf_freeze.training.healing import heal


@pytest.fixture(autouse=True)
def every_tensor_in_a_file(monkeypatch):
    monkeypatch.setattr(paging, "_SMALL", 1)


@pytest.fixture(scope="module", params=["llama", "opt"])
def folders(request, tmp_path_factory) -> Any:
    """Those of a model and of a variant with narrower FFNs. An OPT has dropout, which its layers ask for themselves."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(request.param)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.2)
    model.save_pretrained(folder / "original", max_shard_size="20KB")
    make_variant(model, [FFNPruning(width=8)]).save_pretrained(folder / "student", max_shard_size="20KB")
    assert len(list((folder / "student").glob("*.safetensors"))) > 1
    return folder / "original", folder / "student"


def samples_for(model: Any) -> Any:
    draw, batches = torch.Generator().manual_seed(1), []
    for _ in range(8):
        ids = torch.randint(3, model.config.vocab_size, (3, 10), generator=draw)
        mask = torch.arange(10).expand(3, 10) < torch.randint(3, 11, (3, 1), generator=draw)
        batches.append({"input_ids": ids.masked_fill(~mask, 1), "attention_mask": mask.long()})
    return samples_of(model, batches)


def healed(
    folders: Any, out: Any, *, paged: bool = True, look: Any = lambda student: None, **options: Any
) -> tuple[Any, Any]:
    """The student, which `look` is called with before, and the result."""
    original, student = map(load_model, folders)
    look(student)
    out.mkdir(exist_ok=True)
    options = {"limit": "3epochs", "lora": True, "learning_rate": 3e-3} | options
    with Paged(out, 10**9) as files:
        result = heal(student, original, samples_for(original), out, paged=files if paged else None, **options)
    return student, result


def digests(folders: Any) -> dict[Any, str]:
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for one in folders for path in one.iterdir()}


def in_files(model: Any) -> bool:
    ranges = paging._file_ranges()
    return all(any(start <= p.data_ptr() < end for start, end in ranges) for p in model.parameters())


def test_the_loss_falls_and_merged_weights_lie_in_other_files(folders, tmp_path):
    before, places = digests(folders), {}

    def look(student):
        places.update({name: p.data_ptr() for name, p in student.named_parameters(remove_duplicate=False)})

    student, result = healed(folders, tmp_path / "heal", limit="10epochs", learning_rate=5e-3, lora=None, look=look)
    assert result.better
    assert result.loss_after < 0.95 * result.loss_before
    assert digests(folders) == before
    assert in_files(student)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in student.modules())
    cut = load_model(folders[1])
    assert [(name, p.requires_grad) for name, p in student.named_parameters()] == [
        (name, p.requires_grad) for name, p in cut.named_parameters()
    ]
    linears = [name for name, module in cut.named_modules() if isinstance(module, torch.nn.Linear)]
    output = next(name for name in linears if cut.get_submodule(name) is cut.get_output_embeddings())
    for name in linears:
        same = torch.equal(student.get_parameter(f"{name}.weight"), cut.get_parameter(f"{name}.weight"))
        assert same == (name == output), name
        # In-place changes would be in memory alone: files of a checkpoint are not written to.
        assert (student.get_parameter(f"{name}.weight").data_ptr() == places[f"{name}.weight"]) == same, name
    student.save_pretrained(tmp_path / "saved")
    reloaded, ids = load_model(tmp_path / "saved").eval(), torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(student.eval()(ids).logits, reloaded(ids).logits)


def test_gradients_are_those_without_computing_again(folders, tmp_path, monkeypatch):
    step, recorded = healing._Healer.training_step, []

    def recording(self, model, *args, **options):
        loss = step(self, model, *args, **options)
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        recorded.append((float(loss), runs.copy(), grads))
        return loss

    def made(paged):
        recorded.clear()
        runs.clear()
        _, result = healed(folders, tmp_path / str(paged), paged=paged, look=count)
        return list(recorded), result

    def count(student):
        linear = next(module for module in student.modules() if isinstance(module, torch.nn.Linear))
        linear.register_forward_hook(lambda *_: runs.append(1))

    runs: list[int] = []
    monkeypatch.setattr(healing._Healer, "training_step", recording)
    (again, result), (once, expected) = made(True), made(False)
    assert len(again) == len(once) > 3
    for (loss, runs_again, grads), (other_loss, runs_once, others) in zip(again, once, strict=True):
        assert len(runs_again) > len(runs_once)  # for the gradient, the layer runs once more
        assert loss == pytest.approx(other_loss, rel=1e-5)
        assert grads.keys() == others.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, others[name], rtol=1e-4, atol=1e-6)
    assert result.loss_after == pytest.approx(expected.loss_after, rel=1e-4)


def test_a_student_that_becomes_worse_is_left_as_it_was(folders, tmp_path):
    before, files = fingerprint(load_model(folders[1])), digests(folders)
    student, result = healed(folders, tmp_path / "heal", learning_rate=30.0)
    assert not result.better
    assert fingerprint(student) == before
    assert digests(folders) == files


class Killed(Exception):
    pass


@pytest.mark.parametrize("int8", [False, True])
def test_a_killed_call_ends_as_an_uninterrupted_one(int8, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(healing, "_SAVED", 0.0)  # a checkpoint at each step
    steps: list[int] = []

    def kill(message):
        if message["stage"] == "healing":
            steps.append(message["step"])
            if message["step"] == 2:
                raise Killed

    _, whole = healed(folders, tmp_path / "whole", int8=int8)
    with pytest.raises(Killed):
        healed(folders, tmp_path / "killed", callback=kill, int8=int8)
    steps.clear()
    _, result = healed(
        folders,
        tmp_path / "killed",
        int8=int8,
        callback=lambda message: message["stage"] == "healing" and steps.append(message["step"]),
    )
    assert steps == [2, 3]
    assert result.loss_after == pytest.approx(whole.loss_after, rel=1e-5)
