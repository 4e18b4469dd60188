"""Measures and shows netfold: benchmarks, an emulated rack, the demo, and the search over the protocol.

`bench` compares netfold with its peers, `rack` makes hosts and links of namespaces, `demo` trains over a switch and
over gloo, and `model_check` searches every order of events. `lab/bench` has the scripts behind the committed results.
May import netfold, netfold_plan and netfold_train; none of these imports it.
"""
