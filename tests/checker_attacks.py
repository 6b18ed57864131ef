r"""Attacks on the checker of answers as data: LaTeX that tries to run code, or to cost more than an answer may.

A payload is one Python expression without blanks, parentheses, quotes or capitals, since math-verify takes those out of
\text{...}: assigning to `__class_getitem__` in a comprehension makes a subscript a call.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    name: str
    latex: str
    """<P> stands for the payload, if there is one."""
    executes: bool = False
    """Plain math-verify runs the payload, which shows that the attack is real."""


def payload(code: str, *, classes: tuple[str, str] = ("poly1d", "matrix")) -> str:
    """An expression that executes code, given two classes that sympy's generated code can see."""
    first, second = classes
    spelled = ",".join(str(byte) for byte in code.encode())
    return (
        f"[[0for[{first}.__class_getitem__,{second}.__class_getitem__]in[[bytes,exec]]],"
        f"{second}[{first}[[{spelled}]]]][0]"
    )


SUM = r"\sum_{k=0}^{\infty} (1+k\text{<P>})/k!"

# fmt: off
NAMES = [
    Attack("sum", SUM, executes=True),
    Attack("sum of a fraction", r"\sum_{k=0}^{\infty} \frac{1+k\text{<P>}}{k!}"),
    Attack("sum in brackets", r"\sum_{k=0}^{\infty} \left(\frac{1+k\text{<P>}}{k!}\right)", executes=True),
    Attack("sum from one", r"\sum_{k=1}^{\infty} (1+(k-1)\text{<P>})/k!", executes=True),
    Attack("sum of a power", r"\sum_{k=0}^{\infty} (1+k\text{<P>})^2/k!", executes=True),
    Attack("sum of two names", r"\sum_{k=0}^{\infty} (1+k\text{<P>}+k\text{b})/k!", executes=True),
    Attack("sum with mathrm", SUM.replace("text", "mathrm"), executes=True),
    Attack("sum with textbf", SUM.replace("text", "textbf"), executes=True),
    Attack("sum with textit", SUM.replace("text", "textit"), executes=True),
    Attack("sum with mbox", SUM.replace("text", "mbox"), executes=True),
    Attack("sum with mathbf", SUM.replace("text", "mathbf"), executes=True),
    Attack("sum with mathit", SUM.replace("text", "mathit"), executes=True),
    Attack("sum with textrm", SUM.replace("text", "textrm"), executes=True),
    Attack("sum with mathcal", SUM.replace("text", "mathcal")),
    Attack("sum with hat", SUM.replace("text", "hat")),
    Attack("sum with vec", SUM.replace("text", "vec")),
    Attack("sum with overline", SUM.replace("text", "overline")),
    Attack("sum with tilde", SUM.replace("text", "widetilde")),
    Attack("sum with variable", SUM.replace("text", "variable")),
    Attack("sum with blanks before the brace", SUM.replace("text", "text "), executes=True),
    Attack("negative sum", f"-{SUM}", executes=True),
    Attack("sum and a number", f"3+{SUM}", executes=True),
    Attack("sum times a number", f"3 \\cdot {SUM}", executes=True),
    Attack("power of a sum", f"({SUM})^2", executes=True),
    Attack("sum as an exponent", f"2^{{{SUM}}}"),
    Attack("root of a sum", f"\\sqrt{{{SUM}}}"),
    Attack("sine of a sum", f"\\sin({SUM})", executes=True),
    Attack("logarithm of a sum", f"\\log({SUM})", executes=True),
    Attack("absolute value of a sum", f"|{SUM}|", executes=True),
    Attack("floor of a sum", f"\\lfloor {SUM} \\rfloor", executes=True),
    Attack("factorial of a sum", f"({SUM})!", executes=True),
    Attack("fraction of a sum", f"\\frac{{1}}{{{SUM}}}"),
    Attack("sum in a set", f"\\{{1, {SUM}\\}}"),
    Attack("sum in a tuple", f"(1, 2, {SUM})"),
    Attack("sum in a list", f"1, {SUM}"),
    Attack("sum as the end of an interval", f"[0, {SUM}]"),
    Attack("sum in a union", f"[0, {SUM}) \\cup (7, 9)"),
    Attack("sum in a matrix", f"\\begin{{pmatrix}} 1 & {SUM} \\\\ 2 & 3 \\end{{pmatrix}}"),
    Attack("determinant of a sum", f"\\begin{{vmatrix}} 1 & {SUM} \\\\ 2 & 3 \\end{{vmatrix}}"),
    Attack("sum in an equation", f"x = {SUM}", executes=True),
    Attack("sum in an inequality", f"x < {SUM}"),
    Attack("plus-minus a sum", f"1 \\pm {SUM}"),
    Attack("binomial of a sum", f"\\binom{{{SUM}}}{{2}}"),
    Attack("maximum of a sum", f"\\max(1, {SUM})"),
    Attack("greatest common divisor of a sum", f"\\gcd(2, {SUM})"),
    Attack("percentage of a sum", f"({SUM})\\%"),
    Attack("sum modulo a number", f"{SUM} \\mod 7"),
    Attack("sum of a sum", f"\\sum_{{n=0}}^{{\\infty}} ({SUM})/n!", executes=True),
    Attack("limit of a sum", f"\\lim_{{x \\to 0}} {SUM}"),
    Attack("integral of a sum", f"\\int_0^1 {SUM} dx", executes=True),
    Attack("derivative of a sum", f"\\frac{{d}}{{dx}} {SUM}"),
    Attack("product", r"\prod_{k=0}^{\infty} (1+k\text{<P>})/k!"),
    Attack("integral", r"\int_0^1 \text{<P>} x dx"),
    Attack("limit", r"\lim_{x \to 0} \frac{\text{<P>}}{x}"),
    Attack("a name alone", r"\text{<P>}"),
    Attack("a name as a function", r"\text{<P>}(x)"),
    Attack("an operator name", r"\operatorname{<P>}(x)"),
    Attack("an operator that is a builtin", r"\sum_{k=0}^{\infty} (1+k\operatorname{exec}(\text{<P>}))/k!"),
    Attack("a function that is a builtin", r"\sum_{k=0}^{\infty} (1+k\text{eval}(\text{<P>}))/k!"),
    Attack("a subscript", r"\sum_{k=0}^{\infty} (1+k x_{\text{<P>}})/k!"),
    Attack("a superscript", r"\sum_{k=0}^{\infty} (1+k x^{\text{<P>}})/k!", executes=True),
    Attack("a name within a name", r"\sum_{k=0}^{\infty} (1+k\text{a\mathrm{<P>}b})/k!"),
    Attack("a name in braces", r"\sum_{k=0}^{\infty} (1+k{\text{<P>}})/k!", executes=True),
    Attack("a name cut in two", r"\sum_{k=0}^{\infty} (\text{[1}+\text{k,<P>][0]}k)/k!"),
    Attack("a name in dollars", r"$\sum_{k=0}^{\infty} (1+k\text{<P>})/k!$", executes=True),
    Attack("a name after the answer", r"7 \quad \text{<P>}"),
    Attack("a name beside a right number", r"\sqrt{51}, \text{<P>}"),
    Attack("a final answer within the answer",
           r"The final answer is $\sum_{k=0}^{\infty} (1+k\text{<P>})/k!$. I hope", executes=True),
    Attack("plain Python", "__import__('os').system('id')"),
    Attack("plain Python in text", r"\text{__import__('os').system('id')}"),
    Attack("a plain expression", "1+(lambda:0)()"),
    Attack("a lambda", r"\text{(lambda:print(1))()}"),
    Attack("mathematical letters for Latin ones",
           "\\sum_{k=0}^{\\infty} (1+k\\text{\U0001d41e\U0001d431\U0001d41e\U0001d41c[<P>]})/k!", executes=True),
    Attack("a line break in a name", "\\sum_{k=0}^{\\infty} (1+k\\text{0\n@exec\n<P>})/k!", executes=True),
    Attack("a zero byte in a name", "\\sum_{k=0}^{\\infty} (1+k\\text{a\x00<P>})/k!"),
    Attack("a format string", r"\sum_{k=0}^{\infty} (1+k\text{f'}_{a})/k!+\text{'}"),
]
"""Names that are programs."""

