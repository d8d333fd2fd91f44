"""Tells a variant in the Trainer how far training is."""

from typing import Any

from transformers import TrainerCallback
from transformers.modeling_utils import unwrap_model
from transformers.trainer_callback import ExportableState

from hf_freeze.methods.parts import Schedule, parts_of
from hf_freeze.methods.registry import method_to_dict


class VariantCallback(TrainerCallback, ExportableState):
    """`Trainer(callbacks=[VariantCallback()])` for every variant with a schedule; does nothing for other models.

    The progress is `state.global_step / state.max_steps`, so that a resumed run continues exactly. Raises ValueError at the
    start of a training by several processes whose DistributedDataParallel would wait for gradients of what is frozen for a
    while, and where a run is resumed with other schedules than its checkpoint was made with.
    """

    schedules: list[dict[str, Any]] | None = None  # of the methods, while a model is trained: checkpoints hold them

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"schedules": self.schedules}}

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._rewind(model)  # the Trainer's optimizer takes what is trainable when it is made: in train()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        variant = _variant(model)
        if variant is None:
            return
        self._check_schedules(variant, state)
        names = variant.frozen_for_a_while()
        if args.world_size > 1 and not _finds_unused(args, variant) and (names or variant.skips):
            what = f"{names[0]!r} is frozen for a while" if names else "layers are left out in some steps"
            raise ValueError(
                f"{what}, but with {args.world_size} processes every trainable parameter must get a gradient: pass "
                "ddp_find_unused_parameters=True (with activation checkpointing the default is False), and no ddp_static_graph"
            )
        variant.advance(state.global_step, state.max_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        variant = _variant(model)
        if variant is not None:
            variant.advance(state.global_step, state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._rewind(model)

    def _check_schedules(self, variant: Any, state: Any) -> None:
        """What is scheduled is a function of the step: a resumed run must follow the same function."""
        own = [method_to_dict(method) for method, _ in parts_of(variant.methods, Schedule)]
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        then = (saved[0] if isinstance(saved, list) else saved).get("attributes", {}).get("schedules")
        if state.global_step and then is not None and then != own:
            raise ValueError(
                f"resumed at step {state.global_step} with the schedules {own}, but the checkpoint was made with {then}: train "
                "from the start, or with the same"
            )
        self.schedules = own

    @staticmethod
    def _rewind(model: Any) -> None:
        variant = _variant(model)
        if variant is not None:
            variant.rewind()


def _variant(model: Any) -> Any:
    """The variant inside DistributedDataParallel, torch.compile or PEFT; None where there is none."""
    inner = unwrap_model(model)
    return inner if hasattr(inner, "advance") else None


def _finds_unused(args: Any, model: Any) -> bool:
    """What the Trainer gives to DistributedDataParallel."""
    if getattr(args, "ddp_static_graph", None):
        return False
    if args.ddp_find_unused_parameters is not None:
        return args.ddp_find_unused_parameters
    kind = "activation" if hasattr(args, "activation_checkpointing") else "gradient"  # its older name
    return not (getattr(model, f"is_{kind}_checkpointing") or getattr(args, f"{kind}_checkpointing"))
