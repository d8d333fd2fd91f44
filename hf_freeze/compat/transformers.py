"""What we use, override or replace of transformers (and of torch's modules) beyond their public interfaces.

No other file names these; tests/compat checks each of them and says what moved if a new version lacks it.
"""

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer
from transformers.integrations.accelerate import expand_device_map, offload_weight
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
from transformers.utils import logging, output_capturing
from transformers.utils.output_capturing import OutputRecorder

# Attributes of modules that hold the number of their layer: its place in a cache, or what random attention draws by.
LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_number", "seed")


def cache_name(arguments: Iterable[str]) -> str:
    """The name under which a cache was passed to a forward: `cache` since transformers 5.24, `past_key_values` before."""
    return "cache" if "cache" in arguments else "past_key_values"


if TYPE_CHECKING:  # what the mixins of variants are always combined with
    MixedConfig, MixedModel = PreTrainedConfig, PreTrainedModel
else:
    MixedConfig, MixedModel = object, object


class PrivateHooks:
    """Passes the private hooks that transformers and torch call on a model to the public methods of a variant."""

    def _init_weights(self: Any, module: nn.Module) -> None:
        self.draw_module(module, super()._init_weights)  # type: ignore[misc]

    def _get_resized_embeddings(self: Any, old_embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        native = super()._get_resized_embeddings  # type: ignore[misc]
        return self.resized_embeddings(native, old_embeddings, *args, **kwargs)

    def _get_resized_lm_head(self: Any, old_lm_head: Any, *args: Any, **kwargs: Any) -> Any:
        return self.resized_output(super()._get_resized_lm_head, old_lm_head, *args, **kwargs)  # type: ignore[misc]

    def _adjust_bias(self: Any, output_embeddings: Any, input_embeddings: Any) -> None:
        self.resize_output_bias(super()._adjust_bias, output_embeddings, input_embeddings)  # type: ignore[misc]

    def _get_name(self: Any) -> str:
        # The Trainer's label smoothing looks causal language models up by this name, and would forget to shift the labels.
        return self.native_class.__name__ if self.shifts_labels else super()._get_name()  # type: ignore[misc]

    # transformers looks for these switches in the source file of a class, and caches what it found in the class: a variant would
    # answer for the file of its native class only in a process that has made a native model before.

    @classmethod
    def _can_set_attn_implementation(cls: Any) -> bool:
        return cls.native_class._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls: Any) -> bool:
        return cls.native_class._can_set_experts_implementation()

    @staticmethod
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, **kwargs: Any
    ) -> Any:
        # `from_pretrained` calls this to load the weights, before it leaves those that go to the disk to accelerate.
        native: Any = PreTrainedModel._load_pretrained_model
        info, on_disk = native(model, state_dict, checkpoint_files, load_config, **kwargs)
        if on_disk is not None:
            places = expand_device_map(load_config.device_map, model.state_dict().keys())
            for name, value in model.generate_for_disk({name for name, place in places.items() if place == "disk"}):
                offload_weight(value, name, load_config.disk_offload_folder, on_disk)
        return info, on_disk

    def _get_dtype_plan(self: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
        # The native plan names modules: what methods put into them would be cast too, integers and masks included. A variant has
        # the dtypes of the plan when it is built, and a loaded tensor takes that of its place.
        return {}

    @property
    def _ddp_params_and_buffers_to_ignore(self: Any) -> list[str]:
        # DistributedDataParallel asks for these names when it wraps a model, and does not send them.
        return self.not_broadcast


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers logs errors only: its advice is about models that the user did not ask for."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


# -- Auto classes ------------------------------------------------------------------------------------------------------


def mapped_class(auto_class: Any, config_class: type) -> Any:
    """The model class that an Auto class makes for a config class; None if it has none."""
    return auto_class._model_mapping.get(config_class, None)


def processor_mappings() -> list[Any]:
    """The mappings from config classes to tokenizers, image processors, feature extractors and processors."""
    return [TOKENIZER_MAPPING, IMAGE_PROCESSOR_MAPPING, FEATURE_EXTRACTOR_MAPPING, PROCESSOR_MAPPING]


# -- initialisation ----------------------------------------------------------------------------------------------------


def draw(model: Any, module: nn.Module) -> None:
    """Draw or compute fresh values of one module as `model` does."""
    model._init_weights(module)


@torch.no_grad()
def keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Cast the tensors to fp32 that `from_pretrained(dtype=dtype)` of the native class of `model`, just built, loads in fp32."""
    if plan := PreTrainedModel._get_dtype_plan(model, dtype):
        kept, stored = re.compile("|".join(plan).replace("*", ".*")), model.state_dict().keys()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in stored and tensor.is_floating_point() and kept.search(name):
                tensor.data = tensor.data.float()


class NeverDrawn:
    """Base of modules and tensors that transformers shall draw no values for: they are computed, or filled when made."""

    _is_hf_initialized = True


def is_initialized(parameter: Any) -> bool:
    """Whether transformers takes it for loaded or drawn, so that it draws no values for it."""
    return getattr(parameter, "_is_hf_initialized", False)


def mark_initialized(parameters: Iterable[Any]) -> None:
    """Have transformers draw no values for these parameters or modules."""
    for parameter in parameters:
        setattr(parameter, "_is_hf_initialized", True)  # noqa: B010 (not an attribute that torch declares)


def mark_uninitialized(module: Any) -> None:
    """Have transformers draw the values of a module again where weights are fresh."""
    module._is_hf_initialized = False


# -- what a checkpoint holds -------------------------------------------------------------------------------------------


def do_not_save(model: Any, names: set[str]) -> None:
    """Leave these tensors, and no others, out of the next `save_pretrained`."""
    model._keys_to_ignore_on_save = names


def keep_on_save(model: Any, names: set[str]) -> None:
    """Have `save_pretrained` write these tensors even if the class leaves them out."""
    if names:
        left_out: set[str] = set(model._keys_to_ignore_on_save or ())
        model._keys_to_ignore_on_save = left_out - names


def keys_to_ignore(model: Any) -> tuple[set[str], set[str]]:
    """(names that are not saved, patterns of names that may be missing when loading); a plain module has none."""
    if not isinstance(model, PreTrainedModel):
        return set(), set()
    return set(model._keys_to_ignore_on_save or ()), set(model._keys_to_ignore_on_load_missing or ())


def set_keys_to_ignore(model: Any, on_save: set[str], on_load: set[str]) -> None:
    """Set both; `on_load` may hold names besides the native patterns."""
    native = set(type(model)._keys_to_ignore_on_load_missing or ())
    model._keys_to_ignore_on_save = on_save
    model._keys_to_ignore_on_load_missing = {name if name in native else f"^{re.escape(name)}$" for name in on_load}


def declare_ties(module: Any, prefix: str, added: dict[str, str], removed: Iterable[str]) -> None:
    """Enter ties where transformers, PEFT and accelerate look them up in `module`, whose full name is `prefix`."""
    inside = {
        target.removeprefix(prefix): source.removeprefix(prefix)
        for target, source in added.items()
        if target.startswith(prefix) and source.startswith(prefix)
    }
    gone = {target.removeprefix(prefix) for target in removed if target.startswith(prefix)}
    # Native classes name these ties even if the config ties nothing.
    native = (module._tied_weights_keys or {}) if getattr(module.config, "tie_word_embeddings", False) else {}
    module._tied_weights_keys = {target: source for target, source in native.items() if target not in gone} | inside


def saves_adapters_alone(model: Any) -> bool:
    """Whether `save_pretrained` writes PEFT adapters and not the model."""
    return getattr(model, "_hf_peft_config_loaded", False)


# -- quantisers of transformers, such as bitsandbytes ----------------------------------------------------------------------


def leave_unquantized(model: Any, names: set[str]) -> None:
    """Have the quantiser of `from_pretrained(quantization_config=...)` leave the modules with these full names as they are."""
    model._keep_in_fp32_modules = {*(model._keep_in_fp32_modules or ()), *names}


def is_quantized(model: Any) -> bool:
    """Whether a quantiser of transformers has put its modules into `model`."""
    return getattr(model, "is_quantized", False)


def is_packed(item: Any) -> bool:
    """Whether bitsandbytes has made a module or parameter. Its numbers are packed and never trained."""
    return type(item).__module__.startswith("bitsandbytes.")


def copy_quantizer(old: Any, new: Any) -> None:
    """Let `new`, which has the packed modules of `old`, be known as quantised, to be saved and trained as `old` is."""
    for name in ("is_quantized", "quantization_method", "hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        if name in vars(old):
            setattr(new, name, getattr(old, name))
    if is_quantized(old):
        new.config.quantization_config = old.config.quantization_config


# -- attention ---------------------------------------------------------------------------------------------------------


def attention_implementation(config: Any) -> str | None:
    """Such as "sdpa" or "eager"."""
    return config._attn_implementation


def set_attention_implementation(config: Any, name: str | None) -> None:
    """For models that are made from `config`; a model has `set_attn_implementation`."""
    config._attn_implementation = name


def record_weights(model: Any, name: str, module: nn.Module) -> None:
    """Have transformers, which records the outputs of modules by their class, record the attention weights of `module` as it does
    those of the attention `name` of the base model, whose place it takes. It must return a pair with them."""
    owners = [model.base_model]
    for part in name.split("."):
        owners.append(getattr(owners[-1], part))
    depth, owner = next((i, m) for i, m in reversed([*enumerate(owners)][:-1]) if isinstance(m, PreTrainedModel))
    path = "." + ".".join(name.split(".")[depth:]) + "."
    for key, recorders in (getattr(owner, "_can_record_outputs", None) or {}).items():
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            kind = recorder.target_class if isinstance(recorder, OutputRecorder) else recorder
            place = getattr(recorder, "layer_name", None) or ""
            if (
                isinstance(kind, type)
                and isinstance(owners[-1], kind)
                and f".{place.strip('.')}.".replace("..", ".") in path
            ):
                module.register_forward_hook(_Recording(key))


class _Recording:
    """A forward hook. transformers' own cannot be pickled."""

    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, module: nn.Module, args: Any, outputs: Any) -> None:
        collected = output_capturing._active_collector.get()
        if collected is not None and self.key in collected and outputs[1] is not None:
            collected[self.key].append(outputs[1])


