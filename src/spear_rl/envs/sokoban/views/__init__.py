"""States for a policy to read: pictures, or a few words."""
