"""One decoder; model families are configurations of it."""

from megazero.models.decoder import Decoder
from megazero.models.decoder_config import DecoderConfig, RopeScaling
from megazero.models.initialization import initializer

__all__ = ["Decoder", "DecoderConfig", "RopeScaling", "initializer"]
