"""`hf-freeze inspect`."""

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hf_freeze.cli import terminal


def inspect(
    model: Annotated[str, typer.Argument(help="Directory or Hub id of a variant or a native model.")],
    length: Annotated[int, typer.Option(min=1, help="Length of the sequence in tokens, for models of text.")] = 32,
    latency: Annotated[
        bool, typer.Option("--latency", help="Also load the weights and time the linear layers on this machine.")
    ] = False,
    tokens: Annotated[
        tuple[int, int], typer.Option(metavar="FEW MANY", help="Tokens in each forward that --latency times.")
    ] = (1, 64),
) -> None:
    """Count parameters, stored bytes and multiply-adds per component, and the memory of inference, without loading any weights.

    Example: hf-freeze inspect Helsinki-NLP/opus-mt-tr-en

    Example: hf-freeze inspect runs/freeze-ablation/row-3-seed-1/model --latency --tokens 1 64
    """
    from hf_freeze.analysis.accounting import count_parameters, multiply_adds, stored_bytes
    from hf_freeze.analysis.memory import inference_memory
    from hf_freeze.model.loading import empty_model
    from hf_freeze.publish.cards import shortened

    with terminal.one_line_errors():
        empty = empty_model(model)
        parameters, operations = count_parameters(empty), multiply_adds(empty, length=length)
        memory = {mode: inference_memory(empty, mode) for mode in _modes(empty)}
        latencies = _latency_table(type(empty), model, tokens) if latency else None
    table = Table(
        *("component", "parameters", "trainable", "stored", "forward", "backward"),
        title=f"{type(empty).__name__} {model}",
    )
    rows = [(c, parameters.by_component[c], operations.by_component[c]) for c in parameters.by_component]
    for name, count, macs in [*rows, ("all", parameters, operations)]:
        numbers = (count.total, count.trainable, count.stored, round(macs.forward), round(macs.backward))
        table.add_row(name, *(f"{number:,}" for number in numbers), end_section=name == rows[-1][0])
    console = terminal.console
    console.print(table)
    where = f"token at length {length}" if operations.example is None else f"example ({_shapes(operations.example)})"
    terminal.say(f"stored: {stored_bytes(empty):,} bytes; forward, backward: multiply-adds per {where}")
    step = "decoding step" if empty.can_generate() else "forward"
    for mode, cost in memory.items():
        terminal.say(f"{mode}: {cost.resident:,} bytes in memory; a {step} reads {cost.read:,}")
    for method in getattr(empty.config, "methods", ()):
        console.print(f"method: { {name: shortened(value) for name, value in method.items()} }")
    if latencies is not None:
        console.print(latencies)


def _modes(model: Any) -> tuple[str, ...]:
    """What `set_seeded_execution` makes a difference between; "fused" needs the same memory as "streamed"."""
    return ("resident", "streamed") if getattr(model, "seeded_tensors", None) else ("resident",)


def _shapes(example: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in example.items())


def _latency_table(model_class: Any, name: str, tokens: tuple[int, int]) -> Table:
    import torch

    from hf_freeze.analysis import linear_latencies
    from hf_freeze.analysis.latency import check_tokens

    numbers = [check_tokens(number) for number in dict.fromkeys(tokens)]
    model = model_class.from_pretrained(name).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    where = f"{model.device.type}, {model.dtype}".replace("torch.", "")
    table = Table(
        title=f"Linears of attention and FFN: median time of a forward ({where}, {torch.get_num_threads()} threads)"
    )
    for heading in ("linear", "number", "tokens", "computed", "ms", "plain ms", "ratio"):
        table.add_column(heading, justify="right" if heading in ("number", "ms", "plain ms", "ratio") else "left")
    for linear in linear_latencies(model, numbers):
        what = f"{linear.layer} {linear.inputs} to {linear.outputs}" + f", {linear.setting}" * bool(linear.setting)
        if linear.tokens != numbers[0]:
            what = ""  # the same linear as in the row above
        ratio = "" if linear.path == "plain" else f"{linear.ms / linear.plain_ms:.2f}"
        cells = (what, linear.count, linear.tokens, linear.path, f"{linear.ms:.3f}", f"{linear.plain_ms:.3f}", ratio)
        table.add_row(*(escape(str(cell)) for cell in cells), end_section=linear.tokens == numbers[-1])
    return table
