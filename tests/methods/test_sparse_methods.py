"""MagnitudePruning and VariationalDropout: masks under every optimiser, schedules, resumed runs, the term of the loss."""

import copy
import math

import pytest
import torch
from support.cases import BASELINES as BACKBONES
from support.models import differences, native, outputs, snapshot, trainability
from support.schedules import STEPS, scheduled_model, trainer
from torch.nn import functional
from transformers import AutoModelForSeq2SeqLM, TrainerCallback

from hf_freeze import count_parameters, make_variant, multiply_adds, stored_bytes
from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.layers.masked import Masked, prune_smallest
from hf_freeze.layers.sparse import SparseLinear
from hf_freeze.layers.variational import Variational
from hf_freeze.methods import Freeze, MagnitudePruning, VariationalDropout
from hf_freeze.surgery import effective_weight
from hf_freeze.training import label_smoothed_loss

BATCH = ARCHITECTURES["marian"].tiny_inputs("seq2seq-lm")
WEIGHTS = 4 * 2 * 16 * 24  # of all FFN matrices
RAMP = MagnitudePruning(sparsity=0.8, begin=0.25, end=0.75)
WARM_UP = VariationalDropout(training_size=30, threshold=-6.0, warmup=0.5)

every_backbone = pytest.mark.parametrize("case", BACKBONES, ids=[case.architecture.model_type for case in BACKBONES])


def layers_of(model):
    return [m for m in model.modules() if isinstance(m, Masked | Variational | SparseLinear)]


def zeros(model):
    """Where the weights that the model computes with are zero, of each changed linear (O, I)."""
    return [effective_weight(module) == 0 for module in layers_of(model)]


def sparsity(model):
    found = zeros(model)
    return sum(int(z.sum()) for z in found) / sum(z.numel() for z in found)


def is_within(smaller, larger):
    return all(bool((a <= b).all()) for a, b in zip(smaller, larger, strict=True))


# -- masks and optimisers ----------------------------------------------------------------------------------------------------

OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, weight_decay=0.1),
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("method", [MagnitudePruning(sparsity=0.5), RAMP], ids=["at once", "ramp"])
def test_the_mask_holds_after_every_step(optimiser, method):
    model = scheduled_model(phases=[method]).train()
    optimizer = OPTIMISERS[optimiser](model.parameters())
    steps = 6 if model.scheduled else 3
    for step in range(steps):
        if model.scheduled:
            model.advance(step, steps)
        before, weights = zeros(model), snapshot(model)
        for module, hidden in zip(layers_of(model), before, strict=True):
            assert int(hidden.sum()) == module.zeros()
        model(**BATCH).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert is_within(before, zeros(model))
        assert [int(z.sum()) for z in before] == [int(z.sum()) for z in zeros(model)]
        for name, parameter in model.named_parameters():
            assert not parameter.requires_grad or ".k_proj.bias" in name or not torch.equal(parameter, weights[name])
        for mode in (True, False) if step % 3 == 2 else ():  # what is behind the mask counts nothing
            model.train(mode)
            with torch.no_grad():
                expected = model(**BATCH).logits
                moved = copy.deepcopy(model)
                for module in layers_of(moved):
                    module.weight[~module.kept_entries()] = math.nan
                assert torch.equal(moved(**BATCH).logits, expected)
        model.train()
    assert sparsity(model) == pytest.approx(0.5 if method is not RAMP else 0.8, abs=1e-3)


class Recording(TrainerCallback):
    def __init__(self):
        self.zeros = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.zeros.append(zeros(model))


def test_the_mask_holds_in_the_trainer(tmp_path):
    model = scheduled_model(phases=[RAMP])
    recording = Recording()
    running = trainer(model, tmp_path, accumulate=1)
    running.add_callback(recording)
    running.train()
    counts = [sum(int(z.sum()) for z in each) for each in recording.zeros]
    assert counts == [expected_count(RAMP, step / STEPS) for step in range(STEPS)]
    assert all(is_within(a, b) for a, b in zip(recording.zeros, recording.zeros[1:], strict=False))
    assert is_within(recording.zeros[-1], zeros(model))
    assert counts[:3] == [0, 0, 0]
    assert counts[-1] == counts[-2] == round(0.8 * WEIGHTS)


