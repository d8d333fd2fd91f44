"""`python -m hf_freeze`, for launchers that start a module: torchrun --nproc_per_node 2 -m hf_freeze run RECIPE.yaml"""

from hf_freeze.cli import app

app(prog_name="hf-freeze")
