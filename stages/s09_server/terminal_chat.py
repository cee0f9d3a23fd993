"""A conversation in a terminal, or through a pipe: every line is a message, and the answer streams."""

from __future__ import annotations

import contextlib
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field

import typer

from stages.s01_forward.tokenizer import Message
from stages.s09_server.chat_model import ChatError, ChatModel

HELP = """\
/reset         forget the conversation
/system TEXT   tell the model who it is, from now on; without TEXT: nothing
/exit          end; so does Ctrl-D
Ctrl-C stops an answer."""
PROMPT = ">>> "


@dataclass
class Conversation:
    """What has been said."""

    system: str = ""
    turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """As the model reads it."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns


def converse(model: ChatModel, system: str = "") -> int:
    """Until there are no more messages. The exit code: 1 if a message from a pipe was not answered."""
    conversation, at_terminal = Conversation(system), sys.stdin.isatty()
    if at_terminal:
        note(f"You are talking to {model.name}. /help says what else there is.")
    failed = False
    for line in lines(at_terminal):
        if line.startswith("/"):
            if not command(conversation, line):
                break
        else:
            failed |= not answer(model, conversation, line)
    return int(failed and not at_terminal)


def lines(at_terminal: bool) -> Iterator[str]:
    """What is typed or piped, without empty lines."""
    if not at_terminal:
        yield from filter(None, map(str.strip, sys.stdin))
        return
    with contextlib.suppress(ImportError):  # Windows has none, and its terminal edits lines by itself
        import readline  # noqa: F401  # gives `input` a history and keys to edit with
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo()
            note("/exit or Ctrl-D ends this.")
            continue
        if line:
            yield line


def command(conversation: Conversation, line: str) -> bool:
    """Do what a line with a slash says. False: it was the last."""
    name, _, rest = line.partition(" ")
    if name in ("/exit", "/quit"):
        return False
    if name == "/reset":
        conversation.turns.clear()
        note("The conversation begins anew.")
    elif name == "/system":
        conversation.system = rest.strip()
        note("The model is told so from now on." if conversation.system else "The model is told nothing.")
    elif name == "/help":
        note(HELP)
    else:
        note(f"There is no command {name}.\n{HELP}")
    return True


def answer(model: ChatModel, conversation: Conversation, question: str) -> bool:
    """Ask, and show the answer as it comes. A question that got none is not kept. False: something went wrong."""
    conversation.turns.append({"role": "user", "content": question})
    told: list[str] = []
    trouble, remark = "", ""
    try:
        with contextlib.closing(model.answer(conversation.messages)) as stream:
            for piece in stream:
                told.append(piece)
                sys.stdout.write(printable(piece))
                sys.stdout.flush()
        remark = model.cut
    except ChatError as error:
        trouble = str(error)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        remark = "stopped"
    if text := "".join(told):
        conversation.turns.append({"role": "assistant", "content": text})
    else:
        conversation.turns.pop()
    if text or not trouble:
        typer.echo()
    if remark:
        note(remark)
    if trouble:
        typer.secho(f"error: {trouble}", fg="red", err=True)
    return not trouble


def printable(text: str) -> str:
    """Without the control characters that could make a terminal do things."""
    return "".join(character for character in text if character in "\n\t" or unicodedata.category(character) != "Cc")


def note(text: str) -> None:
    """Not part of the conversation."""
    typer.secho(text, dim=True, err=True)
