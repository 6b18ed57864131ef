"""The colours that option values are reduced to before they are compared, in the original's order, which decides."""

from __future__ import annotations

COLORS = tuple(
    """
    alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo
    caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal
    dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory
    ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor
    mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand
    sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
    wheat white wine yellow
    """.split()  # noqa: SIM905 - read as words
)


def color_of(value: str) -> str:
    """The first colour, in that order, whose name is a part of the value; the value itself where there is none.

    "dark blue" -> "blue", "small" -> "small"
    """
    return next((color for color in COLORS if color in value), value)
