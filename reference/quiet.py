"""Silence transformers' own progress bars for a moment; the caller says what it is doing in its own words."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_bars() -> Iterator[None]:
    """No progress bar of transformers inside the block; the setting from before comes back at its end."""
    from transformers.utils import logging

    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()
