"""From a request's `response_format` to the grammar that its answers must follow.

The grammars are llguidance's: it turns a JSON schema into one, and says for each place of a text which tokens may come
next (`constraint.py`). It is not needed for anything else, so a server runs without it. Why this library: it follows
schemas that refer to themselves, has no work to do ahead for a whole vocabulary, refuses what it cannot follow by name,
needs no other package, and has wheels for Linux, Windows and macOS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

MAX_SCHEMA = 64 * 2**10  # characters
# Limits that the library lacks. Patterns that must all hold are tried together: 20 took 3 seconds, 200 all memory.
# Patterns for names are tried in pairs: 100 took a second, 400 more than a minute.
MAX_MERGED_PATTERNS, MAX_NAME_PATTERNS = 8, 16
MERGING = ("$ref", "anyOf", "oneOf", "patternProperties")  # what they say holds beside what another of these says:
BESIDE = ("pattern", "format", "properties", "additionalProperties", "items", "prefixItems", *MERGING)
MAX_WORDS = 300  # characters of an error of the library's, which may repeat the schema
MISSING = "response_format needs the package llguidance, and this server has none: install it with pip"

# A little space where JSON allows any: a model that is at a loss would go on with it to the end.
OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}", "whitespace_flexible": True, "lenient": False}


def grammar_of(response_format: Mapping[str, Any] | None) -> str | None:
    """The grammar, as the engine takes it; None: any text.

    Raises ValueError for a kind that is not supported, for what is no schema, and for what no grammar can be made of.
    The first time takes a while, up to a second for a schema of thousands of properties, without the GIL.
    """
    kind = "text" if response_format is None else response_format.get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":
        return checked('{"type":"object"}')
    if kind == "json_schema":
        return checked(schema_text(response_format.get("json_schema")))
    raise ValueError(
        f"response_format.type is {kind!r}; supported are 'text', 'json_object' and 'json_schema'"
        if isinstance(kind, str)
        else "response_format has no type; supported are 'text', 'json_object' and 'json_schema'"
    )


def schema_text(named: Any) -> str:
    """The schema in `json_schema`, {"name": ..., "schema": ...}, as text. Raises ValueError if there is none."""
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ValueError(
            'response_format.json_schema must be like {"name": "answer", "schema": {}}, with a JSON schema'
        )
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    if len(text) > MAX_SCHEMA:
        raise ValueError(f"the schema has {len(text)} characters; {MAX_SCHEMA} is the limit")
    check_patterns(schema)
    return text


def check_patterns(schema: Mapping[str, Any]) -> None:
    """Raises ValueError for a schema with so many patterns that the library might not come to an end with them."""
    patterns = for_names = 0
    merged, left = False, [schema]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            patterns += isinstance(node.get("pattern"), str) + isinstance(node.get("format"), str)
            names = node.get("patternProperties")
            for_names += len(names) if isinstance(names, Mapping) else 0
            merging, beside = (sum(key in node for key in keys) for keys in (MERGING, BESIDE))
            merged |= "allOf" in node or (merging > 0 and beside > 1)
        left += node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    if for_names > MAX_NAME_PATTERNS:
        raise ValueError(f"the schema has {for_names} patternProperties; {MAX_NAME_PATTERNS} is the limit")
    if merged and patterns + for_names > MAX_MERGED_PATTERNS:
        raise ValueError(
            f"the schema has {patterns + for_names} patterns and formats; where some may have to hold together "
            f"(allOf; or $ref, anyOf, oneOf or patternProperties beside others), {MAX_MERGED_PATTERNS} is the limit"
        )


@lru_cache(maxsize=128)
def checked(schema: str) -> str:
    """A schema's grammar. Raises ValueError if the library cannot follow it, by trying its first steps with bytes."""
    library = llguidance()
    try:
        grammar: str = library.LLMatcher.grammar_from_json_schema(schema, overrides=OPTIONS)
    except ValueError as error:
        raise ValueError(f"the schema is not supported: {str(error)[:MAX_WORDS]}") from None
    matcher = library.LLMatcher(byte_tokenizer(), grammar, limits=limits(), log_level=0)
    matcher.compute_bitmask()
    for byte in matcher.compute_ff_bytes():  # those that begin every answer
        matcher.consume_token(byte)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(f"the schema is not supported: {why(matcher)}")
    return grammar


def why(matcher: Any) -> str:
    """What a matcher has against a grammar or a token, in one line."""
    return " ".join(matcher.get_error().split("\n<")[0].split())[:MAX_WORDS]


def llguidance() -> Any:
    """The library. Raises ValueError if it is not installed."""
    try:
        import llguidance as library
    except ImportError:
        raise ValueError(MISSING) from None
    return library


@cache
def byte_tokenizer() -> Any:
    """A vocabulary of the 256 bytes."""
    return llguidance().LLTokenizer("byte")


@cache
def limits() -> Any:
    """What a grammar may cost: the library's own limits. Its errors do not repeat the grammar."""
    return llguidance().LLParserLimits(verbose_errors=False)
