"""Stage 07 keeps the contract of all stages. On a CPU without graphs: `test_graphs.py` has what they change."""

from stages.s07_cuda_graph.llm import LLM
from tests.contract import Contract


class TestContract(Contract):
    llm_class = LLM
    ragged_prompts = 6
