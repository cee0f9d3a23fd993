"""`stepinfer`: the engine from the command line. A command imports what it needs when it runs: help is quick.

No module of a stage is imported here: `--mine` must be heard before.
"""

import typer

from stages.cli.bench import bench
from stages.cli.chat import chat
from stages.cli.errors import plain_errors as plain_errors
from stages.cli.generate import generate
from stages.cli.models import download
from stages.cli.serve import serve

app = typer.Typer(help="An LLM inference engine in nine stages.", no_args_is_help=True, add_completion=False)
app.command()(serve)
app.command()(chat)
app.command()(generate)
app.command()(download)
app.command(add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench)
