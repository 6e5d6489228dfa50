import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pentad.config import recipe_file
from pentad.config.load import dump_config, load_config
from pentad.config.recipe_file import dump_yaml, read_tree
from pentad.config.resolve import resolve

DEFAULTS = {"fileroot": "runs", "actor": {"path": None, "optimizer": {"lr": 1e-6}}}


def read(tmp_path, text, *overrides):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return read_tree(path, overrides, DEFAULTS)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("none", "none"),
        ("1e-6", 1e-6),
        ("1.5E3", 1500.0),
        ("-3", -3),
        ("1_000", 1000),
        ("0010", "0010"),
        ("1:30", "1:30"),
        ("2024-01-02", "2024-01-02"),
        ('"8"', "8"),
        ("sglang:d4t2+archon:d4p2t2", "sglang:d4t2+archon:d4p2t2"),
        ("[1, on]", [1, "on"]),
        ("{a: 1}", {"a": 1}),
    ],
)
def test_words_mean_the_same_in_the_file_and_on_the_command_line(tmp_path, text, value):
    from_file = read(tmp_path, f"key: {text}\n")
    from_override = read_tree(None, [f"key={text}"], {})
    for tree in (from_file, from_override):
        assert tree.problems == []
        assert tree.values == {"key": value}
        assert type(tree.values["key"]) is type(value)


def test_overrides_win_and_make_the_blocks_they_need(tmp_path):
    tree = read(tmp_path, "a: {b: 1, c: 2}\n", "+a.b=3", "x.y.z=4", "++a.d=5", "a.c.e=6")
    assert tree.values == {"a": {"b": 3, "c": {"e": 6}, "d": 5}, "x": {"y": {"z": 4}}}
    assert tree.sources["a.c"] == "recipe.yaml:1"
    assert tree.sources["x.y.z"] == "command line"


def test_values_of_overrides_may_hold_equals_signs(tmp_path):
    assert read_tree(None, ["a=b=c"], {}).values == {"a": "b=c"}


@pytest.mark.parametrize("override", ["gconfig", "=3", "a..b=3", "~a=3", "a b=3", "a.=3", "-a=1"])
def test_what_is_no_override_is_named(override):
    (problem,) = read_tree(None, [override], {}).problems
    assert f'"{override}"' in str(problem)
    assert "dotted.key=value" in str(problem)


def test_an_unreadable_value_is_reported_and_left_out():
    tree = read_tree(None, ["a.b=[1", "c=2"], {})
    assert "a.b=[1" in str(tree.problems[0])
    assert tree.bad == {"a.b"}
    assert tree.values == {"c": 2}


def test_references_reach_keys_of_the_file_and_defaults(tmp_path):
    tree = read(
        tmp_path,
        "name: x\npath: ${fileroot}/${name}\nlr: ${actor.optimizer.lr}\nl: [1, '${name}']\n",
        "name=y",
    )
    assert tree.problems == []
    assert tree.values == {"name": "y", "path": "runs/y", "lr": 1e-6, "l": [1, "y"]}


def test_a_reference_to_a_block_brings_the_block(tmp_path):
    tree = read(tmp_path, "actor: {optimizer: {eps: 2}}\ncritic: ${actor}\n")
    assert tree.values["critic"] == {"path": None, "optimizer": {"lr": 1e-6, "eps": 2}}


def test_references_to_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PENTAD_TEST_NAME", "n")
    tree = read(tmp_path, "a: ${oc.env:PENTAD_TEST_NAME}\nb: ${oc.env:PENTAD_NO,7}\n")
    assert tree.values == {"a": "n", "b": "7"}
    tree = read(tmp_path, "a: ${oc.env:PENTAD_NO}\n")
    assert "PENTAD_NO" in str(tree.problems[0])
    assert "default" in tree.problems[0].remedy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: ${nope.x}\n", "nope"),
        ("a: ${b}\nb: ${a}\n", "ecursive"),
        ('a: "${b"\n', "incomplete"),
        ("a: ${foo:1}\n", "foo"),
        ("a: ???\n", "filled in"),
        ("a: {b: [1, '${nope}', '${nope}']}\n", "a.b[1] = ${nope}"),
    ],
)
def test_bad_references_are_reported_with_their_line_and_left_out(tmp_path, text, said):
    tree = read(tmp_path, "ok: 1\n" + text)
    assert said in str(tree.problems[0])
    assert "(recipe.yaml:2)" in tree.problems[0].where
    assert tree.values in ({"ok": 1}, {"ok": 1, "a": {}})


def test_all_bad_references_are_reported_at_once(tmp_path):
    tree = read(tmp_path, 'a: ${x}\nb: "${"\nc: ???\nd: ${y}\n')
    assert len(tree.problems) == 4
    assert tree.bad == {"a", "b", "c", "d"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: [1\nc: 2\n", "line 3"),
        ("a: 1\n b: 2\n", "line 2"),
        ("a: 1\na: 2\n", '"a" is given twice'),
        ("a: {b: 1, b: 2}\n", '"b" is given twice'),
        ("a: &x {b: *x}\n", "nested"),
        ("- 1\n- 2\n", "list"),
        ("just text\n", "str"),
        (
            "a: !!python/object/apply:os.system ['true']\n",
            "python/object/apply:os.system is not supported",
        ),
        ("a: 1\n---\nb: 2\n", "expected a single document"),
    ],
)
def test_what_is_no_recipe_is_reported_with_its_place(tmp_path, text, said):
    tree = read(tmp_path, text)
    assert said in str(tree.problems[0])
    assert "recipe.yaml" in str(tree.problems[0])
    assert tree.values == {}


