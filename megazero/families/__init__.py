"""The registry of model families: one record each, with defaults by flag, tensor names and Hugging Face's
config.json.

This package needs no torch. To add a family, write its record in a file here, and append it to the registry, whose
order decides which architecture a mixture gets. What the record says is all that the configuration, the decoder's
placements and the import from Hugging Face know of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from megazero.families.apertus import APERTUS
from megazero.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from megazero.families.dots1 import DOTS1
from megazero.families.falcon import FALCON
from megazero.families.family import Family, TensorNames
from megazero.families.gemma import GEMMA2, GEMMA3
from megazero.families.glm import GLM, GLM4, GLM4_MOE
from megazero.families.gpt import GPT
from megazero.families.gpt_neox import GPT_NEOX
from megazero.families.gpt_oss import GPT_OSS
from megazero.families.llama import GRANITE, GRANITEMOE, LLAMA, MISTRAL, MIXTRAL, SMOLLM3
from megazero.families.nemotron_h import NEMOTRON_H
from megazero.families.olmo2 import OLMO2, OLMO3, OLMOE
from megazero.families.phi3 import PHI3
from megazero.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_5, QWEN3_MOE, QWEN3_NEXT
from megazero.families.starcoder2 import STARCODER2

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.name: family
        for family in (
            LLAMA,
            GPT,
            QWEN2,
            QWEN3,
            MISTRAL,
            OLMO2,
            OLMO3,
            SMOLLM3,
            GEMMA2,
            GEMMA3,
            STARCODER2,
            PHI3,
            GRANITE,
            GLM,
            GLM4,
            GPT_NEOX,
            FALCON,
            MIXTRAL,
            QWEN3_MOE,
            QWEN2_MOE,
            OLMOE,
            GRANITEMOE,
            GLM4_MOE,
            DOTS1,
            DEEPSEEK_V2,
            DEEPSEEK_V3,
            GPT_OSS,
            QWEN3_NEXT,
            QWEN3_5,
            NEMOTRON_H,
            APERTUS,
        )
    }
)
# Llama's names can express every mixture of choices: what another family's names cannot is stored under them.
GENERAL_NAMES = LLAMA.names

__all__ = ["FAMILIES", "GENERAL_NAMES", "Family", "TensorNames"]
