"""Factored matrices are what their product is."""

import devices
import pytest
import tiny_models
import torch

import hookline
from hookline import HooklineError
from hookline.weights import FactoredMatrix

torch.manual_seed(0)
A, B = torch.randn(2, 3, 8, 2, dtype=torch.float64), torch.randn(2, 3, 2, 8, dtype=torch.float64)
AB = A @ B


@pytest.fixture
def matrix() -> FactoredMatrix:
    return FactoredMatrix(A, B)


def same(a, b) -> bool:
    return torch.allclose(a.AB if isinstance(a, FactoredMatrix) else a, b)


def test_products(matrix) -> None:
    v, m = torch.randn(8, dtype=torch.float64), torch.randn(8, 5, dtype=torch.float64)
    assert matrix.shape == AB.shape
    assert same(matrix, AB)
    assert same(matrix.T, AB.mT)
    assert same(matrix @ v, AB @ v)
    assert same(v @ matrix, v @ AB)
    assert same(matrix @ m, AB @ m)
    assert same(m.T @ matrix, m.T @ AB)
    assert same(matrix @ matrix, AB @ AB)
    wide = FactoredMatrix(torch.randn(8, 6, dtype=torch.float64), torch.randn(6, 8, dtype=torch.float64))
    assert same(wide @ matrix, wide.AB @ AB)
    assert (wide @ matrix).mdim == (matrix @ wide).mdim == 2, "the thinner side is kept"
    assert same(2 * matrix, 2 * AB)


@pytest.mark.parametrize(
    "index", [0, (0, 1), (slice(None), 2), (1, 2, slice(3)), (1, 2, slice(3), slice(1, 4)), (..., slice(2), slice(5))]
)
def test_indexing(matrix, index) -> None:
    assert same(matrix[index], AB[index])


def test_a_single_row_or_column_stays_an_axis(matrix) -> None:
    assert same(matrix[0, 1, 4], AB[0, 1, 4:5])
    assert same(matrix[0, 1, -1, 2], AB[0, 1, 7:, 2:3])
    assert same(matrix.get_corner(2), AB[..., :2, :2])


def test_decompositions(matrix) -> None:
    u, s, v = matrix.svd()
    assert same(u @ torch.diag_embed(s) @ v.mT, AB)
    assert same(s, torch.linalg.svdvals(AB)[..., :2])
    assert same(matrix.norm(), AB.norm(dim=(-2, -1)))
    assert same(matrix.make_even(), AB)
    assert same(matrix.collapse_r() @ matrix.Vh, AB)
    assert same(matrix.U @ matrix.collapse_l(), AB)
    full = torch.linalg.eigvals(AB[0, 0])
    found = matrix.eigenvalues[0, 0]
    assert all((full - value).abs().min() < 1e-9 for value in found)


def test_heads_of_a_model() -> None:
    model = hookline.load("tinyworld")
    with torch.no_grad():
        ov, qk = model.OV, model.QK
        assert ov.shape == qk.shape == (4, 8, 128, 128)
        assert same(ov[3, 4], model.W_V[3, 4] @ model.W_O[3, 4])
        assert torch.allclose(qk[3, 4].AB, model.W_Q[3, 4] @ model.W_K[3, 4].T, atol=1e-5)
    llama = hookline.hook(tiny_models.causal_lm("llama"))
    assert llama.OV.shape[:2] == (4, 4), "keys and values of a group serve each of its heads"


def test_bad_matrices(matrix) -> None:
    with pytest.raises(HooklineError, match="product"):
        FactoredMatrix(A, A)
    with pytest.raises(HooklineError, match="square"):
        (matrix @ torch.randn(8, 5, dtype=torch.float64)).eigenvalues
    with pytest.raises(HooklineError, match="5 indices"):
        matrix[0, 0, 0, 0, 0]


def test_new_axes_and_half_precision() -> None:
    matrix = FactoredMatrix(torch.randn(3, 5, 2), torch.randn(2, 5).expand(3, 2, 5))
    assert torch.allclose(matrix[None, 1].AB, matrix.AB[None, 1], atol=devices.rounding())
    assert torch.equal(matrix[:, None].AB, matrix.AB[:, None])
    with pytest.raises(HooklineError, match="new axis"):
        matrix[0, 2, None]
    half = FactoredMatrix(matrix.A.half(), matrix.B.half())
    assert torch.allclose(half.S, matrix.S, atol=2e-2)
    assert torch.equal(matrix.V, matrix.Vh.mT)
    assert half.eigenvalues.shape == (3, 2)


def test_products_keep_the_smallest_inner_axis() -> None:
    wide = FactoredMatrix(torch.randn(2, 6), torch.randn(6, 3))
    for product, full in (
        (wide @ torch.randn(3, 5), 3),
        (torch.randn(5, 2) @ wide, 2),
        (wide @ FactoredMatrix(torch.randn(3, 7), torch.randn(7, 4)), 3),
    ):
        assert product.mdim == full
    other = FactoredMatrix(torch.randn(3, 7), torch.randn(7, 4))
    assert torch.allclose((wide @ other).AB, wide.AB @ other.AB, atol=1e-5)


def test_a_factor_is_a_number_or_one_for_each_matrix() -> None:
    batch = FactoredMatrix(torch.randn(4, 2, 3), torch.randn(4, 3, 2))
    factors = torch.randn(4, 1, 1)
    assert batch.has_leading_dims
    assert torch.allclose((batch * factors).AB, batch.AB * factors, atol=1e-6)
    for bad in (torch.randn(3), torch.randn(2, 2)):
        with pytest.raises(HooklineError, match="factor"):
            batch * bad
    for bad in (torch.randn(5), torch.randn(5, 2)):
        with pytest.raises(AssertionError, match="no product"):
            batch @ bad
