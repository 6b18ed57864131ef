"""The shop as a web page: the environment's own catalogue, rules and score, for a person with a browser."""

from spear_rl.envs.webshop.browser.server import ShopServer, served
from spear_rl.envs.webshop.browser.visits import visits_of

__all__ = ["ShopServer", "served", "visits_of"]
