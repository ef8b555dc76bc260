"""The losses and their gradients against slow and obvious float64 references, at the edges, and
against other projects' functions.
"""

import math

import pytest
import torch

from eyas.errors import EyasError
from eyas.training.losses import ETA, LEAST, LOSSES, TINY, get_loss
from helpers.peer import peer

D, OUTSIDE = 13, 6  # draft vocabulary, and the tokens that only the target knows
ONE_HOT = torch.eye(D, dtype=torch.float64)
each_loss = pytest.mark.parametrize("name", LOSSES)

# ---- one row at a time, from the definitions: the value token by token with Python's floats, the
# gradient by autograd


def value(name: str, z: list[float], p: list[float]) -> float:
    top = max(z)
    log_sum = top + math.log(math.fsum(math.exp(x - top) for x in z))
    log_q = [x - log_sum for x in z]
    if name == "kl":
        return -math.fsum(b * a for a, b in zip(log_q, p))
    # Leviathan et al.: token i is drafted with probability q and then accepted with min(1, p / q)
    alpha = 0.0
    for a, b in zip(log_q, p):
        q = math.exp(a)
        alpha += q * min(1.0, b / q) if q else 0.0
    if name == "tv":
        return 1 - alpha
    if name == "lk_alpha":
        return -math.log(alpha)
    mass = math.fsum(p)
    kl = math.fsum(b / mass * (math.log(b / mass) - a) for a, b in zip(log_q, p) if b)
    lam = math.exp(-3 * alpha)
    return lam * kl + (1 - lam) * (1 - alpha)


