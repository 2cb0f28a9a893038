"""The frozen target: taps, packed documents, early exit, replicas, refusals; on tiny random models."""

import threading

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from dflash import documents, settings
from dflash.fused import target as fused_target
from dflash.settings import SettingError
from dflash.target import Target, default_taps

CPU = torch.device("cpu")
VOCAB, HIDDEN, LAYERS = 97, 32, 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
SLIDING = {"sliding_window": 5}

CONFIGS = {
    "llama": lambda: tf.LlamaConfig(**SIZES, **GROUPED),
    "llama-tied": lambda: tf.LlamaConfig(**SIZES, **GROUPED, tie_word_embeddings=True),
    "mistral-sliding": lambda: tf.MistralConfig(**SIZES, **GROUPED, **SLIDING),
    "qwen2-sliding": lambda: tf.Qwen2Config(
        **SIZES, num_key_value_heads=2, **SLIDING, use_sliding_window=True, max_window_layers=3
    ),
    "qwen3": lambda: tf.Qwen3Config(**SIZES, **GROUPED),
    "gemma2": lambda: tf.Gemma2Config(
        **SIZES, **GROUPED, **SLIDING, query_pre_attn_scalar=8, final_logit_softcapping=None
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(**SIZES, **GROUPED, **SLIDING, query_pre_attn_scalar=8),
    "gpt-neox": lambda: tf.GPTNeoXConfig(**SIZES),
}


def make(name="llama"):
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def pack(*rows, width=24):
    """Token, document and position tensors [R, width] of rows given as lists of document lengths."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (len(rows), width), generator=generator)
    document = torch.full((len(rows), width), -1)
    position = torch.zeros(len(rows), width, dtype=torch.long)
    for r, lengths in enumerate(rows):
        at = 0
        for number, length in enumerate(lengths):
            document[r, at : at + length] = number
            position[r, at : at + length] = torch.arange(length)
            at += length
    return tokens, document, position


ROWS = ([9, 1, 10], [24], [3, 2], [])


@pytest.mark.parametrize("name", CONFIGS)
def test_features_are_those_of_each_document_run_alone(name):
    taps = [1, 3, 4, 6]
    tokens, document, position = pack(*ROWS)
    model = make(name)
    alone = []
    for r, lengths in enumerate(ROWS):
        for number in range(len(lengths)):
            part = tokens[r, document[r] == number][None]
            with torch.no_grad():
                states = model(part, output_hidden_states=True).hidden_states
            alone.append((r, number, torch.cat([states[tap + 1] for tap in taps], dim=-1)[0]))
    features = Target.from_model(model, taps, [CPU]).features(tokens, document, position)
    assert features.shape == (len(ROWS), 24, len(taps) * HIDDEN)
    assert torch.isfinite(features).all()  # padding too
    for r, number, want in alone:
        torch.testing.assert_close(features[r, document[r] == number], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_documents_one_after_another_have_the_features_that_a_mask_gives(name):
    """As targets on a GPU compute, where all layers are plain."""
    masked = Target.from_model(make(name), [1, 4], [CPU])
    apart = Target.from_model(make(name), [1, 4], [CPU])
    documents.use(apart.body)
    plain = apart.body.config._attn_implementation == documents.NAME
    assert plain == (name in ("llama", "llama-tied", "qwen3", "gpt-neox"))
    rows = pack([9, 1, 14], [24], [5, 12], width=24)
    with torch.no_grad():
        torch.testing.assert_close(apart.features(*rows), masked.features(*rows), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_norms_in_single_passes_have_the_features_of_the_models_own(name):
    batch = pack([9, 7, 3], [20])
    plain, lean = (Target.from_model(make(name), None, [CPU]) for _ in range(2))
    fused_target.use(lean.body)
    replaced = [type(m) for m in lean.body.modules() if type(m).__module__ == fused_target.__name__]
    assert bool(replaced) == (name not in ("gemma2", "gemma3", "gpt-neox"))
    torch.testing.assert_close(lean.features(*batch), plain.features(*batch), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lean.replica([CPU]).features(*batch), lean.features(*batch), rtol=0, atol=0)


def test_a_norm_that_computes_otherwise_keeps_its_own_way():
    class OneMore(type(make().model.norm)):
        def forward(self, x):
            return super().forward(x) * (1 + self.weight) / self.weight

    body = make().model
    body.norm = OneMore(HIDDEN)
    torch.nn.init.zeros_(body.norm.weight)
    fused_target.use(body)
    assert type(body.norm) is OneMore
    assert type(body.layers[0].input_layernorm) is not type(make().model.norm)


def test_what_follows_the_last_tap_is_not_computed():
    model = make()
    calls = []
    for number, layer in enumerate(model.model.layers):
        layer.register_forward_pre_hook(lambda *_, n=number: calls.append(n))
    for name in ("norm", "rotary_emb"):
        getattr(model.model, name).register_forward_pre_hook(lambda *_, n=name: calls.append(n))
    model.lm_head.register_forward_pre_hook(lambda *_: calls.append("head"))
    target = Target.from_model(model, [2, 4], [CPU])
    target.features(*pack([24]))
    assert calls == ["rotary_emb", 0, 1, 2, 3, 4]
    assert (len(target.layers), target.num_layers) == (5, LAYERS)
    assert not any(p.requires_grad for p in target.body.parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_embedding_and_head_are_the_models_own(name):
    model = make(name)
    ids = torch.arange(VOCAB)[None]
    with torch.no_grad():
        embedded, hidden = model.get_input_embeddings()(ids), torch.randn(3, HIDDEN)
        logits = model.get_output_embeddings()(hidden)
    target = Target.from_model(model, None, [CPU])
    torch.testing.assert_close(target.embedding * target.embedding_scale, embedded[0])
    torch.testing.assert_close(hidden @ target.head.T, logits)
    assert (target.head is target.embedding) == (name in ("llama-tied", "gemma2", "gemma3"))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_drafter_finds_the_sizes_it_copies(name):
    target = Target.from_model(make(name), None, [CPU])
    kv_heads = 4 if name == "gpt-neox" else 2
    assert (target.hidden_size, target.vocab_size, target.intermediate_size) == (HIDDEN, VOCAB, 48)
    assert (target.num_attention_heads, target.num_key_value_heads, target.head_dim) == (4, kv_heads, 8)
    assert 0 < target.rms_norm_eps < 1e-4
    assert target.rope_theta == (1_000_000.0 if name == "gemma3" else 10_000.0)


def test_features_can_take_part_in_a_backward_pass():
    features = Target.from_model(make(), None, [CPU]).features(*pack([24]))
    layer = torch.nn.Linear(features.shape[-1], 1)
    layer(features).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_target_adds_what_its_head_reads(name):
    model, (tokens, document, position) = make(name), pack([9, 11], [24])
    with torch.no_grad():
        logits = [model(tokens[r : r + 1, :n]).logits[0] for r, n in ((0, 9), (1, 24))]
    target = Target.from_model(model, [1, 4], [CPU], whole=True)
    features = target.features(tokens, document, position)
    assert features.shape == (2, 24, target.width)
    assert (target.width, len(target.layers)) == (3 * HIDDEN, LAYERS)
    for r, want in enumerate(logits):
        got = features[r, : len(want), -HIDDEN:] @ target.head.T
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    part = Target.from_model(make(name), [1, 4], [CPU]).features(tokens, document, position)
    torch.testing.assert_close(features[..., : 2 * HIDDEN], part)


def test_a_target_that_shapes_its_logits_teaches_no_distribution():
    config = tf.Gemma2Config(**SIZES, **GROUPED, **SLIDING, query_pre_attn_scalar=8, final_logit_softcapping=30.0)
    model = tf.AutoModelForCausalLM.from_config(config)
    with pytest.raises(SettingError, match="final_logit_softcapping"):
        Target.from_model(model, None, [CPU], whole=True)
    assert Target.from_model(model, None, [CPU]).width == 4 * HIDDEN + HIDDEN


def test_a_head_with_a_bias_is_refused():
    config = tf.PhiConfig(**SIZES)
    with pytest.raises(SettingError, match="head without bias"):
        Target.from_model(tf.AutoModelForCausalLM.from_config(config), None, [CPU])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("count", "whole"), [(2, False), (3, True), (12, True)])
def test_a_target_over_several_devices_computes_the_same(name, count, whole):
    """With the CPU several times over, so that only the moves' bookkeeping is tried here."""
    batch = pack(*ROWS)
    want = Target.from_model(make(name), [1, 4], [CPU], whole).features(*batch)
    target = Target.from_model(make(name), [1, 4], [CPU] * count, whole)
    assert torch.equal(target.features(*batch), want)
    assert torch.equal(target.replica([CPU] * count).features(*batch), want)


def test_layers_are_spread_evenly_and_in_order():
    def here(module):
        return {str(p.device) for p in module.parameters()}

    devices = [torch.device("meta"), CPU]
    target = Target.from_model(make("qwen3"), [1, 5], devices, whole=True)
    assert [here(layer) for layer in target.layers] == [{"meta"}] * 4 + [{"cpu"}] * 4
    assert (here(target.body.embed_tokens), here(target.norm)) == ({"meta"}, {"cpu"})
    assert (target.embedding.is_meta, target.head.is_meta) == (True, True)


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two_gpus
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_target_over_two_gpus_computes_the_same(name, whole):
    first, second = (torch.device("cuda", n) for n in range(2))
    batch = pack(*ROWS)
    want = Target.from_model(make(name), [1, 5], [first], whole).features(*batch)
    target = Target.from_model(make(name), [1, 5], [first, second], whole)
    assert {p.device for p in target.body.parameters()} == {first, second}
    for one in (target, target.replica([first, second])):
        torch.testing.assert_close(one.features(*batch), want, rtol=1e-5, atol=1e-5)
    turned = target.replica([second, first])
    assert turned.embedding.device == second
    got = turned.features(*batch).to(first)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_drafters_process_reads_embedding_and_head_alone(name, tmp_path):
    make(name).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    wish = settings.Target(model=str(tmp_path), taps=[1, 4])
    whole, ends = Target.load(wish, [CPU]), Target.ends(wish, CPU)
    assert torch.equal(ends.embedding, whole.embedding)
    assert torch.equal(ends.head, whole.head)
    assert (ends.head is ends.embedding) == (whole.head is whole.embedding)
    assert (ends.num_layers, ends.taps, ends.width) == (whole.num_layers, whole.taps, whole.width)
    assert (ends.embedding_scale, ends.devices) == (whole.embedding_scale, whole.devices)


def made_up(name, folder):
    """A wish for a target of these sizes, in a folder without any weights."""
    config = CONFIGS[name]()
    config.architectures = [type(make(name)).__name__]
    config.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return settings.Target(model=str(folder), taps=[1, 4], made_up=True)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("whole", [False, True])
def test_a_made_up_target_computes_what_a_saved_one_with_its_weights_does(name, whole, tmp_path):
    wish = made_up(name, tmp_path / "blank")
    target = Target.load(wish, [CPU], whole)
    assert not list((tmp_path / "blank").glob("*.safetensors"))
    like = make(name)
    for at, layer in enumerate(target.layers):
        like.get_decoder().get_submodule(f"layers.{at}").load_state_dict(layer.state_dict())
    like.get_input_embeddings().weight.data.copy_(target.embedding)
    like.get_output_embeddings().weight.data.copy_(target.head)
    assert target.head.std() == pytest.approx(0.02, rel=0.1)
    batch = pack(*ROWS)
    want = Target.from_model(like, [1, 4], [CPU], whole).features(*batch)
    torch.testing.assert_close(target.features(*batch), want, rtol=0, atol=0)
    assert want.std() > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_a_made_up_target_is_the_same_everywhere_and_nobody_elses_draws_change(name, tmp_path):
    wish = made_up(name, tmp_path)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, ends = Target.load(wish, [CPU]), Target.ends(wish, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    other = Target.load(wish, [CPU, CPU], whole=True)
    for key, tensor in one.layers.state_dict().items():
        assert torch.equal(tensor, other.layers.state_dict()[key]), key
    for part in (other, ends, one.replica([CPU])):
        assert torch.equal(part.embedding, one.embedding)
        assert torch.equal(part.head, one.head)
        assert (part.head is part.embedding) == (one.head is one.embedding)
    first, second = (one.layers[n].state_dict() for n in (0, 1))
    matrices = [key for key, tensor in first.items() if tensor.dim() == 2]
    assert matrices
    assert not any(torch.equal(first[key], second[key]) for key in matrices)
    assert (ends.num_layers, ends.taps, ends.width) == (one.num_layers, one.taps, one.width)


def test_a_folder_without_weights_is_a_target_only_if_they_are_to_be_made_up(tmp_path):
    wish = made_up("llama", tmp_path)
    with pytest.raises(SettingError, match="the folder must hold weights as"):
        Target.load(settings.Target(model=wish.model), [CPU])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_made_up_target_on_a_gpu_has_the_ends_of_a_drafters_process(tmp_path):
    wish, gpu = made_up("qwen3", tmp_path), torch.device("cuda", 0)
    target, ends = Target.load(wish, [gpu]), Target.ends(wish, gpu)
    assert (target.embedding.dtype, target.embedding.device) == (torch.bfloat16, gpu)
    assert torch.equal(target.embedding, ends.embedding)
    assert torch.equal(target.head, ends.head)
    assert torch.isfinite(target.features(*pack(*ROWS))).all()


def test_default_taps_are_those_of_the_published_drafters():
    assert default_taps(36) == [1, 9, 17, 25, 33]  # Qwen3-4B and -8B, z-lab's configurations
    assert default_taps(30) == [1, 8, 14, 20, 27]
    assert default_taps(36, 1) == [18]


@pytest.mark.parametrize("depth", range(1, 80))
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_default_taps_are_layers_that_exist_each_once(depth, count):
    taps = default_taps(depth, count)
    assert taps == sorted(set(taps))
    assert 0 <= taps[0] <= taps[-1] < depth
    assert len(taps) == (count if depth >= count + 3 else max(1, depth - 3))


def test_a_tap_at_the_last_layer_or_behind_is_refused():
    with pytest.raises(SettingError, match=r"target\.taps=\[1, 7\]: must be below 7"):
        Target.from_model(make(), [1, 7], [CPU])


def test_replicas_share_weights_and_run_side_by_side():
    target = Target.from_model(make("llama-tied"), None, [CPU])
    twins = [target, target.replica([CPU]), target.replica([CPU])]
    for twin in twins[1:]:
        assert twin.body is not target.body
        assert twin.head is twin.embedding
        assert twin.embedding.data_ptr() == target.embedding.data_ptr()
        for mine, theirs in zip(twin.body.parameters(), target.body.parameters(), strict=True):
            assert mine.data_ptr() == theirs.data_ptr()
    batches = [pack([10 + n, 5], [20]) for n in range(3)]
    want = [target.features(*batch) for batch in batches]
    wrong = []

    def work(number):
        for _ in range(30):
            if not torch.equal(twins[number].features(*batches[number]), want[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_replica_elsewhere_leaves_the_first_where_it_is():
    target = Target.from_model(make("llama-tied"), None, [CPU])
    twin = target.replica([torch.device("meta")])
    assert twin.embedding.is_meta
    assert twin.head is twin.embedding
    assert all(p.is_meta for p in twin.body.parameters())
    assert not any(p.is_meta for p in [target.embedding, *target.body.parameters()])


@pytest.fixture
def folder(tmp_path):
    """A model folder as transformers saves it; the tokenizer is not looked at here."""
    path = tmp_path / "model"
    make("qwen3").save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_saved_model_loads_as_it_was(folder):
    wish = settings.Target(model=str(folder), taps=[1, 4])
    target = Target.load(wish, [CPU])
    batch = pack([24])
    assert target.embedding.dtype == torch.float32
    torch.testing.assert_close(
        target.features(*batch), Target.from_model(make("qwen3"), [1, 4], [CPU]).features(*batch)
    )
    outline = Target.outline(wish)
    plain = [name for name, value in vars(target).items() if isinstance(value, int | float | list)]
    assert {"hidden_size", "taps", "rope_theta"} < set(plain)
    assert {name: vars(outline)[name] for name in plain} == {name: vars(target)[name] for name in plain}
    assert outline.embedding.is_meta
    assert outline.embedding.dtype == target.embedding.dtype
    assert Target.outline(wish, torch.device("cuda")).embedding.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b'{"model_type": "no-such-model"}'),
        ("config.json", b"{"),
        ("model.safetensors", b"PK"),
    ],
)
def test_a_folder_that_does_not_load_is_told_in_one_sentence(folder, file, content):
    (folder / file).write_bytes(content)
    with pytest.raises(SettingError, match=r"target\.model=.*must be a model that transformers loads") as caught:
        Target.load(settings.Target(model=str(folder)), [CPU])
    assert "\n" not in str(caught.value)


def test_weights_of_another_shape_are_refused(folder):
    config = (folder / "config.json").read_text().replace('"intermediate_size": 48', '"intermediate_size": 52')
    (folder / "config.json").write_text(config)
    with pytest.raises(SettingError, match="must be a model that transformers loads"):
        Target.load(settings.Target(model=str(folder)), [CPU])


def test_a_missing_weight_is_refused_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SettingError, match=r"1 are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        Target.load(settings.Target(model=str(folder)), [CPU])


def test_the_packaged_model_is_a_target(models_dir):
    wish = settings.Target(model="SmolLM2-135M-Instruct", models_dir=str(models_dir))
    target = Target.load(wish, [CPU])
    assert target.taps == [1, 8, 14, 20, 27]
    assert target.embedding.shape == (49_152, 576)
    assert target.head is target.embedding
    assert target.features(*pack([20, 4])).shape == (1, 24, 5 * 576)
