"""`python -m stages.cli` is `stepinfer`."""

from stages.cli import app

app(prog_name="stepinfer")
