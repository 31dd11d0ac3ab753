"""One decoder; what it is made of is a model section, whose defaults come from a family."""

from megazero.config.model import ModelConfig, from_hf_config, make_model
from megazero.models.decoder import Decoder
from megazero.models.initialization import initializer

__all__ = ["Decoder", "ModelConfig", "from_hf_config", "initializer", "make_model"]
