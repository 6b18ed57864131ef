"""What several environments use: seeded draws, task manifests."""
