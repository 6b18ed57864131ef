r"""Runs inside the sandbox: compares two answers with math-verify without letting sympy evaluate text.

The sandbox's server loads this file as a module (`prepare`, then a fork per comparison), so it imports nothing of ours.
Four independent layers: symbols and functions have names of a strict alphabet; a parsed answer is inspected before it
is compared; sympy's functions that make code from text are replaced; and during a comparison (`seal`) Python ends the
process at the first attempt to compile, execute, import or open anything.
"""

import importlib
import logging
import math
import os
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import math_verify.parser
import mpmath
from latex2sympy2_extended import latex2sympy2
from math_verify import parse, verify
from sympy import Add, Basic, Float, Limit, MatrixBase, Mul, Pow, Rational, factorial, sympify
from sympy.core.function import AppliedUndef, UndefinedFunction
from sympy.core.symbol import Dummy, Str, Symbol, Wild
from sympy.parsing import sympy_parser
from sympy.polys.monomials import MonomialOps

SECONDS = 3
"""To parse an answer, and to compare two. math-verify uses signals for it, which not every computation heeds."""
MAX_NODES, MAX_DEPTH, MAX_BITS = 3000, 100, 200_000
"""Of a parsed answer: nodes, nesting, bits of a number."""
MAX_GENERATORS = 16
"""Variables of a polynomial."""

WORD = "[A-Za-z0-9\u0391-\u03a9\u03b1-\u03c9]+"
NAME = re.compile(rf"_?(?:{WORD}|[a-z]+\{{{WORD}(?:_{WORD})?\}})?(?:_(?:{WORD}|\{{(?:{WORD}|[,+-])*\}})?)*")
"""x, alpha, x_1, x_{12}, a_{n+1}, vec{v}, evelyn, and sympy's own such as _xi_1. No Python but a single word."""
DIRECTIONS = ("+", "-", "+-")
"""Of a limit: sympy makes symbols of these."""
FUNCTION = re.compile(rf"\\?(?:[A-Za-z\u0391-\u03a9\u03b1-\u03c9]|{{greek}})(?:_{WORD}|_\{{{WORD}\}})?".replace(
    "{greek}", "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|chi|psi|omega"
))  # fmt: skip
KNOWN_FUNCTIONS = ("arg", "cis", "deg", "dim", "gcd", "lcm", "max", "min", "sgn")
"""Undefined functions whose names are words. Code that sympy generates calls a function's name."""
CLASSES = (
    *("sympy.calculus", "sympy.concrete", "sympy.core", "sympy.functions", "sympy.integrals", "sympy.logic"),
    *("sympy.matrices", "sympy.series", "sympy.sets", "sympy.simplify", "latex2sympy2_extended"),
)
"""Modules of the classes that a parsed answer may have."""
LOADED = (
    "antlr4",
    *("sympy.assumptions", "sympy.calculus", "sympy.combinatorics", "sympy.concrete", "sympy.core", "sympy.discrete"),
    *("sympy.functions", "sympy.integrals", "sympy.logic", "sympy.matrices", "sympy.ntheory", "sympy.polys"),
    *("sympy.physics.units", "sympy.series", "sympy.sets", "sympy.simplify", "sympy.solvers"),
    *("sympy.strategies", "sympy.tensor", "sympy.utilities"),
)
"""Packages that import modules at first use, which a sealed process cannot."""
NOT_LOADED = re.compile(
    r"\.(?:tests|benchmarks|_pygrun|autowrap|matchpy_connector|mathml|runtests|core\.trace)(?:\.|$)"
)

NUMBER = re.compile(r"\s*([+-]?)\s*(?:(\d+)(?:/(\d+))?|((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?))\s*", re.ASCII)

HARMLESS = frozenset(("builtins.id", "sys._getframe"))
"""Audit events that a comparison raises; any other ends the process."""


class Refused(BaseException):
    """Not an Exception: math-verify would catch it as a parsing failure and look for a number instead."""


def reply(token: str, gold: str, given: str) -> None:
    """Print the token and whether the answers are equal. The process can do nothing else afterwards."""
    seal()
    print(token, "same" if is_same(gold, given) else "different")


def is_same(gold: str, given: str) -> bool:
    """Whether two answers are equal; a refused answer equals nothing."""
    read = []
    try:
        for text in (gold, given):
            parts = parse(f"\\boxed{{{text}}}", parsing_timeout=SECONDS)
            for part in parts:
                inspect(part)
            read.append(parts)
        return bool(verify(*read, timeout_seconds=SECONDS)) and not _refusals
    except (Refused, Exception):  # sympy raises whatever a formula makes it raise
        return False


