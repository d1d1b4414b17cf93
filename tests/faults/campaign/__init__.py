"""A fault campaign: agents in processes under a random schedule of work and faults, and a judge.

``python -m faults.campaign --help`` says how to run it; `schedule` is what happens, `draw` makes it
up, `driver` has it done, `node` is one process of the fleet, `content` knows what must arrive.
"""
