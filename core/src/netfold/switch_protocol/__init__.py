"""Messages between ranks and a switch outside of data packets. Used by switch, communicator and bootstrap.

`control_messages` are length-prefixed msgpack over a stream, with the checks of replies. `control_client` is a rank's
control connection. `job_tree` is what a join says of a job's switches. `pinned_tls` is TLS to a switch with a known
fingerprint. `data_path` is how a job's packets reach the switch, and `packet_keys` derives their keys at both ends.
`acceptor` bounds the unauthenticated peers of every listener, and `open_files` raises a process's limit of descriptors.
May import: `netfold.errors` and the native engine.

Always: sizes are bounded; an unknown message is an error, an unknown field is ignored; no secret travels outside TLS.

Tests: `.venv/bin/pytest core/tests/switch core/tests/communicator`
"""
