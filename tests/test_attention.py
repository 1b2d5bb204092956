"""Every kernel computes what the reference does; rotary positions turn as the formula says."""

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perceiver_ar import attention, flash4, flex, parts, products
from perceiver_ar.attention import attend, reference, rotate, rotation

SHAPES = [(2, 3, 5, 9, 8), (2, 2, 9, 9, 8), (3, 1, 1, 7, 4), (2, 2, 70, 200, 16), (1, 2, 3, 130, 8)]
"""B, H, N, M, K."""


def draw(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor]:
    b, h, n, m, k = shape
    # As the model makes them: (B, T, H, K) in memory.
    q, k_, v = (
        torch.randn(b, t, h, k, dtype=dtype, device=device).transpose(1, 2).requires_grad_()
        for t in (n, m, m)
    )
    return q, k_, v


def masks(shape: tuple[int, int, int, int, int], device: str = "cpu") -> list[tuple[Tensor | None, bool]]:
    """No mask; a mask of the last N, or of all keys; each with and without a query's own key."""
    b, _, n, m, _ = shape
    found: list[tuple[Tensor | None, bool]] = [(None, False)]
    for width in {n, m, (n + m) // 2}:
        visible = torch.rand(b, width, device=device) > 0.5
        visible[0, :-1] = False  # the first example's early queries see nothing at all
        found += [(visible, False), (visible, True)]
    return found


def differences(
    kernel: Callable[..., Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    visible: Tensor | None,
    own: bool,
) -> list[float]:
    """Largest differences in the output and in each gradient from the reference in float64."""
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    wanted = reference(*exact, visible, own)
    got = kernel(*inputs, visible, own)
    upstream = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, exact, upstream)
    got_grads = torch.autograd.grad(got, inputs, upstream.to(got.dtype))
    pairs = zip((got, *got_grads), (wanted, *wanted_grads), strict=True)
    return [(a.double() - b).abs().max().item() for a, b in pairs]


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        *itertools.product(
            [attend, parts.attend_in_two, attention._attend_by_rows, products.attend],
            [*SHAPES, (2, 3, 300, 700, 16)],
        )
    ],
)
def test_kernels_equal_the_reference_with_gradients(
    kernel: Callable[..., Tensor], shape: tuple[int, int, int, int, int]
) -> None:
    for dtype, tolerance in (
        (torch.float64, 1e-12),
        (torch.float32, 1e-5),
        (torch.bfloat16, 0.06),
        (torch.float16, 0.01),
    ):
        for visible, own in masks(shape):
            if kernel is parts.attend_in_two and dtype == torch.float16 and visible is not None:
                continue  # its bias does not fit into float16: attend takes another kernel
            errors = differences(kernel, draw(shape, dtype), visible, own)
            assert all(error < tolerance for error in errors), (dtype, visible is not None, own, errors)


def test_products_in_many_pieces_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "QUERIES", 7)
    monkeypatch.setattr(products, "SCORES", 300)
    shape = (3, 2, 25, 40, 8)
    for visible, own in masks(shape):
        errors = differences(products.attend, draw(shape), visible, own)
        assert all(error < 1e-12 for error in errors), (visible is not None, own, errors)


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_products_are_as_exact_as_flash_attention_however_large_the_scores(size: float) -> None:
    drawn = [x.detach() * by for x, by in zip(draw((2, 2, 64, 300, 64)), (size, 1.0, 1.0), strict=True)]
    inputs = tuple(x.bfloat16().requires_grad_() for x in drawn)
    scores = (inputs[0] @ inputs[1].mT / 8).abs().max()
    assert scores > 100 if size > 1 else scores < 10
    exact, found, flash = [], [], []
    for results, kernel, dtype in (
        (exact, reference, torch.float64),
        (found, products.attend, torch.bfloat16),
        (flash, parts.attend_in_two, torch.bfloat16),
    ):
        given = [x.detach().to(dtype).requires_grad_() for x in inputs]
        out = kernel(*given, None, False)
        torch.manual_seed(1)
        results += [out, *torch.autograd.grad(out, given, torch.randn(out.shape).to(dtype))]
    for true, one, other in zip(exact, found, flash, strict=True):
        errors = [(x.double() - true).norm() / true.norm() for x in (one, other)]
        assert errors[0] < 1.5 * errors[1] + 1e-3


