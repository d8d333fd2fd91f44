"""How fast a run learned: the steps until its score on the dev set was 90 % of the final one."""

from typing import Any

SHARE = 0.9
FEWEST = 5  # evaluations in training; fewer are too far apart to say when it was


def steps_to_share(log: list[dict[str, Any]], quality: str) -> int | None:
    """The step of the first evaluation whose score is at least 90 % of that of the model that was kept (the last evaluation). The
    score is that of the task, `quality`, else accuracy; else a perplexity, which is to be at most the final one / 0.9.

    None where there were too few evaluations in training, or the final score is not above 0.
    """
    evaluations = [entry for entry in log if "eval_loss" in entry and "step" in entry]
    if not evaluations:
        return None
    final = evaluations[-1]
    name = next((name for name in scores_of(quality) if name in final), None)
    in_training = {entry["step"]: entry[name] for entry in reversed(evaluations) if name in entry} if name else {}
    if name is None or len(in_training) < FEWEST or final[name] <= 0:
        return None
    falls = name == "eval_perplexity"
    reached = (
        step
        for step, score in sorted(in_training.items())
        if (score <= final[name] / SHARE if falls else score >= final[name] * SHARE)
    )
    return next(reached, None)


def scores_of(quality: str) -> list[str]:
    """What evaluations in training may call the score, the first that there is."""
    return [f"eval_{quality}", "eval_accuracy", "eval_perplexity"]
