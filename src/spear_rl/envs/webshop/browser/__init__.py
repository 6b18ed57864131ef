"""The shop as a web page for a person: the same catalogue, rules and score as the environment."""

from spear_rl.envs.webshop.browser.server import ShopServer, served
from spear_rl.envs.webshop.browser.visits import visits_of

__all__ = ["ShopServer", "served", "visits_of"]
