"""Time and memory that freezing saves in a training step, for each row of the freeze ablation.

    python benchmarks/freeze_step.py --preset tiny
    python benchmarks/freeze_step.py --preset base --vocab 8000 --rounds 5 \\
        --set backbone.config.encoder_layers=2 --set backbone.config.decoder_layers=2

Claims: a step of a variant takes at most 1.02 of the time of the same row frozen by hand (the native class with
`requires_grad_(False)` on the same tensors, and the same weights). Training it takes exactly the same memory as by hand, and
less than training everything (row 0): frozen tensors have no gradient and no optimiser state, and no activations are saved for
the gradients of their weights.

Time: a step is forward, label-smoothed loss, backward, clipping, fused AdamW and zero_grad, under bf16 autocast if the preset
uses it. The tokens are always the same, random: `--tokens` tokens in sentences of `--length`, without padding. Variant and
by-hand model alternate in one process, after a check that both compute the same losses. Variant and row 0 alternate likewise;
row 0 against a second model of the same kind shows the noise. A ratio is the median of the ratios of the rounds, with quartiles.

Memory: "state" (parameters, gradients, moments) and "kept" (tensors that autograd saves between forward and backward, measured by
`saved_tensors_hooks`, without parameters) are exact. "Peak" is measured in a new process for each model, which first trains one
linear so that all libraries are loaded. It is the largest resident memory (`/proc`; on a GPU the allocator's) over three steps,
less the memory before the model was built. With MALLOC_MMAP_THRESHOLD_ = 1 MB, malloc returns freed memory, which would
otherwise count. In a small model with a large vocabulary, the peak comes from the loss: logits, their log-softmax and the
gradients of both.

Limit: the multiply-adds of forward and backward with these frozen parts, at the rate of bare matrix products of the model's own
linears with this number of tokens; plus 40 bytes for each trained parameter at the rate of a copy (the gradient is read for its
norm, and read and written for clipping; AdamW reads parameter, gradient and two moments and writes three of them). It excludes
softmax, loss, norms, dropout and casts, whose share of a step is larger in smaller models.
"""

import collections
import statistics
from collections.abc import Callable
from typing import Any

import _shared
import torch
from torch import nn
from transformers import MarianMTModel

from hf_freeze import make_variant, multiply_adds
from hf_freeze.lab.recipes.recipe import Run
from hf_freeze.lab.runs.text_training import choose_attention
from hf_freeze.methods.registry import method_from_dict
from hf_freeze.training import label_smoothed_loss


def make(run: dict[str, Any], vocabulary: int, by_hand: bool) -> Any:
    def variant() -> Any:
        methods = [method_from_dict(method) for method in run.methods]
        return make_variant(
            _shared.config_of(run, vocabulary),
            methods,
            task="seq2seq-lm",
            init="marian",
            seed=run.seed,
        )

    if by_hand:
        with torch.device("meta"):
            trained = {name: p.requires_grad for name, p in variant().named_parameters()}
        model: Any = MarianMTModel(_shared.config_of(run, vocabulary))
        model.register_parameter("final_logits_bias", nn.Parameter(model._buffers.pop("final_logits_bias")))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained[name])
    else:
        model = variant()
    choose_attention(model)
    return model.to(_shared.DEVICE).train()


def stepper(model: Any, run: Run, tokens: int, length: int) -> Callable[[], torch.Tensor]:
    """A function that takes one training step and returns its loss."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, model.config.vocab_size, (2, max(1, tokens // length), length), generator=generator)
    inputs, labels = ids.to(_shared.DEVICE)
    loss_of = label_smoothed_loss(run.training.label_smoothing)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-4, weight_decay=0.0, fused=True)

    def step() -> torch.Tensor:
        with torch.autocast(_shared.DEVICE, torch.bfloat16, enabled=run.training.bf16):
            outputs = model(input_ids=inputs, labels=None, decoder_input_ids=labels)
        loss = loss_of(outputs, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def losses(step: Callable[[], torch.Tensor]) -> list[float]:
    torch.manual_seed(0)  # the same dropout
    return [float(step()) for _ in range(3)]


def memory(run: dict[str, Any], vocabulary: int, by_hand: bool, tokens: int, length: int) -> dict[str, float]:
    """Bytes of `state`, `kept` (both exact) and `peak`; call it in a new process."""
    linear = nn.Linear(8, 8).to(_shared.DEVICE)
    with torch.autocast(_shared.DEVICE, torch.bfloat16):
        linear(torch.ones(8, 8, device=_shared.DEVICE)).float().sum().backward()
    torch.optim.AdamW(linear.parameters(), fused=True).step()
    before = _resident("VmRSS")
    model = make(run, vocabulary, by_hand)
    step = stepper(model, run, tokens, length)
    for _ in range(3):
        step()
    peak = _resident("VmHWM") - before
    parameter_storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved_sizes: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_storages:
            saved_sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        step()
    sizes = [(p.numel() * p.element_size(), p.requires_grad) for p in model.parameters()]
    state = sum(size * (4 if trained else 1) for size, trained in sizes)
    return {"state": state, "kept": sum(saved_sizes.values()), "peak": peak}


def _resident(field: str) -> int:
    """Bytes in use now (VmRSS) or at the peak (VmHWM): of the process, or on a GPU of the allocator."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() if field == "VmRSS" else torch.cuda.max_memory_allocated()
    return _shared.resident(field)


