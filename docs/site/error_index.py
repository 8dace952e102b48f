"""Every message with which the programs refuse something, as one page.

``python docs/site/error_index.py > docs/errors.md`` writes it. The messages are read from the source: whatever makes a
:class:`costmodel.base.errors.ProjectError` or ends a command with ``fail``, and the reasons that validators of the
project's own files give. Values are {named} as the code names them; clauses that say what to do are in bold.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby, islice, product
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {
    "`fusion`, and its kernels": ("fusion", "schedules"),
    "`e2e`": ("e2e",),
    "Both tools, and `costmodel`": ("costmodel",),
}
BASE = "ProjectError"
VALIDATORS = {"field_validator", "model_validator", "AfterValidator", "BeforeValidator"}
# Where a ValueError is the reason that a message about a user's text or file ends with.
REASONS = (
    "costmodel/base/units.py", "costmodel/machines/", "costmodel/embedding/", "e2e/parallelism/spec.py",
    "e2e/sharding/plan_file.py", "e2e/whatif/questions.py",
)  # fmt: skip
_DEPTH, _MOST = 4, 40  # of texts within texts; of ways to put one together
# How a clause begins that says what to do.
_VERBS = (
    "add|allow|analyze|ask|calibrate|call|capture|check|choose|collect|compare|compress|"
    "convert|correct|delete|download|drop|export|fetch|fit|free|give|ignore|install|keep|"
    "leave|let|list|load|look|make|measure|mend|move|name|number|pad|pass|pip|price|"
    "put|quantise|record|remove|rename|repair|report|restore|retry|run|save|say|see|set|"
    "shard|shorten|spread|start|take|train|try|tune|unset|update|use|wait|write"
)
# What tells as much: what is wanted, what there is to choose from, which command brings it, what somebody else advises.
_WANTED = (
    r"\bmust\b", r"^expected\b", r"\bneeds? ", r"^known\b", r"^only\b.*\bsupported\b", r"^there are\b", r"^nearest\b",
    r"^did you mean\b", r"^(?:the model|it|NCCL) takes\b", r"^it (?:has|holds) (?!no\b)", r"^(?:its|the) \w+ are\b",
    r"^the step has\b", r"^families\b", r"\bare taken\b", r"^every\b", r"\bat (?:least|most)\b", r"\bmay use\b",
    r"\bsuch as\b", r"`[^`]*(?:python -m|fusion|--)[^`]*`", r"^--\w+ .*\b(?:rewrites|moves)\b", r"\blists (them|all)\b",
    r"^what was fetched stays\b", r"^the first axis\b", r"\bgive\b", r"^\w+ counts?\b", r"\bmakes them faster$",
    r"^\{(?:advice|way)\}", r"more problems$",
)  # fmt: skip
_ADVICE = re.compile("|".join((rf"^(?:(?:or|and|then|with|of) )?(?:{_VERBS})\b", *_WANTED)))

_HEAD = """# Error messages, and what to do

Generated from the source: `python docs/site/error_index.py`.

