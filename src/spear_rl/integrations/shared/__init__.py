"""What the TRL and verl integrations share."""