COSTS = [
    Attack("a tower of powers", "9^{9^{9^{9}}}"),
    Attack("a large power", "10^{10^{10}}"),
    Attack("a large negative power", "3^{-10^{12}}"),
    Attack("a factorial of a factorial", "(100!)!"),
    Attack("a large factorial", "(10^9)!"),
    Attack("a large binomial", r"\binom{10^{9}}{5 \cdot 10^{8}}"),
    Attack("a large exponent of a decimal", "1e999999999"),
    Attack("a long number", "7" * 1999),
    Attack("a long decimal", "0." + "7" * 1990),
    Attack("deep brackets", "(" * 900 + "5" + ")" * 900),
    Attack("deep roots", r"\sqrt{" * 280 + "5" + "}" * 280),
    Attack("deep fractions", r"\frac{1}{1+" * 150 + "x" + "}" * 150),
    Attack("unclosed fractions", r"\frac{" * 300),
    Attack("many terms", "+".join(f"x_{{{n}}}" for n in range(220))),
    Attack("a power of a long sum", "(a+b+c+d+f+g+h+j)^{200}"),
    Attack("a large unit matrix", r"\operatorname{eye}(100000)"),
    Attack("a large matrix of zeros", r"\operatorname{zeros}(30000, 30000)"),
    Attack("a long finite sum", r"\sum_{k=1}^{10^{12}} \sin(k!)"),
    Attack("a long finite product", r"\prod_{k=1}^{10^{9}} (k^k+1)"),
    Attack("an integral that nobody can do", r"\int_0^1 \sin(x^{x^{x}}) \ln(\cos(e^{x}))^{x} dx"),
    Attack("an equation that nobody can solve", "x^{x} + \\sin(x^2) = \\ln(x)^{y} + z^{x}"),
    Attack("broken braces", "{}}}{{\\left("),
    Attack("nothing but backslashes", "\\" * 1999),
    Attack("half a character", "\ud800"),
    Attack("too long", "1+" * 60_000 + "1"),
]
"""Answers that would take the machine's time or memory."""
# fmt: on
ATTACKS = [*NAMES, *COSTS]
