"""Environments of other packages, named `prefix:ID`: `gymnasium:FrozenLake-v1`, `textarena:Wordle-v0`.

A known prefix wins over a module of a user's with that name. Each adapter is a module with a function
`tasks(split, *, id, **options)` and imports its package only when that is called.
"""

ADAPTERS = {
    "gymnasium": "spear_rl.envs.adapters.gymnasium:tasks",
    "openenv": "spear_rl.envs.adapters.openenv:tasks",
    "textarena": "spear_rl.envs.adapters.textarena:tasks",
    "verifiers": "spear_rl.envs.adapters.verifiers:tasks",
}
"""Prefix -> the tasks function, which is given what follows the colon as `id`. The one place to add an adapter."""
