"""HeadPruning during training: what it measures without further passes, how many heads are left at each step, and what is removed
at the end."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from support.cases import BASELINES
from support.deep import deep_config, each_architecture
from support.models import add_noise, differences, native, outputs, reload
from support.training import objective, training_step

from hf_freeze import analysis, make_variant
from hf_freeze.analysis._probe import count_labels
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.architectures.tasks import AUTO_CLASSES
from hf_freeze.layers.masked_heads import MaskedHeads, settle
from hf_freeze.methods import Freeze, HeadPruning, LayerSelection, LayerSharing, LowRank

MARIAN = ARCHITECTURES["marian"]
GRADUAL = HeadPruning(share=0.5, begin=0.0, end=0.75)
every_backbone = pytest.mark.parametrize("case", BASELINES, ids=[case.architecture.model_type for case in BASELINES])


def wide_config(architecture, heads=4):
    """Two layers in each stack, and so many heads in each attention; of Llama, two share keys and values."""
    config = deep_config(architecture, 2)
    for name in ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head"):
        if hasattr(config, name):
            setattr(config, name, heads)
    if hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads, config.head_dim = heads // 2, None
    return config


def wide_model(architecture):
    task, config = architecture.tasks[0], wide_config(architecture)
    if getattr(config, "head_dim", 0) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return add_noise(AUTO_CLASSES[task].from_config(config), architecture).eval(), architecture.tiny_inputs(task)


def masks(model):
    """Attention -> the heads that are not masked."""
    outputs = {name: a.o for name, a in model.architecture.attentions(model.config).items()}
    modules = {name: model.base_model.get_submodule(output) for name, output in outputs.items()}
    return {name: module.mask.tolist() for name, module in modules.items() if isinstance(module, MaskedHeads)}


def modules_of(model):
    attentions = model.architecture.attentions(model.config)
    return {name: model.base_model.get_submodule(a.o) for name, a in attentions.items()}


@each_architecture
def test_the_importance_of_training_is_that_of_the_analysis(architecture):
    """On the same batches, with the latest of them counting most; padding does not count."""
    native, batch = wide_model(architecture)
    model = make_variant(native, [GRADUAL])
    turned = {name: value.flip(0) for name, value in batch.items()}
    one = {name: value[:1] for name, value in batch.items()}
    expected = {}
    for each in (batch, turned, one):
        model.advance(0, 9)
        objective(model.train(), each).backward()
        scores = analysis.head_importance(native, [each], reduction="per_example", normalize="none")
        rows, labels = (
            len(next(iter(each.values()))),
            count_labels(native, each),
        )
        for name, score in scores.items():
            expected[name] = 0.99 * expected.get(name, 0) + score * rows / labels
    settle([*modules_of(model).values()])
    for name, module in modules_of(model).items():
        torch.testing.assert_close(module.importance, expected[name], rtol=1e-4, atol=1e-6)
    before = {name: module.importance.clone() for name, module in modules_of(model).items()}
    settle([*modules_of(model).values()])  # a second call changes nothing
    assert all(torch.equal(module.importance, before[name]) for name, module in modules_of(model).items())


@each_architecture
@pytest.mark.parametrize("shape", ["linear", "cosine", "cubic"])
def test_the_number_of_heads_is_that_of_the_ramp(architecture, shape):
    native, batch = wide_model(architecture)
    method = HeadPruning(share=0.25, begin=0.25, end=0.75, ramp=shape)
    model, total = make_variant(native, [method]), 16
    curve = {
        "linear": lambda t: t,
        "cosine": lambda t: (1 - torch.cos(torch.tensor(torch.pi * t)).item()) / 2,
        "cubic": lambda t: 1 - (1 - t) ** 3,
    }[shape]
    group = next(iter(architecture.attentions(model.config).values())).group_size(model.config)
    gone = {name: set() for name in masks(model)}
    for step in range(total + 1):
        model.advance(step, total)
        share = 1 - 0.75 * curve(min(max((step / total - 0.25) / 0.5, 0), 1))
        assert method.parts[0].values(step, total) == {"share of heads": pytest.approx(share)}
        for name, kept in masks(model).items():
            assert sum(kept) == max(round(share * 4 / group), 1) * group, (step, name)
            now = {head for head, stays in enumerate(kept) if not stays}
            assert gone[name] <= now, "a masked head came back"
            gone[name] = now
        if step in (0, 4):  # else the magnitudes decide
            training_step(model, batch, step, total)
    assert all(len(of) == 4 - max(round(1 / group), 1) * group for of in gone.values())


@each_architecture
def test_the_least_important_go_first_and_what_is_left_computes_the_same(architecture, tmp_path):
    native, batch = wide_model(architecture)
    model = make_variant(native, [HeadPruning(share=0.5, end=0.5)])
    model.advance(0, 2)
    objective(model.train(), batch).backward()
    scores = analysis.head_importance(native, [batch], reduction="per_example")
    model.advance(1, 2)
    attentions = architecture.attentions(model.config)
    removed = {}
    for name, kept in masks(model).items():
        group = attentions[name].group_size(model.config)
        order = scores[name].view(-1, group).sum(1).argsort()[: 2 // group].tolist()
        removed[name] = sorted(number * group + head for number in order for head in range(group))
        assert [head for head, stays in enumerate(kept) if not stays] == removed[name]
    pruned = make_variant(native, [HeadPruning(heads=removed)])
    expected = outputs(pruned, batch)
    assert differences(outputs(model, batch), expected, 1e-5) == []
    assert differences(outputs(model.merge(), batch), expected, 1e-5) == []
    model.finalize()
    assert model.methods == [HeadPruning(heads=removed)]
    assert differences(outputs(model, batch), expected, 1e-5) == []
    assert {name: p.shape for name, p in model.named_parameters()} == {n: p.shape for n, p in pruned.named_parameters()}
    model.save_pretrained(tmp_path)
    again = AUTO_CLASSES[architecture.tasks[0]].from_pretrained(tmp_path)
    assert differences(outputs(again, batch), outputs(model, batch)) == []
    assert differences(outputs(again.merge(), batch), expected, 1e-5) == []


def test_all_heads_are_compared_by_their_share_of_their_attention():
    native, batch = wide_model(MARIAN)
    model = make_variant(native, [HeadPruning(share=0.5, end=0.5, scope="global")])
    model.advance(0, 2)
    objective(model.train(), batch).backward()
    scores = analysis.head_importance(native, [batch], reduction="per_example")
    model.advance(1, 2)
    chosen = analysis.select_heads(scores, count=12, min_heads=1)
    assert {
        name: [h for h, stays in enumerate(of) if not stays] for name, of in masks(model).items() if not all(of)
    } == chosen.heads
    assert len({sum(of) for of in masks(model).values()}) > 1
    model = make_variant(native, [HeadPruning(share=0.0, end=0.5, scope="global")])
    model.advance(1, 2)
    assert {sum(of) for of in masks(model).values()} == {1}


@every_backbone
def test_without_a_gradient_magnitudes_decide(case):
    """As they do where all is removed at once."""
    model = make_variant(native(case), [HeadPruning(share=0.5, begin=0.5)])
    model.finalize()
    at_once = make_variant(native(case), [HeadPruning(share=0.5)])
    assert differences(outputs(model, case.batch()), outputs(at_once, case.batch()), 1e-5) == []


def test_where_all_heads_stay_nothing_is_removed(tmp_path):
    model = make_variant(native(BASELINES[0]), [HeadPruning(share=1.0, begin=0.0, scope="global")])
    model.finalize()
    assert model.methods == [HeadPruning(share=1.0)]
    model.save_pretrained(tmp_path)
    again, _ = reload(BASELINES[0], tmp_path)
    assert differences(outputs(again, BASELINES[0].batch()), outputs(model, BASELINES[0].batch())) == []


def test_heads_behind_frozen_parameters_are_measured_too_and_an_infinite_gradient_is_not():
    native, batch = wide_model(MARIAN)
    frozen = [
        Freeze(embeddings="frozen"),
        Freeze(attention="frozen", ffn="frozen", norm="frozen", layers={"encoder": [0, 1]}),
    ]
    model = make_variant(native, [*frozen, GRADUAL])
    model.advance(0, 9)
    model.train()(**batch).loss.backward()
    first = modules_of(model)["encoder.0.self"]
    assert first.recent.all()
    settle([*modules_of(model).values()])
    before = first.importance.clone()
    for bad in (torch.inf, torch.nan):
        first.recent[0] = bad
        settle([*modules_of(model).values()])
        assert torch.equal(first.importance, before)
        assert not first.recent.any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_computed_again_are_measured_once(reentrant):
    native, batch = wide_model(MARIAN)
    found = []
    for checkpointing in (False, True):
        model = make_variant(native, [GRADUAL]).train()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": reentrant})
        model.advance(0, 9)
        model(**batch).loss.backward()
        found.append({name: module.recent for name, module in modules_of(model).items()})
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)
    assert all(of.all() for of in found[0].values())


def test_what_is_measured_is_saved_and_copied(tmp_path):
    native, batch = wide_model(MARIAN)
    model = make_variant(native, [GRADUAL])
    for step in range(3):
        training_step(model, batch, step, 8)
    model.save_pretrained(tmp_path)
    assert {"mask", "importance", "recent"} <= {
        name.rpartition(".")[2] for name in load_file(tmp_path / "model.safetensors")
    }
    appended = make_variant(model, [Freeze(norm="frozen")])
    for twin in (AUTO_CLASSES["seq2seq-lm"].from_pretrained(tmp_path), copy.deepcopy(model), appended):
        assert differences(outputs(twin, batch), outputs(model, batch)) == []
        assert twin.finalizable
        twin.advance(5, 8)
        other = copy.deepcopy(model)
        other.advance(5, 8)
        assert masks(twin) == masks(other)
        assert any(not all(of) for of in masks(twin).values())


def test_processes_do_not_send_what_each_has_measured():
    model = make_variant(wide_model(MARIAN)[0], [GRADUAL])
    ignored = set(model._ddp_params_and_buffers_to_ignore)
    buffers = {name for name, _ in model.named_buffers() if name.endswith((".mask", ".importance", ".recent"))}
    assert ignored & buffers == {name for name in buffers if name.endswith(".recent")}
    assert len(ignored & buffers) == 6


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            lambda: [HeadPruning(share=0.5, begin=0.8, end=0.2)],
            r"HeadPruning\(begin=0\.8, end=0\.2\): begin must be below end",
        ),
        (
            lambda: [HeadPruning(share=0.5, begin=0.0, ramp="square")],
            r"ramp='square'\): choose from \['linear', 'cosine', 'cubic'\]",
        ),
        (
            lambda: [HeadPruning(share=0.5, begin=0.0, scope="layer")],
            r"scope='layer'\): choose from \['attention', 'global'\]",
        ),
        (
            lambda: [HeadPruning(share=0.5, ramp="linear")],
            r"ramp='linear'\): is for heads that are removed during training: give",
        ),
        (
            lambda: [HeadPruning(share=0.5, scope="global")],
            r"scope='global'\): a calibration compares heads of different attentions, or training does: give",
        ),
        (
            lambda: [HeadPruning(heads={"encoder.0.self": [0]}, end=0.5)],
            r"end=0\.5\): is for heads that are removed during",
        ),
        (lambda: [LowRank(rank=2, components=["attention"]), GRADUAL], "is a LowRankLinear already"),
        (lambda: [GRADUAL, LowRank(rank=2, components=["attention"])], "is a MaskedHeadsLinear already"),
        (lambda: [GRADUAL, HeadPruning(share=0.5)], "is a MaskedHeadsLinear already"),
        (lambda: [GRADUAL, LayerSelection(share=0.5)], r"names layers by number.*or finalize\(\) before"),
        (lambda: [GRADUAL, LayerSharing()], "cannot keep a mask or score each"),
        (lambda: [LayerSharing(), GRADUAL], "cannot keep a mask or score each"),
        (
            lambda: [GRADUAL, Freeze(attention={"q": "random"})],
            r"Freeze after 'head_pruning', which removes some of attention when training ends, .*; finalize\(\) before",
        ),
        (
            lambda: [Freeze(attention={"q": "random"}), GRADUAL],
            "HeadPruning after 'freeze', whose attention a seed regenerates: HeadPruning cannot remove some of it when",
        ),
    ],
)
def test_what_does_not_fit_is_refused(methods, message):
    with pytest.raises(ValueError, match=message) as refused, torch.device("meta"):
        make_variant(wide_config(MARIAN), methods(), task="seq2seq-lm")
    assert "\n" not in str(refused.value)


def test_a_finalized_one_takes_all_of_them():
    native, batch = wide_model(MARIAN)
    final = make_variant(native, [GRADUAL])
    final.finalize()
    for method in (LowRank(rank=2, components=["attention"]), HeadPruning(share=0.5), LayerSelection(share=0.5)):
        outputs(make_variant(final, [method]), batch)
    random = make_variant(final, [Freeze(attention="random")])
    assert any(".q_proj." in name for name in random.seeded_tensors)
