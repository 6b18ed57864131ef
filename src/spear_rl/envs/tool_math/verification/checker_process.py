r"""What runs inside the sandbox: compares two answers with math-verify, and lets sympy evaluate no text on the way.

The sandbox's server loads this file as a module of its own (`prepare` and then a fork for each question), so it imports
nothing of ours. Four things hold, each without the others: no symbol or function gets a name outside a strict
alphabet; a parsed answer is looked through before it is compared; what in sympy makes code from text is replaced; and
once a question is there (`seal`), Python itself ends the process at the first attempt to compile, execute, import or
open anything.
"""

from __future__ import annotations

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

SECONDS = 3
"""For reading an answer and for comparing two; math-verify keeps to it by signals, where a computation lets it."""
MAX_NODES, MAX_DEPTH, MAX_BITS = 3000, 100, 200_000
"""Limits of a parsed answer: nodes, nesting, bits of a number."""
MAX_GENERATORS = 16
"""Variables of a polynomial."""

WORD = "[A-Za-z0-9\u0391-\u03a9\u03b1-\u03c9]+"
NAME = re.compile(rf"_?(?:{WORD}|[a-z]+\{{{WORD}(?:_{WORD})?\}})?(?:_(?:{WORD}|\{{(?:{WORD}|[,+-])*\}})?)*")
"""x, alpha, x_1, x_{12}, a_{n+1}, vec{v}, evelyn, and sympy's own such as _xi_1. No Python but a bare word."""
DIRECTIONS = ("+", "-", "+-")
"""Of a limit: sympy makes symbols of them."""
FUNCTION = re.compile(rf"\\?(?:[A-Za-z\u0391-\u03a9\u03b1-\u03c9]|{{greek}})(?:_{WORD}|_\{{{WORD}\}})?".replace(
    "{greek}", "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|mu|nu|xi|pi|rho|sigma|tau|phi|chi|psi|omega"
))  # fmt: skip
KNOWN_FUNCTIONS = ("arg", "cis", "deg", "dim", "gcd", "lcm", "max", "min", "sgn")
"""Names of undefined functions that are words. In code that sympy makes, a function's name is called."""
CLASSES = (
    *("sympy.calculus", "sympy.concrete", "sympy.core", "sympy.functions", "sympy.integrals", "sympy.logic"),
    *("sympy.matrices", "sympy.series", "sympy.sets", "sympy.simplify", "latex2sympy2_extended"),
)
"""Where the classes of a parsed answer come from."""
LOADED = (
    "antlr4",
    *("sympy.assumptions", "sympy.calculus", "sympy.combinatorics", "sympy.concrete", "sympy.core", "sympy.discrete"),
    *("sympy.functions", "sympy.integrals", "sympy.logic", "sympy.matrices", "sympy.ntheory", "sympy.polys"),
    *("sympy.physics.units", "sympy.series", "sympy.sets", "sympy.simplify", "sympy.solvers"),
    *("sympy.strategies", "sympy.tensor", "sympy.utilities"),
)
"""Packages that load modules when they first need them, which a sealed process cannot."""
NOT_LOADED = re.compile(
    r"\.(?:tests|benchmarks|_pygrun|autowrap|matchpy_connector|mathml|runtests|core\.trace)(?:\.|$)"
)

NUMBER = re.compile(r"\s*([+-]?)\s*(?:(\d+)(?:/(\d+))?|((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?))\s*", re.ASCII)

HARMLESS = frozenset(("builtins.id", "sys._getframe"))
"""Audit events that a comparison needs; any other ends the process."""


class Refused(BaseException):
    """Not an Exception: math-verify would take one for a formula it cannot read and look for a number instead."""


def reply(token: str, gold: str, given: str) -> None:
    """Print the token and whether the answers are the same. The process is good for nothing else afterwards."""
    seal()
    print(token, "same" if is_same(gold, given) else "different")


def is_same(gold: str, given: str) -> bool:
    """Whether two answers mean the same; a refused answer equals nothing."""
    from math_verify import parse, verify

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


