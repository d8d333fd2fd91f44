"""`hf-freeze inspect`."""

from typing import Annotated, Any

import typer

from hf_freeze import terminal

_TIMES = ("linear", "number", "tokens", "computed", "ms", "plain ms", "ratio")


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
    from hf_freeze.methods.registry import written
    from hf_freeze.model.loading import empty_model

    with terminal.one_line_errors():
        empty = empty_model(model)
        parameters, operations = count_parameters(empty), multiply_adds(empty, length=length)
        memory = {mode: inference_memory(empty, mode) for mode in _modes(empty)}
        latencies = _latencies(type(empty), model, tokens) if latency else None
    counts = [(c, parameters.by_component[c], operations.by_component[c]) for c in parameters.by_component]
    rows = []
    for name, count, macs in [*counts, ("all", parameters, operations)]:
        numbers = (count.total, count.trainable, count.stored, round(macs.forward), round(macs.backward))
        rows.append((name, *(f"{number:,}" for number in numbers)))
    headings = ("component", "parameters", "trainable", "stored", "forward", "backward")
    title = f"{type(empty).__name__} {model}"
    terminal.show_table(headings, rows, title=title, numbers=headings[1:], sections=[len(counts) - 1])
    where = f"token at length {length}" if operations.example is None else f"example ({_shapes(operations.example)})"
    terminal.say(f"stored: {stored_bytes(empty):,} bytes; forward, backward: multiply-adds per {where}")
    step = "decoding step" if empty.can_generate() else "forward"
    for mode, cost in memory.items():
        terminal.say(f"{mode}: {cost.resident:,} bytes in memory; a {step} reads {cost.read:,}")
    for method in getattr(empty.config, "parsed_methods", ()):
        terminal.say(f"method: {written(method, _short)}")
    if latencies is not None:
        title, rows, sections = latencies
        terminal.show_table(_TIMES, rows, title=title, numbers=_TIMES[1:2] + _TIMES[4:], sections=sections)


def _short(value: Any) -> str:
    from hf_freeze.methods.registry import shortened

    return str(shortened(value)) if isinstance(value, (list, dict)) else repr(value)


def _modes(model: Any) -> tuple[str, ...]:
    """What `set_seeded_execution` makes a difference between; "fused" needs the same memory as "streamed"."""
    return ("resident", "streamed") if getattr(model, "seeded_tensors", None) else ("resident",)


def _shapes(example: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {' x '.join(map(str, shape))}" for name, shape in example.items())


def _latencies(model_class: Any, name: str, tokens: tuple[int, int]) -> tuple[str, list[Any], list[int]]:
    """The title, the rows, and after which of them a line is."""
    import torch

    from hf_freeze.analysis import linear_latencies
    from hf_freeze.analysis.latency import check_tokens

    numbers = [check_tokens(number) for number in dict.fromkeys(tokens)]
    model = model_class.from_pretrained(name).eval().to("cuda" if torch.cuda.is_available() else "cpu")
    where = f"{model.device.type}, {model.dtype}".replace("torch.", "")
    title = f"Linears of attention and FFN: median time of a forward ({where}, {torch.get_num_threads()} threads)"
    rows, sections = [], []
    for linear in linear_latencies(model, numbers):
        what = f"{linear.layer} {linear.inputs} to {linear.outputs}" + f", {linear.setting}" * bool(linear.setting)
        if linear.tokens != numbers[0]:
            what = ""  # the same linear as in the row above
        ratio = "" if linear.path == "plain" else f"{linear.ms / linear.plain_ms:.2f}"
        sections += [len(rows)] * (linear.tokens == numbers[-1])
        times = f"{linear.ms:.3f}", f"{linear.plain_ms:.3f}", ratio
        rows.append((what, linear.count, linear.tokens, linear.path, *times))
    return title, rows, sections