def product_rate(model: Any, tokens: int, bf16: bool) -> float:
    """Multiply-adds per second of bare forward products of all linears of the model; each shape counts as often as it occurs."""
    shapes = collections.Counter(tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Linear))
    work = time = 0.0
    for (out, into), count in shapes.items():
        x, weight = (torch.randn(n, into, device=_shared.DEVICE) for n in (tokens, out))
        if bf16:
            x, weight = x.bfloat16(), weight.bfloat16()
        time += count * _shared.best(lambda x=x, weight=weight: nn.functional.linear(x, weight))
        work += count * tokens * out * into
    return work / time


def main() -> None:
    parser = _shared.parser(__doc__)
    parser.add_argument("--rows", nargs="+", default=["0", "1", "2", "3", "4", "5", "6"])
    parser.add_argument("--vocab", type=int, help="default: the preset's")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens in a batch, on each side")
    parser.add_argument("--length", type=int, default=32, help="tokens in a sentence")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of four steps for each ratio")
    options = parser.parse_args()
    runs = _shared.rows(options)
    vocabulary = options.vocab or runs["0"].tokenizer.vocab_size
    batch = (options.tokens, options.length)
    malloc = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    measured = {row: [_shared.in_new_process(memory, runs[row], vocabulary, hand, *batch, **malloc) for hand in (False, True)]
                for row in dict.fromkeys(["0", *options.rows])}  # fmt: skip
    everything = make(runs["0"], vocabulary, by_hand=False)
    whole_step = stepper(everything, runs["0"], *batch)
    bf16 = runs["0"].training.bf16
    products, copies = product_rate(everything, options.tokens, bf16), _shared.copy_rate()
    lines, ratios = [], {"time": [], "memory": [], "peak": []}
    for row in options.rows:
        variant, native = (make(runs[row], vocabulary, by_hand=hand) for hand in (False, True))
        native.load_state_dict(variant.state_dict())
        step, step_by_hand = stepper(variant, runs[row], *batch), stepper(native, runs[row], *batch)
        if losses(step) != losses(step_by_hand):
            raise RuntimeError(f"row {row}: the variant and the model frozen by hand have different losses")
        hand = _shared.in_turns(step, step_by_hand, options.rounds)
        whole = _shared.in_turns(step, whole_step, options.rounds)
        (ours, theirs), (whole_memory, _) = measured[row], measured["0"]
        if any(ours[kind] != theirs[kind] for kind in ("state", "kept")):
            raise RuntimeError(f"row {row}: {ours}, but by hand {theirs}")
        ratios["time"].append(hand.ratio)
        if row != "0":
            ratios["memory"].append((ours["state"] + ours["kept"]) / (whole_memory["state"] + whole_memory["kept"]))
            ratios["peak"].append(ours["peak"] / whole_memory["peak"])
        macs = multiply_adds(variant, length=options.length)
        tokens = options.tokens // options.length * options.length
        trained = sum(parameter.numel() for parameter in variant.parameters() if parameter.requires_grad)
        limits = tokens * (macs.forward + macs.backward) / products, 40 * trained / copies
        time = statistics.median([*hand.one, *whole.one])
        lines.append([runs[row].label, f"{1e3 * time:.1f}", str(hand), str(whole),
                      f"{1e3 * limits[0]:.1f} + {1e3 * limits[1]:.1f}", f"{sum(limits) / time:.2f}",
                      *(f"{ours[kind] / 1e6:.1f}" for kind in ("state", "kept")),
                      *(f"{bytes_ / 1e6:.0f}" for bytes_ in (ours["peak"], theirs["peak"]))])  # fmt: skip
        print(*lines[-1], sep=" | ", flush=True)
    header = ["row", "ms a step", "ratio to by hand", "ratio to row 0", "limit: products + optimiser, ms", "limit / time",
              "state, MB", "kept", "peak", "peak by hand"]  # fmt: skip
    summary = f"step: at most {max(ratios['time']):.3f} of the same done by hand (claim: 1.02)"
    if ratios["memory"]:
        summary += f"; state and kept as by hand and at most {max(ratios['memory']):.3f} of row 0 (claim: below 1), peak at most "
        summary += f"{max(ratios['peak']):.3f}"
    summary += (
        f"; {options.preset}, {vocabulary} types, {products / 1e9:.0f} billion multiply-adds and {copies / 1e9:.1f} "
    )
    _shared.report(options, _shared.markdown(header, lines), summary + "billion bytes a second")


if __name__ == "__main__":
    main()
