"""Legitimate answers as data: (reference, the same in another spelling, a near miss)."""

# ruff: noqa: E501 (an answer a line)
from __future__ import annotations

# fmt: off
ANSWERS: list[tuple[str, str, str]] = [
    # fractions, decimals, percentages, units
    (r"\frac{1}{2}", "0.5", "0.51"),
    (r"\dfrac{7}{20}", "7/20", "7/21"),
    (r"-\frac{2}{3}", r"\frac{-2}{3}", r"\frac{2}{3}"),
    (r"2\frac{1}{3}", r"\frac{7}{3}", r"\frac{2}{3}"),
    (r"\frac{14}{3}", "14/3", "13/3"),
    ("0.25", r"\frac14", r"\frac15"),
    ("3.14", "3.140", "3.15"),
    (r"10\%", r"\frac{1}{10}", r"\frac{1}{9}"),
    (r"5.4 \text{ cents}", "5.4", "4.5"),
    (r"864 \mbox{ inches}^2", r"864 \text{ inches}^2", "865"),
    (r"90^\circ", r"90^{\circ}", r"91^\circ"),
    (r"\$18.90", "18.90", "18.09"),
    (r"11,\! 111,\! 111,\! 100.5", "11111111100.5", "1111111110.5"),
    # radicals and powers
    (r"3\sqrt{13}", r"\sqrt{117}", r"2\sqrt{13}"),
    (r"\sqrt[3]{54}", r"3\sqrt[3]{2}", r"3\sqrt[3]{3}"),
    (r"\frac{3\sqrt{3}}{4}", r"\frac{9}{4\sqrt{3}}", r"\frac{3\sqrt{3}}{2}"),
    (r"\frac{1+\sqrt{5}}{2}", r"\frac{\sqrt5+1}{2}", r"\frac{1-\sqrt{5}}{2}"),
    (r"2^{10}+\frac12", "1024.5", "1023.5"),
    (r"x^{-2}", r"\frac{1}{x^2}", "x^2"),
    (r"2^{2021}", r"2 \cdot 2^{2020}", "2^{2020}"),
    (r"5!+\frac12", "120.5", "24.5"),
    (r"\binom{6}{2}+\frac12", "15.5", "20.5"),
    # constants
    (r"\frac{\pi}{3}", r"\pi/3", r"\frac{\pi}{4}"),
    (r"4\pi r^2", r"4 r^2 \pi", r"2\pi r^2"),
    ("e^2", r"\exp(2)", "e^3"),
    (r"\infty", r"+\infty", r"-\infty"),
    (r"\ln 8", r"3\ln 2", r"\ln 9"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}", r"\log_3 2"),
    # intervals, sets, tuples
    ("(3, 7]", r"\left( 3, 7 \right]", "(3, 7)"),
    (r"[-2,5) \cup (7,\infty)", r"\left[-2,5\right)\cup\left(7,\infty\right)", r"[-2,5] \cup (7,\infty)"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty,2)\cup(3,\infty)", r"(-\infty, 2) \cup (4, \infty)"),
    (r"\{1, 2, 3\}", r"\{3, 2, 1\}", r"\{1, 2, 4\}"),
    ("1, 2, 7", "7, 1, 2", "1, 2"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)", r"(\pi/2, 3)"),
    ("(6,31,-1)", "(6, 31, -1)", "(6,31,1)"),
    (r"(-2,1), (3, 4)", r"(3,4), (-2,1)", r"(-2,1), (4,3)"),
    (r"\mathbb{R}", r"\mathbb{R}", r"\mathbb{Z}"),
    (r"\emptyset", r"\{\}", r"\{0\}"),
    (r"x \in [-2,7]", "[-2,7]", "[-2,8]"),
    # complex numbers
    ("6 - 5i", "-5i+6", "6 + 5i"),
    (r"\frac{1+i}{2}", r"\frac12+\frac{i}{2}", r"\frac{1-i}{2}"),
    (r"i\sqrt{3}", r"\sqrt{3}i", r"-i\sqrt{3}"),
    (r"e^{i\pi/2}", r"e^{\frac{\pi i}{2}}", r"e^{i\pi/3}"),
    # polynomials and rational functions in named variables
    ("x^2 - 1", "(x-1)(x+1)", "x^2+1"),
    ("p - q", "-q + p", "q - p"),
    ("x^3+3x-6", "3x + x^3 - 6", "x^3+3x+6"),
    (r"\frac{x+2}{7}", "(x+2)/7", "x+2/7"),
    (r"\frac{1}{x+1}+1", r"\frac{x+2}{x+1}", r"\frac{x+1}{x+2}"),
    ("(x+5)(x+3)(x-3)", "(x^2-9)(x+5)", "(x^2+9)(x+5)"),
    (r"2ab+c^2", "c^2+2ba", "2ab-c^2"),
    (r"\alpha + \beta", r"\beta+\alpha", r"\alpha-\beta"),
    (r"\sin^2\theta", r"1-\cos^2\theta", r"\cos^2 \theta"),
    (r"\omega^2 y", r"y\omega^2", r"\omega y"),
    ("x_1 + x_2", "x_2+x_1", "x_1+x_3"),
    ("a_{12} - 1", "-1+a_{12}", "a_{13} - 1"),
    ("a_{n+1}", "a_{n + 1}", "a_{n-1}"),
    (r"\overline{AB} + 1", r"1 + \overline{AB}", r"\overline{AC} + 1"),
    (r"\vec{v} + \vec{u}", r"\vec{u} + \vec{v}", r"\vec{v} - \vec{u}"),
    (r"|x-3|", r"\left|x-3\right|", "|x+3|"),
    (r"\lfloor x \rfloor", r"\left\lfloor x \right\rfloor", r"\lceil x \rceil"),
    # equations and inequalities
    ("y = 2x + 3", "y=3+2x", "y=2x-3"),
    ("x = 5.5", "5.5", "5.4"),
    ("2x+3y=7", "4x+6y=14", "2x+3y=8"),
    ("x < 3", "3 > x", "x > 3"),
    (r"x \ge \frac12", r"\frac12 \leq x", r"x > \frac12"),
    (r"f(x) = x^2", r"x^2", "x^3"),
    # plus-minus
    (r"\pm 2", "2, -2", "2"),
    (r"1 \pm \sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{18}"),
    # matrices
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}", r"\begin{pmatrix} 1 & 2 \\ 4 & 3 \end{pmatrix}"),
    (r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}", r"\begin{pmatrix} -\frac13 \\ \frac23 \\ \frac53 \end{pmatrix}", r"\begin{pmatrix} 1/3 \\ 2/3 \\ 5/3 \end{pmatrix}"),
    # text
    (r"\text{Evelyn}", "Evelyn", r"\text{Carla}"),
    (r"\text{(C)}", r"\text{C}", r"\text{(D)}"),
    (r"\text{even}", r"\textbf{even}", r"\text{odd}"),
    (r"\text{C, E}", r"\text{C, E}", r"\text{C, D}"),
    (r"\text{June 20}", r"\text{June 20}", r"\text{June 21}"),
    (r"\text{Zürich}", r"\text{Zürich}", r"\text{Bern}"),
    (r"\text{Fermat's}", r"\text{Fermat's}", r"\text{Euler's}"),
    # bases, series, integrals, limits
    ("2516_8", "2516_{8}", "2517_8"),
    (r"\sum_{k=0}^{\infty} \frac{1}{2^k} + \frac12", r"\frac52", r"\frac72"),
    (r"\int_0^1 x^2 dx", r"\frac13", r"\frac12"),
    (r"\lim_{x \to 0} \frac{\sin x}{x} + \frac12", r"\frac32", r"\frac12"),
    (r"\gcd(12, 18) + \frac12", "6.5", "7.5"),
]
# fmt: on
