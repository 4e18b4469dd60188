"""What ranks need before they are a group: how they find each other, prove who they are, and measure their links.

`launchers`, `pmi`, `store` and `tcp_store` say who takes part; `rendezvous` makes authenticated connections of it, with
`addresses`, `listener`, `handshake`, `security` and `secure_stream`; `shm_discovery` and `peer_memory` find ranks that
share memory; `fabric` and `mpi` set up these transports; `probe` measures links, `capacity` switches.
May import: tuning, switch_protocol, `netfold.options`, `netfold.errors` and the native engine. Never communicator.

Always: a peer proved that it knows the job's secret before any of its bytes is used; a wait has a deadline; an error
names the rank.

Tests: `.venv/bin/pytest tests/bootstrap`
"""
