"""Questions with answers that follow from them: what the small target learns to be good at.

Most answers are told by rule from a function's syntax tree, so they are long, differ with every function and
leave little to guess. A model of six million parameters learns such tasks well; of free prose it would learn
to repeat itself.
"""

from __future__ import annotations

import ast
import json
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Pair = tuple[str, str]  # question, answer

_NAMES = (
    "value item total first second count data result number text line name index key word size limit start end "
    "source other node left right step part group entry record field level point batch"
)
_THINGS = (
    "apple bridge candle desert engine forest garden hammer island jacket kettle ladder meadow needle orange pencil "
    "river saddle table violin window yellow zebra anchor basket copper dragon feather guitar helmet iron jungle"
)
NAMES, THINGS = _NAMES.split(), _THINGS.split()
ADDRESSES = ("Explain what this Python function does.", "Describe this function.", "What happens here?")
STEPS = ("List the steps of this function.", "Go through this function step by step.", "Which steps does this take?")
ARGUMENTS = ("List the arguments of this function.", "Which arguments does this function take?")
DOCSTRINGS = ("Write a docstring for this function.", "Summarise this function in a sentence or two.")
BODIES = ("Write this Python function.", "Complete this function.", "Implement this function.")
CALLS = ("Which functions does this code call?", "Name everything that is called here.")


@dataclass
class Function:
    """A function of at least three lines; `code` is its dedented source, `plain` the same without docstring."""

    name: str
    code: str
    plain: str
    signature: str
    docstring: str
    tree: ast.FunctionDef


