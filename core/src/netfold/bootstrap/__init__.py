"""Ranks before they are a group: find each other, authenticate, and measure their links.

`launchers`, `pmi`, `store` and `tcp_store` find the ranks. `rendezvous` makes authenticated connections, with
`addresses`, `listener`, `handshake`, `security` and `secure_stream`; over them the ranks exchange values (`tree`).
`handle`, `endpoint` and `regroup` form a group without a store. `shm_discovery` and `peer_memory` find ranks that share
memory. `fabric` sets up streams over libfabric. `probe` measures links, `capacity` switches.
May import: tuning, switch_protocol, `netfold.options`, `netfold.errors` and the native engine. Never communicator.

Always: a peer proved that it knows the job's secret before any of its bytes is used; a wait has a deadline; an error
names the rank.

Tests: `.venv/bin/pytest core/tests/bootstrap`
"""
