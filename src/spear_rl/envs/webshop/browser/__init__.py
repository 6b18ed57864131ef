"""The shop as a web page for a person: the same catalogue, rules and score as the environment."""

from spear_rl.envs.webshop.browser.server import ShopServer
from spear_rl.envs.webshop.browser.visits import visits_of

__all__ = ["ShopServer", "visits_of"]
