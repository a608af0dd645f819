"""Every public name says what it takes and gives: shapes, dtypes, ranges, errors, and where it comes from."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import jaxkv
import pallas_kernels
from jaxkv import viz

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (jaxkv, viz, pallas_kernels)
    for name in package.__all__
    if not inspect.ismodule(getattr(package, name))
}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
METHODS = {
    f"{name}.{method}": inspect.unwrap(getattr(value, method))
    for name, value in CLASSES.items()
    for method, member in vars(value).items()
    if not method.startswith("_") and (inspect.isfunction(member) or isinstance(member, classmethod | staticmethod))
}

NEVER_RAISES = {"jaxkv.step", "pallas_kernels.quantize"}  # inside jit, with nothing to check
SIDE_EFFECT_ONLY = {"jaxkv.save"}
SOURCES = {  # what is not our own idea, and where it comes from
    "jaxkv.generate": "Orca",
    "jaxkv.beam_search": "transformers",
    "jaxkv.Sampling": "1904.09751",
    "jaxkv.NGram": "Saxena",
    "jaxkv.Draft": "2211.17192",
    "jaxkv.Rope": "2104.09864",
    "jaxkv.PagedKVCache": "2309.06180",
    "pallas_kernels.paged_attention": "2309.06180",
}
SHAPE = r"\[[\w, *+.-]+\]|\b[if](?:8|16|32|64)\[\]|\bscalars?\b|one per|one key|one value per"
ARRAYS = r"\bArray\b|ndarray"


def doc(value) -> str:
    return inspect.getdoc(value) or ""


def entry(text: str, name: str) -> str:
    """What a docstring says about a parameter or field: its lines from the name on to the next entry."""
    found = re.search(rf"^ +(?:[\w*]+, )*{re.escape(name)}(?:, [\w*]+)*:.*\n?(?:^ {{4,}}.*\n?)*", text + "\n", re.MULTILINE)
    return found[0] if found else ""


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_it_has_one_that_begins_with_a_sentence(name: str) -> None:
    text = doc({**PUBLIC, **METHODS}[name])
    assert text, "no docstring"
    assert re.match(r"[A-Za-z`\[].*?[.:]", text.split("\n\n")[0], re.DOTALL), text.split("\n")[0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_is_explained(name: str) -> None:
    text = doc(FUNCTIONS[name])
    arguments = text.partition("Args:")[2]
    for parameter in inspect.signature(FUNCTIONS[name]).parameters:
        assert entry(arguments, parameter) or re.search(rf"\b{parameter}\b", arguments), f"{parameter} is not under Args"


def says_its_shape(name: str, parameter: inspect.Parameter) -> bool:
    """Whether the shape stands in the annotation, which the tests check at run time, or in words under Args."""
    typed = re.search(r"(?:Int|Float|Bool|Key|Shaped)\[", str(parameter.annotation))
    return bool(typed or re.search(SHAPE, entry(doc(PUBLIC[name]).partition("Args:")[2], parameter.name)))


def followed(name: str, said: str) -> str:
    """The public function that an entry "x: as for `jaxkv.f`" points at; "" where there is none."""
    found = re.search(r"\bas for `([\w.]+)`", said)
    return next((f for f in (found[1], f"{name.rpartition('.')[0]}.{found[1]}") if f in FUNCTIONS), "") if found else ""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_array_has_a_shape(name: str) -> None:
    """Its own entry says it, or says which public function's parameter of the same name it is like, and that one says it."""
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        annotation = str(parameter.annotation)
        may_be_number = re.match(r"(?:float|int|typing.Union\[float)", annotation)
        if not re.search(ARRAYS, annotation) or may_be_number or says_its_shape(name, parameter):
            continue
        said = entry(doc(FUNCTIONS[name]).partition("Args:")[2], parameter.name)
        other = followed(name, said)
        assert other, f"{parameter.name}: {annotation} has no shape and follows no public function in {said!r}"
        theirs = inspect.signature(FUNCTIONS[other]).parameters.get(parameter.name)
        assert theirs is not None, f"{parameter.name} follows {other}, which has no such parameter"
        assert says_its_shape(other, theirs), f"{parameter.name} follows {other}, which does not say its shape itself"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_parameter_follows_is_explained_there(name: str) -> None:
    """An entry that only points at another function names a public one, whose own entry explains the parameter and points no further."""
    for parameter in inspect.signature(FUNCTIONS[name]).parameters.values():
        said = entry(doc(FUNCTIONS[name]).partition("Args:")[2], parameter.name)
        if (
            not re.search(r": (?:as (?:for|given|in|to)\b|[Tt]he same)", said)
            or parameter.kind is inspect.Parameter.VAR_KEYWORD
        ):
            continue
        other = followed(name, said)
        assert other, f"{parameter.name} follows no public function in {said!r}"
        theirs = entry(doc(FUNCTIONS[other]).partition("Args:")[2], parameter.name)
        assert theirs, f"{parameter.name} follows {other}, which does not explain it"
        assert not followed(other, theirs), f"{parameter.name} follows {other}, which follows another in {theirs!r}"


@pytest.mark.parametrize("name", CLASSES)
def test_every_array_field_has_a_shape(name: str) -> None:
    text = doc(CLASSES[name])
    for field, annotation in inspect.get_annotations(CLASSES[name]).items():
        if field.startswith("_") or not re.search(ARRAYS, str(annotation)) or "ArrayLike" in str(annotation):
            continue
        if re.search(r"(?:Int|Float|Bool|Key|Shaped)\[", str(annotation)):
            continue
        common = text.partition("Args:")[0]  # what holds for all fields
        assert re.search(SHAPE, entry(text, field)) or re.search(SHAPE, common), f"{field}: {annotation} has no shape"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_says_what_it_raises(name: str) -> None:
    assert ("Raises:" in doc(FUNCTIONS[name])) != (name in NEVER_RAISES)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_says_what_it_returns(name: str) -> None:
    """Under Returns, or its annotation is a public class that explains itself."""
    text, returned = doc(FUNCTIONS[name]), inspect.signature(FUNCTIONS[name]).return_annotation
    explained = returned in CLASSES.values()
    assert "Returns:" in text or explained or name in SIDE_EFFECT_ONLY


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_not_our_idea_names_its_source(name: str) -> None:
    source = doc(PUBLIC[name]).partition("Source:")[2]
    assert SOURCES[name] in source


def test_examples_print_what_they_say() -> None:
    tried = 0
    for package in ("jaxkv", "pallas_kernels"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if ">>> " in path.read_text():
                module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
                failed, attempted = doctest.testmod(module)
                assert not failed, path
                tried += attempted
    assert tried >= 5
