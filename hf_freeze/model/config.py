"""The config of a variant: that of its backbone, with the methods. Untrusted input is checked before anything is allocated."""

import copy
import re
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import transformers
from packaging.version import InvalidVersion, Version

from hf_freeze._version import __version__
from hf_freeze.architectures.base import LARGEST_LABELS, Architecture, check_sizes, read, set_fields
from hf_freeze.architectures.contradictions import check_contradictions
from hf_freeze.architectures.derive import derive
from hf_freeze.architectures.kinds import fields_of_kinds, tells_kinds
from hf_freeze.architectures.registry import ARCHITECTURES, VARIANT_PREFIX
from hf_freeze.architectures.shrink import sizes_in
from hf_freeze.architectures.stored import from_data, to_data
from hf_freeze.compat.peft import share_default_targets
from hf_freeze.compat.transformers import MixedConfig, copy_attention_implementation
from hf_freeze.io import write_whole
from hf_freeze.methods.base import Method
from hf_freeze.methods.order import check_order
from hf_freeze.methods.parts import layers_kept
from hf_freeze.methods.registry import method_from_dict, method_to_dict
from hf_freeze.model.migrations import migrate
from hf_freeze.model.remote_code import MODULE, has_remote_code, module_for

_LONGEST = 1000  # characters of an error message
INITS = ("backbone", "marian")
# Field -> its default.
VARIANT_FIELDS: dict[str, Any] = {
    "methods": field(default_factory=list),
    "init": "backbone",
    "hf_freeze_version": None,
    "digests": field(default_factory=dict),
    "original_fields": field(default_factory=dict),
    "description": None,
    "calibration": None,
}


