"""How linears multiply: one file for each arithmetic, and the table of their names, which needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megazero.products.product import Product

# Where the object of each is. A cluster file has the rate of NAME as device.NAME_tflops.
PRODUCTS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("bf16", "fp16", "fp32", "fp64"), "megazero.products.product:PLAIN")
)


def find_product(name: str) -> Product:
    """Return the product of that name of PRODUCTS."""
    return resolve_name(PRODUCTS[name])
