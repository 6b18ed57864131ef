"""The caller's side of the sandbox: sessions, one-off calls, the fork-server's process."""