class VariantConfigMixin(MixedConfig):
    """The fields that a variant adds to the config of its backbone; all are untrusted input, checked at construction.

    `methods`: the methods applied, in order, as plain data. `init`: how fresh weights are drawn, `"backbone"` (natively) or
    `"marian"` (`make_variant`). `digests`: name below `base_model_prefix` -> digest of the fp32 values of a tensor that is
    not stored. `original_fields`: native fields that methods have changed, such as the depth, with the values that the
    backbone is built with; None makes the methods change them at construction. `description`: what was derived of a family that
    no file of hf_freeze describes (`architectures/stored.py`); None has it derived at construction. `calibration`: how many
    `texts` and `tokens` the methods were calibrated with; None without.
    """

    _layers_left: dict[str, list[int]]
    code_files: dict[str, str] | None = None  # while a model saves its folder: name -> source of the code that loads it
    of_backbone: bool = False  # while a variant builds its backbone from this config
    methods: list
    init: str
    hf_freeze_version: str | None
    digests: dict
    original_fields: dict | None
    description: dict | None
    calibration: dict | None

    def __post_init__(self, **kwargs: Any) -> None:
        try:
            _check_labels(kwargs.get("num_labels"), type(self).model_type)
            super().__post_init__(**kwargs)
            self._check()
        except ValueError as error:
            message = str(error)
            if len(message) <= _LONGEST:
                raise
            # The message quotes a value, which may be very long in a config from the Hub.
            raise ValueError(f"{message[: _LONGEST - 200]} ... {message[-200:]}") from None

    def _check(self) -> None:
        _check_version(self.hf_freeze_version)
        if not isinstance(self.methods, list) or not all(isinstance(method, dict) for method in self.methods):
            raise ValueError(f"methods must be a list of dicts, not {self.methods!r}")
        if self.hf_freeze_version is not None and migrate(self, self.hf_freeze_version):
            self.hf_freeze_version = __version__  # for its copies
        if self.init not in INITS:
            raise ValueError(f"unknown init {self.init!r}; choose from {list(INITS)}")
        if not isinstance(self.digests, dict) or not all(map(_is_digest, self.digests.values())):
            raise ValueError(f"digests must map tensor names to hexadecimal digits, not {self.digests!r}")
        _check_calibration(self.calibration)
        before, changed = self.before_methods(), {}
        kept = self._layers_left = {}
        architecture = self._native_architecture = self._describe(before)
        methods = [method_from_dict(data) for data in self.methods]
        for number, method in enumerate(methods):
            if (reason := method.refusal(self._native_architecture)) is not None:
                raise ValueError(f"method {method.name!r} does not support {architecture.model_type!r}; {reason}")
            check_order(method, methods[:number])
            method.check(architecture, before)
            changed |= (new := method.config_changes(architecture, before))
            check_sizes(architecture.model_type, SimpleNamespace(**new), architecture.sizes)
            for stack, numbers in layers_kept(method, architecture, before).items():
                kept[stack] = [kept[stack][number] for number in numbers] if stack in kept else list(numbers)
            architecture = method.describe(architecture, before)
            set_fields(before, new)
            architecture.check_sizes(before)
        if kept and self.original_fields is None:
            native = native_config(self.before_methods())
            changed |= fields_of_kinds(native, self._native_architecture, kept, changed)
        elif kept:  # those that were found when it was made
            names = [name for name in self.original_fields or () if name not in changed and tells_kinds(name)]
            changed |= {name: read(self, name) for name in names}
        self._follow(changed)
        self._parsed = methods

    def _describe(self, before: Any) -> Architecture:
        """The architecture of the backbone, whose config is `before`: described by hand, stored, or derived now."""
        native_type = type(self).model_type.removeprefix(VARIANT_PREFIX)
        architecture = ARCHITECTURES.get(native_type)
        sizes = sizes_in(self) if architecture is None else architecture.sizes
        for config in (self, before):
            check_sizes(native_type, config, sizes)
        check_contradictions(before)
        if architecture is None and self.description is not None:
            architecture = from_data(self.description, before)
        elif architecture is None:
            architecture = derive(native_config(before))
            self.description = to_data(architecture, transformers.__version__)
        architecture.check_sizes(before)
        return architecture

    @property
    def native_architecture(self) -> Architecture:
        """The architecture of the backbone, before any method."""
        return self._native_architecture

    @property
    def layers_left(self) -> dict[str, list[int]]:
        """Stack -> the numbers of its layers in the backbone, in order, for stacks whose layers methods have renumbered."""
        return self._layers_left

    @property
    def decoder_depth(self) -> int | None:
        """The number of layers of the decoder, in a model that has an encoder too."""
        stacks = self._native_architecture.stacks
        return read(self, stacks["decoder"].depth) if {"encoder", "decoder"} <= stacks.keys() else None

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> Any:
        """As the native method. With `decoder=True`, which sizes caches, the config has the depth of the decoder: the native one
        of T5 has that of the encoder. Its result gives the same when asked again, as caches do."""
        config = super().get_text_config(decoder=decoder, encoder=encoder)
        if not decoder or encoder or "_native_architecture" not in vars(self):
            return config
        depth = self.decoder_depth
        if depth is not None:
            config = copy.deepcopy(config) if config is self else config
            # The native method takes away `decoder_layers`, which then reads as the default of the class.
            set_fields(config, {stack.depth: depth for stack in self._native_architecture.stacks.values()})
            if config.num_hidden_layers != depth:
                config.num_hidden_layers = depth
        return config

    def before_methods(self) -> Any:
        """A copy with the native fields that the backbone is built with. Raises ValueError for unknown fields."""
        fields = self.original_fields
        if fields is not None and not isinstance(fields, dict):
            raise ValueError(f"original_fields must be a dict, not {fields!r}")
        for name, value in (fields or {}).items():
            if name in (*VARIANT_FIELDS, "model_type") or type(_read(self, name)) is not type(value):
                raise ValueError(f"original_fields: {name!r} cannot be {value!r}: it is {_read(self, name)!r} now")
        before = copy.deepcopy(self)
        set_fields(before, fields or {})
        return before

    @property
    def native_before_methods(self) -> Any:
        """The native config that the backbone is built with."""
        return native_config(self.before_methods())

    def _follow(self, changed: dict[str, Any]) -> None:
        """Apply the fields that the methods change; if they were applied before, check them."""
        if self.original_fields is None:
            self.original_fields = {name: read(self, name) for name in changed}
            set_fields(self, changed)
        differ = [name for name, value in changed.items() if read(self, name) != value]
        if differ or set(self.original_fields) != set(changed):
            raise ValueError(
                f"the methods make {changed} of {self.original_fields}, but the config says "
                f"{ {name: read(self, name) for name in changed} }: it was changed by hand"
            )

    @property
    def parsed_methods(self) -> list[Method]:
        """`methods` as objects."""
        return list(self._parsed)

    def set_methods(self, methods: Sequence[Method]) -> None:
        """Replace the methods: what `finalize` leaves, or with other token ids after a resize."""
        self.methods = [method_to_dict(method) for method in methods]
        self._parsed = list(methods)

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """As the native method, with the files of code that `auto_map` names."""
        super().save_pretrained(save_directory, push_to_hub, **kwargs)
        if has_remote_code(self):
            for name, source in (self.code_files or {MODULE: module_for(self)}).items():
                # what a model has saved there knows more
                if self.code_files or not Path(save_directory, name).exists():
                    write_whole(Path(save_directory, name), source)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing. transformers calls it for a class that remote code loads, and would then save the source file of the
        class; a variant saves its own code (`save_pretrained(remote_code=True)`)."""

    def to_dict(self) -> dict[str, Any]:
        # PEFT calls to_dict() and then looks up the model_type: the last moment to enter ours without importing PEFT for
        # every user.
        variant_type = type(self).model_type
        native_type = variant_type.removeprefix(VARIANT_PREFIX)
        by_hand = ARCHITECTURES.get(native_type)
        alike = (native_type, None if by_hand is None else by_hand.named_like)
        share_default_targets(variant_type, *(name for name in alike if name is not None))
        data = super().to_dict()
        for name in ("_parsed", "_native_architecture", "_layers_left", "code_files", "of_backbone"):
            data.pop(name, None)
        for name in ("description", "calibration"):
            if data.get(name) is None:
                data.pop(name, None)
        return data


def native_config_class(config_class: Any) -> Any:
    """The native config class of a variant's, or the class itself."""
    return getattr(config_class, "native_class", config_class)


