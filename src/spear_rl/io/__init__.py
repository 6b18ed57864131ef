"""Files, locks, run records, HTTP and untrusted text. Standard library only, but for `terminal`."""
