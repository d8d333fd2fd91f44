"""Counts of small models of all model types against torch's counts on the real modules.

    python benchmarks/counts.py                  # every model type that hf_freeze understands: some minutes
    python benchmarks/counts.py --only bert,t5

Claim: `multiply_adds(model).forward` is what torch's FlopCounterMode counts in a forward of the real small model on the same
inputs, in eval mode (two flops are one multiply-add), and `count_parameters(model).total` is the number of values in its distinct
parameters, without sinusoidal positions, which are constants. Both are exact, for every model type.

A line shows the difference or the error; model types for which both counts are equal are only counted, unless `--all` is given.
"""

import argparse
import contextlib
import io
import time
import warnings
from typing import Any

import _shared
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hf_freeze import count_parameters, multiply_adds
from hf_freeze.analysis.accounting import example_inputs
from hf_freeze.architectures.families import model_types
from hf_freeze.architectures.published import default_config
from hf_freeze.architectures.registry import architecture_of
from hf_freeze.architectures.shrink import shrink
from hf_freeze.architectures.tasks import AUTO_CLASSES

LENGTH = 16


def small_model(model_type: str) -> Any:
    """A small model with random weights, for the first task of the model type; None if the type is not understood."""
    try:
        architecture = architecture_of(default_config(model_type))
    except Exception:  # not described, or its default config does not work at all
        return None
    config = shrink(default_config(model_type))
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return AUTO_CLASSES[architecture.tasks[0]].from_config(config).eval()


def real_count(model: Any) -> float:
    """Multiply-adds of the real modules, as one product for each matrix: other kernels are not counted."""
    model.set_attn_implementation("eager")
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    inputs, tokens = example_inputs(model, LENGTH)
    # Not under no_grad, where the counter fails on some mixtures.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**inputs)
    return counter.get_total_flops() / 2 / tokens


def attempt(count: Any, *arguments: Any) -> tuple[Any, str]:
    """(result, "") or (None, the first line of the error)."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return count(*arguments), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:160]


def compare(model_type: str) -> dict[str, Any] | None:
    """The counts of one model type; None if it is not understood."""
    model, problem = attempt(small_model, model_type)
    if model is None and not problem:
        return None
    if problem:
        return {"problem": f"no small model: {problem}", "equal": False}
    fixed = {id(p) for module in model.modules() if "Sinusoidal" in type(module).__name__ for p in module.parameters()}
    parameters = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in fixed)
    constant, problem = attempt(count_parameters, model)
    counted, counting = attempt(lambda: multiply_adds(model, length=LENGTH).forward)
    real, running = attempt(real_count, model)
    found = {
        "parameters": parameters, "parameters counted": constant and constant.total, "real": real, "counted": counted,
        "problem": problem or counting or (running and f"the real model: {running}"),
    }  # fmt: skip
    equal = counted is not None and counted == real and found["parameters counted"] == parameters
    return found | {"equal": equal}


def cell(value: Any) -> str:
    return "" if value is None else f"{value:,}"


def main() -> None:
    parser = _shared.parser(__doc__, presets=False)
    parser.add_argument("--only", help="model types, separated by commas")
    parser.add_argument("--all", action=argparse.BooleanOptionalAction, help="also show the equal ones")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    start, found = time.time(), {}
    for model_type in options.only.split(",") if options.only else model_types():
        result = compare(model_type)
        if result is not None:
            found[model_type] = result
    columns = ["parameters", "parameters counted", "real", "counted"]
    lines = [
        [name, *(cell(result.get(column)) for column in columns), result["problem"]]
        for name, result in found.items()
        if options.all or not result["equal"]
    ]
    header = ["model type", "parameters", "counted", "multiply-adds of the real modules", "counted", "problem"]
    equal = sum(result["equal"] for result in found.values())
    missed = [name for name, result in found.items() if not result["equal"] and not result["problem"]]
    summary = (
        f"{equal} of {len(found)} model types are counted as torch counts the real modules; {len(missed)} differ; "
        f"{len(found) - equal - len(missed)} could not be counted; {time.time() - start:.0f} s"
    )
    _shared.report(options, _shared.markdown(header, lines), summary)


if __name__ == "__main__":
    main()
