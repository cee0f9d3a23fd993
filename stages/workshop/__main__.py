"""`python -m stages.workshop` is the `course` command."""

from stages.workshop.cli import app

app(prog_name="course")