def test_missing_and_binary_files_are_one_sentence(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, said in [
        (tmp_path / "nope.yaml", "no such file"),
        (tmp_path, "is a folder, not a file"),
        (tmp_path / "binary", "not UTF-8"),
    ]:
        (problem,) = read_tree(path, [], {}).problems
        assert said in str(problem)
        assert str(path) in str(problem)


def test_an_empty_file_is_an_empty_recipe(tmp_path):
    tree = read(tmp_path, "# nothing yet\n")
    assert (tree.values, tree.problems) == ({}, [])


def test_anchors_and_merges_work(tmp_path):
    tree = read(tmp_path, "a: &x {lr: 1}\nb: {<<: *x, eps: 2}\n")
    assert tree.values["b"] == {"lr": 1, "eps": 2}


texts = st.text(max_size=12).filter(lambda text: text != "???") | st.sampled_from(
    ["on", "1e-6", "0x1F", "1:30", "${a}", "\\${a}", "\\\\${", "null", "", " x", "a: b", "'", "\n"]
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
trees = st.dictionaries(
    st.from_regex(r"[a-z_]{1,6}", fullmatch=True), plain | st.lists(plain, max_size=3), max_size=5
)


lines = st.lists(st.sampled_from(["- ", "a", ": b", "c" * 40, "#", "'", '"', "\\", "é", "1e5"]))


@settings(max_examples=200, deadline=None)
@given(trees, lines.map(" ".join))
def test_the_fast_dumper_writes_the_same_bytes(values, long):
    values = values | {"long": [long]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe_file, "FastDumper", recipe_file.Dumper)
        expected = dump_yaml(values)
    assert dump_yaml(values) == expected


def test_configs_are_dumped_by_the_fast_dumper(monkeypatch):
    """It takes a quarter of the time; a program that creates runs dumps one for each."""
    pytest.importorskip("yaml._yaml")
    monkeypatch.setattr(recipe_file, "Dumper", None)
    config, _ = resolve(load_config(None, ["actor.path=/a/m", "train_dataset.path=/a/d"]))
    assert "path: /a/m" in dump_config(config)


@settings(max_examples=50, deadline=None)
@given(trees)
def test_what_is_dumped_reads_back_equal(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_yaml(values), encoding="utf-8")
    tree = read_tree(path, [], {})
    assert tree.problems == []
    assert tree.values == values


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("? [a, b]\n: c\n", "a key must be a word"),
        ("seed: \x01\n", "is not YAML: unacceptable character"),
        ("seed: " + "9" * 5000, "cannot be read: exceeds the limit"),
        ("a: " + "[" * 3000 + "]" * 3000, "cannot be read: maximum recursion depth"),
    ],
)
def test_text_that_breaks_the_reader_is_one_problem(tmp_path, text, rule):
    (problem,) = read(tmp_path, text).problems
    assert rule in str(problem) and "\n" not in str(problem)


def bomb(levels, line, last):
    """Each level names the one before it nine times."""
    lines = [line.format(name="a0", inner=last)]
    for i in range(1, levels):
        lines.append(line.format(name=f"a{i}", inner=", ".join([f"*a{i - 1}"] * 9)))
    return "\n".join(lines)


TWICE = "\n".join(["a0: x", *(f"a{i}: ${{a{i - 1}}}${{a{i - 1}}}" for i in range(1, 60))])
CHAIN = "\n".join(["a0: x", *(f"a{i}: ${{a{i - 1}}}" for i in range(1, 2000))])


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (bomb(9, "{name}: &{name} [{inner}]", "1, 2"), "over 20000 values"),
        (bomb(9, "{name}: &{name} {{<<: [{inner}]}}", "{k: 1}"), "over 20000 values"),
        (TWICE, "over 200 references"),
        (CHAIN, "over 200 references"),
        ("a: &a {<<: *a}", "nested more than 16 deep"),
        ("a: !!bool maybe", "is no bool"),
        ("a: !!timestamp soon", "timestamp is not supported"),
        ("a: !!binary '@@'", "binary is not supported"),
        ("a: !!int []", "is no int"),
        ("a: {<<: 3}", "expected a mapping"),
        ("#" * (1 << 20) + "#", "larger than 1 MiB"),
    ],
)
def test_a_recipe_that_multiplies_or_lies_about_types_ends_in_a_sentence(tmp_path, text, rule):
    started = time.monotonic()
    (problem,) = read(tmp_path, text).problems
    assert rule in str(problem)
    assert time.monotonic() - started < 60  # a second; without a bound for ever


def test_a_recipe_without_end_or_bound_is_not_read(tmp_path):
    (problem,) = read_tree("/dev/zero", [], {}).problems
    assert "is a pipe, a socket or a device, not a file" in str(problem)
    (tmp_path / "large.yaml").write_text("# " + "x" * (1 << 20))
    (problem,) = read_tree(tmp_path / "large.yaml", [], {}).problems
    assert "larger than 1 MiB" in str(problem)


def test_an_override_that_multiplies_ends_in_a_sentence():
    text = bomb(9, "&{name} [{inner}]", "1, 2").replace("\n", ", ")
    (problem,) = read_tree(None, [f"gconfig.stop=[{text}]"], {}).problems
    assert "over 20000 values" in str(problem)


def test_an_override_that_breaks_the_reader_is_one_problem(tmp_path):
    (problem,) = read(tmp_path, "", "seed=" + "9" * 5000).problems
    assert "the value cannot be read" in str(problem)
