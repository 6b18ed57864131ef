"""How a process is isolated: namespaces, landlock, seccomp, cgroups."""
