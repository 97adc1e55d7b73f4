"""Test that patterns in configurations match as in Python's re or raise errors, and never run for long."""

import random
import re
import time
import warnings
from collections.abc import Callable

import pytest

from lora_models import llama
from shoestring import lora
from shoestring.adapters.targets import (
    ENDING,
    INSIDE,
    LAYER,
    WHOLE,
    by_pattern,
    first_match,
    is_inside,
    matches,
)

RULES: dict[int, Callable[[str, str], re.Match[str] | None]] = {
    WHOLE: re.fullmatch,
    ENDING: lambda pattern, name: re.match(rf"(.*\.)?({pattern})$", name),
    INSIDE: lambda pattern, name: re.match(rf"(^|.*\.){pattern}($|\..*)", name),
    LAYER: lambda pattern, name: re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name),
}
NAMES = [
    "", "q_proj", "lm_head", "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "layers.10.x", "h.0.attn.1.b",
    "ab", "aab", "a.b", "A", "é", "a.é", "a\n", "a\nb", "\x1c", "a{2}", "a{", "a]", "-", "kK", "x" * 300,
]  # fmt: skip
# Patterns that are supported: for every name and rule, they match as in Python's re.
SUPPORTED = [
    "", "q_proj", "model.layers.0.self_attn.q_proj", "^model.layers.0.self_attn.q_proj", r".*\.q_proj", "q_proj$", r"model\.layers",
    r".*\.(q|k|v)_proj", r"(?=.*attn).*q_proj", r"(?!.*layers\.0).*_proj", r".*(?<=attn)\.q_proj", r".*(?<!attn)\.q_proj",
    r"model\.layers\.[0-9]+\..*", r".*[^.]+_proj", "layers", "h", "[a-z]+", r"(?:a|b)+", "(a|b)*", "a{2}b", "a{,2}b?", "a{2", "a{}",
    "a{,}", "a??b", "[]a]+", "[^]a]+", "[[:alpha:]]+", "(?P<part>a)b", "(?i)LM_HEAD", "(?i:K)+", "(?s:a.b)", "a(?#comment)+b",
    r"\x61\u0062", r"\Aa", r"a\Z", "a$", "^a", "é", "[é]", r"\.", r"a\-?b", "a|ab", "a.b", "(.*)(b)", "x*", r"[\w.]+", r".*\bq_proj",
    r"\d*", r"[^\d]+", "a#b", "()", "(|a)+b", "mlp|q_proj", "a)|(b",
]  # fmt: skip
REFUSED = [
    "(", ")", "[", "a**", "*", "+a", "a|*", "^*", "(?", "(?P<", "(?P<1>a)", "(?P<n>a)(?P<n>b)", "[z-a]", r"[\d-z]", "\\", r"\q",
    r"\x6", "a{3,2}", "a{2}{3}", "(?<=a*)b", "(" * 100_000, "(?:" * 500 + ")" * 500, "a{99999999999}",
    # Python's re supports the patterns in the rest of this list, but PCRE2 may match them differently.
    r"(a)\1", "(?P<n>a)(?P=n)", "(a)?(?(1)b)", "a++", "(?>a)b", r"\Ba", r"\0", r"\N{BULLET}", "(?x:a)", "(?a:a)", "(?<=a|bc)d",
    "(?m)^a", "(?=a)*b", "(x|y)" * 5_000,
]  # fmt: skip
CATASTROPHIC = [
    "(a+)+b",
    "(a|a)*b",
    "(.*)*b",
    "(.*.*)*b",
    "(.*)*(.*)*[bc]",
    "(?:(?:a*)*)*[bc]",
    "(a|aa)+[bc]",
    "(.+.+)+[bc]",
]


def verdict(pattern: str, name: str, rule: int) -> tuple[int, str] | str:
    try:
        return first_match([pattern], name, rule)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return "refused"


