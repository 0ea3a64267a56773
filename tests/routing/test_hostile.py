"""Files and settings that are broken, or made to take for ever, end in an error at once.

What could take long runs in a process of its own, to which the system gives seconds of CPU time.
"""

import json
import math
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_eopt.routing import OverrideError, entries_from_dict, limits, read_overrides, resolve
from tests.routing.made import KNOWN, model

# Each file in a child of its own, which has imported everything and has two seconds for what it does itself.
READ = """
import os, resource, sys, traceback
from megatron_eopt.routing import OverrideError, ParameterInfo, read_overrides, resolve
from tests.routing.made import KNOWN, model

for key in KNOWN.optimizers:
    KNOWN.optimizers[key]  # read once, by whoever asks first
parameters = [*model(3), ParameterInfo("a" * 5000, (4, 4))]
for path in sys.argv[1:]:
    if (child := os.fork()):
        os.waitpid(child, 0)
        continue
    with open(path + ".answer", "w") as answer:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
            resolve(read_overrides(path, KNOWN, keep_mistakes=True), parameters, "muon", known=KNOWN)
            answer.write("0 nothing is wrong")
        except OverrideError as error:
            answer.write(f"{len(str(error))} {str(error).splitlines()[0]}")
        except BaseException:
            answer.write(traceback.format_exc()[-500:])
    os._exit(0)
"""


def billion_laughs(first, depth=9, width=10):
    lines = [f"- &a0 {first}"]
    lines += [f"- &a{k} {{<<: [{', '.join([f'*a{k - 1}'] * width)}]}}" for k in range(1, depth)]
    return "\n".join(lines)


def lists(depth, width):
    return "\n".join(
        ["- &a0 {select: x, betas: &b0 [1]}"]
        + [f"- {{select: x, betas: &b{k} [{', '.join([f'*b{k - 1}'] * width)}]}}" for k in range(1, depth)]
    )


