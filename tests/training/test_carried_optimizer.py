"""Pruning in the middle of training: the optimizer goes on with what is left."""

import copy

import pytest
import torch
from support.cases import BASELINES, once
from support.models import build, native
from support.training import objective
from torch import nn
from transformers import Trainer, TrainingArguments

from hf_freeze import make_variant, methods
from hf_freeze.analysis._probe import input_hooks
from hf_freeze.training import carried_optimizer, parameter_groups

STEPS = 3


def train(model, optimizer, batch, steps=STEPS):
    for _ in range(steps):
        optimizer.zero_grad()
        objective(model, batch).backward()
        optimizer.step()


def adam(model):
    groups = parameter_groups(model, {"attention": 0.003}, lr=0.01)
    return torch.optim.Adam(groups, amsgrad=True, eps=1e-4)  # gradients that are nought but for rounding move nothing


def largest_difference(model, other):
    found = dict(other.named_parameters())
    # What only the removed attention read has no gradient any more, where the masked one gives it zeros.
    return max((p - found[name]).abs().max().item() for name, p in model.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("case", BASELINES, ids=lambda case: case.architecture.model_type)
@pytest.mark.parametrize("whole", [False, True])
def test_pruned_heads_in_the_middle_of_training(case, whole):
    """Against the whole model trained on with these heads masked: what is left has the same gradients and the same moments."""
    model, batch = build(case), case.batch()
    name, attention = next(iter(case.architecture.attentions(model.config).items()))
    size, group = attention.head_size(model.config), attention.group_size(model.config)
    output = model.base_model.get_submodule(attention.o)
    count = model.base_model.get_submodule(attention.o).weight.numel() // model.config.hidden_size // size
    heads = list(range(count if whole else group))
    pruning = methods.HeadPruning(heads={name: heads})
    optimizer = adam(model)
    train(model, optimizer, batch)
    pruned = make_variant(model, [pruning])
    carried, fresh = carried_optimizer(optimizer, model, pruned), adam(forgetful := copy.deepcopy(pruned))
    assert [group["lr"] for group in carried.param_groups] == [group["lr"] for group in optimizer.param_groups]
    train(pruned, carried, batch)
    train(forgetful, fresh, batch)

    gates = torch.ones(count).index_fill(0, torch.tensor(heads), 0).repeat_interleave(size)
    with input_hooks({name: output}, lambda _, context: context * gates):
        train(model, optimizer, batch)
    expected = make_variant(model, [pruning])
    assert largest_difference(pruned, expected) < 2e-5
    assert largest_difference(forgetful, expected) > 1e-3, "the moments matter here"


@pytest.mark.parametrize("case", BASELINES, ids=lambda case: case.architecture.model_type)
def test_other_parts_left_out(case):
    """The moments are those of the same weights, picked by hand."""
    model, config = build(case), native(case).config
    architecture = case.architecture
    optimizer = adam(model)
    train(model, optimizer, case.batch())
    stack_name, stack = next(iter(architecture.stacks.items()))
    block, linears = next(iter(architecture.ffns(config).items()))
    vocabulary = config.get_text_config().vocab_size
    special = {
        getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "decoder_start", "forced_eos")
    }
    kept_tokens = sorted({*range(0, vocabulary, 2), *(i for i in special if i is not None)})
    neurons = [0, 2, 3]
    for method in (
        methods.FFNPruning(keep={block: neurons}),
        methods.LayerSelection(keep={stack_name: [1]}),
        methods.VocabularyTrimming(keep=kept_tokens),
    ):
        new = make_variant(model, [method])
        carried = carried_optimizer(optimizer, model, new)
        assert {p for group in carried.param_groups for p in group["params"]} == {
            p for p in new.parameters() if p.requires_grad
        }
        old = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
        unlike = 0
        for name, parameter in new.named_parameters():
            if parameter not in carried.state:
                continue
            source = name
            if isinstance(method, methods.LayerSelection):
                source = name.replace(stack.layers.format(0), stack.layers.format(1))
            for key, value in carried.state[parameter].items():
                expected = old[source][key]
                if value.ndim and value.shape != expected.shape:
                    unlike += 1
                    if isinstance(method, methods.VocabularyTrimming):
                        expected = expected[..., kept_tokens] if expected.shape[0] == 1 else expected[kept_tokens]
                    else:
                        at = next(side for side, size in enumerate(expected.shape) if size != value.shape[side])
                        expected = expected.index_select(at, torch.tensor(neurons))
                assert torch.equal(value, expected), (method.name, name, key)
        assert unlike or isinstance(method, methods.LayerSelection)
        assert linears


