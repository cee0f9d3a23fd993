"""Stage 02 keeps the contract of all stages."""

from stages.s02_kv_cache.llm import LLM
from tests.contract import Contract


class TestContract(Contract):
    llm_class = LLM
