"""From a configuration to what a run is made of: `rollout` needs no torch, `training` does."""
