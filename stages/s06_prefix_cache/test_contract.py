"""Stage 06 keeps the contract of all stages, however it finds what it remembers. Without a cache it is stage 05."""

from pathlib import Path
from typing import Any

from stages.s06_prefix_cache.llm import LLM
from tests.contract import Contract


class WithRadixTree(LLM):
    """The other index; blocks of one token, so that all of a prompt but its last token can be found."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        super().__init__(model, prefix_cache="radix", block_size=1, **options)


class TestContract(Contract):
    llm_class = LLM


class TestContractWithRadixTree(Contract):
    llm_class = WithRadixTree
    ragged_prompts = 6
