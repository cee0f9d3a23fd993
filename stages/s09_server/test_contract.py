"""Stage 09 keeps the contract of all stages, with every request, token and end of an answer sent as bytes."""

import pytest

from stages.s01_forward.sampling_params import SamplingParams
from stages.s09_server.llm import LLM
from tests.contract import Contract


class TestContract(Contract):
    llm_class = LLM
    ragged_prompts = 6

    def test_what_cannot_be_sent_is_refused_whole(self, llm):
        """Half of a surrogate pair has no UTF-8; of the prompts before it nothing is left."""
        params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=3, cache_salt="\ud83d")]
        with pytest.raises(ValueError, match="surrogates"):
            llm.generate([[5], [6]], params)
        while llm.loop.has_work:
            llm.step()
        assert not any((llm.answers.open, llm.news, llm.loop.requests, llm.loop.not_begun))
        assert llm.generate([[5]], params[0])[0].finish_reason in ("stop", "length")