# -- the ramp ----------------------------------------------------------------------------------------------------------------


def expected_count(method, progress, weights=WEIGHTS, *, ahead=0.0):
    """Zhu & Gupta's cubic ramp; `ahead`: by this share of the ramp."""
    begin, end = method.begin or 0, 1 if method.end is None else method.end
    done = (progress - begin) / (end - begin)
    done = min(max(done + ahead * (done > 0), 0), 1)
    return round(method.sparsity * (1 - (1 - done) ** 3) * weights)


@pytest.mark.parametrize(
    "method",
    [
        RAMP,
        MagnitudePruning(sparsity=0.9, begin=0.0),
        MagnitudePruning(sparsity=0.6, end=0.5),
        MagnitudePruning(sparsity=0.7, begin=0.5, end=1.0, scope="layer"),
    ],
    ids=["both", "begin", "end", "layer"],
)
def test_the_sparsity_follows_the_cubic_ramp(method):
    model = scheduled_model(phases=[method])
    assert model.scheduled
    assert sparsity(model) == 0
    before = zeros(model)
    for step in range(0, 321, 4):
        model.advance(step, 320)
        now = zeros(model)
        assert is_within(before, now), "what is pruned stays pruned"
        groups = [now] if method.scope == "global" else [[z] for z in now]
        for group in groups:
            weights = sum(z.numel() for z in group)
            least, most = (expected_count(method, step / 320, weights, ahead=ahead) for ahead in (0, 0.01))
            assert least <= sum(int(z.sum()) for z in group) <= most, step
        before = now
    assert sparsity(model) == pytest.approx(method.sparsity, abs=1 / 384)


def test_most_steps_of_a_ramp_rank_nothing(monkeypatch):
    """A ranking of all weights costs more than a step: there are a hundred of them, however long the training is."""
    model = scheduled_model(phases=[RAMP])
    ranked = []
    kthvalue = torch.Tensor.kthvalue
    monkeypatch.setattr(torch.Tensor, "kthvalue", lambda *args: ranked.append(1) or kthvalue(*args))
    for step in range(1000):
        model.advance(step, 1000)
    assert 50 < len(ranked) <= 100


@pytest.mark.parametrize("step", range(0, 9, 2))
def test_finalize_prunes_to_the_full_sparsity_at_any_step(step):
    model = scheduled_model(phases=[RAMP])
    model.advance(step, 8)
    before = zeros(model)
    model.finalize()
    assert sum(int(z.sum()) for z in zeros(model)) == round(0.8 * WEIGHTS)
    assert is_within(before, zeros(model))
    assert all(isinstance(module, SparseLinear) for module in layers_of(model))
    assert sum(module.nonzeros for module in layers_of(model)) == WEIGHTS - round(0.8 * WEIGHTS)
    assert not model.scheduled
    model.train()(**BATCH).loss.backward()  # nobody needs to advance it any more
    model.advance(0, 3)


@pytest.mark.parametrize("method", [RAMP, WARM_UP])
def test_a_schedule_on_meta(method):
    """Multiply-adds are counted there."""
    with torch.device("meta"):
        model = scheduled_model(phases=[method])
    model.advance(4, 8)
    assert multiply_adds(model, length=8).forward == multiply_adds(scheduled_model(phases=[method]), length=8).forward


def test_a_second_training_keeps_what_was_pruned():
    model = scheduled_model(phases=[RAMP])
    model.advance(8, 8)
    pruned = zeros(model)
    model.rewind()
    model.advance(0, 8)
    assert all(torch.equal(a, b) for a, b in zip(zeros(model), pruned, strict=True))