def oracle(pattern: str, name: str, rule: int) -> tuple[int, str] | str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = RULES[rule](pattern, name)
        except (re.error, RecursionError, OverflowError):
            return "refused"
    return (0, (found[1] or "") if found.re.groups else "") if found else (-1, "")


def assert_agree(pattern: str, name: str, rule: int) -> bool:
    """Check that a pattern matches as in Python's re; return False if shoestring raises an error for it."""
    ours, expected = verdict(pattern, name, rule), oracle(pattern, name, rule)
    if ours == "refused":
        return False
    assert expected != "refused" and ours[0] == expected[0], (pattern, name, rule, ours, expected)
    if rule == LAYER:
        assert ours == expected, (pattern, name, rule)
    return True


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pattern", SUPPORTED)
def test_agrees_with_re(pattern: str, rule: int) -> None:
    for name in NAMES:
        agreed = assert_agree(pattern, name, rule)
        if name.isascii() and name.isprintable() and oracle(pattern, name, rule) != "refused":
            assert agreed, (pattern, name, rule)


@pytest.mark.parametrize("pattern", REFUSED, ids=lambda pattern: pattern[:20])
def test_refuses(pattern: str) -> None:
    assert verdict(pattern, "model.layers.0.self_attn.q_proj", ENDING) == "refused"


def test_agrees_with_re_on_random_patterns(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [
        *"ab.qé0_-#{}[]()|*+?^$ ", r"\.", r"\d", r"\w", r"\b", r"\s", r"\A", r"\Z", "q_proj", "layers", "[ab]", "[^.]", "[a-z]", "[]a]",
        "(?:", "(?=", "(?!", "(?<=a", "(?<!q", "(?i:A)", "(?i)", "(?#x)", "{2}", "{,2}", "{1,}", "??", "*?", r"\x61", r"\n", "[\\w.]",
    ]  # fmt: skip
    judged = 0
    for _ in range(4000):
        pattern = "".join(rng.choice(pieces) for _ in range(rng.randint(1, 7)))
        if rng.random() < 0.5:
            pattern += ")" * max(0, pattern.count("(") - pattern.count(")"))
        judged += assert_agree(pattern, rng.choice(NAMES), rng.choice(list(RULES)))
    assert judged > 1000


@pytest.mark.parametrize("pattern", CATASTROPHIC)
def test_catastrophic_patterns_are_judged_or_refused_at_once(pattern: str) -> None:
    start = time.perf_counter()
    for rule in RULES:
        verdict(pattern, "a" * 200 + ".q_proj", rule)
    assert time.perf_counter() - start < 20


def test_first_pattern_of_several() -> None:
    assert first_match(["k_proj", "q_proj", ".*"], "a.q_proj", ENDING) == (1, "")
    assert by_pattern({"k_proj": 1, ".*q_proj": 2, ".*": 3}, "a.q_proj", 4) == 2
    assert by_pattern({}, "a.q_proj", 4) == 4 and by_pattern({"k_proj": 1}, "a.q_proj", 4) == 4
    assert (
        matches("a.q_proj", r".*q_proj")
        and not matches("a.q_proj", "q_proj")
        and is_inside("a.mlp.up", "mlp")
    )


def test_limits_reach_every_option() -> None:
    """A pattern that would run for hours raises an error soon, whichever option contains it."""
    hostile = r"(.*.*)*(.*.*)*[xyz]"
    for options in (
        {"target_modules": hostile},
        {"target_modules": ["q_proj"], "exclude_modules": hostile},
        {"target_modules": ["q_proj"], "rank_pattern": {hostile: 4}},
        {"target_modules": ["q_proj"], "alpha_pattern": {hostile: 4}},
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": [hostile]},
    ):
        model, start = llama(), time.perf_counter()
        with pytest.raises(ValueError, match="runs within limits"):
            lora.apply(model, **options)  # type: ignore[arg-type]
        assert time.perf_counter() - start < 20
    assert verdict("\ud800", "a", WHOLE) == "refused"