def test_products_are_an_operation_as_torch_wants_it() -> None:
    q, k, v = (x.flatten(0, 1).detach().requires_grad_() for x in draw((2, 3, 5, 9, 8)))
    for shown in (None, torch.rand(6, 7) > 0.5):
        torch.library.opcheck(products._forward, (q, k, v, shown, shown is not None))


@pytest.mark.parametrize("native", [False, True])
def test_products_serve_bf16_where_a_cpu_has_it(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "NATIVE", native)
    monkeypatch.setattr(products, "LONGEST", 7)
    for dtype, queries, keys in itertools.product((torch.float32, torch.bfloat16), (1, 3, 4), (4, 7, 8)):
        q, k = (torch.zeros(1, 1, n, 8, dtype=dtype) for n in (queries, keys))
        chosen = attention._kernel(q, k, None, False, None) is products.attend
        assert chosen is (native and dtype == torch.bfloat16 and queries > 1 and keys < 8)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 256, 1000, 64),
        (2, 4, 300, 300, 64),
        (2, 4, 1, 77, 64),
        (2, 2, 128, 4096, 24),
        (1, 1, 128, 512, 512),
    ],
)
def test_cuda_kernels_equal_the_reference_with_gradients(shape: tuple[int, int, int, int, int]) -> None:
    for dtype, tolerance in ((torch.float32, 5e-3), (torch.bfloat16, 0.06)):
        for visible, own in masks(shape, "cuda"):
            errors = differences(attend, draw(shape, dtype, "cuda"), visible, own)
            assert all(error < tolerance for error in errors), (dtype, visible is not None, own, errors)


