"""Attention of the decode step behind transformers' interface: taken, refused, and off again without a trace."""

from dataclasses import replace

import pytest
import torch
from test_overlay import HEADS, HIDDEN, KV, TOKENS, Item, only, serve, state, tiny
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.errors import InputError
from kernels.overlay import install
from kernels.overlay.attention import Prefixes, last_seen
from kernels.problems import build
from kernels.ruler.build import build as compile_candidate
from kernels.templates import family


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    return tmp_path_factory.mktemp("builds")


def attention(builds, **changes):
    """A model, and the default template for the attention of its decode steps at 2 × 7…16 positions."""
    model = tiny(torch.bfloat16, **changes)
    shapes = [{"batch": 2, "length": 16}, {"batch": 2, "length": 7}]
    problem = build("attention_decode", visible=shapes, seed=1, heads=HEADS, kv_heads=KV, dim=HIDDEN // HEADS)
    problem, template = replace(problem, hidden=()), family("attention_decode_bf16")
    candidate = template.render(template.default, problem)
    compile_candidate(candidate, problem, builds)
    return model, Item(problem, candidate)


def interface():
    return dict(ALL_ATTENTION_FUNCTIONS._local_mapping), dict(ALL_ATTENTION_FUNCTIONS._global_mapping)


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    """The interface is the whole process's: what a test leaves there, the next one profiles."""
    before = interface()
    yield
    assert interface() == before


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_attention_of_decode_steps_agrees_and_comes_off_again(cache, implementation, builds):
    model, promoted = attention(builds, attn_implementation=implementation)
    before, config, library, expected = state(model), model.config.to_dict(), interface(), serve(model, cache)
    handle, count = only(model, promoted, builds)
    got = serve(model, cache)
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.05)
    assert torch.equal(got[:, :6], expected[:, :6])  # the prefill
    assert (count()["sites"], count()["taken"], count()["reasons"]) == (2, 6, {"shape": 2})
    assert model.config.to_dict() == config
    handle.remove()
    handle.remove()
    assert state(model) == before
    assert interface() == library
    assert torch.equal(serve(model, cache), expected)


def test_attention_that_sees_no_plain_prefix_is_stock(builds):
    model, promoted = attention(builds)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0

    @torch.no_grad()
    def padded():
        past = DynamicCache(config=model.config)
        model(TOKENS, cache=past, attention_mask=mask[:, :6])
        return model(TOKENS[:, :1], cache=past, attention_mask=mask).logits

    expected = padded()
    handle, count = only(model, promoted, builds)
    assert torch.equal(padded(), expected)
    assert (count()["taken"], count()["reasons"]) == (0, {"shape": 2, "mask": 2})
    handle.reset()
    mask[:] = 1
    padded()
    assert (count()["taken"], count()["reasons"]) == (2, {"shape": 2})
    handle.remove()


@torch.no_grad()
def test_attention_weights_when_asked_for_are_the_stock_models(builds):
    model, promoted = attention(builds, attn_implementation="eager")
    handle, count = only(model, promoted, builds)
    past = DynamicCache(config=model.config)
    model(TOKENS, cache=past)
    weights = model(TOKENS[:, :1], cache=past, output_attentions=True).attentions
    assert [w.shape for w in weights] == [(2, HEADS, 1, 7)] * 2
    assert (count()["taken"], count()["reasons"]) == (0, {"shape": 2, "arguments": 2})
    handle.remove()


def test_attention_of_two_models_in_one_process(builds):
    (one, promoted), (two, _) = attention(builds), attention(builds)
    plain, library = tiny(torch.bfloat16), interface()
    first, count_one = only(one, promoted, builds)
    second, count_two = only(two, promoted, builds)
    expected = serve(plain)
    first.remove()
    serve(one)
    assert torch.equal(serve(plain), expected)
    serve(two)
    assert (count_one()["taken"], count_two()["taken"]) == (0, 6)
    with pytest.raises(InputError, match="already has an overlay"):
        install(two, [promoted], builds, threads=1)
    second.remove()
    assert interface() == library


def test_attention_in_a_compiled_graph_is_stock(builds):
    """One graph without breaks, and the overlay out of its way."""
    model, promoted = attention(builds)
    expected = serve(model, "static")
    handle, count = only(model, promoted, builds)
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(serve(model, "static"), expected, atol=0.05, rtol=0.05)
    assert count()["taken"] == 0
    handle.remove()


def test_attention_of_other_heads_finds_no_site(builds):
    model, promoted = attention(builds)
    problem = build("attention_decode", visible=[{"batch": 2, "length": 8}], seed=1, heads=8, kv_heads=KV, dim=16)
    _, count = only(model, replace(promoted, problem=problem), builds)
    assert list(count()["reasons"]) == ["disabled: no module of the model has these weights"]


LOWEST = torch.finfo(torch.bfloat16).min
MASKS = {
    "all": (None, [3, 3]),
    "prefixes": ([[1, 1, 0, 0], [1, 1, 1, 1]], [1, 3]),
    "hole": ([[1, 0, 1, 0], [1, 1, 1, 1]], None),
    "left": ([[0, 1, 1, 1], [1, 1, 1, 1]], None),
    "nothing": ([[0, 0, 0, 0], [1, 1, 1, 1]], None),
}


@pytest.mark.parametrize("floating", [False, True])
@pytest.mark.parametrize("case", MASKS)
def test_prefixes_of_masks(case, floating):
    rows, expected = MASKS[case]
    mask = None if rows is None else torch.tensor(rows, dtype=torch.bool)[:, None, None]
    if floating and mask is not None:
        mask = torch.where(mask, 0.0, LOWEST).bfloat16()
    last = last_seen(mask, 2, 4)
    assert (None if last is None else last.tolist()) == expected


def test_masks_that_are_something_else():
    row = torch.tensor([True, True, False]).view(1, 1, 1, 3)
    assert last_seen(row, 4, 3).tolist() == last_seen(row.expand(4, 1, 1, 3), 4, 3).tolist() == [1] * 4
    assert last_seen(row, 4, 2) is None
    assert last_seen(row.expand(4, 2, 1, 3), 4, 3) is None
    assert last_seen(row[0], 1, 3) is None
    assert last_seen(row.long(), 1, 3) is None
    assert last_seen(torch.tensor([0.0, 0.0, -1.0]).view(1, 1, 1, 3), 1, 3) is None  # a bias


def test_a_mask_is_read_anew_in_each_forward():
    prefixes, mask, layers = Prefixes(), torch.ones(1, 1, 1, 4, dtype=torch.bool), [torch.nn.Identity(), object()]
    first = prefixes.last(layers[0], mask, 1, 4)
    assert prefixes.last(layers[1], mask, 1, 4) is first
    mask[..., 2:] = False
    assert prefixes.last(layers[0], mask, 1, 4).tolist() == [1]
    assert prefixes.last(layers[1], mask, 1, 4).tolist() == [1]
    assert prefixes.last(layers[1], mask[:], 1, 4).tolist() == [1]
