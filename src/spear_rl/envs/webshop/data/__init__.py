"""Products, goals and the search index, from WebShop's files or the generated catalogue."""
