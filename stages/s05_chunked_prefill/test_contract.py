"""Stage 05 keeps the contract of all stages, with prompts cut into many small chunks too."""

from pathlib import Path
from typing import Any

from stages.s05_chunked_prefill.llm import LLM
from tests.contract import Contract


class InSmallChunks(LLM):
    """At most 8 answers and 9 tokens per step."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        super().__init__(model, max_num_seqs=8, max_num_batched_tokens=9, block_size=4, **options)


class TestContract(Contract):
    llm_class = LLM


class TestContractInSmallChunks(Contract):
    llm_class = InSmallChunks
    ragged_prompts = 6
