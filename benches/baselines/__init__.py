"""What kvxfer is measured beside: memcpy, plain sockets, NIXL, Mooncake, UCX."""