def prepare() -> None:
    """In the server, once: load all that a comparison may need, close what evaluates text, and warm up."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    _load()
    _close_evaluators()
    _check_names()
    for gold, given in WARM_UP:
        is_same(gold, given)
    _refusals.clear()


def seal() -> None:
    """Restrict this process to computing, by an audit hook, which cannot be removed."""

    def ends_the_process(event: str, _: object, harmless: frozenset[str] = HARMLESS, end: Any = os._exit) -> None:
        if event not in harmless:
            end(13)

    sys.addaudithook(ends_the_process)


def inspect(answer: Any) -> None:
    """Refuse a parsed answer with a name, a class or a size that no answer needs. Evaluates nothing."""
    from sympy import Basic, Limit, MatrixBase, Symbol
    from sympy.core.function import AppliedUndef
    from sympy.core.symbol import Str

    waiting: list[tuple[Any, int]] = [(answer, 0)]
    num_nodes = 0
    while waiting:
        node, depth = waiting.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _refusal("too many parts")
        if isinstance(node, str) and depth == 0:  # text that could not be read is compared as text
            continue
        if isinstance(node, AppliedUndef):  # its class bears the name and belongs to no module
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
"""Recorded as well as raised: sympy may swallow the exception."""


def _refusal(what: str) -> Refused:
    _refusals.append(what)
    return Refused(what)


def _bits(node: Any) -> float:
    """At most how many bits the number has that an expression spells out; of one with variables, its largest number."""
    from sympy import Add, Float, Mul, Pow, Rational, factorial

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
        return max(parts[0] * _power(parts[1]) if parts[0] > 1 else 1.0, parts[1])
    if isinstance(node, factorial):
        return _power(parts[0]) * parts[0]
    return max(parts, default=1.0)


def _power(bits: float) -> float:
    return math.pow(2.0, min(bits, 64.0))


def _load() -> None:
    """Import every module that would otherwise be imported at first use."""
    for name in LOADED:
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}.", onerror=lambda _: None):
            if NOT_LOADED.search(found.name) is None:
                with suppress(Exception):  # a module for a package that is not installed
                    importlib.import_module(found.name)


def _close_evaluators() -> None:
    """Replace the functions that evaluate text by ones that do not."""
    import math_verify.parser
    from latex2sympy2_extended import latex2sympy2
    from sympy.parsing import sympy_parser
    from sympy.polys.monomials import MonomialOps
    from sympy.utilities.lambdify import lambdify

    _replace(sympy_parser.parse_expr, as_number)
    _replace(sympy_parser.eval_expr, _refuse_text)
    _replace(lambdify, as_function)
    math_verify.parser.parse_expr = lambda text, **_: latex2sympy2.latex2sympy(text.replace("**", "^"), is_real=True)
    # Its code depends on the number of variables alone: made beforehand, it needs no making.
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
    """The number that a text is, where sympy would evaluate the text. Nothing else is read from text."""
    from sympy import Float, Rational

    found = NUMBER.fullmatch(text)
    if found is None:
        raise _refusal(f"the text {text!r:.80}")
    sign, above, below, decimal = found.groups()
    return Float(sign + decimal) if decimal else Rational(int(sign + above), int(below or "1"))


def as_function(variables: Any, expression: Any, *_: Any, **__: Any) -> Callable[..., Any]:
    """A function that computes an expression part by part, where sympy would print it as code and run that."""
    from sympy import sympify

    names = list(variables) if isinstance(variables, (list, tuple)) else [variables]
    return lambda *values: _value(sympify(expression), dict(zip(names, values, strict=True)))


def _value(node: Any, values: dict[Any, Any]) -> Any:
    import mpmath
    from sympy import Add, Mul, Pow

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


def _check_names() -> None:
    """Refuse to create a symbol or function whose name is outside the alphabet."""
    from sympy.core.function import UndefinedFunction
    from sympy.core.symbol import Dummy, Str, Symbol, Wild

    for kind in (Symbol, Dummy, Wild, Str):
        kind.__new__ = staticmethod(_checked(kind.__new__, _check_symbol))
    UndefinedFunction.__new__ = staticmethod(_checked(UndefinedFunction.__new__, check_function))


def _checked(make: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    def checked(kind: Any, name: Any = None, *arguments: Any, **options: Any) -> Any:
        if name is None:  # a Dummy has a name of its own
            return make(kind, *arguments, **options)
        check(name)
        return make(kind, name, *arguments, **options)

    return checked


def _check_symbol(name: Any) -> None:
    if name not in DIRECTIONS:
        check_name(name)


WARM_UP = (
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{3}{4}", "3/5"),
    (r"-\frac{2}{3}", r"2 \frac{1}{3}"),
    (r"3\sqrt{13}", r"\sqrt{117}"),
    (r"\sqrt[3]{5}+\frac{\sqrt{2}}{2}", r"\frac{1+\sqrt{5}}{2}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
    ("(-2,1)", "(1,-2)"),
    (r"[-2,5) \cup (7, \infty)", r"\left[-2,5\right) \cup (8,\infty)"),
    (r"(-\infty, 2]", "x \\le 2"),
    (r"\{1, 2, \frac{3}{2}\}", r"1, 2, 1.5"),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
    ("6 - 5i", "-5i+6"),
    (r"e^{2 \pi i / 3}", r"\frac{-1+i\sqrt{3}}{2}"),
    (r"x^2 - 1", "(x-1)(x+1)"),
    ("x^3+3x-6", "x^3+3x-5"),
    ("11x^{10} - 2y + z_1", "2a_{12}b^{-1}"),
    (r"\frac{x+2}{(x-1)(x+3)}", r"\frac{x+2}{x^2+2x-3}"),
    ("y = 2x + 3", "2x + 3"),
    ("x=5", "y=5"),
    ("2x+3y=7", "4x+6y=14"),
    ("1 < x < 2", "(1,2)"),
    (r"\begin{pmatrix} 1 & 2 \\ -3 & \frac{1}{2} \end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ -3 & 0.5 \end{bmatrix}"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{(C)}", "C"),
    (r"5.4 \text{ cents}", "5.4"),
    (r"90^\circ", "90"),
    (r"10\%", "0.1"),
    (r"\sin \theta + \cos^2 \alpha", r"\tan{\frac{\pi}{4}}"),
    (r"\log_2 8 + \ln 3", r"\log_{10}(5)"),
    (r"2^{10} \cdot 3!", r"\binom{6}{2}"),
    (r"|x-3| + \lfloor 2.5 \rfloor", r"\lceil y \rceil"),
    (r"f(x) = \arcsin x", r"g(2)"),
    (r"\overline{AB} + \vec{v}", r"\mathbf{v} \times 3 \div 2"),
    (r"1{,}000", "1000.5"),
    ("2516_8", "2516_9"),
    (r"\sum_{k=0}^{\infty} \frac{1}{k!}", "e"),
    (r"\int_0^1 x^2 dx", r"\lim_{x \to 0} \frac{\sin x}{x}"),
    (r"x \in \mathbb{R} \setminus \{0\}", r"\emptyset"),
)
"""Typical answers: they fill the caches of math-verify and sympy before the first fork."""
