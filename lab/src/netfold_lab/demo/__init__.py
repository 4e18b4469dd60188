"""The demo: a super-resolution network trained over netfold, then over gloo, and the two compared.

The demo starts a switch and a few workers on this machine. They train EDSR with DistributedDataParallel on the
photographs inside the scikit-image wheel. Then the demo trains with gloo from the same seeds, measures how much gloo
differs from itself when only the order of its sums changes, and writes one page with the results.
`experiment` is the order of events, `launch` runs the processes, `worker` is a rank's program, `agreement` compares the
losses, and `report` writes the page.

May use: torch, scikit-image (the packages of `netfold[lab]`), netfold.page, rack's processes, bench's description of
the machine, and train's EDSR, photographs, order of examples and arithmetic of pictures. The worker has its own
training loop. It uses the backend as any training script: `init_process_group("netfold")` and the command `netfold
switch`. Always holds: the worker's code is the same for every backend; no held-out photograph is trained on; no process
and no temporary file outlives the demo; the page needs no network. Test: pytest lab/tests/demo
"""
