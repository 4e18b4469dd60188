"""What a run lives through.

`state` names what a checkpoint holds, `atomic_checkpoint` makes a folder whole, `checkpoint` writes it over a group of
its own, `recovery` says where a run goes on, `recipe_changes` what a recipe may not change silently, `drift` compares
copies before a checkpoint, and `restart_log` what was trained twice; `policies`, `stop`, `straggler` and `bad_examples`
each are one thing that goes wrong, and what is done about it.
"""
