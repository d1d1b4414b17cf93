"""Shared by the tests of agents: caches with an independent model, child processes, a fake peer.

Nothing in here measures time. Limits are generous and only there so that nothing hangs.
"""
