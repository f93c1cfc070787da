"""linear for some tens of tokens by clusters of CUDA's blocks, beyond the op's samples: sizes that fill tiles and parts of
K and sizes that don't, rows apart, both kinds of ends."""

from __future__ import annotations

import pytest

from surogate_core.engine import cuda

from .test_few_tokens import Product

pytestmark = pytest.mark.cuda

KERNEL = "clusters"


@pytest.fixture(autouse=True, scope="module")
def has_clusters():
    if cuda.find_driver().devices[0].architecture < 90:
        pytest.skip("this device has no clusters of blocks")


@pytest.mark.parametrize("tokens", (9, 16, 17, 32, 33, 64))
@pytest.mark.parametrize(
    ("n", "k"), ((16, 8), (33, 136), (130, 2048), (9000, 64), (257, 8200), (1024, 3080), (17000, 520))
)
def test_sizes(tokens, n, k):
    Product(tokens, n, k).check(KERNEL)
    Product(tokens, n, k, gap=8, bias="f32", addend=True, result="f32").check(KERNEL)
    Product(tokens, n, k, gap=8, bias="bf16", addend=True).check(KERNEL)


def test_bits_do_not_depend_on_how_many_tokens_there_are():
    product = Product(64, 300, 2080, bias="bf16", addend=True)
    whole = product.run(KERNEL)
    for tokens in (1, 9, 16, 31, 33):
        assert product.run(KERNEL, tokens).tobytes() == whole[:tokens].tobytes()
