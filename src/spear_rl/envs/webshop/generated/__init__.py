"""The embedded catalogue: generated products and goals in the schema of WebShop's files."""
