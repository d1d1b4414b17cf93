"""Measuring kvxfer against memcpy, plain sockets and other transfer engines on one host."""
