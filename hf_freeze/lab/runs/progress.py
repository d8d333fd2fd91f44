"""What a grid prints about its runs."""

from typing import Any

from rich.console import Console
from rich.progress import Progress


def show_progress(bars: Progress, task: Any, message: dict[str, Any], console: Console, name: str) -> None:
    if "step" in message:
        shown = ("loss", "eval_perplexity", "eval_accuracy")
        note = " ".join(f"{key} {message[key]:.3g}" for key in shown if key in message)
        bars.update(task, completed=message["step"], total=message["steps"], note=note)
        if (dev := dev_score(message)) and not console.is_terminal:
            console.print(f"{name}: epoch {message['epoch']:.3g}, {dev}")
    else:
        bars.update(task, note=message["stage"])


def dev_score(message: dict[str, Any]) -> str | None:
    if "eval_perplexity" in message:
        return f"dev perplexity {message['eval_perplexity']:.2f}"
    return f"dev accuracy {message['eval_accuracy']:.2%}" if "eval_accuracy" in message else None


def summary_line(record: dict[str, Any], seconds: float) -> str:
    metrics, parameters = record["metrics"], record["parameters"]
    shown = (
        ("test_bleu", "BLEU", "5.1f"),
        ("test_perplexity", "test perplexity", "7.2f"),
        ("test_accuracy", "test accuracy", "6.2%"),
        ("dev_perplexity", "dev perplexity", "7.2f"),
        ("dev_accuracy", "dev accuracy", "6.2%"),
    )
    score = "  ".join(f"{heading} {metrics[key]:{form}}" for key, heading, form in shown if key in metrics)
    return (
        f"row {record['row']:<4} seed {record['seed']} {record['label']:<28} {score}  "
        f"trainable {parameters['trainable_share']:4.0%}  {seconds:4.0f} s"
    )
