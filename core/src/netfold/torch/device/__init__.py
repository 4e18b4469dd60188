"""Collectives on tensors in a GPU's memory.

`driver` runs the calls of a group on one thread, in the order of submission, each by one of three paths. `host_staging`
has chunks copied through pinned host memory by native code, in a pipeline with the copy engines. `intra_host` reduces
among the GPUs of a host first, by each other's memory (`ipc`) or by NCCL. `compressed_sums` quantises for the i8 wire
format and stages the bytes. At the first call the ranks agree on the paths (`paths`, `capability_exchange`).
`transfers` is send and receive. All modules use `device_api`, a narrow interface to devices: `cuda` implements it by
torch.cuda, with `cuda_driver` for functions that torch lacks. The tests' implementation delays and reorders copies that
are not ordered. May import: communicator, torch; of its parent, calls and work.

Always: device memory is read and written only after the event that permits it; every wait has a deadline; pinned memory
is bounded; all ranks take the same path; without a CUDA device no group has a driver. A thread makes the tensor's
device its current one before it calls the device API, and ends no other thread's capture. Results are complete before a
group's memory and NCCL's group are freed.

Tests: `.venv/bin/pytest core/tests/torch/device`; with a GPU `make test-cuda`
"""