@pytest.mark.parametrize(
    "case",
    once(lambda case: bool(case.methods) and case.from_model),
    ids=lambda case: case.id,
)
def test_every_method_carries_the_state_or_is_refused(case):
    """The moments are set to the values of the weights: they must stay equal wherever those go."""
    model = make_variant(native(case), [])
    optimizer = torch.optim.Adam([parameter for parameter in model.parameters() if parameter.requires_grad])
    train(model, optimizer, case.batch(), steps=1)
    for parameter, state in optimizer.state.items():
        state["exp_avg"] = parameter.detach().clone()
    new = make_variant(model, list(case.methods))
    if not all(method.facts.selects for method in new.methods):
        with pytest.raises(ValueError, match="creates other weights, or selects them by value"):
            carried_optimizer(optimizer, model, new)
        return
    carried = carried_optimizer(optimizer, model, new)
    assert len(carried.state) > 5
    for parameter, state in carried.state.items():
        assert torch.equal(state["exp_avg"], parameter)
        assert float(state["step"]) == 1


def test_with_the_trainer(tmp_path):
    """Whose optimizer is wrapped; groups and the step go on."""
    case = BASELINES[0]
    model, batch = build(case), case.batch()
    rows = [{name: value[0] for name, value in batch.items()}] * 8

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return objective(model, inputs)

    def trained(model, optimizer=None):
        args = TrainingArguments(
            str(tmp_path), max_steps=2, report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True
        )
        trainer = Own(model=model, args=args, train_dataset=rows, optimizers=(optimizer, None))
        trainer.train()
        return trainer

    trainer = trained(model)
    name = next(iter(case.architecture.attentions(model.config)))
    pruned = make_variant(model, [methods.HeadPruning(heads={name: [0]})])
    optimizer = carried_optimizer(trainer.optimizer, model, pruned)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {2.0}
    assert type(optimizer) is type(trainer.optimizer.optimizer)
    again = trained(pruned, optimizer)
    assert {float(state["step"]) for state in again.optimizer.state.values()} == {4.0}


def test_frozen_parameters_have_no_state():
    case = BASELINES[0]
    model = make_variant(native(case), [methods.Freeze(ffn="frozen")]).eval()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    train(model, optimizer, case.batch())
    name = next(iter(case.architecture.attentions(model.config)))
    pruned = make_variant(model, [methods.HeadPruning(heads={name: [0]})])
    carried = carried_optimizer(optimizer, model, pruned)
    held = {p for group in carried.param_groups for p in group["params"]}
    assert held == {p for p in pruned.parameters() if p.requires_grad}
    assert len(held) < len(list(pruned.parameters()))
    assert carried.param_groups[0]["momentum"] == 0.9


def test_what_cannot_be_carried_is_refused():
    case = BASELINES[0]
    model = build(case)
    optimizer = adam(model)
    train(model, optimizer, case.batch())
    with pytest.raises(ValueError, match="must be the old one with more methods"):
        carried_optimizer(optimizer, model, native(case))
    halved = make_variant(model, [methods.HeadPruning(share=0.5)])
    with pytest.raises(ValueError, match=r"HeadPruning\(heads=None, share=0\.5.* selects them by value; only methods"):
        carried_optimizer(optimizer, model, halved)
    name = next(iter(case.architecture.attentions(model.config)))
    pruned = make_variant(model, [methods.HeadPruning(heads={name: [0]})])
    with pytest.raises(ValueError, match="has a parameter that is not in the old model"):
        carried_optimizer(torch.optim.Adam([nn.Parameter(torch.ones(2))]), model, pruned)
    first = next(p for p in model.parameters() if p.requires_grad)
    optimizer.state[first]["exp_avg"] = torch.ones(3)
    with pytest.raises(
        ValueError, match=r"the state 'exp_avg' of '\S+' has the shape \(3,\), not that of the parameter"
    ):
        carried_optimizer(optimizer, model, pruned)


def test_an_8_bit_optimizer_trains_what_is_not_frozen_and_cannot_be_carried_over():
    optim = pytest.importorskip("bitsandbytes").optim
    case = BASELINES[0]
    model = make_variant(native(case), [methods.Freeze(ffn="random")])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = optim.AdamW8bit(parameter_groups(model, lr=0.01), min_8bit_size=256)
    first = objective(model, case.batch()).item()
    train(model, optimizer, case.batch(), steps=5)
    assert objective(model, case.batch()).item() < first
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) or parameter.requires_grad, name
        if (state := optimizer.state.get(parameter)) and parameter.numel() >= 256:
            assert state["state1"].dtype == state["state2"].dtype == torch.uint8
    assert any(state["state1"].dtype == torch.uint8 for state in optimizer.state.values())
    heads = next(iter(case.architecture.attentions(model.config)))
    pruned = make_variant(model, [methods.HeadPruning(heads={heads: [0]})])
    with pytest.raises(ValueError, match=r"the state 'qmap1' of '\S+' has the shape \(256,\)"):
        carried_optimizer(optimizer, model, pruned)
