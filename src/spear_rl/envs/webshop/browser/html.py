"""How the shop looks in a browser. Every text of the catalogue is escaped: scraped pages hold anything."""

from __future__ import annotations

import html

from spear_rl.envs.webshop.browser.visits import Visit
from spear_rl.envs.webshop.data.product import NO_LIMIT, Goal, Product
from spear_rl.envs.webshop.score import Score
from spear_rl.envs.webshop.session import BACK, BUY, NEXT, PREVIOUS, SUB_PAGES, Kind, Page
from spear_rl.io.escaping import visible

_TITLES = {
    Kind.SEARCH: "Search",
    Kind.RESULTS: "Results",
    Kind.ITEM: "Product",
    Kind.DESCRIPTION: "Description",
    Kind.FEATURES: "Features",
    Kind.REVIEWS: "Reviews",
    Kind.CLOSED: "Your score",
}


def escape(text: str) -> str:
    """A text as part of a page, also within quotation marks: no HTML, no control or bidirectional character."""
    return html.escape(visible(text))


def document(visit: Visit) -> str:
    """The page a visitor is on, as a whole document."""
    page, session = visit.session.page, visit.session
    notice = f'<p class="notice" role="alert">Nothing happened: {escape(visit.notice)}.</p>' if visit.notice else ""
    turns = f"{session.turns_left} turns left" if session.turns_left != 1 else "1 turn left"
    mean = f" · mean score {sum(visit.scores) / len(visit.scores):.2f} of {len(visit.scores)}" if visit.scores else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_TITLES[page.kind]} - spear shop</title>
<link rel="stylesheet" href="/style.css">
</head>
<body>
<a class="skip" href="#main">Skip to the page</a>
<header>
<p class="brand">spear shop</p>
<p class="status">Task {visit.place + 1} of {visit.num_tasks} · <span id="turns">{turns}</span>{mean}</p>
</header>
<section class="wish" aria-label="What to buy">
<h1>Please buy</h1>
<p id="instruction">{escape(page.instruction)}</p>
</section>
<main id="main">
{notice}
{_body(visit, page)}
</main>
<footer>
<form method="post" action="/task">{_acts(visit)}
<label for="number">Task</label>
<input id="number" name="number" type="number" min="1" max="{visit.num_tasks}" value="{visit.place + 1}">
<button type="submit">Start it</button>
</form>
</footer>
</body>
</html>
"""


def _body(visit: Visit, page: Page) -> str:
    if page.kind == Kind.SEARCH:
        return _search(visit)
    if page.kind == Kind.RESULTS:
        return _results(visit, page)
    if page.kind == Kind.CLOSED:
        return _verdict(visit, page.score, page.product)
    assert page.product is not None
    return _item(visit, page, page.product) if page.kind == Kind.ITEM else _sub_page(visit, page, page.product)


def _search(visit: Visit) -> str:
    return f"""<form class="search" method="post" action="/search" role="search">{_acts(visit)}
<label for="words">Search the shop</label>
<div class="bar"><input id="words" name="words" type="search" autocomplete="off" autofocus required maxlength="500">
<button class="primary" type="submit">Search</button></div>
<p class="hint">You may search, turn pages, read, choose options and buy once. Options count, and so does the price.</p>
</form>"""


def _results(visit: Visit, page: Page) -> str:
    cards = "".join(f"<li>{_card(visit, product, is_seen=product.asin in page.seen)}</li>" for product in page.listed)
    listed = f'<ol class="cards">{cards}</ol>' if cards else "<p>Nothing was found. Try other words.</p>"
    last = max(-(-page.num_results // page.page_size), 1)
    return f"""{_navigation(visit, page)}
<h2>Results for “{escape(page.query)}”</h2>
<p class="hint">Page {page.number} of {last}, {page.num_results} results</p>
{listed}"""


def _card(visit: Visit, product: Product, *, is_seen: bool) -> str:
    content = (
        f'<span class="name">{escape(product.title)}</span><span class="price">{escape(product.price_tag)}</span>'
        f'<span class="asin">{escape(product.asin)}</span>'
    )
    return _click(visit, product.asin.lower(), content, "card seen" if is_seen else "card")


def _item(visit: Visit, page: Page, product: Product) -> str:
    groups = "".join(
        f'<fieldset><legend>{escape(name)}</legend><div class="options">'
        + "".join(
            _click(visit, value, escape(value), "option", is_pressed=page.chosen.get(name) == value) for value in values
        )
        + "</div></fieldset>"
        for name, values in product.options.items()
    )
    reading = "".join(_click(visit, name, name.capitalize(), "plain") for name in SUB_PAGES)
    return f"""{_navigation(visit, page)}
