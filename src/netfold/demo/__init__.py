"""The demo: a super-resolution network trained over netfold, then over gloo, and the two compared.

What it does: starts a switch and a few workers on this machine, trains EDSR with DistributedDataParallel on
the photographs inside the scikit-image wheel, does the same with gloo from the same seeds, measures how far
gloo is from gloo when only the order of its sums changes, and writes one page with all of it.
A run in four files: `experiment` (what happens, in order) -> `launch` (processes) -> `worker` (what a rank does)
-> `agreement` (are the losses the same?) and `report` (the page).

May use: torch, scikit-image, matplotlib (the extra `netfold[demo]`), bench's description of the machine, and train's
EDSR, photographs, order of examples and arithmetic of pictures; not its loop, which the worker writes out.
The backend only from outside, as any training script would: `init_process_group("netfold")` and the command
`netfold switch`.
Always holds: the worker's code is the same for every backend; no held-out photograph is trained on; no process
and no temporary file outlives the demo; the page needs no network.
Test: pytest tests/demo
"""
