"""The cost of a model per component: parameters, stored bytes, multiply-adds. Everything works for models on `meta`."""

import copy
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_freeze.architectures.base import TRAINED, Architecture, base_name, canonical_parameters
from hf_freeze.architectures.describe import first_line
from hf_freeze.architectures.examples import probe_inputs
from hf_freeze.architectures.registry import architecture_for
from hf_freeze.architectures.tasks import tasks_of
from hf_freeze.compat.transformers import count_all_experts, keys_to_ignore, set_attention_implementation
from hf_freeze.layers.derived import Derived
from hf_freeze.layers.expanded_embedding import ExpandedEmbedding
from hf_freeze.layers.quantized import Quantized

SMALL = 2**24  # parameters of a model that may be allocated to count what depends on values


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Numbers of parameters. Tied tensors count once, constants (sinusoidal positions) do not count, and a quantised matrix
    counts as the weights that it encodes.

    `stored`: those that `save_pretrained` writes. `by_component`: the counts of `embeddings`, `attention`, `ffn`, `norm`, `head`.
    """

    total: int
    trainable: int
    stored: int
    by_component: dict[str, "ParameterCount"]


def count_parameters(model: nn.Module) -> ParameterCount:
    """Count the parameters of a variant or of a native model of a registered architecture.

    Raises ValueError for any other model.
    """
    seeded = getattr(model, "seeded_tensors", {})
    counts: dict[str, list[int]] = {component: [0, 0, 0] for component in TRAINED}
    for name, parameter, component in _components(model):
        if component != "constant":
            size = parameter.numel()
            added = (size, size * parameter.requires_grad, size * (name not in seeded))
            counts[component] = [old + new for old, new in zip(counts[component], added, strict=True)]
    for module, component in _quantized(model):
        counts[component][0] += module.weight_count
        counts[component][2] += module.weight_count
    by_component = {
        component: ParameterCount(total=total, trainable=trainable, stored=stored, by_component={})
        for component, (total, trainable, stored) in counts.items()
    }
    total, trainable, stored = (sum(values) for values in zip(*counts.values(), strict=True))
    return ParameterCount(total=total, trainable=trainable, stored=stored, by_component=by_component)


def stored_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that `save_pretrained` writes: stored parameters and persistent buffers, without the header."""
    left_out = set(getattr(model, "seeded_tensors", ())) | keys_to_ignore(model)[0]
    if hasattr(model, "trained_constants"):
        left_out -= model.trained_constants()  # type: ignore[operator]
    parameters = sum(
        parameter.numel() * parameter.element_size()
        for name, parameter, _ in _components(model)
        if name not in left_out
    )
    persistent = set(model.state_dict())
    buffers = {id(buffer): buffer for name, buffer in model.named_buffers() if name in persistent - left_out}
    return parameters + sum(buffer.numel() * buffer.element_size() for buffer in buffers.values())


