"""From a public call to a backend's kernel: calls, plans, the registry, requirements, the self-check."""
