"""There is one decoder. A model section says what it is made of, and the section's defaults come from a family."""

from megazero.config.model.architecture import architecture_of, from_hf_config
from megazero.config.model.section import ModelConfig, make_model
from megazero.models.decoder import Decoder, initializer

__all__ = [
    "Decoder",
    "ModelConfig",
    "architecture_of",
    "from_hf_config",
    "initializer",
    "make_model",
]