def prepare(typical: list[tuple[str, str]]) -> None:
    """In the server, once: import all that a comparison may need, disable evaluation of text, and fill caches."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    _load()
    _replace_evaluators()
    _restrict_names()
    for gold, given in typical:
        is_same(gold, given)
    _refusals.clear()


def seal() -> None:
    """Restrict this process to computing, by an audit hook: it cannot be removed."""

    def ends_the_process(event: str, _: object, harmless: frozenset[str] = HARMLESS, end: Any = os._exit) -> None:
        if event not in harmless:
            end(13)

    sys.addaudithook(ends_the_process)


def inspect(answer: Any) -> None:
    """Refuse a parsed answer with a name, class or size that no answer needs. Evaluates nothing."""
    waiting: list[tuple[Any, int]] = [(answer, 0)]
    num_nodes = 0
    while waiting:
        node, depth = waiting.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _refusal("too many parts")
        if isinstance(node, str) and depth == 0:  # text that cannot be parsed is compared as text
            continue
        if isinstance(node, AppliedUndef):  # its class has the name and belongs to no module
            check_function(type(node).__name__)
        elif not isinstance(node, (Basic, MatrixBase)) or not type(node).__module__.startswith(CLASSES):
            raise _refusal(f"a {type(node).__name__}")
        elif isinstance(node, (Symbol, Str)):
            check_name(node.name)
        if isinstance(node, Limit):
            children = node.args[:3]
        elif isinstance(node, MatrixBase):
            children = tuple(node.flat())
        else:
            children = (*node.args, *(getattr(node, "_unsorted_args", None) or ()))
        waiting += [(child, depth + 1) for child in children]
    if not isinstance(answer, str) and _bits(answer) > MAX_BITS:
        raise _refusal("too large a number")


def check_name(name: str) -> None:
    if not isinstance(name, str) or NAME.fullmatch(name) is None or "__" in name:
        raise _refusal(f"the name {name!r:.80}")


def check_function(name: str) -> None:
    if FUNCTION.fullmatch(name) is None and name not in KNOWN_FUNCTIONS:
        raise _refusal(f"the function {name!r:.80}")


_refusals: list[str] = []
"""Recorded as well as raised: sympy may catch the exception."""


def _refusal(what: str) -> Refused:
    _refusals.append(what)
    return Refused(what)


def _bits(node: Any) -> float:
    """Upper bound on the bits of the number that an expression spells out, or of its largest number."""
    if isinstance(node, Rational):
        return max(abs(int(node.p)).bit_length(), int(node.q).bit_length())
    if isinstance(node, Float):
        return float(abs(node._mpf_[2]) + node._mpf_[3])
    parts = [_bits(child) for child in getattr(node, "args", ())]
    if isinstance(node, Mul):
        return sum(parts)
    if isinstance(node, Add):
        return max(parts) + len(parts)
    if isinstance(node, Pow) and node.args[1].is_number:
        return max(parts[0] * math.pow(2.0, min(parts[1], 64.0)) if parts[0] > 1 else 1.0, parts[1])
    if isinstance(node, factorial):
        return math.pow(2.0, min(parts[0], 64.0)) * parts[0]
    return max(parts, default=1.0)


def _load() -> None:
    for name in LOADED:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}.", onerror=lambda _: None):
            if NOT_LOADED.search(found.name) is None:
                with suppress(Exception):  # needs a package that is not installed
                    importlib.import_module(found.name)


def _replace_evaluators() -> None:
    """Replace the functions that evaluate text by ones that do not."""
    from sympy.utilities.lambdify import lambdify  # no module of ours keeps the original

    _replace(sympy_parser.parse_expr, as_number)
    _replace(sympy_parser.eval_expr, _refuse_text)
    _replace(lambdify, as_function)
    math_verify.parser.parse_expr = lambda text, **_: latex2sympy2.latex2sympy(text.replace("**", "^"), is_real=True)
    # Its code depends on the number of variables alone: generated beforehand.
    build = MonomialOps._build
    built: dict[str, Any] = {}
    for number in range(1, MAX_GENERATORS + 1):
        for name in ("mul", "pow", "mulpow", "ldiv", "div", "lcm", "gcd"):
            MonomialOps._build = lambda self, code, name: built.setdefault(code, build(self, code, name))
            getattr(MonomialOps(number), name)()
    MonomialOps._build = lambda self, code, name: built[code]


def _replace(old: Any, new: Any) -> None:
    """Rebind `old` to `new` in every loaded module of sympy."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "sympy"]:
        for name in [name for name, value in vars(module).items() if value is old]:
            setattr(module, name, new)


def _refuse_text(*_: Any, **__: Any) -> Any:
    raise _refusal("text to be evaluated")


def as_number(text: str, *_: Any, **__: Any) -> Any:
    """Instead of `parse_expr`: parses a number and nothing else."""
    found = NUMBER.fullmatch(text)
    if found is None:
        raise _refusal(f"the text {text!r:.80}")
    sign, above, below, decimal = found.groups()
    return Float(sign + decimal) if decimal else Rational(int(sign + above), int(below or "1"))


def as_function(variables: Any, expression: Any, *_: Any, **__: Any) -> Callable[..., Any]:
    """Instead of `lambdify`, which prints and executes code: a function that computes the expression part by part."""
    names = list(variables) if isinstance(variables, (list, tuple)) else [variables]
    return lambda *values: _value(sympify(expression), dict(zip(names, values, strict=True)))


def _value(node: Any, values: dict[Any, Any]) -> Any:
    if node in values:
        return values[node]
    if node.is_Integer:
        return int(node)
    if node.is_number and not node.args:
        return mpmath.mpmathify(node.evalf(mpmath.mp.dps))
    parts = [_value(part, values) for part in node.args]
    if isinstance(node, Add):
        return sum(parts)
    if isinstance(node, Mul):
        return math.prod(parts)
    if isinstance(node, Pow):
        base, exponent = parts
        return mpmath.mpf(base) ** exponent if isinstance(base, int) and exponent < 0 else base**exponent
    raise NotImplementedError


def _restrict_names() -> None:
    """Refuse to create a symbol or function whose name is outside the alphabet."""
    for kind in (Symbol, Dummy, Wild, Str):
        kind.__new__ = staticmethod(_checked(kind.__new__, _check_symbol))
    UndefinedFunction.__new__ = staticmethod(_checked(UndefinedFunction.__new__, check_function))


def _checked(make: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    def checked(kind: Any, name: Any = None, *arguments: Any, **options: Any) -> Any:
        if name is None:  # a Dummy makes its own name
            return make(kind, *arguments, **options)
        check(name)
        return make(kind, name, *arguments, **options)

    return checked


def _check_symbol(name: Any) -> None:
    if name not in DIRECTIONS:
        check_name(name)