def count_all_experts(model: Any) -> None:
    """Have mixtures compute each token's experts one after the other, in products that also run on `meta` in float32, and that
    torch.export traces."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")


def apply_gate(experts: Any, values: torch.Tensor) -> torch.Tensor:
    """(N, 2 W), what the matrix of gate and up of one of the experts gives -> (N, W), what the matrix after them reads."""
    if hasattr(experts, "_apply_gate"):
        return experts._apply_gate(values)
    gate, up = values.chunk(2, dim=-1)
    return experts.act_fn(gate) * up


def product_of_experts() -> Any:
    """The operation (rows, matrices, ends of the rows of each matrix) by which mixtures compute their experts where torch.export
    traces them in fp32."""
    import transformers.integrations.moe  # noqa: F401 (registers it)

    return torch.ops.transformers.grouped_mm_fallback.default


def copy_attention_implementation(old: Any, new: Any) -> None:
    """It is not part of `config.to_dict()`. Nested configs, which the setter gives that of the whole, may have another."""
    new._attn_implementation = old._attn_implementation
    for name in old.sub_configs:
        if getattr(old, name, None) is not None:
            copy_attention_implementation(getattr(old, name), getattr(new, name))


# -- loops in a graph of torch.export -------------------------------------------------------------------------------------


def scan(step: Any, state: Any, sequences: Any) -> tuple[Any, Any]:
    """Apply `step(state, values)`, which returns the next state and an output, to each token of `sequences` (B, T, ...): the last
    state, and the outputs (B, T, ...), of any number of tokens."""
    from torch._higher_order_ops.scan import scan as scan_first

    state, outputs = scan_first(step, state, [sequence.transpose(0, 1) for sequence in sequences])
    return state, outputs.transpose(0, 1)


# -- caches ------------------------------------------------------------------------------------------------------------


def has_states(layer: Any) -> bool:
    """Whether a layer of a cache holds states of a fixed size, of convolutions or recurrent ones."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def state_of_convolution(layer: Any) -> Any:
    """The inputs (B, H, K) that a layer with states keeps of its one convolution; None if it keeps anything else too."""
    states, others = layer.conv_states, layer.recurrent_states
    states, others = (list(each.values()) if isinstance(each, dict) else [each] for each in (states, others))
    alone = type(layer) is LinearAttentionLayer and len(states) == 1 and all(other is None for other in others)
    return states[0] if alone else None


