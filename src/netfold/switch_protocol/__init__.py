"""What ranks and a switch say to each other outside of data packets: used by switch, communicator and bootstrap.

`control_messages` are length-prefixed msgpack over a stream, `data_path` is how a job's packets reach the switch,
`packet_keys` derives the keys of data packets at both ends, `pinned_tls` is TLS to a switch that is known by its
fingerprint. May import: the native engine.

Always: sizes are bounded; an unknown message is an error, an unknown field is ignored; no secret travels outside TLS.

Tests: `.venv/bin/pytest tests/switch tests/communicator`
"""
