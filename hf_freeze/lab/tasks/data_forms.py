"""The forms of data by their earlier place; they are in `lab/recipes/settings.py`."""

from hf_freeze.lab.recipes.settings import SPLITS as SPLITS
from hf_freeze.lab.recipes.settings import data_form as data_form