def native_config(config: Any) -> Any:
    """The config of a variant as a native one, without the fields that make it a variant's."""
    left_out = (*VARIANT_FIELDS, "model_type", "auto_map")  # which names code that loads the variant
    data = {name: value for name, value in config.to_dict().items() if name not in left_out}
    native = native_config_class(type(config)).from_dict(data)
    copy_attention_implementation(config, native)
    return native


def cache_fields(config: Any) -> dict[str, int]:
    """What the native config of a variant's `config` lacks to generate with a cache: transformers would size that of a T5 by its
    encoder, unless the config has `decoder_layers`. Empty where the cache is deep enough."""
    depth = config.decoder_depth
    if depth is None or native_config(config).get_text_config(decoder=True).num_hidden_layers >= depth:
        return {}
    return {"decoder_layers": depth}


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def _read(config: Any, name: Any) -> Any:
    """The value of a field that a config from the Hub names; None if there is no such field."""
    try:
        return read(config, name)
    except (AttributeError, TypeError):
        return None


def _check_labels(count: Any, model_type: str) -> None:
    """transformers names each label, one by one, before all other checks."""
    if isinstance(count, int) and count > LARGEST_LABELS:
        native = model_type.removeprefix(VARIANT_PREFIX)
        raise ValueError(f"{native} config: num_labels={count} is outside 1..{LARGEST_LABELS}")


def _check_calibration(calibration: Any) -> None:
    if calibration is None:
        return
    is_dict = isinstance(calibration, dict) and calibration.keys() == {"texts", "tokens"}
    if not is_dict or any(type(count) is not int or count < 0 for count in calibration.values()):
        raise ValueError(f"calibration must be {{'texts': a number, 'tokens': a number}}, not {calibration!r}")


def _check_version(version: Any) -> None:
    try:
        newer = version is not None and Version(version) > Version(__version__)
    except (InvalidVersion, TypeError):
        raise ValueError(f"hf_freeze_version {version!r} is not a version number") from None
    if newer:
        raise ValueError(f"this model was written by hf_freeze {version}, newer than {__version__}: update hf_freeze")
