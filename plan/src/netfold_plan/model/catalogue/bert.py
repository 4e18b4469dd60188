"""BERT (Devlin et al. 2018), encoder and pooler, uncased; without the heads of pre-training, whose largest matrix is
the word embedding again."""

from netfold_plan.model.catalogue.layers import Layer, attention, embedding, layer_norm, linear

WORDS = 30522
POSITIONS = 512
# The sequence length of most of pre-training, and of the published speeds.
TOKENS = 128


def bert(depth: int, width: int) -> list[Layer]:
    """Sequences of TOKENS tokens."""
    layers = [
        embedding("words", WORDS, width),
        embedding("positions", POSITIONS, width),
        embedding("types", 2, width),
        layer_norm("norm", width, rows=TOKENS),
    ]
    for block in range(depth):
        layers += [linear(f"{block}.{name}", width, width, rows=TOKENS) for name in ("query", "key", "value")]
        layers += [
            attention(f"{block}.attention", TOKENS, width),
            linear(f"{block}.output", width, width, rows=TOKENS),
            layer_norm(f"{block}.norm1", width, rows=TOKENS),
            linear(f"{block}.up", width, 4 * width, rows=TOKENS),
            linear(f"{block}.down", 4 * width, width, rows=TOKENS),
            layer_norm(f"{block}.norm2", width, rows=TOKENS),
        ]
    return [*layers, linear("pooler", width, width)]
