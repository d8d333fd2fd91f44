"""A Trainer callback that advances the schedules of a variant."""

from typing import Any

from transformers import TrainerCallback
from transformers.modeling_utils import unwrap_model
from transformers.trainer_callback import ExportableState

from hf_freeze.methods.parts import Schedule, parts_of
from hf_freeze.methods.registry import method_to_dict


class VariantCallback(TrainerCallback, ExportableState):
    """Needed by every variant with a schedule: `Trainer(callbacks=[VariantCallback()])`. It does nothing for other models.

    The progress is `state.global_step / state.max_steps`, so a resumed run continues exactly. Raises ValueError when training
    starts, if several processes train and DistributedDataParallel would wait for the gradients of temporarily frozen
    parameters, or if a run resumes with schedules that differ from its checkpoint's.
    """

    schedules: list[dict[str, Any]] | None = None  # of the methods of the trained model; saved in checkpoints

    def state(self) -> dict[str, Any]:
        """The schedules, as the Trainer stores them in its checkpoints."""
        return {"args": {}, "attributes": {"schedules": self.schedules}}

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        # Thaw everything that trains at some time: the Trainer later creates its optimizer from the trainable parameters.
        self._rewind(model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Check the schedules, and tell the model the first step. Raises ValueError as the class says."""
        variant = _variant(model)
        if variant is None:
            return
        self._check_schedules(variant, state)
        names = variant.frozen_for_a_while()
        if args.world_size > 1 and not _finds_unused(args, variant) and (names or variant.skips):
            reason = f"{names[0]!r} is frozen for a while" if names else "layers are left out in some steps"
            raise ValueError(
                f"{reason}, but with {args.world_size} processes every trainable parameter must get a gradient: pass "
                "ddp_find_unused_parameters=True (the default is False with activation checkpointing), and no ddp_static_graph"
            )
        variant.advance(state.global_step, state.max_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        variant = _variant(model)
        if variant is not None:
            variant.advance(state.global_step, state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._rewind(model)

    def _check_schedules(self, variant: Any, state: Any) -> None:
        """Schedules are functions of the step, so a resumed run must have the same schedules as its checkpoint."""
        schedules = [method_to_dict(method) for method, _ in parts_of(variant.methods, Schedule)]
        state_of_callback = state.stateful_callbacks.get(type(self).__name__, {})
        if isinstance(state_of_callback, list):
            state_of_callback = state_of_callback[0]
        saved = state_of_callback.get("attributes", {}).get("schedules")
        if state.global_step and saved is not None and saved != schedules:
            raise ValueError(
                f"resumed at step {state.global_step} with the schedules {schedules}, but the checkpoint was made with {saved}: "
                "use the same schedules, or train from the start"
            )
        self.schedules = schedules

    @staticmethod
    def _rewind(model: Any) -> None:
        variant = _variant(model)
        if variant is not None:
            variant.rewind()


def _variant(model: Any) -> Any:
    """The variant inside DistributedDataParallel, torch.compile or PEFT; None for other models."""
    inner = unwrap_model(model)
    return inner if hasattr(inner, "advance") else None


def _finds_unused(args: Any, model: Any) -> bool:
    """The `find_unused_parameters` that the Trainer passes to DistributedDataParallel."""
    if getattr(args, "ddp_static_graph", None):
        return False
    if args.ddp_find_unused_parameters is not None:
        return args.ddp_find_unused_parameters
    kind = "activation" if hasattr(args, "activation_checkpointing") else "gradient"  # its older name
    return not (getattr(model, f"is_{kind}_checkpointing") or getattr(args, f"{kind}_checkpointing"))
