"""Files, locks, HTTP and untrusted text: what outlives a kill, and what is safe to print. Standard library only."""