def functions(source: str, longest: int = 700) -> Iterator[Function]:
    """The functions and methods of a file whose source has at most `longest` characters."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])).strip()
        if code.count("\n") < 2 or len(code) > longest:
            continue
        try:
            tree = ast.parse(code).body[0]
        except SyntaxError:  # a string over several lines that the dedenting moved
            continue
        if not isinstance(tree, ast.FunctionDef) or tree.body[0].lineno == tree.lineno:
            continue
        docstring = ast.get_docstring(tree) or ""
        own = code.splitlines()
        head = own[: tree.body[0].lineno - 1]
        if docstring:
            if len(tree.body) == 1:
                continue
            rest = own[tree.body[0].end_lineno or 0 :]
        else:
            rest = own[len(head) :]
        paragraph = docstring.split("\n\n")[0]
        yield Function(
            tree.name, code, "\n".join(head + rest), "\n".join(head), re.sub(r"\s+", " ", paragraph).strip(), tree
        )


def about(function: Function, choose: random.Random) -> dict[str, Pair]:
    """Task -> question that needs the code in front of it (`body`: stands alone), and its answer."""
    pairs = {
        "explain": (choose.choice(ADDRESSES), explanation(function)),
        "steps": (choose.choice(STEPS), steps(function)),
        "arguments": (choose.choice(ARGUMENTS), arguments(function)),
        "calls": (choose.choice(CALLS), calls(function)),
        "rename": renaming(function, choose),
    }
    if 10 < len(function.docstring) < 300:
        pairs["docstring"] = (choose.choice(DOCSTRINGS), function.docstring)
        head = f'{function.signature}\n    """{function.docstring}"""'
        pairs["body"] = (f"{choose.choice(BODIES)}\n\n{fenced(head)}", fenced(function.plain))
    return pairs


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def explanation(function: Function) -> str:
    names = [f"`{argument.arg}`" for argument in _arguments(function.tree)]
    takes = f"takes {listed(names)}" if names else "takes no arguments"
    told = [f"The function `{function.name}` {takes}."]
    statements = _statements(function)
    for at, statement in enumerate(statements):
        word = "First it" if at == 0 and len(statements) > 1 else "Finally it" if at == len(statements) - 1 else "It"
        phrase = _phrase(statement, function.code)
        if phrase.startswith(("if ", "for ", "while ", "with ")):
            told.append(f"{phrase[0].upper()}{phrase[1:]}.")
        else:
            told.append(f"{word} {phrase}.")
    return " ".join(told)


def steps(function: Function) -> str:
    phrases = [_phrase(statement, function.code) for statement in _statements(function)]
    return "\n".join(f"{number}. {phrase[0].upper()}{phrase[1:]}." for number, phrase in enumerate(phrases, start=1))


def arguments(function: Function) -> str:
    found = _arguments(function.tree)
    if not found:
        return f"`{function.name}` takes no arguments."
    given = function.tree.args
    positional = [*given.posonlyargs, *given.args]
    defaults: dict[str, ast.expr | None] = {
        argument.arg: default
        for argument, default in zip(positional[::-1], given.defaults[::-1], strict=False)  # defaults are the last ones
    }
    defaults |= {argument.arg: default for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)}
    lines = [f"`{function.name}` takes {len(found)} argument{'s' if len(found) > 1 else ''}:"]
    for argument in found:
        default = defaults.get(argument.arg)
        if argument is given.vararg:
            how = "any number of positional arguments"
        elif argument is given.kwarg:
            how = "any keyword arguments"
        else:
            how = f"optional, `{_text(default, function.code)}` by default" if default else "required"
        lines.append(f"- `{argument.arg}`: {how}")
    return "\n".join(lines)


def calls(function: Function) -> str:
    found: dict[str, None] = {}
    for node in ast.walk(function.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            found[_text(node.func, function.code)] = None
    if not found:
        return f"`{function.name}` calls nothing."
    return f"`{function.name}` calls {listed([f'`{name}`' for name in found])}."


def renaming(function: Function, choose: random.Random) -> Pair:
    own = [argument.arg for argument in _arguments(function.tree) if argument.arg not in ("self", "cls")]
    old = choose.choice(own) if own else function.name
    new = choose.choice([name for name in NAMES if not re.search(rf"\b{name}\b", function.plain)])
    return f"Rename `{old}` to `{new}`.", fenced(re.sub(rf"\b{re.escape(old)}\b", new, function.plain))


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _arguments(tree: ast.FunctionDef) -> list[ast.arg]:
    given = tree.args
    found = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [argument for argument in found if argument is not None]


def _statements(function: Function) -> list[ast.stmt]:
    return function.tree.body[1:] if ast.get_docstring(function.tree) is not None else function.tree.body


def _text(node: ast.AST | None, code: str, longest: int = 60) -> str:
    text = re.sub(r"\s+", " ", ast.get_source_segment(code, node) or "" if node else "")
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _phrase(statement: ast.stmt, code: str, depth: int = 0) -> str:
    """A statement as words that follow "It"; at most three statements of a nested block are told."""

    def text(node: ast.AST | None) -> str:
        return f"`{_text(node, code)}`"

    def block(body: list[ast.stmt]) -> str:
        if depth == 2:
            return "it does more"
        return listed([f"it {_phrase(inner, code, depth + 1)}" for inner in body[:3]])

    match statement:
        case ast.Assign(targets=targets, value=value):
            return f"sets {listed([text(target) for target in targets])} to {text(value)}"
        case ast.AnnAssign(target=target, value=value) if value is not None:
            return f"sets {text(target)} to {text(value)}"
        case ast.AugAssign(target=target, value=value):
            return f"updates {text(target)} with {text(value)}"
        case ast.Return(value=None):
            return "returns"
        case ast.Return(value=value):
            return f"returns {text(value)}"
        case ast.Raise(exc=error) if error is not None:
            return f"raises {text(error)}"
        case ast.Expr(value=ast.Call() as call):
            return f"calls {text(call)}"
        case ast.Expr(value=ast.Yield() | ast.YieldFrom() as value):
            return f"gives {text(value)}"
        case ast.If(test=test, body=body, orelse=[]):
            return f"if {text(test)}, {block(body)}"
        case ast.If(test=test, body=body, orelse=other):
            return f"if {text(test)}, {block(body)}, otherwise {block(other)}"
        case ast.For(target=target, iter=over, body=body):
            return f"for each {text(target)} in {text(over)}, {block(body)}"
        case ast.While(test=test, body=body):
            return f"while {text(test)}, {block(body)}"
        case ast.With(items=items, body=body):
            return f"with {listed([text(item.context_expr) for item in items])}, {block(body)}"
        case ast.Try(body=body, handlers=handlers) if handlers:
            caught = listed([text(handler.type) if handler.type else "any error" for handler in handlers])
            return f"tries that {block(body)}, and catches {caught}"
        case ast.FunctionDef(name=name):
            return f"defines the inner function `{name}`"
        case ast.Assert(test=test):
            return f"checks that {text(test)}"
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return f"imports {listed([f'`{alias.name}`' for alias in names])}"
        case ast.Pass():
            return "does nothing"
        case _:
            return f"runs {text(statement)}"


# --- tasks without a source ------------------------------------------------------------------------------


def _sort_words(choose: random.Random) -> Pair:
    words = choose.sample(THINGS, choose.randint(3, 8))
    return f"Sort these words: {', '.join(words)}.", f"Sorted, the words are {listed(sorted(words))}."


def _reverse_words(choose: random.Random) -> Pair:
    words = choose.sample(THINGS, choose.randint(3, 8))
    return f"Say these words backwards, the last first: {', '.join(words)}.", ", ".join(words[::-1])


def _python_list(choose: random.Random) -> Pair:
    name, words = choose.choice(NAMES), choose.sample(THINGS, choose.randint(3, 8))
    loop = f"for {name} in {json.dumps(words)}:\n    print({name})"
    return f"Write a loop over {listed(words)}, with the variable `{name}`.", fenced(loop)


def _as_json(choose: random.Random) -> Pair:
    pairs = {key: choose.randint(0, 99) for key in choose.sample(THINGS, choose.randint(2, 6))}
    told = listed([f"{key} is {number}" for key, number in pairs.items()])
    return f"Write as JSON: {told}.", f"```json\n{json.dumps(pairs, indent=2)}\n```"


def _table(choose: random.Random) -> Pair:
    pairs = [(word, choose.randint(0, 99)) for word in choose.sample(THINGS, choose.randint(2, 6))]
    head = choose.choice(NAMES)
    rows = "\n".join(f"| {word} | {number} |" for word, number in pairs)
    told = "; ".join(f"{word}, {number}" for word, number in pairs)
    return f"Make a table with the columns name and {head}: {told}.", f"| name | {head} |\n|---|---|\n{rows}"


def _dataclass(choose: random.Random) -> Pair:
    kinds = [(name, choose.choice(("int", "str", "float", "bool"))) for name in choose.sample(NAMES, 4)]
    title = choose.choice(THINGS).capitalize()
    told = listed([f"`{name}` ({kind})" for name, kind in kinds])
    fields = "\n".join(f"    {name}: {kind}" for name, kind in kinds)
    return f"Write a dataclass `{title}` with the fields {told}.", fenced(f"@dataclass\nclass {title}:\n{fields}")


def _count_up(choose: random.Random) -> Pair:
    start, step, count = choose.randint(0, 50), choose.randint(1, 5), choose.randint(4, 10)
    numbers = [str(start + step * n) for n in range(count)]
    return f"Count from {start} in steps of {step}, {count} numbers.", ", ".join(numbers)


MADE_UP: tuple[Callable[[random.Random], Pair], ...] = (
    _sort_words,
    _reverse_words,
    _python_list,
    _as_json,
    _table,
    _dataclass,
    _count_up,
)