def slope(name: str, z: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    z = z.clone().requires_grad_()
    log_q = z - torch.logsumexp(z, 0)
    alpha = torch.minimum(p, log_q.exp()).sum()
    lam = torch.exp(-3 * alpha.detach())
    p_d = p / p.sum()
    losses = {
        "kl": -(p * log_q).sum(),
        "tv": 1 - alpha,
        "lk_alpha": -alpha.log(),
        "lk_lambda": lam * -(p_d * log_q).sum() + (1 - lam) * (1 - alpha),
    }
    return torch.autograd.grad(losses[name], z)[0]


def seen(n: int, sharpness: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a drafter [n, D] and the target's probabilities over its whole vocabulary, those of
    the D tokens [n, D].
    """
    g = torch.Generator().manual_seed(seed)
    z = torch.randn(n, D, generator=g, dtype=torch.float64) * sharpness
    p = (torch.randn(n, D + OUTSIDE, generator=g, dtype=torch.float64) * sharpness).softmax(-1)[
        :, :D
    ]
    return z, p.where(p >= TINY, 0)


def cases() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    z, p = seen(20, 2.0)
    unlikely = z[:D].masked_fill(ONE_HOT.bool(), -40.0)  # alpha about 1e-18
    extreme = (z > 1.5).double() * 2000 - 1000
    extreme[:, 3] = 1000.0
    return {
        "soft": (z, p),
        "sharp": seen(20, 8.0),
        "whole": (z, p / p.sum(-1, keepdim=True)),
        "zeros": (
            z,
            p.where(
                torch.rand(p.shape, generator=torch.Generator().manual_seed(1)) < 0.4, 0
            ).index_fill(1, torch.tensor([5]), 0.03),
        ),
        "outside": (z, p * 1e-6),
        "one-hot": (z[:D], ONE_HOT),
        "unlikely": (unlikely, ONE_HOT),
        "extreme": (extreme, p),
        "shifted": (z + 1e4, p),
    }


@pytest.mark.parametrize("case", cases())
@each_loss
def test_against_the_definition(name, case):
    z, p = cases()[case]
    if not LOSSES[name].whole_vocab:
        p = p / p.sum(-1, keepdim=True)
    losses, gradient = LOSSES[name].rows(z.clone(), p)
    assert losses.shape == (len(z),) and gradient.shape == z.shape
    tolerance = 1e-9 if case != "shifted" else 1e-8  # logits of 1e4 have lost 1e-12 each
    for i in range(len(z)):
        assert float(losses[i]) == pytest.approx(
            value(name, z[i].tolist(), p[i].tolist()), rel=0, abs=tolerance
        )
        torch.testing.assert_close(gradient[i], slope(name, z[i], p[i]), rtol=0, atol=tolerance)


@each_loss
def test_where_p_and_q_are_equal(name):
    """Half of torch.minimum's slope goes to each, as autograd has it."""
    z = seen(4, 1.0)[0]
    q = z.log_softmax(-1).exp()
    p = q * torch.tensor([1.0, 1.0, 0.5, 1.0, 1.3, 0.0, 1.0, 1.1, 0.9, 1.0, 1.0, 0.2, 1.0])
    assert torch.equal((p == q).sum(-1), torch.full((4,), 7))
    leaf = z.clone().requires_grad_()
    alpha = torch.minimum(p, leaf.log_softmax(-1).exp()).sum(-1)
    lam, p_d = torch.exp(-3 * alpha.detach()), p / p.sum(-1, keepdim=True)
    cross = -(p_d * leaf.log_softmax(-1)).sum(-1)
    expected = {
        "kl": cross,
        "tv": -alpha,
        "lk_alpha": -alpha.log(),
        "lk_lambda": lam * cross - (1 - lam) * alpha,
    }[name]
    _, gradient = LOSSES[name].rows(z.clone(), p if LOSSES[name].whole_vocab else p_d)
    torch.testing.assert_close(
        gradient, torch.autograd.grad(expected.sum(), leaf)[0], rtol=0, atol=1e-9
    )


@each_loss
def test_real_size(name):
    """float32 as in training, against float64; p is left alone, the gradient takes the logits'
    place, and nothing in it is slow to compute with.
    """
    g = torch.Generator().manual_seed(0)
    z = (
        torch.randn(40, 8192, generator=g) * 12
    )  # the least likely tokens have probabilities below float32's normal numbers
    p = (z / 2 + torch.randn(40, 8192, generator=g) * 4).softmax(-1)
    p = p.where(p >= TINY, 0)
    before, place = p.clone(), z.data_ptr()
    expected = LOSSES[name].rows(z.double(), p.double())
    losses, gradient = LOSSES[name].rows(z, p)
    torch.testing.assert_close(losses.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected[1], rtol=0, atol=2e-6)
    assert losses.dtype == gradient.dtype == torch.float32
    assert torch.equal(p, before) and gradient.data_ptr() == place
    assert float(gradient[gradient != 0].abs().min()) > (1e-20 if name == "kl" else TINY * 0.999)
    assert 0.05 < float((gradient == 0).float().mean()) < 0.95


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_nothing_accepted(dtype):
    """The target's only token is one that the drafter never says: the loss is held, the gradient
    still says where to go.
    """
    z = torch.zeros(2, D, dtype=dtype)
    z[:, 4] = torch.tensor([-200.0, -1e4], dtype=dtype)
    p = ONE_HOT[4].to(dtype).repeat(2, 1)
    expected = torch.full((2, D), 1 / (D - 1), dtype=dtype)
    expected[:, 4] = -1
    for name in ("lk_alpha", "lk_lambda", "kl"):
        losses, gradient = LOSSES[name].rows(z.clone(), p)
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-4)
        wanted = (
            [-math.log(LEAST)] * 2
            if name == "lk_alpha"
            else [200 + math.log(D - 1), 1e4 + math.log(D - 1)]
        )
        assert losses.tolist() == pytest.approx(wanted, rel=1e-5)
    losses, gradient = LOSSES["tv"].rows(z.clone(), p)
    assert losses.tolist() == [1, 1] and not gradient.any()  # why the two others exist


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize(
    "name, held", (("tv", 1.0), ("lk_alpha", -math.log(LEAST)), ("lk_lambda", 1.0))
)
def test_nothing_to_accept(name, held, dtype):
    losses, gradient = LOSSES[name].rows(seen(3, 2.0)[0].to(dtype), torch.zeros(3, D, dtype=dtype))
    assert losses.tolist() == pytest.approx([held] * 3) and not gradient.any()


@each_loss
def test_least_where_q_is_p(name):
    p = seen(1, 1.0)[1]
    p = p / p.sum()
    least = float(LOSSES[name].rows(p.log(), p)[0])
    assert least == pytest.approx(-float((p * p.log()).sum()) if name == "kl" else 0.0, abs=1e-12)
    g = torch.Generator().manual_seed(2)
    for size in (1e-3, 0.1, 1.0, 10.0):
        z = p.log() + size * torch.randn(50, D, generator=g, dtype=torch.float64)
        assert float(LOSSES[name].rows(z, p.repeat(50, 1))[0].min()) > least + 1e-9
    if name == "kl":  # the others have a kink there
        assert float(LOSSES[name].rows(p.log(), p)[1].abs().max()) < 1e-12


@each_loss
def test_a_step_against_the_gradient_makes_it_less(name):
    z, p = seen(20, 2.0, seed=3)
    if not LOSSES[name].whole_vocab:
        p = p / p.sum(-1, keepdim=True)
    before, gradient = LOSSES[name].rows(z.clone(), p)
    after, _ = LOSSES[name].rows(z - 1e-3 * gradient, p)
    assert (after < before).all()


def test_names():
    assert {name: loss.whole_vocab for name, loss in LOSSES.items()} == {
        "kl": False,
        "tv": True,
        "lk_alpha": True,
        "lk_lambda": True,
    }
    for name in LOSSES:
        assert get_loss(name) is LOSSES[name] and get_loss(name).name == name
    with pytest.raises(
        EyasError,
        match="no loss 'lk'; expected one of kl, tv, lk_alpha, lk_lambda; next: python -m eyas",
    ):
        get_loss("lk")


# ---- their own functions, in their own environments (float32 within)


@pytest.mark.peer
def test_speculators_has_the_same(tmp_path):
    """Theirs take logits of both sides over one vocabulary, and keep the entropy out of kl."""
    g = torch.Generator().manual_seed(4)
    z, t = (torch.randn(30, D, generator=g) * 2 for _ in range(2))
    torch.save((z, t), tmp_path / "in.pt")
    found = peer(
        "EYAS_PEER_SPECULATORS",
        "speculators==0.9.0",
        """
from speculators.losses.eager import kl_div_loss, lk_hybrid_loss, neg_log_acceptance_loss, tv_loss
z, t = torch.load(sys.argv[2])
found = {}
for name, function in (("kl", kl_div_loss), ("tv", tv_loss), ("lk_alpha", \
neg_log_acceptance_loss), ("lk_lambda", lk_hybrid_loss)):
    leaf = z[None].clone().requires_grad_()
    losses = function(leaf, t[None])
    found[name] = losses.detach()[0], torch.autograd.grad(losses.sum(), leaf)[0][0]
""",
        str(tmp_path / "found.pt"),
        str(tmp_path / "in.pt"),
    )
    p = t.double().softmax(-1)
    assert set(found) == set(LOSSES)
    for name, (losses, gradient) in found.items():
        ours = LOSSES[name].rows(z.double(), p)
        entropy = -(p * p.log()).sum(-1) if name == "kl" else 0
        torch.testing.assert_close(ours[0] - entropy, losses.double(), rtol=0, atol=5e-6)
        torch.testing.assert_close(ours[1], gradient.double(), rtol=0, atol=5e-6)


@pytest.mark.peer
def test_specforge_has_the_same(tmp_path):
    """A batch of one position each, so that the mean acceptance is that of the row; p over the
    whole vocabulary in the acceptance, over D in KL.
    """
    z, p = (t.float() for t in seen(30, 2.0, seed=5))
    torch.save((z, p, ETA), tmp_path / "in.pt")
    found = peer(
        "EYAS_PEER_SPECFORGE",
        "-r requirements/cpu.txt --no-deps && PEER/bin/pip install --no-deps specforge==0.2.0",
        """
from specforge.core.lk_loss import compute_acceptance_rate, compute_lk_loss
z, p, eta = torch.load(sys.argv[2])
found = {}
for name in ("tv", "lk_alpha", "lk_lambda"):
    rows = []
    for row, target in zip(z, p):
        leaf = row[None, None].clone().requires_grad_()
        rate, log_rate = compute_acceptance_rate(logits=leaf, target_probs=target[None, None], \
position_mask=torch.ones(1, 1, 1, dtype=torch.bool))
        kl = torch.nn.functional.kl_div(leaf[0, 0].log_softmax(-1), target / target.sum(), \
reduction="sum")
        loss = 1 - rate if name == "tv" else compute_lk_loss(
            kl_loss=kl, acceptance_rate=rate, log_acceptance_rate=log_rate, lk_loss_type=name[3:], \
kl_scale=1.0, kl_decay=eta)
        rows.append((loss.detach(), torch.autograd.grad(loss, leaf)[0][0, 0]))
    found[name] = [torch.stack(column) for column in zip(*rows)]
""",
        str(tmp_path / "found.pt"),
        str(tmp_path / "in.pt"),
    )
    assert len(found) == 3
    for name, (losses, gradient) in found.items():
        ours = LOSSES[name].rows(z.double(), p.double())
        torch.testing.assert_close(ours[0], losses.double(), rtol=0, atol=5e-6)
        torch.testing.assert_close(ours[1], gradient.double(), rtol=0, atol=5e-6)
