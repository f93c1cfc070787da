"""What YAML does behind one's back, and what is done about it."""

from __future__ import annotations

import pytest

from surogate_core.config.tree import Scalar, Where, plain_value
from surogate_core.config.yaml_file import parse_yaml
from surogate_core.errors import ConfigError


def values(text: str, environ: dict[str, str] | None = None) -> object:
    return plain_value(parse_yaml(text, "x.yaml", environ or {}))


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1e-4", 1e-4),
        ("1.0e-4", 1e-4),
        ("5E+3", 5e3),
        (".5", 0.5),
        ("1_000", 1000),
        ("007", 7),
        ("010", 10),  # eight, for YAML 1.1
        ("1:30", "1:30"),  # ninety, for YAML 1.1
        ("2024-01-02", "2024-01-02"),  # a date, for YAML 1.1
        ("off", False),
        ("Yes", True),
        ("n", "n"),
        ("~", None),
        ("'1e-4'", "1e-4"),
        ('"off"', "off"),
        ("''", ""),
        ("1e", "1e"),
        (".", "."),
        ("0x10", "0x10"),
    ],
)
def test_scalars_by_their_looks(written: str, value: object):
    found = values(f"key: {written}")["key"]
    assert found == value and type(found) is type(value)


def test_duplicate_keys_name_both_lines():
    with pytest.raises(ConfigError, match=r"x\.yaml:3: `lr` is given twice; first at x\.yaml:1"):
        values("lr: 1\nseed: 2\nlr: 3\n")


def test_duplicate_keys_below_the_top():
    with pytest.raises(ConfigError, match=r"x\.yaml:3: `path` is given twice"):
        values("datasets:\n- path: a\n  path: b\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", r"x\.yaml:\d+: not valid YAML"),
        ("a: b: c", r"x\.yaml:1: not valid YAML.*mapping values"),
        ("a:\n\t- b", r"x\.yaml:2: not valid YAML"),
        ("a: 1\n---\nb: 2\n", r"x\.yaml:2: not valid YAML.*"),
        ("a: !!python/object/apply:os.system ['true']", r"x\.yaml:1: the tag .*python.* is not taken"),
        ("a: !custom b", r"x\.yaml:1: the tag !custom is not taken"),
        ("? [a, b]\n: c", r"x\.yaml:1: a key must be a word"),
        ("a: &x [*x]", r"x\.yaml:1: an anchor contains itself"),
        ("<<: 3", r"x\.yaml:1: `<<` merges mappings only"),
        ("a: *nowhere", r"x\.yaml:1: not valid YAML.*undefined alias"),
        ("a: \x00", r"x\.yaml: not valid YAML"),
    ],
)
def test_what_is_no_yaml_says_where(text: str, message: str):
    with pytest.raises(ConfigError, match=message):
        values(text)


def test_aliases_that_stand_for_billions_end_soon():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 10)]
    with pytest.raises(ConfigError, match="more than 20000 values"):
        values("\n".join(lines))


def test_deep_nesting_is_an_error_and_no_crash():
    with pytest.raises(ConfigError):
        values("[" * 1000 + "]" * 1000)


def test_anchors_and_merges():
    text = "base: &base {x: 1, y: 2}\nmore: {<<: *base, y: 3}\nmost:\n  <<: [*base, {z: 4}]\n"
    assert values(text) == {
        "base": {"x": 1, "y": 2},
        "more": {"x": 1, "y": 3},
        "most": {"x": 1, "y": 2, "z": 4},
    }


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${LR}", 2e-3),
        ("${NAME}-${LR}", "run-2e-3"),
        ("${NOT_SET:-5}", 5),
        ("${EMPTY:-5}", 5),
        ("${NOT_SET:-}", None),
        ("'${LR}'", "2e-3"),
        ("$${LR}", "${LR}"),
        ("$LR costs $5", "$LR costs $5"),
        ("${NESTED}", "${LR}"),  # what a variable holds is not expanded again
    ],
)
def test_environment(written: str, value: object):
    environ = {"LR": "2e-3", "NAME": "run", "EMPTY": "", "NESTED": "${LR}"}
    assert values(f"key: {written}", environ)["key"] == value


def test_missing_variable_names_key_and_line():
    with pytest.raises(ConfigError, match=r"x\.yaml:2: `model`: the environment variable MODEL is not set") as error:
        values("a: 1\nmodel: ${MODEL}\n")
    assert "${MODEL:-value}" in error.value.hint


def test_variable_that_is_none():
    with pytest.raises(ConfigError, match=r"x\.yaml:1: `a`: `\$\{` begins no variable"):
        values("a: ${not a name}")


def test_missing_variable_in_a_list_names_the_line():
    with pytest.raises(ConfigError, match=r"x\.yaml:3: `report_to`: the environment variable WHERE"):
        values("report_to:\n- a\n- ${WHERE}\n")


def test_value_of_quoted_null_is_text():
    assert Scalar("null", False, Where("x")).value == "null"
