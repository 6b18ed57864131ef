"""The generated catalogue, in the schema of WebShop's files."""
