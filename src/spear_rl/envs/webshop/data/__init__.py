"""Products, goals and the search index, read from WebShop's files or the embedded catalogue."""