# -- scopes ------------------------------------------------------------------------------------------------------------------


@every_backbone
@pytest.mark.parametrize("share", [0.0, 0.001, 0.37, 0.5, 0.999])
def test_scopes_count_exactly_and_take_the_smallest(case, share):
    backbone = native(case)
    with torch.no_grad():
        for *_, name in case.architecture.linears(backbone.config, "ffn"):  # of unequal scale
            backbone.base_model.get_submodule(name).weight.mul_(1 + len(name) % 3)
    dense = make_variant(backbone, [MagnitudePruning(sparsity=0.0)])
    sizes = [effective_weight(module).abs() for module in layers_of(dense)]
    everything = torch.cat([size.flatten() for size in sizes])
    together = make_variant(backbone, [MagnitudePruning(sparsity=share)])
    assert sum(int(z.sum()) for z in zeros(together)) == round(share * everything.numel())
    limit = everything.sort().values[round(share * everything.numel()) :].min()
    assert all(torch.equal(z, size < limit) for z, size in zip(zeros(together), sizes, strict=True))
    apart = make_variant(backbone, [MagnitudePruning(sparsity=share, scope="layer")])
    for found, size in zip(zeros(apart), sizes, strict=True):
        assert int(found.sum()) == round(share * size.numel())
        assert not found.any() or found.all() or size[found].max() < size[~found].min()


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.77])
@pytest.mark.parametrize("values", [1, 3])
def test_ties_do_not_change_the_count(scope, share, values):
    backbone = scheduled_model(phases=[]).merge()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if ".fc" in name and name.endswith("weight"):
                sign = 2 * torch.randint(2, parameter.shape, generator=generator) - 1
                parameter.copy_(sign * (1 + torch.randint(values, parameter.shape, generator=generator)))
    model = make_variant(backbone, [MagnitudePruning(sparsity=share, scope=scope)])
    groups = [zeros(model)] if scope == "global" else [[z] for z in zeros(model)]
    for group in groups:
        assert sum(int(z.sum()) for z in group) == round(share * sum(z.numel() for z in group))
    again = make_variant(backbone, [MagnitudePruning(sparsity=share, scope=scope)])
    assert all(torch.equal(a, b) for a, b in zip(zeros(model), zeros(again), strict=True))


def test_components_and_layers():
    model = scheduled_model(
        phases=[MagnitudePruning(sparsity=0.5, components=["attention", "ffn"], layers={"decoder": [1]})]
    )
    names = [name for name, module in model.named_modules() if isinstance(module, Masked)]
    assert len(names) == 4 + 4 + 2
    assert all("decoder.layers.1." in name for name in names)


