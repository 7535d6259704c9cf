"""The decoder against Hugging Face: full-sequence logits of every family and rope scaling, however the tokens are cut."""

import json
import tracemalloc
from types import SimpleNamespace

import pytest
import torch

from minisgl.models import sizes
from minisgl.models.loader import fill_dummy_weights
from minisgl.models.spec import ModelSpec
from tests.e2e.model_factory import CONFIGS, greedy, make_model, make_prompts
from tests.unit.models.decoder_harness import Session, empty_decoder, load_decoder
from tests.unit.models.test_spec import QWEN3_30B

TOLERANCE = 1e-4


def reference(model, prompt):
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].float()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_hugging_face(tmp_path, name):
    model = make_model(tmp_path, name)
    decoder = load_decoder(tmp_path)
    prompts = make_prompts([41, 1, 17])
    # All in one batch, in two chunks each, so that windows, rope and masks meet a cached prefix.
    session = Session(decoder, 3, 48)
    whole = session.step([(i, prompt[:9]) for i, prompt in enumerate(prompts)])
    first = dict(enumerate(whole.split([min(9, len(p)) for p in prompts])))
    rest = session.step([(0, prompts[0][9:]), (2, prompts[2][9:])])
    second = dict(zip((0, 2), rest.split([32, 8])))
    for index, prompt in enumerate(prompts):
        ours = torch.cat([first[index], second[index]]) if index in second else first[index]
        expected = reference(model, prompt)
        assert ours.dtype == torch.float32
        assert (ours - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.abs().max()))


def test_dynamic_rope_follows_hugging_face_beyond_max_position(tmp_path):
    """From 40 cached tokens to 71, across max_position 48: a token's rotation is that of a sequence ending there."""
    model = make_model(tmp_path, "llama_dynamic")
    (prompt,) = make_prompts([40])
    session = Session(load_decoder(tmp_path), 1, 80)
    logits, ours = session.step([(0, prompt)]), []
    for _ in range(32):
        ours.append(int(logits[-1].argmax()))
        logits = session.step([(0, ours[-1:])])
    assert ours == greedy(model, prompt, 32)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "mixtral"])
def test_bfloat16_stays_close(tmp_path, name):
    """Same weights in bf16: no exact parity (other GEMM shapes), but errors of rounding size and no more."""
    model = make_model(tmp_path, name, dtype=torch.bfloat16)
    spec = ModelSpec.from_folder(tmp_path)
    assert spec.dtype == torch.bfloat16
    (prompt,) = make_prompts([23])
    exact = reference(model.float(), prompt)
    ours = Session(load_decoder(tmp_path, torch.bfloat16), 1, 24).step([(0, prompt)])
    assert ours.dtype == torch.float32
    # A router that flips between two near-equal experts changes single rows a lot: compare the typical row.
    error = ((ours - exact).norm(dim=1) / exact.norm(dim=1)).median()
    assert error < 0.05


def test_logit_rows_and_padding(tmp_path):
    make_model(tmp_path, "qwen3_moe")
    decoder = load_decoder(tmp_path)
    (prompt,) = make_prompts([11])
    whole = Session(decoder, 1, 16).step([(0, prompt)])
    some = Session(decoder, 1, 16).step([(0, prompt)], rows=[10, 3])
    torch.testing.assert_close(some, whole[[10, 3]], rtol=0, atol=1e-5)
    padded = Session(decoder, 1, 16).step([(0, prompt)], num_padding=5)
    assert len(padded) == 16
    torch.testing.assert_close(padded[:11], whole, rtol=0, atol=1e-5)
    assert padded.isfinite().all()


def test_padding_uses_no_expert(tmp_path):
    make_model(tmp_path, "qwen3_moe")
    decoder = load_decoder(tmp_path)
    routings = []
    for layer in decoder.moe_layers().values():
        route = layer.backend.route

        def watch(*args, route=route):
            routings.append(route(*args))
            return routings[-1]

        layer.backend = SimpleNamespace(begin=layer.backend.begin, route=watch)
    Session(decoder, 1, 16).step([(0, [5, 6, 7])], num_padding=4)
    assert len(routings) == 3
    assert all(bool((r.ids_TK[:3] >= 0).all()) and bool((r.ids_TK[3:] == -1).all()) for r in routings)


def test_windows_give_several_problems(tmp_path):
    make_model(tmp_path, "qwen2_window")
    decoder = load_decoder(tmp_path)
    assert [problem.window for problem in decoder.backends] == [None, 8]
    assert [layer.attention.problem.window for layer in decoder.layers] == [None, 8, 8]


def test_meta_device_allocates_nothing():
    """Qwen3-30B-A3B as it is: 61 GB of structure in almost no memory, and the sizes agree with the spec's."""
    spec = ModelSpec.from_config(QWEN3_30B)
    tracemalloc.start()
    decoder = empty_decoder(spec, torch.bfloat16, torch.device("meta"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tensors = [*decoder.parameters(), *(m.store.records_EB for m in decoder.moe_layers().values())]
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert sum(p.numel() for p in decoder.parameters()) == sizes.num_dense_params(spec)
    stored = sum(m.store.bytes().device for m in decoder.moe_layers().values())
    assert stored == 2 * sizes.num_expert_params(spec)
    assert peak < 50e6


def test_tied_head_is_one_tensor(tmp_path):
    make_model(tmp_path, "llama_tied")
    decoder = load_decoder(tmp_path)
    assert decoder.lm_head.weight is decoder.embedding.weight
    assert "lm_head.weight" not in decoder.places()


def test_places_cover_every_parameter(tmp_path):
    make_model(tmp_path, "qwen3_moe_mixed")
    decoder = empty_decoder(ModelSpec.from_folder(tmp_path))
    places = decoder.places()
    assert sum(p.numel() for p in places.values()) == sum(p.numel() for p in decoder.parameters())
    owned = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    assert all(p.untyped_storage().data_ptr() in owned for p in places.values())


@pytest.mark.parametrize("name", ["llama_bias", "qwen3_moe_tied"])
def test_dummy_weights_run_and_repeat(tmp_path, name):
    make_model(tmp_path, name)
    spec = ModelSpec.from_folder(tmp_path)
    logits = []
    for seed in (1, 1, 2):
        decoder = empty_decoder(spec)
        for parameter in decoder.parameters():
            parameter.fill_(torch.nan)
        fill_dummy_weights(decoder, seed=seed)
        logits.append(Session(decoder, 1, 8).step([(0, [1, 2, 3])]))
    assert logits[0].isfinite().all()
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_old_and_new_config_styles_run_the_same(tmp_path):
    model = make_model(tmp_path, "llama_llama3")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": config.pop("dtype")}
    path.write_text(json.dumps(config))
    (prompt,) = make_prompts([30])
    ours = Session(load_decoder(tmp_path), 1, 32).step([(0, prompt)])
    assert (ours - reference(model, prompt)).abs().max() < 1e-3
