"""Stage 01 keeps the contract of all stages."""

from stages.s01_forward.llm import LLM
from tests.contract import Contract


class TestContract(Contract):
    llm_class = LLM