# -- resuming ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[RAMP, WARM_UP], ids=["magnitude", "variational"])
def undisturbed(request, tmp_path_factory):
    """A run with dropout, and a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("undisturbed")
    model = scheduled_model(dropout=0.2, phases=[request.param])
    trainer(model, folder, save_strategy="steps", save_steps=1).train()
    return request.param, folder, model


@pytest.mark.parametrize("step", [2, 3, 5, 7])  # before the ramp, within it in either epoch, and after it
def test_a_resumed_run_is_an_undisturbed_one(undisturbed, tmp_path, step):
    method, folder, whole = undisturbed
    model = scheduled_model(dropout=0.2, phases=[method])
    torch.manual_seed(99)
    resumed = trainer(model, tmp_path)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert resumed.state.global_step == STEPS
    assert model.state_dict().keys() == whole.state_dict().keys()
    assert any("mask" in name or "log_sigma" in name for name in model.state_dict())
    for name, value in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    ended, twin = copy.deepcopy(whole), copy.deepcopy(model)
    for one in (ended, twin):
        one.finalize()
    assert ended.config.methods == twin.config.methods
    assert differences(outputs(twin, BATCH), outputs(ended, BATCH)) == []


def test_a_mask_is_saved_in_the_middle(tmp_path):
    model = scheduled_model(phases=[RAMP])
    model.advance(4, 8)
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert 0 < sparsity(again) == sparsity(model) < 0.8
    assert again.finalizable
    assert differences(outputs(again, BATCH), outputs(model, BATCH)) == []
    appended = make_variant(model, [Freeze(norm="frozen")])
    assert all(torch.equal(a, b) for a, b in zip(zeros(appended), zeros(model), strict=True))
    for one in (again, appended):
        one.advance(8, 8)
        model.advance(8, 8)
        assert all(torch.equal(a, b) for a, b in zip(zeros(one), zeros(model), strict=True))


# -- training without telling the progress -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [RAMP, WARM_UP])
def test_training_without_a_callback_is_refused(method, tmp_path):
    model = scheduled_model(phases=[method])
    with pytest.raises(ValueError, match=rf"\['{method.name}'\] .*VariantCallback.* model\.advance"):
        model.train()(**BATCH)
    with pytest.raises(ValueError, match=r"pass Trainer\(callbacks=\[VariantCallback\(\)\]\)"):
        trainer(model, tmp_path, callback=False).train()
    outputs(model, BATCH)
    model.advance(0, 1)
    model.train()(**BATCH)


def test_what_follows_no_progress_needs_no_callback(tmp_path):
    for method in (MagnitudePruning(sparsity=0.5), VariationalDropout(training_size=30, warmup=0)):
        model = scheduled_model(phases=[method])
        assert not model.scheduled
        trainer(model, tmp_path, callback=False, max_steps=1).train()


# -- the term of the loss ----------------------------------------------------------------------------------------------------


def divergence(model):
    """Σ KL in nats, Molchanov et al., equation 14, in fp64."""
    total = 0.0
    for module in layers_of(model):
        theta, log_sigma = (p.detach().double() for p in (module.weight, module.log_sigma))
        log_alpha = (2 * log_sigma - torch.log(theta.square() + 1e-30)).clamp(-10, 10)
        gate = 1 / (1 + torch.exp(-(1.87320 + 1.48695 * log_alpha)))
        total += float((0.63576 - 0.63576 * gate + 0.5 * torch.log1p(torch.exp(-log_alpha))).sum())
    return total


def test_the_term_warms_up_and_is_divided_by_the_labels_of_an_epoch():
    model = scheduled_model(phases=[WARM_UP])
    whole = divergence(model) / 30
    for step, weight in ((0, 0), (1, 0.25), (2, 0.5), (4, 1), (7, 1)):
        model.advance(step, 8)
        result = model.train()(**BATCH)
        assert result["auxiliary_loss"].item() == pytest.approx(weight * whole, rel=1e-4)
        native_loss = functional.cross_entropy(result.logits.flatten(0, 1), BATCH["labels"].flatten())
        assert result.loss.item() == pytest.approx(native_loss.item() + weight * whole, rel=1e-5)
        result.loss.backward()


def test_the_term_counts_once_in_accumulated_batches(monkeypatch):
    """By the native mean over everything, by shares with `num_items_in_batch`, and with a loss outside."""
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    model = scheduled_model(phases=[WARM_UP]).train()
    model.advance(3, 8)

    def gradients(*losses):
        for loss in losses:
            loss().backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    parts = [{name: value[k : k + 1] for name, value in BATCH.items()} for k in range(2)]
    items = int((BATCH["labels"] != -100).sum())
    loss = label_smoothed_loss(0.0)
    labels = [batch["labels"] for batch in (BATCH, *parts)]
    expected = gradients(lambda: model(**BATCH).loss)
    assert any("log_sigma" in name and value.abs().max() > 0 for name, value in expected.items())
    for found in (
        gradients(*[lambda part=part: model(**part, num_items_in_batch=items).loss for part in parts]),
        gradients(lambda: loss(model(**BATCH), labels[0])),
        gradients(*[lambda part=part: loss(model(**part), part["labels"], items) for part in parts]),
    ):
        assert differences(found, expected, 1e-5) == []


def test_the_term_is_there_in_training_only():
    model = scheduled_model(phases=[WARM_UP])
    model.advance(4, 8)
    assert "auxiliary_loss" not in model.eval()(**BATCH)
    with torch.no_grad():
        assert "auxiliary_loss" not in model.train()(**BATCH)
    assert "auxiliary_loss" in model(**BATCH)
    assert "auxiliary_loss" not in scheduled_model(phases=[RAMP, Freeze(norm="frozen")]).eval()(**BATCH)
    with pytest.raises(ValueError, match="needs return_dict=True"):
        model(**BATCH, return_dict=False)
    assert isinstance(model.eval()(**BATCH, return_dict=False), tuple)
    model.train().finalize()
    assert "auxiliary_loss" not in model(**BATCH)


def test_a_loss_outside_that_forgets_the_term_is_refused_at_the_second_step():
    model = scheduled_model(phases=[WARM_UP]).train()
    model.advance(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = BATCH | {"decoder_input_ids": model.prepare_decoder_input_ids_from_labels(BATCH["labels"])}
    labels = inputs.pop("labels")

    def step(loss):
        loss(model(**inputs)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def forgetful(result):
        assert result.get("loss") is None
        return functional.cross_entropy(result.logits.flatten(0, 1), labels.flatten())

    step(forgetful)
    with pytest.raises(
        ValueError, match=r"\['variational_dropout'\] add a term .* must add outputs\['auxiliary_loss'\]"
    ):
        step(forgetful)
    for _ in range(3):
        step(lambda result: forgetful(result) + result["auxiliary_loss"])
        step(lambda result: label_smoothed_loss(0.1)(result, labels))
    # Looking is no step: a forward without a backward, and a copy, change nothing.
    model(**inputs)
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one(**inputs)["auxiliary_loss"].backward()
        one.zero_grad()
    step(lambda result: forgetful(result) + result["auxiliary_loss"])


def test_what_is_loaded_after_a_look_is_no_step():
    model = scheduled_model(phases=[WARM_UP]).train()
    model.advance(4, 8)
    state = copy.deepcopy(model.state_dict())
    model(**BATCH)
    model.load_state_dict(state)
    torch.manual_seed(0)  # of the noise
    loss = model(**BATCH).loss
    loss.backward()
    unlooked = scheduled_model(phases=[WARM_UP]).train()
    unlooked.advance(4, 8)
    unlooked.load_state_dict(state)
    torch.manual_seed(0)
    torch.testing.assert_close(loss, unlooked(**BATCH).loss)


def test_the_weight_of_the_kl_term():
    def added(**settings):
        model = scheduled_model(phases=[VariationalDropout(**settings)]).train()
        if settings.get("warmup") != 0:
            model.advance(1, 8)  # β = 1/4 of the warm-up over half of the training
        return model(**BATCH)["auxiliary_loss"].item()

    once = added(training_size=10, warmup=0.0)
    assert once > 0
    assert added(training_size=10, warmup=0.0, kl_weight=0.25) == pytest.approx(once / 4)
    assert added(kl_lambda=0.1, warmup=0.0) == pytest.approx(once)
    assert added(kl_lambda=0.1, warmup=0.5) == pytest.approx(once / 4)
    assert added(kl_lambda=0, warmup=0.0) == 0


def test_training_needs_the_number_of_labels():
    model = scheduled_model(phases=[VariationalDropout(warmup=0.0)])
    outputs(model, BATCH)
    with pytest.raises(
        ValueError, match=r"VariationalDropout\(training_size=None\): training needs the number of labels"
    ):
        model.train()(**BATCH)
    model.finalize()
    model.train()(**BATCH).loss.backward()


def test_bf16_training_by_the_trainer(tmp_path):
    model = scheduled_model(phases=[WARM_UP])
    running = trainer(model, tmp_path, bf16=True, max_steps=3, logging_steps=1)
    running.train()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


# -- what finalize leaves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 0.98])
def test_the_file_of_a_finalized_model_holds_what_is_left(share):
    """fp32 values, and one bit a weight, or a column of two bytes for each value and a count of four for each row."""
    model = scheduled_model(phases=[MagnitudePruning(sparsity=share, scope="layer")])
    dense = stored_bytes(scheduled_model(phases=[]))
    masked = stored_bytes(model)
    assert masked == dense + WEIGHTS // 8
    model.finalize()
    places = 0
    for module in layers_of(model):
        size = module.in_features * module.out_features
        places += min(size // 8, 2 * module.nonzeros + 4 * module.out_features)
    left = sum(module.nonzeros for module in layers_of(model))
    assert left == sum(z.numel() - round(share * z.numel()) for z in zeros(model))
    assert stored_bytes(model) == dense - 4 * (WEIGHTS - left) + places
    assert count_parameters(model).by_component["ffn"].trainable == left + 2 * 2 * (16 + 24)


@pytest.mark.parametrize(("inputs", "share"), [(512, 0.5), (512, 0.01), (40_000, 0.001)])
def test_two_processes_can_send_its_buffers(inputs, share):
    """Neither gloo nor NCCL know 16-bit integers, and DistributedDataParallel sends all buffers."""
    masked = Masked.from_linear(torch.nn.Linear(inputs, 5))
    prune_smallest([masked], 1 - share, "layer")
    sparse = masked.sparse()
    assert hasattr(sparse, "columns") == (share < 0.1)
    assert all(buffer.dtype in (torch.uint8, torch.int32) for buffer in sparse.buffers())
    assert sparse.nonzeros == round(share * inputs * 5)
    assert torch.equal(sparse.dense_weight(), masked.dense_weight())
    x = torch.randn(3, inputs)
    torch.testing.assert_close(sparse(x), masked(x))


@pytest.mark.parametrize(
    "method", [MagnitudePruning(sparsity=0.5), VariationalDropout(training_size=9, threshold=-6.0)]
)
def test_a_finalized_model_of_another_initialisation_takes_more_methods(method):
    model = scheduled_model(phases=[method])
    assert model.config.init == "marian"
    model.finalize()
    further = make_variant(model, [Freeze(attention="frozen")])
    assert differences(outputs(further, BATCH), outputs(model, BATCH)) == []


def test_variational_dropout_drops_what_is_noise():
    model = scheduled_model(phases=[VariationalDropout(training_size=9, threshold=1.0, warmup=0.0)])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for module in layers_of(model):
            module.log_sigma.copy_(torch.randn(module.log_sigma.shape, generator=generator) - 2)
    expected = [2 * m.log_sigma - m.weight.square().log() >= 1 for m in layers_of(model)]
    assert all(torch.equal(z, e) for z, e in zip(zeros(model), expected, strict=True))
    assert 0.1 < sparsity(model) < 0.9
    logits = outputs(model, BATCH)
    model.finalize()
    assert all(torch.equal(z, e) for z, e in zip(zeros(model), expected, strict=True))
    assert differences(outputs(model, BATCH), logits, 1e-6) == []
    assert "variational_dropout" in {m["method"] for m in model.config.methods}


@pytest.mark.parametrize("threshold", [-1e9, 1e9])
def test_all_or_nothing_may_be_left(threshold, tmp_path):
    model = scheduled_model(phases=[VariationalDropout(training_size=9, threshold=threshold)])
    model.finalize()
    assert sparsity(model) == (1 if threshold < 0 else 0)
    model.save_pretrained(tmp_path)
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert differences(outputs(again, BATCH), outputs(model, BATCH)) == []
    again.train()(**BATCH).loss.backward()
    assert trainability(again) == trainability(model)


# -- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sparsity": 1}, r"MagnitudePruning\(sparsity=1\): must be a share of at least 0 and below 1"),
        ({"sparsity": 1.0}, "sparsity=1.0"),
        ({"sparsity": -0.1}, "sparsity=-0.1"),
        ({"sparsity": math.nan}, "sparsity=nan"),
        ({"sparsity": True}, "sparsity=True"),
        ({"sparsity": "0.5"}, "sparsity='0.5'"),
        ({"sparsity": None}, "sparsity=None"),
        ({"sparsity": 0.5, "scope": "row"}, r"MagnitudePruning\(scope='row'\): choose from \['global', 'layer'\]"),
        ({"sparsity": 0.5, "scope": ["layer"]}, r"MagnitudePruning\(scope=\['layer'\]\): choose from"),
        (
            {"sparsity": 0.5, "begin": -0.1},
            r"MagnitudePruning\(begin=-0.1\): must be None or a share of training in 0\.\.1",
        ),
        ({"sparsity": 0.5, "begin": True}, r"MagnitudePruning\(begin=True"),
        ({"sparsity": 0.5, "end": 1.5}, r"MagnitudePruning\(end=1.5"),
        ({"sparsity": 0.5, "end": math.nan}, r"MagnitudePruning\(end=nan"),
        (
            {"sparsity": 0.5, "begin": 0.5, "end": 0.5},
            r"MagnitudePruning\(begin=0.5, end=0.5\): begin must be below end",
        ),
        ({"sparsity": 0.5, "begin": 1}, "begin must be below end"),
        ({"sparsity": 0.5, "end": 0}, "begin must be below end"),
    ],
)
def test_a_pruning_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MagnitudePruning(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"training_size": 0}, r"VariationalDropout\(training_size=0\): must be an integer of at least 1"),
        ({"training_size": -5}, "training_size=-5"),
        ({"training_size": True}, "training_size=True"),
        ({"training_size": 10.0}, "training_size=10.0"),
        ({"threshold": math.inf}, r"VariationalDropout\(threshold=inf\): must be a number in -1e\+09\.\.1e\+09"),
        ({"threshold": math.nan}, "threshold=nan"),
        ({"threshold": "3"}, "threshold='3'"),
        ({"log_sigma": -math.inf}, r"VariationalDropout\(log_sigma=-inf\): must be a number in -40\.\.40"),
        ({"log_sigma": -(2**70)}, "log_sigma=-1180591620717411303424"),
        ({"log_sigma": None}, "log_sigma=None"),
        ({"log_sigma": True}, "log_sigma=True"),
        ({"warmup": -0.1}, r"VariationalDropout\(warmup=-0.1\): must be a share in 0\.\.1"),
        ({"warmup": 1.1}, "warmup=1.1"),
        ({"warmup": True}, "warmup=True"),
        ({"warmup": None}, "warmup=None"),
        ({"kl_weight": -1}, r"VariationalDropout\(kl_weight=-1\): must be a number in 0\.\.1e\+09"),
        ({"kl_lambda": "1"}, r"VariationalDropout\(kl_lambda='1'\): must be a number in 0\.\.1e\+09"),
        (
            {"kl_lambda": 0.1},
            r"kl_lambda=0\.1\): stands for kl_weight / training_size; leave out training_size=9",
        ),
        ({"kl_lambda": 0.1, "training_size": None, "kl_weight": 2}, r"leave out training_size=None and kl_weight=2"),
    ],
)
def test_a_dropout_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        VariationalDropout(**({"training_size": 9} | arguments))


both = pytest.mark.parametrize(
    "make",
    [lambda **a: MagnitudePruning(sparsity=0.5, **a), lambda **a: VariationalDropout(training_size=9, **a)],
    ids=["magnitude", "variational"],
)


@both
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"components": []}, r"\(components=\[\]\): must be a list such as \['ffn', 'attention'\]"),
        ({"components": "ffn"}, r"\(components='ffn'\): must be a list"),
        ({"components": ["norm"]}, r"\(components=\['norm'\]\): choose from \['ffn', 'attention'\]"),
        ({"components": [1]}, "choose from"),
        ({"layers": [0]}, r"layers=\[0\]: must be None or a dict"),
        ({"layers": {"encoder": [True]}}, "must be None or a dict"),
        ({"nonzeros": 5}, r"\(nonzeros=5\): must be None, or a dict from linears to numbers"),
        ({"nonzeros": {"a": -1}}, r"\(nonzeros=\{'a': -1\}\)"),
        ({"nonzeros": {"a": 1.0}}, r"\(nonzeros=\{'a': 1.0\}\)"),
        ({"nonzeros": {"a": True}}, r"\(nonzeros=\{'a': True\}\)"),
    ],
)
def test_bad_places_are_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)


@both
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layers": {"encoder": [2]}}, r"no layer 2 in stack 'encoder' of marian: it has layers 0\.\.1"),
        ({"layers": {"body": [0]}}, "no stack 'body' in marian; choose from"),
        ({"layers": {"encoder": []}}, r"\(layers=\{'encoder': \[\]\}\) names no layer"),
        ({"layers": {}}, r"\(layers=\{\}\) names no layer"),
        ({"nonzeros": {}}, "nonzeros must name the linears"),
        (
            {"nonzeros": {"encoder.layers.0.fc1": 3}, "layers": {"encoder": [0]}},
            "'encoder.layers.0.fc2' does not match",
        ),
        (
            {
                "nonzeros": {"encoder.layers.0.fc1": 385, "encoder.layers.0.fc2": 3},
                "layers": {"encoder": [0]},
            },
            r"'encoder\.layers\.0\.fc1': nonzeros=385: must be in 0\.\.384 for 16 inputs, 24 outputs",
        ),
    ],
)
def test_what_does_not_fit_the_backbone_is_refused(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        scheduled_model(phases=[make(**arguments)])


@both
def test_a_linear_is_changed_once(make):
    message = r"'encoder\.layers\.0\.fc1' is a \w+ already, which another method made; leave it out by"
    for first in (MagnitudePruning(sparsity=0.5), VariationalDropout(training_size=9)):
        with pytest.raises(ValueError, match=message):
            scheduled_model(phases=[first, make()])
        model = scheduled_model(phases=[first])
        model.finalize()
        with pytest.raises(ValueError, match=message):
            make_variant(model, [make()])
    apart = scheduled_model(phases=[make(layers={"encoder": [0]}), make(layers={"decoder": [0]})])
    assert len(layers_of(apart)) == 4
    apart.finalize()
    assert not apart.finalizable


@both
def test_numbers_of_weights_without_the_weights_are_refused(make):
    """`nonzeros` is what `finalize()` writes into a config; without its checkpoint there is no telling which."""
    counts = {"encoder.layers.0.fc1": 3, "encoder.layers.0.fc2": 0}
    method = make(nonzeros=counts, layers={"encoder": [0]})
    assert not method.facts.finalizable
    message = r"only the checkpoint of the finalized model knows which weights remain; load that checkpoint, or"
    with pytest.raises(ValueError, match=message):
        scheduled_model(phases=[method])
    with pytest.raises(ValueError, match=message):
        make_variant(scheduled_model(phases=[]), [method])
    finalized = scheduled_model(phases=[make()])
    finalized.finalize()
    with pytest.raises(ValueError, match=message):
        make_variant(finalized.config, [], task="seq2seq-lm")
    with torch.device("meta"):  # for counting
        model = scheduled_model(phases=[method])
    assert [module.nonzeros for module in layers_of(model)] == [3, 0]


def test_one_scheduled_and_one_at_once_end_together():
    model = scheduled_model(
        phases=[
            MagnitudePruning(sparsity=0.5, layers={"encoder": [0, 1]}),
            VariationalDropout(training_size=30, threshold=-6.0, warmup=0.5, layers={"decoder": [0, 1]}),
        ]
    )
    assert model.scheduled
    model.finalize()
    assert not model.scheduled
    assert len(layers_of(model)) == 8
    assert all(isinstance(module, SparseLinear) for module in layers_of(model))
