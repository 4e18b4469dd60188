"""netfold: the network part of a training job.

A collective-communication backend that can add up gradients inside the network. `import netfold` loads nothing heavy;
with torch, `init_process_group("netfold")` needs no import at all.
"""

__version__ = "0.1.0"