def convolution_layer(state: Any) -> Any:
    """The layer of a cache whose convolution has had the inputs `state` (B, H, K)."""
    layer = LinearAttentionLayer()
    layer.update_conv_state(state)
    return layer


def mark_stateful(model: Any) -> None:
    """Have `generate` refuse searches that take back tokens, such as assisted generation: a state cannot forget them."""
    model._is_stateful = True


# -- sound -------------------------------------------------------------------------------------------------------------


def mask_of_frames(model: Any, mask: Any, frames: int) -> Any:
    """The mask (B, frames) of the hidden states of an encoder of sound whose inputs have the mask (B, samples)."""
    to_frames = getattr(model, "_get_feature_vector_attention_mask", None)
    return mask if to_frames is None else to_frames(frames, mask)


# -- Trainer -----------------------------------------------------------------------------------------------------------


def on_device(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """A batch on the device that a Trainer trains on."""
    return trainer._prepare_inputs(batch)


def set_checkpointing(model: Any, on: bool) -> None:
    """Whether layers of `model` compute their activations again for the gradient; 5.23 has other names for it than 5.10. They do
    so where their `training` is True, without dropout all the same: it is False from then on."""
    begins = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if not on:
        getattr(model, f"{begins}_checkpointing_disable")()
        return
    getattr(model, f"{begins}_checkpointing_enable")(**{f"{begins}_checkpointing_kwargs": {"use_reentrant": False}})
    for layer in model.modules():
        if (checkpoint := getattr(layer, "_gradient_checkpointing_func", None)) is not None:
            layer._gradient_checkpointing_func = functools.partial(_checkpointed, layer, checkpoint)


def _checkpointed(layer: Any, checkpoint: Any, function: Any, *args: Any) -> Any:
    return checkpoint(functools.partial(_run_in_eval_mode, layer, function), *args)


def _run_in_eval_mode(layer: Any, function: Any, *args: Any) -> Any:
    layer.training = False
    return function(*args)
