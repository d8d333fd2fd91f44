"""A resumed training ends as the undisturbed one: its weights, its optimizer, and what `finalize` makes of it."""

import copy
import functools

import pytest
from support.cases import EXAMPLES, name_of, supports
from support.models import differences, outputs, perturbed
from support.schedules import PHASES, STEPS, scheduled_model, trainer
from support.sparse import BATCH, RAMP, WARM_UP

from hf_freeze.architectures.registry import ARCHITECTURES
from hf_freeze.methods import HeadPruning, LayerDrop
from hf_freeze.methods.parts import Schedule

# name -> (methods, the steps of 8 after which a run is resumed: before, at, within and after what happens)
RUNS = {
    "phases": (PHASES, [1, 3, 4, 5, 6, 7]),  # switches at 2, 4, 5 and 6
    "magnitude": ([RAMP], [2, 3, 5, 7]),
    "variational": ([WARM_UP], [2, 3, 5, 7]),
    "heads": ([HeadPruning(share=0.5, begin=0.25, scope="global", ramp="linear")], [1, 4, 6]),
    "learnt layer drop": ([LayerDrop(p=0.3, learned=True, seed=4)], [1, 5]),
    **{
        name_of(method): ([method], [3])
        for method in EXAMPLES
        if method.part(Schedule) is not None and supports(type(method), ARCHITECTURES["marian"])
    },
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """name -> (folder with a checkpoint of every step, model, optimizer) of a run with dropout and accumulated batches"""

    @functools.cache
    def of(name):
        folder = tmp_path_factory.mktemp("undisturbed")
        model = scheduled_model(dropout=0.2, phases=RUNS[name][0])
        running = trainer(model, folder, save_strategy="steps", save_steps=1)
        running.train()
        return folder, model, running.optimizer.state_dict()

    return of


@pytest.mark.parametrize(("name", "step"), [(name, step) for name, (_, steps) in RUNS.items() for step in steps])
def test_a_resumed_run_is_an_undisturbed_one(undisturbed, tmp_path, name, step):
    folder, whole, optimizer = undisturbed(name)
    # With noise, or a training from the start would end alike.
    model = perturbed(scheduled_model(dropout=0.2, phases=RUNS[name][0]))
    resumed = trainer(model, tmp_path)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    assert resumed.state.global_step == STEPS
    assert differences(dict(model.state_dict()), dict(whole.state_dict())) == []
    state = resumed.optimizer.state_dict()
    assert state["param_groups"] == optimizer["param_groups"]
    assert state["state"].keys() == optimizer["state"].keys()
    for number, values in optimizer["state"].items():
        assert differences(state["state"][number], values) == [], number
    if name == "phases":  # never frozen; attention; FFN and table
        assert {int(values["step"]) for values in state["state"].values()} == {8, 5, 4}
    ended, twin = copy.deepcopy(whole), copy.deepcopy(model)
    for one in (ended, twin):
        if one.finalizable:
            one.finalize()
    assert twin.config.methods == ended.config.methods
    assert differences(outputs(twin, BATCH), outputs(ended, BATCH)) == []
