"""Stage 04 keeps the contract of all stages."""

from stages.s04_continuous_batching.llm import LLM
from tests.contract import Contract


class TestContract(Contract):
    llm_class = LLM
