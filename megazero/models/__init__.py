"""The one decoder. A model section says how it is built; a family sets the section's defaults."""

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
