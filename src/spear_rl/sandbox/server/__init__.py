"""The fork-server and its children: the only part that runs beside untrusted code."""
