"""Find out from outside what is wrong with a job.

`status_segment` finds and reads the status segments of this machine's processes. `job` reports what each rank of a hung
job is doing, and which ranks delay the others. `sampler` samples a running job many times a second; `top` shows the
result. `fabric` lists libfabric's providers and tries them. `preflight` checks hosts, links and switches before a job;
only it forms a group. May import: the native engine, for names and libfabric.

Always: everything but preflight only reads; a process that hangs, is stopped or is dying need not respond.

Tests: `.venv/bin/pytest core/tests/diagnostics`
"""