<article>
<h2>{escape(product.title)}</h2>
<p class="price">{escape(product.price_tag)}</p>
<p class="hint">Rating: {escape(product.rating)} · {escape(product.asin)}</p>
<div class="row" aria-label="Read more">{reading}</div>
{groups}
{_click(visit, BUY, "Buy Now", "primary buy")}
</article>"""


def _sub_page(visit: Visit, page: Page, product: Product) -> str:
    if page.kind == Kind.DESCRIPTION:
        content = f"<p>{escape(product.description) or 'There is no description.'}</p>"
    elif page.kind == Kind.FEATURES:
        bullets = "".join(f"<li>{escape(bullet)}</li>" for bullet in product.bullets)
        content = f"<ul>{bullets}</ul>" if bullets else "<p>There are no features.</p>"
    else:
        content = "".join(
            f"<blockquote><p><strong>{escape(review.title)}</strong> <span>{escape(review.stars)} of 5</span></p>"
            f"<p>{escape(review.text)}</p></blockquote>"
            for review in product.reviews
        )
        content = content or "<p>No reviews found.</p>"
    return f"""{_navigation(visit, page)}
<article>
<h2>{_TITLES[page.kind]}</h2>
<p class="hint">{escape(product.title)}</p>
{content}
</article>"""


def _verdict(visit: Visit, score: Score | None, bought: Product | None) -> str:
    again = f"""<form method="post" action="/task">{_acts(visit)}
<input type="hidden" name="number" value="{visit.place + 2 if visit.place + 1 < visit.num_tasks else 1}">
<button class="primary" type="submit" autofocus>Next task</button></form>
<form method="post" action="/task">{_acts(visit)}
<input type="hidden" name="number" value="{visit.place + 1}"><button type="submit">Try this one again</button></form>"""
    if score is None:
        told = '<p class="score" id="score">0.00</p><p>The shop closed before anything was bought.</p>'
    else:
        told = f'<p class="score" id="score">{score.total:.2f}</p>{_breakdown(score, visit.goal)}'
    name = f'<p class="hint">You bought: {escape(bought.title)}</p>' if score and bought else ""
    return f"""<article><h2>Your score</h2>{told}{name}
<div class="row">{again}</div></article>"""


def _breakdown(score: Score, goal: Goal) -> str:
    rows = [(f"has “{escape(name)}”", holds) for name, holds in score.attributes.items()]
    rows += [(f"option “{escape(name)}” chosen", holds) for name, holds in score.options.items()]
    limit = "no price limit" if goal.price_limit == NO_LIMIT else f"costs at most {goal.price_limit:.2f} dollars"
    rows.append((limit, score.is_affordable))
    lines = "".join(
        f'<tr><th scope="row">{what}</th><td class="{"yes" if holds else "no"}">{"yes" if holds else "no"}</td></tr>'
        for what, holds in rows
    )
    met = sum(holds for _, holds in rows)
    return f"""<table><caption>{met} of {len(rows)} wishes met, times {score.type_factor:g} for the kind of product
({score.title_share:.0%} of the title's nouns)</caption><tbody>{lines}</tbody></table>"""


def _navigation(visit: Visit, page: Page) -> str:
    names = {BACK: "Back to Search", PREVIOUS: "< Prev", NEXT: "Next >"}
    buttons = "".join(
        _click(visit, name, escape(shown), "plain") for name, shown in names.items() if name in page.clickable
    )
    return f'<nav class="row" aria-label="Shop">{buttons}</nav>'


def _click(visit: Visit, words: str, content: str, kind: str, *, is_pressed: bool | None = None) -> str:
    """A button that clicks on `words`; `content` is HTML already."""
    pressed = "" if is_pressed is None else f' aria-pressed="{str(is_pressed).lower()}"'
    return (
        f'<form method="post" action="/click">{_acts(visit)}'
        f'<button class="{kind}" type="submit" name="words" value="{escape(words)}"{pressed}>{content}</button></form>'
    )


def _acts(visit: Visit) -> str:
    return f'<input type="hidden" name="acts" value="{visit.num_acts}">'