def _components(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, str]]:
    """(name, parameter, component), with each tied parameter once."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        raise ValueError(f"{type(model).__name__} is not a transformers model")
    architecture = architecture_for(model)
    for name, parameter in canonical_parameters(model):
        yield name, parameter, architecture.component(base_name(model, name))


def _quantized(model: Any) -> Iterator[tuple[Quantized, str]]:
    """(module, component) for each quantised weight, which is a buffer; tied ones once."""
    architecture, tied = architecture_for(model), getattr(model, "all_tied_weights_keys", {})
    for name, module in model.named_modules():
        if isinstance(module, Quantized) and f"{name}.packed" not in tied:
            yield module, architecture.component(base_name(model, f"{name}.weight"))


@dataclass(frozen=True, kw_only=True)
class MultiplyAdds:
    """Multiply-adds of matrix products, per token. `backward`: those of autograd, which skips work for frozen parameters.

    `example`: for models of images or sound, which are counted per example, input -> its shape in one example; None per token.
    """

    forward: float
    backward: float
    by_component: dict[str, "MultiplyAdds"]
    example: dict[str, tuple[int, ...]] | None = None


def multiply_adds(model: Any, *, length: int = 32) -> MultiplyAdds:
    """Multiply-adds per token of one training step on a sequence of `length` tokens (encoder-decoders: a pair of sequences); of a
    model for images or sound, per example.

    Each operation is counted on `meta` (torch's FlopCounterMode: two flops are one multiply-add), score products of attention
    included. The lookup of an embedding is free; the product with a tied output matrix counts as `embeddings`. A linear whose
    weight is computed counts with the products that a CPU would choose for `length` tokens, including those that compute the
    weight, unless the weight is frozen and cached. A linear with zeros in its weight is computed densely and counts as dense.

    Some models look at values. Where values of the inputs do, torch's fake tensors take the place of `meta`. Where they must be
    computed, as for some mixtures of experts, a copy of the model with fewer than 2**24 parameters is run on the CPU.

    Raises ValueError for a length below 1 or above the positions of the model, and for operations that cannot be counted so.
    """
    return _counted(model, length, with_backward=True)


def forward_multiply_adds(model: Any) -> int:
    """Of a token of a sequence of 32 (of source and target each), as `multiply_adds` counts them, in less than half the time."""
    length = min(32, getattr(model.config, "max_position_embeddings", 32))
    return round(_counted(model, length, with_backward=False).forward)


def _counted(model: Any, length: int, with_backward: bool) -> MultiplyAdds:
    """Those of the first twin of the model that they can be counted on."""
    architecture = architecture_for(model)
    positions = getattr(model.config, "max_position_embeddings", length)
    if length < 1 or 0 < positions < length:  # XLNet, without a limit, has -1 positions
        raise ValueError(f"length={length} is outside 1..{positions}, the positions of the model")
    twins = [_meta_twin, _fake_twin]
    if sum(parameter.numel() for parameter in model.parameters()) < SMALL:
        twins.append(_real_twin)
    problem = Exception()
    for make_twin in twins:
        try:
            # torch does not count its fused attention on the CPU, which some models call whatever the implementation.
            # Making a model and running it may draw random numbers: the caller's stay as they are.
            with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH), torch.random.fork_rng(devices=[]):
                # Caches ask for the address of a tensor.
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                return _count(make_twin(model), architecture, length, with_backward)
        except Exception as error:  # all kinds of errors tell that a value is needed
            problem = error
    raise ValueError(f"{model.config.model_type}: operations cannot be counted: {first_line(problem)}") from problem


def _count(twin: Any, architecture: Architecture, length: int, with_backward: bool) -> MultiplyAdds:
    inputs, count = example_inputs(twin, length)
    example = {name: tuple(value.shape[1:]) for name, value in inputs.items()} if _of_examples(twin) else None
    inputs = {name: value.to(twin.device) for name, value in inputs.items()}
    calls: dict[nn.Module, list[tuple[list[Any], dict[str, Any]]]] = defaultdict(list)

    def alone(value: Any) -> Any:
        return value.detach().requires_grad_(value.requires_grad) if torch.is_tensor(value) else value

    def record_inputs(module: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        calls[module].append(([alone(a) for a in arguments], {name: alone(a) for name, a in named.items()}))

    if any(isinstance(module, Derived) for module in twin.modules()):
        twin(**inputs)  # weights that are computed once if they are frozen
        _detach_states(twin)
    linears = [module for module in twin.modules() if _is_linear(module)] if with_backward else []
    hooks = [module.register_forward_pre_hook(record_inputs, with_kwargs=True) for module in linears]
    with FlopCounterMode(display=False) as counter:
        outputs = twin(**inputs)
    for hook in hooks:
        hook.remove()
    forward = _forward_by_component(twin, architecture, counter)
    forward_flops, backward_flops = counter.get_total_flops(), _backward_flops(outputs.values()) if with_backward else 0
    # The counter cannot attribute the backward pass to modules. So each linear runs again, alone; the difference to the total
    # are the score products of attention.
    backward: dict[str, float] = defaultdict(float)
    known: dict[Any, int] = {}  # of plain linears that are alike
    for module, (component, _) in forward.items():
        for arguments, named in calls[module]:
            key: Any = module, len(known)
            if type(module) is nn.Linear and not named:
                tensors = (*arguments, *module._parameters.values())
                key = tuple(tensor if tensor is None else (tensor.shape, tensor.requires_grad) for tensor in tensors)
            if key not in known:
                _detach_states(module)
                results = module(*arguments, **named)
                known[key] = _backward_flops(results if isinstance(results, tuple) else (results,))
            backward[component] += known[key]
    backward["attention"] += backward_flops - sum(backward.values())
    share = 1 / 2 / count  # of a token or an example: two flops are one multiply-add
    by_component = {
        component: MultiplyAdds(
            forward=share * sum(flops for c, flops in forward.values() if c == component),
            backward=share * backward[component],
            by_component={},
        )
        for component in TRAINED
    }
    return MultiplyAdds(
        forward=share * forward_flops, backward=share * backward_flops, by_component=by_component, example=example
    )


def _backward_flops(outputs: Iterable[Any]) -> int:
    """Flops of the gradients of a call, with respect to trainable parameters and the inputs that need a gradient."""
    parts = [y.sum() for y in outputs if torch.is_tensor(y) and y.requires_grad]
    with FlopCounterMode(display=False) as counter:
        if parts:
            torch.stack(parts).sum().backward()
    return counter.get_total_flops()


def example_inputs(model: Any, length: int) -> tuple[dict[str, torch.Tensor], int]:
    """The inputs that operations are counted on, and the number of tokens, or for images and sound of examples, in them."""
    ids = torch.zeros(1, length, dtype=torch.long)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    if _of_examples(model):
        inputs = probe_inputs(model.config, model)
        length = next(iter(inputs.values())).shape[0]
    elif "multiple-choice" in tasks_of(model):
        inputs = {name: value[None] for name, value in inputs.items()}  # an example of one choice
    if getattr(model.config, "add_cross_attention", False):  # a decoder that attends to `length` encoder states
        inputs["encoder_hidden_states"] = torch.zeros(1, length, model.config.hidden_size)
    return inputs, length


def _of_examples(model: Any) -> bool:
    """Whether operations are counted per example: an image, a sound, or a text and an image for two encoders."""
    return model.main_input_name != "input_ids" or hasattr(model, "get_text_features")


def _detach_states(model: nn.Module) -> None:
    """Keep a backward pass out of the calls before: recurrent layers may hold a state as an attribute."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if torch.is_tensor(value) and value.grad_fn is not None:
                setattr(module, name, value.detach())


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear, or experts in tensors of three dimensions: all of its products are with its own weights."""
    weights = [parameter for parameter in module._parameters.values() if parameter is not None]
    return isinstance(module, Derived) or "weight" in module._parameters or any(weight.ndim == 3 for weight in weights)


def _meta_twin(model: Any) -> Any:
    """A twin without any values."""
    return _prepared(_new_twin(model, "meta"), model)


def _fake_twin(model: Any) -> Any:
    """A twin whose parameters and buffers have no values. What is computed from the inputs alone, such as masks, has some, and
    transformers asks fake tensors for fewer values than those on meta."""
    twin = _new_twin(model, "meta")
    with FakeTensorMode(allow_non_fake_inputs=True):
        twin.to_empty(device="cpu")
    return _prepared(twin, model)


def _real_twin(model: Any) -> Any:
    """A twin on the CPU with the values of the model; random ones if it is on meta."""
    twin = _prepared(_new_twin(model, "cpu"), model)
    values = _named_tensors(model)
    with torch.no_grad():
        for name, tensor in _named_tensors(twin).items():
            if name in values and not values[name].is_meta:
                tensor.copy_(values[name])
    return twin


def _named_tensors(model: Any) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _new_twin(model: Any, device: str) -> Any:
    config = copy.deepcopy(model.config)
    # Plain matrix products: the counter sees each of them on every device.
    set_attention_implementation(config, "eager")
    with torch.device(device):
        return type(model)(config)


def _prepared(twin: Any, model: Any) -> Any:
    """The twin in training mode, tied, with the same frozen parameters as the model."""
    # Without a cache, some forwards read the positions. With a padding id, some look for padding among the ids, which meta lacks;
    # others need one.
    twin.config.use_cache = True
    twin.config.pad_token_id = None if twin.device.type == "meta" else -1
    twin.only_counted = True
    twin.tie_weights()
    count_all_experts(twin)
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, parameter in twin.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(trainable[name])
    twin.train()
    for module in twin.modules():
        if isinstance(module, ExpandedEmbedding):
            module.once_per_id = False
        # In training, those of transformers drop layers or mask inputs at random.
        if type(module).__module__.startswith("transformers."):
            module.training = False
    return twin


def _forward_by_component(
    model: Any, architecture: Architecture, counter: FlopCounterMode
) -> dict[nn.Module, tuple[str, int]]:
    """module -> (component, its own flops). The counter adds each operation to all enclosing modules, so the flops of submodules
    are subtracted."""
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    tied = model.all_tied_weights_keys
    root = type(model).__name__
    own_flops: dict[nn.Module, tuple[str, int]] = {}
    for name, module in model.named_modules():
        key = f"{root}.{name}" if name else root
        flops = counts.get(key, 0) - sum(counts.get(f"{key}.{child}", 0) for child, _ in module.named_children())
        if flops and _is_linear(module):
            packed = tied.get(f"{name}.packed", f"{name}.packed").removesuffix("packed")
            source = tied.get(f"{name}.weight", f"{packed}weight")
            if "weight" not in module._parameters and not isinstance(module, Derived):  # experts
                source = f"{name}.{next(iter(module._parameters))}"
            own_flops[module] = (architecture.component(base_name(model, source)), flops)
        elif flops:
            own_flops[module] = ("attention", flops)  # score products, outside any linear
    return own_flops
