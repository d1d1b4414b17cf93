"""The protocol as a small machine, all of whose states are visited."""
