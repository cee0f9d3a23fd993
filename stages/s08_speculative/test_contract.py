"""Stage 08 keeps the contract of all stages while it guesses in every step that may have guesses."""

from pathlib import Path
from typing import Any

from stages.s08_speculative.llm import LLM
from tests.contract import Contract


class WithNgrams(LLM):
    """However the guesses fare; a single token that stood before is enough for some."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        often = {"speculative_least_rate": 0.0, "speculative_max_rows": 64}
        super().__init__(model, speculative="ngram", **(often | options))
        self.engine.proposer.sizes = range(3, 0, -1)


class TestContract(Contract):
    llm_class = WithNgrams
    ragged_prompts = 6
