"""How linears multiply: one file for each arithmetic, and the table of their names, which needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megazero.products.product import Product

# The other dtypes of params_dtype, by their words, in torch's names.
PLAIN = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
# Where the class of each is. A cluster file has the rate of NAME as device.NAME_tflops.
_FP8 = {"tensorwise": "TensorScales", "rowwise": "RowScales", "blockwise": "BlockScales"}
RECIPES = tuple(_FP8)  # of scales of fp8
BLOCK = 128  # elements of a token that share a scale of blockwise ones
FP8_PRODUCTS = tuple(f"fp8_{recipe}" for recipe in RECIPES)
PRODUCTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(PLAIN, "megazero.products.product:Product"),
        **{f"fp8_{recipe}": f"megazero.products.fp8:{name}" for recipe, name in _FP8.items()},
    }
)


def make_product(name: str, **options: Any) -> Product:
    """Return the product of that name of PRODUCTS with its options."""
    return resolve_name(PRODUCTS[name])(**options)


def fits_fp8(matrices: Iterable[tuple[int, ...]], least: int) -> bool:
    """Tell whether the matrices [out, in] that multiply one input are multiplied in fp8: if both sides of one of them
    are at least ``least``. They share the input's conversion, so small ones follow a large one.
    """
    return any(min(sides) >= least for sides in matrices)


def operand_bytes(product: str, elements: int, width: int) -> int:
    """Return the bytes of what linears keep of a token's input of so many elements of ``width`` bytes, and gather."""
    if product == "fp8_blockwise":
        return elements + 4 * -(-elements // BLOCK)
    return elements if product == "fp8_tensorwise" else elements * width
