"""The runner: environments run in-process or in a pool of workers."""
