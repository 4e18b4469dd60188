"""What a run lives through.

`contents` names what a checkpoint holds, `sealed` makes a folder whole, `checkpoint` writes it over a group of its own,
`recovery` says where a run goes on, `changed` what a recipe may not change silently, `drift` compares copies before a
checkpoint, and `lives` what was trained twice; `policies`, `stop`, `straggler` and `unreadable`
each are one thing that goes wrong, and what is done about it.
"""