class One:
    """A process alone."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def max(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 9, 8), (3, 4, 256, 1000, 64), (2, 2, 70, 200, 24), (2, 2, 9, 9, 16)]
)
def test_a_process_alone_shares_its_keys_with_nobody(
    shape: tuple[int, int, int, int, int], device: str
) -> None:
    dtype, tolerance = (torch.float64, 1e-6) if device == "cpu" else (torch.bfloat16, 0.06)
    for visible, own in masks(shape, device):
        if not own:
            errors = differences(
                functools.partial(attend, share=One()), draw(shape, dtype, device), visible, own
            )
            assert all(error < tolerance for error in errors), (visible is not None, errors)


NEEDS_FLASH4 = [pytest.mark.gpu, pytest.mark.skipif(not flash4.INSTALLED, reason="needs flash-attn-4")]


@pytest.mark.gpu
@pytest.mark.skipif(not flash4.INSTALLED, reason="needs flash-attn-4")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 256, 1000, 64),
        (2, 4, 300, 300, 64),
        (3, 2, 33, 4097, 32),
        (2, 2, 200, 900, 128),
        (1, 2, 1024, 40_038, 64),
    ],
)
def test_flash_attention_4_equals_the_reference_with_gradients(
    shape: tuple[int, int, int, int, int], compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()  # else the other shapes count towards what may be compiled again
    monkeypatch.setattr(flash4, "WORTH", 0)
    for dtype, tolerance in ((torch.bfloat16, 0.06), (torch.float16, 0.01)):
        inputs = draw(shape, dtype, "cuda")
        assert attention._kernel(inputs[0], inputs[1], None, False, None) is flash4.attend
        kernel = torch.compile(flash4.attend, fullgraph=True, dynamic=False) if compiled else flash4.attend
        errors = differences(kernel, inputs, None, False)
        assert all(error < tolerance for error in errors), (dtype, errors)


def test_flash_attention_4_is_called_where_there_is_enough_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash4, "INSTALLED", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for rows, queries, keys, wanted in (
        (32, 1024, 1024, True),
        (4, 1024, 1024, False),
        (4, 1024, 131_072, True),
        (4, 512, 4096, False),
    ):
        q, k = (torch.empty(rows, 16, places, 64, device="meta") for places in (queries, keys))
        assert flash4.serves(q, k, None, False) is wanted


@pytest.mark.gpu
@pytest.mark.skipif(not flash4.INSTALLED, reason="needs flash-attn-4")
@pytest.mark.parametrize("shape", [(3, 4, 256, 1000, 64), (2, 2, 33, 34, 32), (2, 2, 1024, 9000, 32)])
def test_flash_attention_4_hides_keys(shape: tuple[int, int, int, int, int]) -> None:
    torch.compiler.reset()
    visible = torch.rand(shape[0], shape[2], device="cuda") > 0.7
    visible[0] = False
    for kernel in (flash4.attend, torch.compile(flash4.attend, fullgraph=True, dynamic=False)):
        inputs = draw(shape, torch.bfloat16, "cuda")
        assert attention._kernel(inputs[0], inputs[1], visible, False, None) is flash4.attend
        errors = differences(kernel, inputs, visible, False)
        assert all(error < 0.06 for error in errors), errors


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_FLASH4)])
@pytest.mark.parametrize("turned", [False, True])
def test_what_lies_together_is_attended_to_as_what_lies_apart(
    device: str, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(flash4, "WORTH", 0)
    dtype, tolerance = (torch.float64, 1e-6) if device == "cpu" else (torch.bfloat16, 0.06)
    turn = rotation(torch.arange(300, device=device)[None], 32, 0.5, 300.0) if turned else None
    qkv = torch.randn(2, 300, 3, 4, 32, dtype=dtype, device=device, requires_grad=True)
    exact = qkv.detach().double().requires_grad_()
    found, wanted = attention.attend_packed(qkv, turn), reference(*attention.unpack(exact, turn))
    upstream = torch.randn_like(wanted)
    gradients = (
        torch.autograd.grad(found, qkv, upstream.to(dtype)),
        torch.autograd.grad(wanted, exact, upstream),
    )
    for a, b in ((found, wanted), (gradients[0][0], gradients[1][0])):
        assert (a.double() - b).abs().max() < tolerance


def test_what_lies_together_is_turned_where_it_lies() -> None:
    qkv = torch.randn(2, 7, 3, 4, 6, dtype=torch.float64, requires_grad=True)
    turn = rotation(torch.randint(99, (2, 7)), 6, 0.7, 99.0)
    apart = torch.stack([x.transpose(1, 2) for x in attention.unpack(qkv, turn)], dim=2)
    together = attention._turn_packed(qkv, turn)
    upstream = torch.randn_like(apart)
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(
        torch.autograd.grad(together, qkv, upstream), torch.autograd.grad(apart, qkv, upstream)
    )


@pytest.mark.parametrize("shape", [(2, 1, 300, 300, 8), (2, 1, 256, 1000, 8), (3, 1, 130, 777, 8)])
def test_flex_attention_reads_every_block_that_is_seen_and_checks_what_it_must(
    shape: tuple[int, int, int, int, int],
) -> None:
    block = flex.BLOCK
    q, k, _ = draw(shape)
    padded = torch.arange(shape[3]) >= torch.tensor([0, 200, 290])[: shape[0], None]
    for visible, own in itertools.product((padded, torch.rand(shape[0], shape[2]) > 0.5), (False, True)):
        seen = attention._open(q, k, visible, own, 0, shape[2])[:, 0]
        rest = -seen.shape[1] % block, -seen.shape[2] % block
        blocks = [F.pad(seen, (0, rest[1], 0, rest[0]), value=x) for x in (False, True)]
        some, all_ = (x.unflatten(2, (-1, block)).unflatten(1, (-1, block)) for x in blocks)
        made = flex._block_mask(q, k, visible, own)
        checked, open_ = (as_blocks(*x) for x in (
            (made.kv_num_blocks, made.kv_indices), (made.full_kv_num_blocks, made.full_kv_indices)
        ))  # fmt: skip
        assert not (open_ & checked).any()
        assert torch.equal(open_ | checked, some.any(-1).any(-2) | checked)  # nothing that is seen is missing
        assert not (open_ & ~all_.all(-1).all(-2)).any()  # nothing unchecked that is hidden
        if visible is padded:
            assert (
                checked.sum() <= 3 * checked.shape[0] * checked.shape[1]
            )  # the diagonal, and where it begins


def as_blocks(counts: Tensor, indices: Tensor) -> Tensor:
    """(B, rows, columns): which are listed."""
    listed = torch.arange(indices.shape[-1]) < counts[..., None]
    return torch.zeros(indices.shape, dtype=torch.bool).scatter(-1, indices.long(), listed)[:, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [3686, 16_384, 40_038, 131_071])
def test_a_long_cross_attend_with_hidden_keys_on_the_gpu(keys: int) -> None:
    # As cross-attend dropout hides them: only the last N. By lists that are made before, or on the way.
    shape, visible = (4, 2, 1024, keys, 64), torch.rand(4, 1024, device="cuda") > 0.7
    inputs = draw(shape, torch.bfloat16, "cuda")
    wanted = attention._attend_by_rows(*(x.float() for x in inputs), visible, False)
    compiled = torch.compile(attend, dynamic=False)
    for blocks in (flex.blocks_shown(visible, 1024, keys), None):
        leaves = [x.detach().requires_grad_() for x in inputs]
        found = compiled(*leaves, visible, False, blocks)
        found.sum().backward()
        torch.cuda.synchronize()
        torch.testing.assert_close(found.float(), wanted, atol=0.02, rtol=0.05)
        assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)


@pytest.mark.gpu
def test_compiled_kernels_follow_changing_shapes() -> None:
    # Padded batches of a store: other lengths, and other numbers of keys that may be hidden, at each step.
    compiled = torch.compile(lambda q, k, v, visible, own: attend(q, k, v, visible, own))
    for queries, keys, width in ((256, 1024, 512), (256, 1000, 300), (200, 900, 900), (130, 777, 400)):
        visible = torch.rand(2, width, device="cuda") > 0.3
        for own in (False, True):
            inputs = draw((2, 2, queries, keys, 32), torch.bfloat16, "cuda")
            errors = differences(compiled, inputs, visible, own)
            assert all(error < 0.06 for error in errors), (queries, keys, width, own, errors)


def test_the_reference_is_right_aligned_and_sees_its_own_key() -> None:
    q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 4, 1)
    v = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 1, 4, 1)
    assert reference(q, k, v).flatten().tolist() == pytest.approx([7 / 3, 15 / 4])
    visible = torch.tensor([[False, True, False, True]])
    assert reference(q, k, v, visible).flatten().tolist() == pytest.approx([2.0, 5.0])
    assert reference(q, k, v, visible, own=True).flatten().tolist() == pytest.approx([3.0, 5.0])
    assert reference(q, k, v, torch.zeros(1, 4, dtype=torch.bool)).flatten().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("keys", [256, 512, 4096])
@pytest.mark.parametrize("kernel", [attend, attention._attend_by_rows])
def test_no_tensor_as_large_as_queries_times_keys_is_made(kernel: Callable[..., Tensor], keys: int) -> None:
    shape = (1, 1, 256, keys, 4)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, tuple | list) else (result,):
                if isinstance(x, Tensor):
                    largest = max(largest, x.numel())
            return result

    for visible, own in masks(shape):
        q, k, v = draw(shape)
        with Watch():
            kernel(q, k, v, visible, own).sum().backward()
    assert 0 < largest < 256 * keys / 2


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(at_q: int, at_k: int) -> float:
        turns = (rotation(torch.tensor([[at]]), 8, 0.5, 48) for at in (at_q, at_k))
        by_q, by_k = turns
        return (rotate(q, by_q) * rotate(k, by_k)).sum().item()

    assert score(7, 3) == pytest.approx(score(1007, 1003), abs=1e-5)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_rotary_turns_interleaved_pairs_and_leaves_the_rest() -> None:
    x, position, longest = torch.randn(1, 1, 1, 16), 5, 48
    turned = rotate(x, rotation(torch.tensor([[position]]), 16, 0.5, longest)).flatten()
    pairs = torch.view_as_complex(x.flatten()[:8].reshape(4, 2).contiguous())
    frequencies = [longest ** -(pair / 3) for pair in range(4)]  # both ends included
    for pair, frequency in enumerate(frequencies):
        wanted = complex(pairs[pair].item()) * complex(
            math.cos(position * frequency), math.sin(position * frequency)
        )
        assert complex(*turned[2 * pair : 2 * pair + 2].tolist()) == pytest.approx(wanted, abs=1e-6)
    torch.testing.assert_close(turned[8:], x.flatten()[8:])


def test_rotary_takes_heads_of_odd_width() -> None:
    x = torch.randn(2, 3, 4, 7)
    turned = rotate(x, rotation(torch.arange(4)[None], 7, 1.0, 48))
    even = rotate(x[..., :6], rotation(torch.arange(4)[None], 6, 1.0, 48))
    torch.testing.assert_close(turned, torch.cat((even, x[..., 6:]), dim=-1))


def test_angles_stay_exact_at_a_hundred_million() -> None:
    position = 10**8 + 1
    cos, _ = rotation(torch.tensor([[position]]), 4, 1.0, 1e9)
    assert cos.flatten()[0].item() == pytest.approx(math.cos(position), abs=1e-6)
