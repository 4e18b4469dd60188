"""Collectives on tensors in a GPU's memory.

`driver` takes calls in the order in which they were made, one thread a group, and sends each one way: `host_staging`,
through pinned host memory, piece by piece, beside the copy engines; or `intra_host`, added up among the GPUs of a host
first, which reach each other's memory by `ipc` or are left to NCCL. Which way there is, the ranks find out together
when the first call comes (`capability_exchange`). `transfers` is send and receive. All of it speaks to `device_api`, a
narrow interface to the devices: `cuda` is that of torch.cuda, with `cuda_driver` for what torch does not offer; tests
bring one whose copies are late and out of step unless they are ordered. May import: communicator, torch; of its parent,
calls and work.

Always: a device's memory is read and written only behind an event that says that it may be; no wait lacks a deadline;
pinned memory is bounded; all ranks take the same way; where torch finds no CUDA device no group has a driver. A thread
makes the tensor's device its current one before it calls the layer, and ends no other thread's capture. What was handed
over as a result is whole before a group's memory and NCCL's group are freed.

Tests: `.venv/bin/pytest tests/torch/device`; with a GPU `make test-cuda`
"""
