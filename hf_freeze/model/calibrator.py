"""Gives the methods of one `make_variant` what each linear sees: on texts, or from a calibration that was saved."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from hf_freeze import surgery
from hf_freeze.methods.base import Method
from hf_freeze.methods.parts import KeptTokens
from hf_freeze.model.calibrating import CalibrationPass
from hf_freeze.model.calibration import Calibration, Report, StoredMoments, warned_once
from hf_freeze.model.fidelity import fidelity_on
from hf_freeze.model.paging import Paged
from hf_freeze.model.samples import Samples, samples_of
from hf_freeze.model.weights import regenerate
from hf_freeze.solvers.moments import Moments


class Calibrator:
    """Gives the methods of one `make_variant` their statistics, each of the model as it is by then, or those that were saved.

    `calibration`: what `samples_of` takes, or a `Calibration`. Raises the ValueError of `Calibration.check`.
    """

    def __init__(
        self,
        model: Any,
        calibration: Any,
        tokenizer: Any,
        make: Callable[[Any, Method], Any],
        paged: Paged | None = None,
    ) -> None:
        """`make(model, method)`: the variant without a calibration. `paged`: as for `CalibrationPass`."""
        self._make, self._paged = make, paged
        self._stored: Mapping[str, Moments] | None = None
        self.samples: Samples | None = None
        if isinstance(calibration, Calibration):
            calibration.check(model)
            self._stored = calibration.moments
            self.report = Report(calibration.texts, calibration.tokens)
        else:
            self.samples = samples_of(model, calibration, tokenizer)
            self.report = Report(self.samples.texts, self.samples.tokens)

    @property
    def runs(self) -> bool:
        """Whether there are texts to run models on."""
        return self._stored is None

    @contextmanager
    def statistics(self, old: Any, new: Any) -> Iterator[CalibrationPass | StoredMoments]:
        with warned_once():
            if self.samples is None:
                with torch.no_grad(), surgery.holding(old):
                    yield StoredMoments(self._stored or {}, old, self.report)
                return
            calibration = CalibrationPass(old, new, self.samples.batches, self.report, self._make, self._paged)
            with calibration.running() as statistics:
                yield statistics

    def convert(self, method: Method, old: Any, new: Any) -> None:
        """`method.convert` with statistics, if it uses them."""
        if method.facts.calibration is None:
            self.report.note(f"{method.name}: is the same with a calibration as without")
            method.convert(old, new)
            if method.facts.renumbers == "tokens" and self.samples is not None:
                tokens: Any = method.part(KeptTokens)
                self.samples = self.samples.renumbered(tokens.kept)
        else:
            if self._paged is not None:
                self._paged.say(f"{method.name}:")
            regenerate(new)  # the new model runs, and what a seed draws has no values yet
            with self.statistics(old, new) as statistics:
                method.convert(old, new, statistics)
        if self._stored is not None and (method.facts.shares_layers or method.facts.renumbers == "layers"):
            self._stored = {}  # names are those of other layers from now on

    def compares(self, method: Method) -> bool:
        """Whether the method's plain form is made, too, to keep the better one: where there are texts for it, and memory."""
        has_both = method.facts.calibration == "used"
        return has_both and self.samples is not None and bool(self.samples.held_out) and self._paged is None

    def better(self, method: Method, original: Any, calibrated: Any, plain: Any) -> Any:
        """That of two variants whose outputs are nearer those of the `original` on the texts that are held out."""
        held_out = self.samples.held_out if self.samples is not None else []
        distances = [fidelity_on(original, one, held_out).distance for one in (calibrated, plain)]
        if distances[0] <= distances[1]:
            return calibrated
        self.report.note(
            f"{method.name}: on texts held out, the form with calibration is further from the original ({distances[0]:.3g}) than "
            f"the one without ({distances[1]:.3g}), which was taken"
        )
        return plain