A program that cannot go on says why in one line that begins with `error:`, and ends with status 2. Search this page for
words of yours: {count} messages, by the part of the program that says them, {{names}} standing for values, what to do
in bold. The last word of each line is the file that says it. A reason of the operating system (`Permission denied`,
`No such file or directory`, `No space left on device`) is what to mend. Options that do not go together in
`e2e predict` are told by `python -m e2e predict --help`. Whatever ends in a traceback instead is a mistake of the programs
([robustness](robustness.md)).
"""


class Message(NamedTuple):
    """``text`` as a user sees it, and the file that says so."""

    path: str
    text: str


@dataclass(frozen=True)
class Scope:
    """What stands for texts where a message is put together: names, and functions of the file that return texts."""

    texts: Mapping[str, ast.expr] = field(default_factory=dict)
    functions: Mapping[str, ast.FunctionDef] = field(default_factory=dict)
    depth: int = 0

    def inside(self, texts: Mapping[str, ast.expr]) -> Scope:
        """With other ``texts``, one step further in."""
        return Scope(texts, self.functions, self.depth + 1)


@cache
def sources() -> dict[str, ast.Module]:
    """All modules of the packages by their path."""
    packages = [package for folders in TOOLS.values() for package in folders]
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def messages(trees: Mapping[str, ast.Module]) -> list[Message]:
    """All of them by their words; what a file says alike in several places stands once, bare values not at all."""
    errors, constants = error_names(trees), {path: _texts(tree.body) for path, tree in trees.items()}
    found: set[Message] = set()
    for path, tree in trees.items():
        found |= {Message(path, text) for text in _messages(path, tree, errors, _imported(tree, constants))}
    return sorted((each for each in found if len(_words(each.text)) > 1), key=lambda each: (_words(each.text), each))


def error_names(trees: Mapping[str, ast.Module]) -> set[str]:
    """Names of all classes below ``ProjectError``, itself among them."""
    classes = [each for tree in trees.values() for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]
    found, before = {BASE}, 0
    while len(found) > before:
        before = len(found)
        found |= {each.name for each in classes if found & {ast.unparse(base) for base in each.bases}}
    return found


def clauses(text: str) -> list[str]:
    """``text`` cut between its clauses; put together again it is the same."""
    return re.split(
        r"(?<=; )|(?<=\. )|(?<=: )(?![^(]*\))|(?<=, )(?=known|expected|such as|name |give )|(?<=\()(?=known|did )", text
    )


def is_advice(clause: str) -> bool:
    """Whether it says what to do, or what there is to choose from."""
    return bool(_ADVICE.search(clause.strip(" ;.)")))


def without_advice(trees: Mapping[str, ast.Module]) -> list[Message]:
    """Messages that leave a user alone."""
    return [each for each in messages(trees) if not any(map(is_advice, clauses(each.text)))]


def page(trees: Mapping[str, ast.Module]) -> str:
    """The page as it must be on disk."""
    grouped: dict[str, dict[str, None]] = defaultdict(dict)
    for message in messages(trees):
        grouped[role(message.path)][f"- {marked(message.text)} ({Path(message.path).name})"] = None
    parts = [_HEAD.format(count=sum(map(len, grouped.values())))]
    for title, packages in TOOLS.items():
        parts.append(f"## {title}\n")
        for name, told in roles().items():
            if name.split("/")[0] in packages and name in grouped:
                parts.append("\n".join((f"### {name}\n", f"{told}\n", *grouped.pop(name), "")))
    if grouped:
        raise ValueError(f"{', '.join(grouped)}: not in the drawing of docs/architecture.md")
    return "\n".join(parts)


def role(path: str) -> str:
    """The folder of the drawing in ``docs/architecture.md`` that a file belongs to."""
    return "/".join(Path(path).parent.parts[:2])


@cache
def roles() -> dict[str, str]:
    """What each folder is for, as that drawing says."""
    drawing = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    found, package = dict[str, str](), ""
    for indent, name, told in re.findall(r"^( *)(\w+) {2,}(.+)$", drawing, re.MULTILINE):
        package = package if indent else name
        found[f"{package}/{name}" if indent else name] = told
    return found


def marked(text: str) -> str:
    """For Markdown: what to do in bold, signs of Markdown outside of code as they are."""
    shown = ""
    for advice, group in groupby(clauses(text), is_advice):
        part = "".join(group)
        bare = part.rstrip(" ;:.,(")
        shown += f"**{bare}**{part[len(bare) :]}" if advice else part
    return "".join(
        part if place % 2 else re.sub(r"(?<!\*)\*(?!\*)", r"\\*", part.replace("<", "&lt;"))
        for place, part in enumerate(re.split(r"(`[^`]*`)", shown))
    )


def _messages(path: str, tree: ast.Module, errors: set[str], constants: Mapping[str, ast.expr]) -> Iterator[str]:
    """What one file says."""
    functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    telling = {each.name: each for each in functions if _returned(each)}
    wrapped = {_name(each) for call in calls if _name(call.func) in VALIDATORS for each in call.args}
    for function in functions:
        known = {**constants, **_texts(_own(function))}
        decorators = {_name(each.func if isinstance(each, ast.Call) else each) for each in function.decorator_list}
        validates = bool(VALIDATORS & decorators) or function.name in wrapped or path.startswith(REASONS)
        hints = {each.arg: ast.unparse(each.annotation) for each in function.args.args if each.annotation}
        kinds = {name for name, hint in hints.items() if hint.startswith("type[") and hint[5:-1] in errors}
        makers = (
            errors | kinds | ({"ValueError"} if validates else set()) | ({"fail"} if "fail" not in telling else set())
        )
        for call in _own(function):
            if isinstance(call, ast.Call) and call.args and _name(call.func) in makers and function.name != "fail":
                for given in _given(function, calls, call.args[0]):
                    yield from texts_of(call.args[0], Scope({**known, **given}, telling))


def _given(function: ast.FunctionDef, calls: Iterable[ast.Call], told: ast.expr) -> list[dict[str, ast.expr]]:
    """The texts that ``calls`` give to ``function`` for those of its parameters that ``told`` shows."""
    used = {each.id for each in ast.walk(told) if isinstance(each, ast.Name)}
    bound = [_bound(call, function) for call in calls if _name(call.func) == function.name]
    found = [{name: value for name, value in each.items() if name in used and _is_text(value)} for each in bound]
    return [each for each in found if each] or [{}]


def texts_of(node: ast.expr, scope: Scope) -> list[str]:
    """The texts that ``node`` may be, values as {names}."""
    match node:
        case ast.Constant():
            return [str(node.value)]
        case ast.JoinedStr():
            return [*islice(map("".join, product(*(texts_of(each, scope) for each in node.values))), _MOST)]
        case ast.FormattedValue():
            quote = "'" if node.conversion == ord("r") else ""
            return [f"{quote}{each}{quote}" for each in texts_of(node.value, scope)]
        case ast.BinOp(op=ast.Add()) if _is_text(node):
            return [first + last for first, last in product(texts_of(node.left, scope), texts_of(node.right, scope))]
        case ast.IfExp() if _is_text(node):
            return [*texts_of(node.body, scope), *texts_of(node.orelse, scope)]
        case ast.Name() if node.id in scope.texts and scope.depth < _DEPTH:
            rest = {name: each for name, each in scope.texts.items() if name != node.id}
            return texts_of(scope.texts[node.id], scope.inside(rest))
        case ast.Call() if _name(node.func) in scope.functions and scope.depth < _DEPTH:
            function = scope.functions[_name(node.func)]
            given = {name: each for name, each in _bound(node, function).items() if _is_text(each)}
            known = scope.inside({**_texts(_own(function)), **given})
            return [text for each in _returned(function) for text in texts_of(each, known)]
    return [f"{{{value_name(node)}}}"]


def value_name(node: ast.expr) -> str:
    """A word for a value: the last name of its expression that means something."""
    match node:
        case ast.Name(id="error" | "reason") | ast.Attribute(attr="strerror"):
            return "reason"
        case ast.Name():
            return node.id.strip("_").lower()
        case ast.Attribute(value=inner, attr="__name__" | "name" | "value") if _name(inner) != "self":
            return value_name(inner)
        case ast.Attribute():
            return node.attr.strip("_")
        case ast.Call(args=arguments, func=called):
            for each in arguments:
                if not isinstance(each, ast.Constant) and _name(each) not in ("str", "repr"):
                    return value_name(each)
            if isinstance(called, ast.Attribute) and _name(called.value) != "self":
                return value_name(called.value)
            return _name(called).strip("_")
        case ast.GeneratorExp() | ast.ListComp() | ast.SetComp():
            return value_name(node.generators[0].iter)
        case ast.Subscript(value=inner) | ast.Starred(value=inner) | ast.IfExp(body=inner) | ast.UnaryOp(operand=inner):
            return value_name(inner)
        case ast.BinOp(left=ast.Constant(), right=inner) | ast.BinOp(left=inner) | ast.BoolOp(values=[inner, *_]):
            return value_name(inner)
    return "value"


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What is in ``function``, but not in functions inside of it."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.FunctionDef)]


def _returned(function: ast.FunctionDef) -> list[ast.expr]:
    """The texts that ``function`` returns, the empty one left out."""
    values = [each.value for each in _own(function) if isinstance(each, ast.Return) and each.value is not None]
    return [each for each in values if _is_text(each) and not (isinstance(each, ast.Constant) and not each.value)]


def _texts(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    """Names that are given a text, once."""
    found: dict[str, list[ast.expr]] = defaultdict(list)
    for node in nodes:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            if isinstance(node, ast.Assign | ast.AugAssign):
                found[_name(target)].append(node.value)
    return {name: values[0] for name, values in found.items() if name and len(values) == 1 and _is_text(values[0])}


def _imported(tree: ast.Module, constants: Mapping[str, Mapping[str, ast.expr]]) -> dict[str, ast.expr]:
    """Constants that are texts: those that ``tree`` imports, what these are made of, and its own."""
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            there = constants.get(f"{node.module.replace('.', '/')}.py", {})
            if any(each.name in there for each in node.names):
                found |= there
    return found | _texts(tree.body)


def _is_text(node: ast.expr | None) -> bool:
    match node:
        case ast.IfExp():
            return _is_text(node.body) and _is_text(node.orelse)
        case ast.BinOp():
            return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _bound(call: ast.Call, function: ast.FunctionDef) -> dict[str, ast.expr]:
    """The arguments of ``call`` by the parameters of ``function``."""
    given = function.args
    names = [each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs] if each.arg != "self"]
    return {**dict(zip(names, call.args, strict=False)), **{each.arg: each.value for each in call.keywords if each.arg}}


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", re.sub(r"\{[^}]*\}|--[\w-]+", " ", text).lower())


if __name__ == "__main__":
    print(page(sources()), end="")
