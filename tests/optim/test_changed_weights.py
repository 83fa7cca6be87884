"""`track_changes=True`: a bit for each BF16 weight whose stored bits a step has changed, in every backend."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from hf_lowprec.optim import AdamW
from hf_lowprec.optim.changed_weights import changed_weights
from hf_lowprec.rounding.block_bits import block_bits, elements_of_words
from tests.support.optim.emulated_gpu import EmulatedGpu
from tests.support.optim.every_kind_of_value import in_some_rows, values_of_every_kind
from tests.support.optim.every_optimizer import MODES, OPTIONS, build
from tests.support.optim.simulated_copies import simulate_device
from tests.support.processes.shards import shard
from tests.support.triton_available import device_of, require_triton

BF16 = torch.bfloat16
SHAPES = [(40, 64), (7,), (3, 33), (300, 32), (2, 3, 96), (64,)]
"""Those with rows of whole blocks have bits; the fourth has more elements than a chunk of a kernel."""
TRACKED = [len(shape) > 1 and shape[-1] % 32 == 0 for shape in SHAPES]
BF16_MODES = [mode for dtype, mode in MODES if dtype == BF16]


def weights(device: str = "cpu") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, BF16)) for shape in SHAPES]


def give_gradients(params, step: int, special: bool = False) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in params:
        grad = torch.randn(param.shape, generator=generator).to(BF16)
        grad = in_some_rows(grad, 3, generator) if special and grad.ndim > 1 else grad
        param.grad = grad.to(param.device)


def bits(param: torch.Tensor) -> torch.Tensor:
    return param.detach().view(torch.int16).flatten().clone()


def assert_changes(params, before, found) -> None:
    """What is found is what a comparison with the weights before finds, and every NaN."""
    for param, earlier, is_tracked in zip(params, before, TRACKED, strict=True):
        if not is_tracked:
            assert found[param] is None
        else:
            changed = (bits(param) != earlier) | param.detach().flatten().isnan()
            assert torch.equal(found[param], changed.nonzero().flatten())


def test_a_word_has_the_bits_of_its_block():
    flags = torch.randint(0, 2, (4, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    words = block_bits(flags).view(4, 2, 32)
    assert (words == words[..., :1]).all()
    expected = [[sum(int(bit) << k for k, bit in enumerate(part)) for part in row.split(32)] for row in flags]
    assert (words[..., 0].long() & 0xFFFFFFFF).tolist() == expected
    assert torch.equal(elements_of_words(words[..., 0].contiguous()), flags.flatten().nonzero().flatten())


@pytest.mark.parametrize("options", BF16_MODES, ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_bit_is_set_where_the_stored_weight_has_other_bits(backend, name, options):
    """Over one step, over two, and where weights and gradients are of every kind; the step itself stays as it was."""
    params, untracked = (weights(device_of(backend)) for _ in range(2))
    options = {**OPTIONS[name][0], **options, "lr": 1e-4, "backend": backend}
    optimizer, ordinary = build(name, params, track_changes=True, **options), build(name, untracked, **options)
    for step, steps in enumerate((1, 2, 1)):
        special = step == 2
        if special:
            values = values_of_every_kind(params[0].detach().cpu(), torch.Generator().manual_seed(9))
            for param in (params[0], untracked[0]):
                param.data.copy_(values)
        before = list(map(bits, params))
        for k in range(steps):
            for each in (params, untracked):
                give_gradients(each, 10 * step + k, special)
            optimizer.step()
            ordinary.step()
        found = changed_weights(optimizer)
        if steps == 1:
            assert_changes(params, before, found)
        else:  # a weight may come back
            for param, earlier, is_tracked in zip(params, before, TRACKED, strict=True):
                changed = set((bits(param) != earlier).nonzero().flatten().tolist()) if is_tracked else set()
                assert not is_tracked or changed <= set(found[param].tolist())
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(params, untracked, strict=True))
    assert all(indices is None or not len(indices) for indices in changed_weights(optimizer).values())


@pytest.mark.parametrize("options", [BF16_MODES[1], BF16_MODES[3], BF16_MODES[5]], ids=str)
def test_the_compiled_kernel_sets_the_same_bits(options):
    require_triton()
    found = []
    for backend in ("eager", "triton"):
        params = weights()
        optimizer = AdamW(params, lr=1e-4, track_changes=True, backend=backend, **options)
        with EmulatedGpu(90).steps():
            for step in range(2):
                give_gradients(params, step)
                optimizer.step()
        found.append([None if each is None else each.tolist() for each in changed_weights(optimizer).values()])
    assert found[0] == found[1] and sum(map(len, filter(None, found[0]))) > 100


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_release": True},
        {"offload_states": True},
        {"offload_states": True, "offload_gradients": True, "max_grad_norm": 0.1},
    ],
    ids=str,
)
def test_it_goes_with_gradients_and_states_that_are_elsewhere(monkeypatch, options):
    simulate_device(monkeypatch)
    params = weights()
    optimizer = AdamW(params, lr=1e-4, rounding="split", track_changes=True, **options)
    for step in range(2):
        before = list(map(bits, params))
        generator = torch.Generator().manual_seed(step)
        sum((param * torch.randn(param.shape, generator=generator).to(BF16)).sum() for param in params).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_changes(params, before, changed_weights(optimizer))


@pytest.mark.parametrize(("dim", "width", "is_known"), [(0, 96, True), (1, 128, True), (1, 96, False)])
def test_indices_of_shards_are_those_of_the_full_tensor(two_fake_ranks, dim, width, is_known):
    """Rank 0 of two has the first rows; or the first columns, 64 of 128, or 48 of 96, which cut a block."""
    mesh, generator = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    full, grad = (torch.randn(6, width, generator=generator).to(BF16) for _ in range(2))
    found = []
    for place in (torch.clone, lambda tensor: shard(tensor, mesh, [Shard(dim)])):
        param = nn.Parameter(place(full))
        param.grad = place(grad)
        optimizer = AdamW([param], lr=1e-3, first_parameter=0, track_changes=True)
        optimizer.step()
        found.append(changed_weights(optimizer)[param])
    whole, part = found
    if is_known:
        held = whole < 3 * width if dim == 0 else whole % width < width // 2
        assert torch.equal(part, whole[held]) and len(part)
    else:
        assert part is None


def test_a_checkpoint_has_no_bits_and_copies_go_on(tmp_path):
    import copy

    params = weights()
    optimizer = AdamW(params, track_changes=True)
    give_gradients(params, 0)
    optimizer.step()
    assert all("changed" not in state for state in optimizer.state_dict()["state"].values())
    resumed = AdamW(weights(), track_changes=True)
    resumed.load_state_dict(optimizer.state_dict())
    twin = copy.deepcopy(optimizer)
    own = [param for group in twin.param_groups for param in group["params"]]
    before = list(map(bits, own))
    give_gradients(own, 1)
    twin.step()
    assert_changes(own, before, changed_weights(twin))


def test_it_must_have_been_asked_for():
    optimizer = AdamW(weights())
    with pytest.raises(ValueError, match="track_changes=True"):
        changed_weights(optimizer)
    with pytest.raises(ValueError, match="track_changes=3"):
        AdamW(weights(), track_changes=3)