# name of the file -> what it holds, and what is said of it
FILES = {
    "merges.yaml": (billion_laughs("{select: x, lr: 1}"), r":6: with aliases followed, there are more than"),
    "deep_merges.yaml": (
        billion_laughs("{select: x, lr: 1}", 30, 2),
        r":14: with aliases followed, there are more than",
    ),
    "lists.yaml": (lists(4, 3000), r":3: with aliases followed, there are more than"),
    "nested.yaml": ("[" * 900 + "]" * 900, r":1: values lie more than 8 deep"),
    "nested.json": ("[" * 900 + "]" * 900, r":1: values lie more than 8 deep"),
    "far_nested.json": ("[" * 100_000 + "]" * 100_000, r":1: values lie more than 8 deep"),
    "blocks.yaml": ("- " * 100_000, r":1: values lie more than 8 deep"),
    "keys.yaml": ("? " * 100_000, r":1: values lie more than 8 deep"),
    "braces.yaml": ("{" * 100_000, r":1: values lie more than 8 deep"),
    "digits.yaml": (
        f"- select: x\n  lr: {'1' * 5000}\n",
        r":2: lr: '1{20}'\.\.\. has 5,000 characters, and may have 500",
    ),
    "digits.json": (f'[{{"select": "x",\n"lr": {"1" * 5000}}}]', r":2: lr: '1{20}'\.\.\. has 5,000 characters"),
    "float.yaml": (f"- select: x\n  lr: 1{'0' * 400}\n", r":2: lr: expected a number of at least 0, got 1000"),
    "steps.yaml": (
        "- select: x\n  num_ns_steps: 100000000\n  coefficient_type: simple",
        r":2: num_ns_steps: expected a whole number in \[1, 100\], got 100000000",
    ),
    "repeats.yaml": (
        '- select: "re:a{99999999999}"\n  lr: 1\n',
        r":1: select: 'a\{99999999999\}' is no regular expression: the repetition number is too large",
    ),
    "globs.yaml": (f'- {{select: "{"*a" * 200}!", lr: 1}}\n', r":1: select: .* matches no parameter"),
    "blanks.yaml": (f'- {{select: "a:{" " * 490}x y", lr: 1}}\n', r":1: select: unknown kind of selector 'a'"),
    "parentheses.yaml": (
        f'- select: "re:{"(" * 5000}{")" * 5000}"\n  lr: 1\n',
        r":1: select: 're:\(+'\.\.\. has 10,003 characters",
    ),
    "groups.yaml": (f'- select: "re:{"(" * 240}!{")" * 240}"\n  lr: 1\n', r":1: select: .* matches no parameter"),
    "misspelt.yaml": ("- {select: x, wieght_decaz: 1}\n" * 5000, r":1: wieght_decaz: unknown setting"),
    "settings.yaml": (
        "- select: x\n" + "".join(f"  lrr{k}: 1\n" for k in range(2_000)),
        r":1: there are 2,001 settings, and an entry may have 100",
    ),
    "unmatched.yaml": ("- {select: fc3.wieght, lr: 1}\n" * 1000, r":1: select: 'fc3.wieght' matches no param"),
    "merged.yaml": (
        "- &a {select: x, lr: 1}\n- {<<: [" + "*a, " * 50_000 + "*a]}",
        r":2: with aliases followed, there are more than",
    ),
    "unicode.yaml": (r'- "\UFFFFFFFF"', r":1: this is no YAML: .*"),
    "code.yaml": ('- "\\ud800\\U00110000"', r":1: this is no YAML: .*"),
    "version.yaml": (f"%YAML {'1' * 5000}.1\n--- 1", r":1: this is no YAML: .*"),
    "escape.yaml": (
        '- {select: x, "l\\e[31mr": 1}\n- {select: "a\\nb", lr: 1}',
        r":1: 'l\\x1b\[31mr' has characters that cannot be printed",
    ),
    "tag.yaml": ("- {select: x, lr: !<%1b[31m> 1}", r":1: lr: \\x1b\[31m is a tag"),
    "name.yaml": (f"- {{select: x, {'n' * 100_000}: 1}}", r":1: this is no YAML: expected ',' or '}', but got ':'"),
    "key.yaml": (
        f"- select: x\n  ? {'n' * 100_000}\n  : 1",
        r":2: 'nnnnnnnnnnnnnnnnnnnn'\.\.\. has 100,000 characters",
    ),
    "text.yaml": (f"- select: x\n  optimizer: {'n' * 100_000}", r":2: optimizer: 'n{20}'\.\.\. has 100,000 characters"),
    "betas.yaml": (f"- select: x\n  betas: [{'1, ' * 5_000}]", r":2: betas: expected two numbers in .{80}"),
    "alias.yaml": (f"- *{'n' * 100_000}", r":1: this is no YAML: found undefined alias"),
    "zero.yaml": ("\0" * 1000, r":1: this is no YAML: unacceptable character #x0000"),
    "large.yaml": ("#" * (limits.MAX_FILE_BYTES + 1), r": expected a file of at most 262,144 bytes"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    for name, (text, _) in FILES.items():
        (folder / name).write_text(text)
    root = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", READ, *FILES], cwd=folder, env=os.environ | root, check=True)
    return {name: (folder / f"{name}.answer").read_text() for name in FILES}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_answered_at_once(answers, name):
    size, _, line = answers[name].partition(" ")
    assert re.match(re.escape(name) + FILES[name][1], line), answers[name]
    assert int(size) < 2**20


NO_FILES = {
    "folder": lambda path: path.mkdir(),
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "16 GiB": lambda path: path.touch() or os.truncate(path, 2**34),
}


@pytest.mark.parametrize("make", NO_FILES.values(), ids=NO_FILES)
def test_what_is_no_file_with_text_is_not_opened(tmp_path, make):
    path = tmp_path / "o.yaml"
    make(path)
    with pytest.raises(OverrideError) as error:
        read_overrides(path, KNOWN)
    assert str(error.value) == f"{path}: expected a file of at most 262,144 bytes, no device and no folder"


def test_after_many_mistakes_the_last_line_says_how_far_the_file_was_read(tmp_path):
    path = tmp_path / "o.yaml"
    path.write_text("- {select: x, lrr: 1}\n" * (limits.MAX_MISTAKES + 9))
    with pytest.raises(OverrideError) as error:
        read_overrides(path, KNOWN, keep_mistakes=True)
    *mistakes, last = str(error.value).splitlines()
    assert mistakes == [f"{path}:{k}: lrr: unknown setting, did you mean 'lr'?" for k in range(1, len(mistakes) + 1)]
    assert last == f"{path}:{len(mistakes)}: read up to here: mend these first"
    assert len(mistakes) == limits.MAX_MISTAKES + 1


def test_many_selectors_that_match_nothing_are_all_reported():
    entries = entries_from_dict({f"x{k}": {"lr": 1} for k in range(limits.MAX_MISTAKES + 9)}, known=KNOWN)
    with pytest.raises(OverrideError) as error:
        resolve(entries, model(1), "muon", known=KNOWN)
    assert str(error.value).count("matches no parameter") == limits.MAX_MISTAKES + 9


NUMBERS = [10**400, 10**5000, -(10**400), math.nan, -math.inf, True, "1" * 5000]


@pytest.mark.parametrize("value", NUMBERS, ids=range(len(NUMBERS)))
@pytest.mark.parametrize("key", ["lr", "num_ns_steps"])
def test_python_too_may_set_numbers_alone(key, value):
    with pytest.raises(OverrideError) as error:
        entries_from_dict({"x": {key: value}}, known=KNOWN)
    assert str(error.value).startswith(f"overrides['x']: {key}: ")
    assert len(str(error.value)) < 400


NO_SURROGATES = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
WORDS = """select lr 1 { } [ ] &a *a <<: !!int !x | > ' " \\ \\x %YAML --- ... # re: ( )+ * null ~ .nan 1e400 muon
optimizer betas -0.0 true predicate""".split()
LIKE_YAML = st.lists(
    st.sampled_from(
        [*WORDS, *("- ", "\n", "\n  ", ": ", ", ", "? ", " ", "\t", "\0", "\x1b", "\x85", "\ufeff", "0" * 600)]
    ),
    max_size=30,
).map("".join)
NUMBERS_OR_NOT = st.none() | st.booleans() | st.integers() | st.floats() | st.just(10**400)
SCALARS = NUMBERS_OR_NOT | st.sampled_from(["re:(", "*"]) | NO_SURROGATES
KEYS = st.sampled_from("select lr betas num_ns_steps name predicate split optimizer".split()) | NO_SURROGATES
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=8
)
WRITTEN = st.binary(max_size=60) | (NO_SURROGATES | LIKE_YAML | VALUES.map(json.dumps)).map(str.encode)


@example(b'- "\\UFFFFFFFF"', ".yaml")
@example(b"%YAML 1" + b"1" * 5000 + b".1\n---\n", ".yaml")
@example(b'[{"select": "\\ud800", "lr": 1}]', ".json")
@example(b"\xef\xbb\xbf\n\xff", ".yaml")
@given(WRITTEN, st.sampled_from([".yaml", ".json"]))
def test_whatever_a_file_holds_it_is_read_or_refused(tmp_path_factory, written, suffix):
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(written)
    said = ""
    try:
        resolve(read_overrides(path, KNOWN), model(1), "muon", known=KNOWN)
    except OverrideError as error:
        said = str(error)
    assert said.replace("\n", "").isprintable()


@given(st.dictionaries(SCALARS | st.lists(SCALARS).map(tuple), VALUES, max_size=3))
def test_whatever_a_dict_holds_it_is_taken_or_refused(overrides):
    with suppress(OverrideError):
        resolve(entries_from_dict(overrides, known=KNOWN), model(1), "muon", known=KNOWN)
