"""Stage 03 keeps the contract of all stages."""

from stages.s03_paged_kv.llm import LLM
from tests.contract import Contract


class TestContract(Contract):
    llm_class = LLM
