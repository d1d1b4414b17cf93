"""Looks whether a host is set up for transfers, and says what would hurt and how to mend it.

Probes are functions from a `Tree` to findings. They read files of ``/sys`` and ``/proc`` and the
answers of libraries through it, so they can be run on what was recorded elsewhere.
"""
