"""The modules of the mixers of tokens, one of each row of config/model/mixers. Layers import theirs by name."""
