"""SPEAR inside other people's trainers. Each wraps and post-processes, and none knows `spear_rl.train`."""
