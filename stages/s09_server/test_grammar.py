"""Structured output: what comes out is what was asked for, whatever the engine does, and nobody else notices."""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest
import torch

from stages.s01_forward.generation import Generation
from stages.s01_forward.inputs import answer_seed
from stages.s01_forward.outputs import RequestOutput, SampledToken
from stages.s01_forward.sampling_params import SamplingParams
from stages.s01_forward.tokenizer import Tokenizer
from stages.s02_kv_cache.contiguous_cache import BlockCopy
from stages.s04_continuous_batching.request import Request
from stages.s08_speculative.proposer import Draft
from stages.s09_server import bench_grammar
from stages.s09_server import grammar as module
from stages.s09_server.async_llm import AsyncLLM
from stages.s09_server.constraint import MAX_KNOWN, GrammarConstraint, Grammars
from stages.s09_server.engine_process import EngineSettings
from stages.s09_server.grammar import MAX_SCHEMA, grammar_of
from stages.s09_server.llm import LLM
from stages.s09_server.messages import Abort, Add

VOCAB, END_OF_TEXT, IM_END = 512, 0, 2  # of the tiny models; ids from 500 on are padding
WORD = {"type": "string", "maxLength": 4}
PERSON = {
    "type": "object",
    "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "integer": {"type": "integer", "minimum": -20, "maximum": 20},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "multiple": {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 99},
    "boolean or null": {"type": ["boolean", "null"]},
    "text": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]{3}$"},
    "format": {"type": "string", "format": "date"},
    "enum": {"enum": ["red", "grün", "青", "😀", 3, None, {"a": [1, 2]}]},
    "const": {"const": {"ключ": "значение\n\"'\\"}},
    "person": PERSON,
    "keys": {
        "type": "object",
        "properties": {'a "quoted" key\n': {"type": "boolean"}, "é": {"enum": ["ü"]}},
        "required": ['a "quoted" key\n', "é"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, WORD], "items": False, "minItems": 2},
    "anyOf": {"anyOf": [PERSON, {"type": "array", "items": {"type": "null"}, "maxItems": 2}, {"type": "boolean"}]},
    "nested": {
        "type": "object",
        "properties": {"of": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2}},
        "required": ["of"],
        "additionalProperties": False,
    },
    "$ref": {
        "$defs": {"leaf": {"enum": ["x", "y"]}, "pair": {"type": "array", "items": {"$ref": "#/$defs/leaf"}}},
        "allOf": [{"$ref": "#/$defs/pair"}, {"type": "array", "minItems": 1, "maxItems": 2}],
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"v": {"enum": [0, 1]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
}
PROMPT = [7, 100, 33]
Job = tuple[list[list[int]], SamplingParams, dict[str, Any] | None]


def of(schema: object) -> dict[str, Any]:
    """As a client says it."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def one_within_another(left: int) -> dict[str, Any]:
    """Patterns of one property that must all hold, no two of them at the same place."""
    schema: dict[str, Any] = {"properties": {"x": {"type": "string", "pattern": f"(.*[ab]){{{20 + left}}}c"}}}
    return {**schema, "anyOf": [one_within_another(left - 1)]} if left > 1 else schema


def wish(seed: int = 0, **keys: Any) -> SamplingParams:
    """At a temperature at which the tiny model tries everything."""
    return SamplingParams(**{"temperature": 4.0, "seed": seed, "max_tokens": 200, **keys})


def together(llm: LLM, jobs: list[Job]) -> list[list[RequestOutput]]:
    """Several calls at the same time, each with a format of its own."""
    requests = [llm.requests.build(prompts, params) for prompts, params, _ in jobs]
    runs = [llm.run(each, grammar_of(job[2])) for each, job in zip(requests, jobs, strict=True)]
    for _ in zip_longest(*runs):
        pass
    return [[request.output() for request in each] for each in requests]


@pytest.fixture(scope="module")
def llm(tiny) -> LLM:
    return LLM(tiny("qwen2"), device="cpu")


@pytest.fixture(scope="module")
def grammars(tiny) -> Grammars:
    return Grammars(Tokenizer(tiny("qwen2")), VOCAB, [END_OF_TEXT, IM_END])


def start(grammars: Grammars, schema: object) -> GrammarConstraint:
    grammar = grammar_of(of(schema))
    assert grammar is not None
    return grammars.compile(grammar).result(10).after(())


def allowed(constraint: GrammarConstraint) -> list[int]:
    return constraint.allowed().nonzero().flatten().tolist()


# ---- what a client may ask for ---------------------------------------------------------------------------------------


class TestGrammarOf:
    @pytest.mark.parametrize("response_format", [None, {"type": "text"}])
    def test_any_text(self, response_format):
        assert grammar_of(response_format) is None

    @pytest.mark.parametrize(
        ("response_format", "words"),
        [
            ({}, "has no type"),
            ({"type": ["json_object"]}, "has no type"),
            ({"type": "xml"}, "'xml'; supported are 'text', 'json_object' and 'json_schema'"),
            ({"type": "json_schema"}, "json_schema must be like"),
            ({"type": "json_schema", "json_schema": "{}"}, "json_schema must be like"),
            ({"type": "json_schema", "json_schema": {"name": "x"}}, "with a JSON schema"),
            (of(True), "with a JSON schema"),
            (of({"const": float("nan")}), "not JSON"),
            (of({"enum": ["x" * MAX_SCHEMA]}), f"{MAX_SCHEMA} is the limit"),
            (of({"type": "strin"}), "not supported: Invalid type: strin"),
            (of({"properties": 3}), "properties must be an object"),
            (of({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
            (of({"not": {}, "x-guidance": {"lenient": True}}), 'Unimplemented keys: ["not"]'),
            (of({"$ref": "#/$defs/none"}), "does not exist"),
            (of({"$ref": "https://example.com/schema"}), "not present"),
            (of({"type": "string", "pattern": "("}), "unclosed group"),
            (of({"minimum": 3, "maximum": 2, "type": "integer"}), "Unsatisfiable schema"),
            (of({"$ref": "#"}), "not supported"),
            (of({"type": "object", "properties": {f"p{i}": {} for i in range(600)}}), "Current row has"),
            (of({"allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(200)]}), "200 patterns and formats"),
            (of({"patternProperties": {f"^{i}z": {} for i in range(400)}}), "400 patternProperties; 16 is the limit"),
            (of(one_within_another(20)), "20 patterns and formats"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_what_cannot_be_done(self, response_format, words):
        """In words for a client, without the schema in them, and soon."""
        begun = time.perf_counter()
        with pytest.raises(ValueError) as error:
            grammar_of(response_format)
        assert words in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 400
        assert time.perf_counter() - begun < 5

    def test_patterns_that_need_not_hold_together(self):
        properties = {f"p{i}": {"type": "string", "pattern": f"^a.{{{i}}}b"} for i in range(60)}
        assert grammar_of(of({"type": "object", "properties": properties, "required": list(properties)}))

    def test_a_property_may_have_any_name(self):
        """A schema's own words as names are no patterns and no allOf."""
        names = {name: {"type": "string", "pattern": "^a"} for name in ("pattern", "format", "type", "enum", "$ref")}
        assert grammar_of(of({"properties": names}))

    def test_without_the_library(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(ValueError, match="needs the package llguidance"):
            grammar_of(of({"type": "null", "description": "checked for the first time"}))
        assert grammar_of({"type": "text"}) is None

    def test_the_second_time_costs_nothing(self, monkeypatch):
        first = grammar_of(of(SCHEMAS["nested"]))
        monkeypatch.setattr(module, "llguidance", lambda: pytest.fail("checked again"))
        assert grammar_of(of(SCHEMAS["nested"])) == first


# ---- which tokens ----------------------------------------------------------------------------------------------------


class TestConstraint:
    def test_against_all_texts(self, grammars):
        """A grammar of few texts: allowed is what begins one of them, and EOS after a whole one, and nothing else."""
        values = ["a", "ab", "the then", "é", "😀"]
        texts = [json.dumps(value, ensure_ascii=False).encode() for value in values]
        token_bytes, rng = grammars.tokenizer.token_bytes, Random(1)
        ends = set()
        for _ in range(20):
            constraint, text, done = start(grammars, {"enum": values}), b"", False
            while not done:
                ids, new = allowed(constraint), {i: text + token_bytes(i) for i in range(VOCAB) if token_bytes(i)}
                begins = {i for i, longer in new.items() if any(whole.startswith(longer) for whole in texts)}
                assert ids and set(ids) <= begins
                if len({t[len(text)] for t in texts if t.startswith(text)}) > 1:  # else the usual tokens are forced
                    assert set(ids) == begins
                token = rng.choice(ids)
                text, done = text + token_bytes(token), constraint.accept(token)
            assert text in texts
            assert set(allowed(constraint)) <= {END_OF_TEXT, IM_END}
            ends.add(text)
        assert len(ends) == len(texts)

    def test_an_end_is_one_of_several_tokens(self, grammars):
        constraint = start(grammars, {"type": "integer"})
        assert not {END_OF_TEXT, IM_END} & set(allowed(constraint))
        assert not constraint.accept(grammars.tokenizer.encode("7")[0])
        assert {END_OF_TEXT, IM_END} < set(allowed(constraint))
        assert constraint.accept(END_OF_TEXT)

    def test_what_is_not_allowed_is_an_error_with_words(self, grammars):
        constraint = start(grammars, {"type": "integer"})
        assert not constraint.accept(grammars.tokenizer.encode("x")[0])
        assert allowed(constraint) == []
        assert "cannot be followed" in constraint.error and "\n" not in constraint.error

    def test_after_guesses(self, grammars):
        """Copies go their own ways; the one they were made of stays where it is."""
        constraint, (quote, letter) = start(grammars, WORD), grammars.tokenizer.encode('"x')
        before = allowed(constraint)
        ahead = constraint.after([quote, letter])
        assert allowed(ahead) != before == allowed(constraint)
        assert allowed(constraint.after([letter])) == []
        assert constraint.accept(quote) is constraint.accept(letter) is False
        assert allowed(constraint) == allowed(ahead)

    def test_little_space(self, grammars):
        """Else a model that is at a loss goes on with it for ever."""
        constraint, (bracket, space) = start(grammars, {"type": "array"}), grammars.tokenizer.encode("[ ")
        constraint.accept(bracket)
        count = 0
        while space in allowed(constraint):
            constraint.accept(space)
            count += 1
        assert count == 20 and len(allowed(constraint)) > 9

    def test_a_model_without_eos(self, tiny):
        """Ends when nothing can be added; where something can, it cannot say that it will not."""
        grammars = Grammars(Tokenizer(tiny("qwen2")), VOCAB, [])
        digit = grammars.tokenizer.encode("7")[0]
        constraint = start(grammars, {"enum": [7, 8]})
        assert constraint.accept(digit)
        constraint = start(grammars, {"type": "integer"})
        assert not constraint.accept(digit)
        assert constraint.allowed().shape == (VOCAB,) and END_OF_TEXT not in allowed(constraint)

    def test_sentence_piece(self, tmp_path):
        """Bytes as tokens of their own, and a space put before every text: what is forced is written without it."""
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, normalizers
        from transformers import PreTrainedTokenizerFast

        words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁name", "name", '"', "▁▁", '▁"']
        model = models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
        backend = Backend(model)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special = {"eos_token": "</s>", "unk_token": "<unk>"}
        PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(tmp_path)
        tokenizer, rng = Tokenizer(tmp_path), Random(3)
        assert tokenizer.encode('"', add_special=False) == [words.index("▁"), words.index('"')]
        grammars = Grammars(tokenizer, len(words) + 9, [1])
        for _ in range(10):
            constraint, ids, done = start(grammars, PERSON), [], False
            while not done and len(ids) < 100:
                ids.append(rng.choice(allowed(constraint)))
                done = constraint.accept(ids[-1])
            text = b"".join(map(tokenizer.token_bytes, ids)).decode()
            jsonschema.validate(json.loads(text), PERSON)


class TestGrammars:
    def test_each_is_compiled_once(self, grammars):
        text = grammar_of(of({"const": "once"}))
        assert grammars.compile(text) is grammars.compile(text)

    def test_not_all_are_kept(self, grammars):
        first = grammar_of(of({"const": "first"}))
        grammars.compile(first).result(10)
        for number in range(MAX_KNOWN):
            grammars.compile(grammar_of(of({"const": number}))).result(10)
        assert len(grammars.known) == MAX_KNOWN and first not in grammars.known

    @pytest.mark.parametrize(
        "grammar", ["no grammar", {"grammars": []}, {"grammars": [{"json_schema": {"type": "x"}}]}]
    )
    def test_no_grammar(self, grammars, grammar):
        text = grammar if isinstance(grammar, str) else json.dumps(grammar)
        with pytest.raises(ValueError, match="cannot be followed"):
            grammars.compile(text).result(10)

    def test_no_tokenizer(self):
        with pytest.raises(ValueError, match="no tokenizer"):
            Grammars(None, VOCAB, [0]).compile(grammar_of({"type": "json_object"})).result(10)


# ---- answers ---------------------------------------------------------------------------------------------------------

SEEDS = {name: seed for seed, name in enumerate([*SCHEMAS, "free"])}
FREE = wish(SEEDS["free"], n=2, max_tokens=60)


@pytest.fixture(scope="module")
def answers(llm) -> dict[str, RequestOutput]:
    """By schema, four to each, all at once, and "free": two beside them that follow none."""
    jobs: list[Job] = [([PROMPT], wish(SEEDS[name], n=4), of(schema)) for name, schema in SCHEMAS.items()]
    outputs = together(llm, [*jobs, ([PROMPT], FREE, None)])
    return dict(zip(SEEDS, [each[0] for each in outputs], strict=True))


@pytest.mark.parametrize("name", SCHEMAS)
def test_valid(name, answers):
    """What ends is valid, and nearly all ends; n answers are n different ones, where the schema leaves a choice."""
    texts = [answer.text for answer in answers[name].outputs if answer.finish_reason == "stop"]
    assert len(texts) >= 3 and all(answer.error is None for answer in answers[name].outputs)
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    assert name == "const" or len(set(texts)) > 1


def test_neighbours_do_not_notice(llm, answers):
    alone = llm.generate(PROMPT, FREE)[0]
    assert [each.token_ids for each in alone.outputs] == [each.token_ids for each in answers["free"].outputs]


LITTLE_ROOM = {"kv_cache_mb": 0.16, "max_model_len": 208, "block_size": 4, "max_num_seqs": 16}
ENGINES: dict[str, dict[str, Any]] = {
    "little room": LITTLE_ROOM,
    "swap": {**LITTLE_ROOM, "swap_mb": 1},
    "chunks, no cache": {"max_num_batched_tokens": 8, "max_num_seqs": 8, "prefix_cache": "off", "overlap": False},
    "guesses": {"speculative": "ngram", "speculative_least_rate": 0.0, "speculative_max_rows": 64},
}


class Told:
    """Guesses as it was told, by the seeds of the answers; every third last guess is a token that is never allowed."""

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers, self.rng = answers, Random(0)

    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, Draft]:
        drafts = {}
        for request, most in wanted.items():
            known = len(request.generation.token_ids)
            tokens = self.answers[request.generation.seed][known : known + most]
            if tokens and not self.rng.randrange(3):
                tokens = [*tokens[:-1], 1]
            drafts[request] = Draft(tuple(tokens))
        return drafts

    def copy_blocks(self, pairs: Sequence[BlockCopy]) -> None:
        pass

    def forget(self, request: Request) -> None:
        pass


@pytest.mark.parametrize("name", ENGINES)
def test_the_same_answers_whatever_the_engine_does(name, tiny, answers):
    """Preempted, swapped out, cut into chunks or guessed at: what is drawn follows from seed and place alone."""
    other = LLM(tiny("qwen2"), device="cpu", **ENGINES[name])
    if name == "guesses":
        told = {answer_seed(SEEDS[each], one.index): one.token_ids for each in SEEDS for one in answers[each].outputs}
        other.engine.proposer = Told(told)
    names = ["person", "nested", "array", "text"]
    jobs: list[Job] = [([PROMPT], wish(SEEDS[each], n=4), of(SCHEMAS[each])) for each in names]
    outputs = together(other, [*jobs, ([PROMPT], FREE, None)])
    for (mine,), each in zip(outputs, [*names, "free"], strict=True):
        assert [answer.token_ids for answer in mine.outputs] == [answer.token_ids for answer in answers[each].outputs]
        assert [answer.text for answer in mine.outputs] == [answer.text for answer in answers[each].outputs]
    if "kv_cache_mb" in ENGINES[name]:
        assert other.engine.scheduler.num_preemptions > 3
    if name == "guesses":
        stats = other.engine.stats
        assert stats.accepted > 100 and stats.drafted - stats.accepted > 20
    assert other.engine.scheduler.cache.pool.num_free == other.engine.scheduler.cache.pool.num_blocks - 1


def test_guesses_by_the_ratio_rule(tiny):
    """Another draw, and a grammar all the same."""
    llm = LLM(tiny("qwen2"), device="cpu", **ENGINES["guesses"] | {"speculative": "layers:2", "acceptance": "ratio"})
    output = llm.generate([PROMPT], wish(5, n=6), response_format=of(PERSON))[0]
    assert llm.engine.stats.drafted > 100
    assert {answer.finish_reason for answer in output.outputs} == {"stop"}
    for answer in output.outputs:
        jsonschema.validate(json.loads(answer.text), PERSON)


def test_any_object(llm):
    """A model that wants to end it can."""
    bias = {llm.tokenizer.encode(sign)[0]: 12.0 for sign in '"}'}
    output = llm.generate(PROMPT, wish(3, n=8, logit_bias=bias), response_format={"type": "json_object"})[0]
    ended = [answer for answer in output.outputs if answer.finish_reason == "stop"]
    assert len(ended) > 5
    assert all(isinstance(json.loads(answer.text), dict) for answer in ended)


def test_token_by_token(llm):
    whole = llm.generate(PROMPT, wish(), response_format=of(PERSON))[0]
    assert "".join(event.text for event in llm.stream(PROMPT, wish(), response_format=of(PERSON))) == whole.text
    with pytest.raises(ValueError, match="no-such-format"):
        llm.stream(PROMPT, wish(), response_format={"type": "no-such-format"})


class TestEnd:
    def test_where_nothing_can_be_added(self, llm):
        """At once, and not with a token more than the text has."""
        answer = llm.generate(PROMPT, wish(), response_format=of(SCHEMAS["array"]))[0].outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
        assert answer.text == llm.tokenizer.decode(answer.token_ids)
        assert answer.token_ids[-1] not in (END_OF_TEXT, IM_END)

    def test_with_the_last_token_that_it_may_have(self, llm):
        """Complete, so a stop, as EOS would be."""
        whole = llm.generate(PROMPT, wish(), response_format=of(SCHEMAS["array"]))[0].outputs[0]
        length = len(whole.token_ids)
        for limit, reason in ((length, "stop"), (length - 1, "length")):
            answer = llm.generate(PROMPT, wish(max_tokens=limit), response_format=of(SCHEMAS["array"]))[0].outputs[0]
            assert (answer.finish_reason, answer.token_ids) == (reason, whole.token_ids[:limit])
            assert whole.text.startswith(answer.text)

    def test_by_eos_where_the_text_may_end(self, llm):
        """However much the model wants it: not before there is a number."""
        answer = llm.generate(PROMPT, wish(logit_bias={IM_END: 100.0}), response_format=of({"type": "integer"}))[0]
        assert (answer.finish_reason, answer.outputs[0].stop_reason) == ("stop", IM_END)
        assert abs(int(answer.text)) < 10

    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_min_tokens(self, llm, ignore_eos):
        """EOS is kept back as long as there is another way, and no longer."""
        keys = {"logit_bias": {IM_END: 100.0}, "min_tokens": 6, "ignore_eos": ignore_eos}
        number = llm.generate(PROMPT, wish(**keys), response_format=of({"type": "integer"}))[0]
        short = llm.generate(PROMPT, wish(**keys), response_format=of({"enum": [7, 8]}))[0]
        assert number.finish_reason == short.finish_reason == "stop"
        assert len(number.text) >= (1 if ignore_eos else 6) and number.text == str(int(number.text))
        assert short.text in ("7", "8") and len(short.token_ids) == 1

    def test_stop_strings_and_stop_tokens(self, llm):
        """They are the client's own affair."""
        quote = llm.tokenizer.encode('"')[0]
        for keys in ({"stop": ['"']}, {"stop_token_ids": [quote], "logit_bias": {quote: 50.0}}):
            answer = llm.generate(PROMPT, wish(**keys), response_format=of({"const": "abc"}))[0]
            assert answer.finish_reason == "stop"
            assert '"' not in answer.text

    def test_a_grammar_that_fails_on_the_way(self, llm, monkeypatch):
        """Ends its own answer, with words; the neighbour goes on."""
        monkeypatch.setattr(GrammarConstraint, "accept", lambda self, _: bool(self.matcher.consume_token(END_OF_TEXT)))
        mine, theirs = together(llm, [([PROMPT], wish(), of(PERSON)), ([PROMPT], wish(max_tokens=9), None)])
        assert mine[0].finish_reason == "error"
        assert "grammar cannot be followed" in mine[0].outputs[0].error
        assert theirs[0].finish_reason == "length"

    def test_nothing_is_accepted_after_the_end(self, grammars):
        generation = Generation([1], SamplingParams(), seed=0, token_limit=9)
        generation.constraint = start(grammars, {"enum": [7, 8]})
        generation.append(SampledToken(grammars.tokenizer.encode("7")[0]))
        assert (generation.finish_reason, generation.stop_reason) == ("stop", None)


# ---- on the way to the engine ----------------------------------------------------------------------------------------


class Slow:
    """Grammars that are there when a test says so."""

    def __init__(self) -> None:
        self.compiling: dict[str, Future[GrammarConstraint]] = {}

    def compile(self, grammar: str) -> Future[GrammarConstraint]:
        return self.compiling.setdefault(grammar, Future())


class TestLoop:
    """Messages to the loop itself."""

    @pytest.fixture
    def slow(self, llm, monkeypatch) -> Slow:
        slow = Slow()
        monkeypatch.setattr(llm.loop, "grammars", slow)
        return slow

    def add(self, llm: LLM, grammar: str | None, n: int = 1) -> Add:
        first = llm.next_number
        llm.next_number += n
        message = Add(first, first, PROMPT, wish(n=n, max_tokens=40), list(range(n)), 40, grammar)
        llm.loop.take(message)
        return message

    def drain(self, llm: LLM) -> Iterator[tuple[int, int]]:
        while llm.loop.has_work:
            step = llm.loop.step()
            yield from zip(step.answers, step.tokens, strict=True)

    def test_nobody_waits_for_a_grammar_but_its_own(self, llm, slow, grammars):
        bound, free = self.add(llm, "g"), self.add(llm, None)
        told = [answer for answer, _ in zip_longest(*zip(*[next(self.drain(llm)) for _ in range(10)], strict=True))]
        assert set(told) == {free.first}
        slow.compile("g").set_result(start(grammars, {"enum": [7, 8]}))
        told = list(self.drain(llm))
        assert len([token for answer, token in told if answer == bound.first]) == 1
        assert not llm.loop.requests and not llm.loop.compiling

    def test_with_nothing_else_to_do_it_waits(self, llm, slow):
        """Without burning a processor, and short enough to hear what is said."""
        self.add(llm, "g")
        begun = time.thread_time(), time.perf_counter()
        for _ in range(5):
            assert llm.loop.has_work and not llm.loop.step().answers
        assert time.thread_time() - begun[0] < 0.1 and 0.05 < time.perf_counter() - begun[1] < 10
        slow.compile("g").set_exception(BaseException("a panic"))
        step = llm.loop.step()
        assert list(step.errors.values()) == ["the grammar cannot be followed: a panic"]
        assert not llm.loop.has_work

    def test_given_up_before_it_began(self, llm, slow, grammars):
        """All of it, or one answer of two."""
        gone, half = self.add(llm, "g", n=2), self.add(llm, "g", n=2)
        llm.loop.take(Abort([*gone.answers, half.first]))
        llm.loop.step()
        slow.compile("g").set_result(start(grammars, {"enum": [7, 8]}))
        assert {answer for answer, _ in self.drain(llm)} == {half.first + 1}
        assert not llm.loop.requests and not llm.loop.not_begun


def test_through_the_server(tiny: Callable[[str], Path], llm: LLM) -> None:
    """The stream's texts, put together, are those of the whole; so are the ids, and the answer's end."""
    whole = llm.generate([PROMPT], wish(7, n=3), response_format=of(SCHEMAS["anyOf"]))[0].outputs

    async def stream() -> tuple[list[str], list[list[int]], dict[int, str]]:
        engine = await AsyncLLM.start(EngineSettings(str(tiny("qwen2")), {"device": "cpu"}), in_process=True)
        texts, ids, reasons = [""] * 3, [list[int]() for _ in range(3)], {}
        answers = engine.open(engine.requests.build([PROMPT], wish(7, n=3)), grammar=grammar_of(of(SCHEMAS["anyOf"])))
        while events := await answers.next():
            for event in events:
                texts[event.answer] += event.text
                ids[event.answer] += event.token_ids
                if event.finish_reason:
                    reasons[event.answer] = event.finish_reason
        await engine.close()
        return texts, ids, reasons

    texts, ids, reasons = asyncio.run(stream())
    assert texts == [answer.text for answer in whole]
    assert ids == [answer.token_ids for answer in whole]
    assert reasons == {answer.index: answer.finish_reason for answer in whole}


def test_a_dry_run_tells_its_story(tiny):
    """It has no logits that a grammar could act on, and no error either."""

    async def stories() -> list[list[int]]:
        settings = EngineSettings(str(tiny("qwen2")), {"device": "cpu"}, dry_run=True)
        engine, told = await AsyncLLM.start(settings, in_process=True), []
        for grammar in (None, grammar_of(of(PERSON))):
            answers = engine.open(engine.requests.build([PROMPT], wish(max_tokens=9)), grammar=grammar)
            ids = list[int]()
            while events := await answers.next():
                ids += [token for event in events for token in event.token_ids]
            told.append(ids)
        await engine.close()
        return told

    one, other = asyncio.run(stories())
    assert one == other and len(one) == 9


def test_the_benchmark_runs(tmp_path, capsys):
    bench_grammar.main(["--quick", "--out", str(tmp_path)])
    names = [each["name"] for each in json.loads((tmp_path / "s09_grammar.json").read_text("utf-8"))["measurements"]]
    assert len(set(names)) == len(names) > 15
    assert "batch of 2, 1 with a grammar" in capsys.readouterr().out


def test_allowed_is_a_tensor_of_its_own(grammars):
    """What somebody does with it changes nothing."""
    constraint = start(grammars, {"type": "integer"})
    constraint.allowed().fill_(True)
    assert constraint.allowed().dtype == torch.bool and not constraint.allowed().all()
