"""A target's attention over packed documents: all in one call where torch has one for it, else a call for each."""

import inspect
import itertools
import sys
import threading

import pytest
import torch
import transformers as tf
from torch.nn.functional import scaled_dot_product_attention

from dflash import documents
from dflash.fused import target as fused_target
from dflash.target import Target

CPU = torch.device("cpu")
VOCAB, WIDTH = 97, 24
# Documents of several rows; what is left of a row is padding.
ROWS = {
    "several rows, padding": ([9, 1, 10], [24], [3, 2]),
    "one document": ([24],),
    "documents of one token": ([1] * 24, [1] * 5),
    "padding alone": ([], [24]),
}


def pack(rows, width=WIDTH):
    """Token, document and position tensors [R, width] of rows given as lists of document lengths."""
    tokens = torch.randint(VOCAB, (len(rows), width), generator=torch.Generator().manual_seed(1))
    document, position = torch.full((2, len(rows), width), -1)
    for r, lengths in enumerate(rows):
        ids = [(number, at) for number, length in enumerate(lengths) for at in range(length)]
        for at, pair in enumerate(ids):
            document[r, at], position[r, at] = pair
    return tokens, document, position


def filled(rows, width):
    """Positions [R, width] with the padding as a document, as targets give them."""
    lengths = [[*row, width - sum(row)] for row in rows]
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


class Varlen:
    """Stands for torch's function, whose GPU is missing here: the signature of the installed one, and its results."""

    def __init__(self, monkeypatch, *without, causal=True):
        from torch.nn.attention import varlen

        signature = inspect.signature(varlen.varlen_attn)
        kept = [p for name, p in signature.parameters.items() if name not in without]
        self.__signature__ = signature.replace(parameters=kept)
        self.causal, self.calls = causal, []
        monkeypatch.setattr(varlen, "varlen_attn", self)
        monkeypatch.setattr(documents, "_takes", lambda *tensors: True)
        monkeypatch.setattr(documents, "sent", lambda tensor, device: tensor.clone())
        documents._together.cache_clear()

    def __call__(self, *args, **more):
        given = self.__signature__.bind(*args, **more)
        given.apply_defaults()
        given = given.arguments
        query, key, value, ends, longest = (given[name] for name in ("query", "key", "value", "cu_seq_q", "max_q"))
        assert (given["cu_seq_k"] is ends, given["max_k"], given["window_size"]) == (True, longest, (-1, 0))
        assert ends.dtype == torch.int32
        assert ends[0] == 0
        assert ends[-1] == len(query)
        assert ends.diff().max() == longest
        assert given.get("enable_gqa", True)
        self.calls.append(ends)
        out = torch.empty_like(query)
        for start, end in itertools.pairwise(ends.tolist()):
            q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
            attended = scaled_dot_product_attention(
                q, k, v, None, 0.0, self.causal, scale=given["scale"], enable_gqa=True
            )
            out[start:end] = attended[0].transpose(0, 1)
        return out


@pytest.fixture(autouse=True)
def _no_choice_is_kept():
    documents._together.cache_clear()
    yield
    documents._together.cache_clear()


def model(kind="Qwen3", **more):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
    }
    sizes |= {} if kind == "GPTNeoX" else {"num_key_value_heads": 2}
    torch.manual_seed(0)
    made = tf.AutoModelForCausalLM.from_config(getattr(tf, f"{kind}Config")(**sizes | more)).eval()
    for parameter in made.parameters():  # as drawn, attention adds next to nothing to what a token is by itself
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return made


def apart(kind="Qwen3", **more):
    """A target that attends as on a GPU."""
    target = Target.from_model(model(kind, **more), [1, 3], [CPU])
    documents.use(target.body)
    assert target.body.config._attn_implementation == documents.NAME
    return target


@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "GPTNeoX"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_all_documents_of_a_batch_are_one_call_a_layer(kind, rows, monkeypatch):
    batch = pack(rows)
    masked = Target.from_model(model(kind), [1, 3], [CPU]).features(*batch)
    varlen = Varlen(monkeypatch)
    target = apart(kind)
    target.features(*batch)  # the first batch has the trial
    varlen.calls.clear()
    found = target.features(*batch)
    assert len(varlen.calls) == len(target.layers) == 4
    assert all(ends is varlen.calls[0] for ends in varlen.calls)  # sent to the device once
    torch.testing.assert_close(found, masked, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(found).all()


def test_another_batch_has_other_documents(monkeypatch):
    Varlen(monkeypatch)
    masked, target = Target.from_model(model(), [1, 3], [CPU]), apart()
    for rows in ROWS.values():
        batch = pack(rows)
        torch.testing.assert_close(target.features(*batch), masked.features(*batch), rtol=1e-4, atol=1e-5)


def test_targets_side_by_side_have_documents_of_their_own(monkeypatch):
    Varlen(monkeypatch)
    target = apart()
    twins, batches = [target, target.replica([CPU])], [pack([[5, 19]]), pack([[12, 2, 10]])]
    want = [target.features(*batch) for batch in batches]
    wrong = []

    def work(number):
        for _ in range(20):
            if not torch.equal(twins[number].features(*batches[number]), want[number]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_function_that_shares_keys_unasked_is_not_asked(monkeypatch):
    """torch 2.11 has no `enable_gqa`."""
    varlen = Varlen(monkeypatch, "enable_gqa")
    q, k = torch.randn(1, 4, WIDTH, 8), torch.randn(1, 2, WIDTH, 8)
    with documents.apart(filled([[20]], WIDTH)):
        found, _ = documents.attend(None, q, k, k, None, 0.9)
    assert len(varlen.calls) == 2  # the trial's and this
    torch.testing.assert_close(found, documents._one_by_one(q, k, k, [(0, 0, 20), (0, 20, 24)], 0.9))


def refuses(self, *args, **more):
    raise RuntimeError("head_size must be a multiple of 8")


def shuffles(self, query, *args, **more):
    return Varlen.__call__(self, query, *args, **more).flip(0)


def nothing(self, query, *args, **more):
    return torch.full_like(query, float("nan"))


@pytest.mark.parametrize("wrong", ["refuses", "not causal", "shuffled", "not a number", "missing", "other arguments"])
def test_without_a_call_that_computes_the_same_documents_attend_one_by_one(wrong, monkeypatch):
    varlen = Varlen(monkeypatch, *(["window_size"] if wrong == "other arguments" else []), causal=wrong != "not causal")
    calls = []
    broken = {"refuses": refuses, "shuffled": shuffles, "not a number": nothing}.get(wrong, Varlen.__call__)

    class Broken(Varlen):
        def __init__(self):
            self.__dict__ = varlen.__dict__

        def __call__(self, *args, **more):
            calls.append(wrong)
            return broken(self, *args, **more)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", Broken())
    if wrong == "missing":
        monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    batch = pack(ROWS["several rows, padding"])
    target = apart()
    masked = Target.from_model(model(), [1, 3], [CPU]).features(*batch)
    for _ in range(2):
        torch.testing.assert_close(target.features(*batch), masked, rtol=1e-4, atol=1e-5)
    assert len(calls) == (wrong != "missing")  # tried once, and left alone


def test_a_device_that_is_full_says_nothing_about_the_function(monkeypatch):
    varlen = Varlen(monkeypatch)
    full = [True]

    class Full(Varlen):
        def __init__(self):
            self.__dict__ = varlen.__dict__

        def __call__(self, *args, **more):
            if full:
                full.pop()
                raise torch.OutOfMemoryError("out of memory")
            return super().__call__(*args, **more)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", Full())
    target, batch = apart(), pack(ROWS["one document"])
    with pytest.raises(torch.OutOfMemoryError):
        target.features(*batch)
    target.features(*batch)
    assert varlen.calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_cpu_nothing_reaches_the_function(dtype, monkeypatch):
    takes = documents._takes
    varlen = Varlen(monkeypatch)
    monkeypatch.setattr(documents, "_takes", takes)
    q = torch.randn(1, 2, WIDTH, 8, dtype=dtype)
    with documents.apart(filled([[20]], WIDTH)):
        documents.attend(None, q, q, q, None)
    assert varlen.calls == []


def test_long_documents_go_one_by_one(monkeypatch):
    """What counts is the document that a token lies in, on average over tokens."""
    varlen = Varlen(monkeypatch)
    monkeypatch.setattr(documents, "SHORT", 10)
    q = torch.randn(1, 2, WIDTH, 8)
    for lengths, calls in (([10, 10, 4], 1), ([13, 11], 0), ([16, 1, 1, 1, 1, 1, 1, 1, 1], 0), ([14, *[1] * 10], 1)):
        varlen.calls.clear()
        documents._together.cache_clear()
        with documents.apart(filled([lengths], WIDTH)):
            documents.attend(None, q, q, q, None)
        assert len(varlen.calls) == 2 * calls, lengths  # the trial's, and its own


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_a_document_taken_for_longer_gives_the_same(rows):
    q, k, v = torch.randn(3, len(rows), 2, WIDTH, 8, dtype=torch.float64)
    bounds = documents._Documents.of(filled(rows, WIDTH)).bounds
    wanted = documents._one_by_one(q, k, v, bounds, None)
    torch.testing.assert_close(documents._one_by_one(q, k, v, bounds, None, rounded_to=7), wanted)


# On a GPU: the function itself.
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
MORE_ROWS = ROWS | {"long documents": ([300, 1, 700], [1000], [129, 128])}


@pytest.fixture
def device():
    """A GPU on which torch has the function."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("FlashAttention needs a GPU of compute capability 8.0")
    return torch.device("cuda", 0)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32, 8, 128), (6, 6, 64), (8, 2, 256), (3, 1, 24)])
@pytest.mark.parametrize("rows", MORE_ROWS.values(), ids=MORE_ROWS)
def test_one_call_on_a_gpu_gives_what_one_after_another_give(rows, shape, dtype, device):
    heads, grouped, size = shape
    length = max(map(sum, rows))
    made = torch.Generator(device).manual_seed(5)
    query, key, value = (
        torch.randn(len(rows), length, n, size, generator=made, device=device).to(dtype).transpose(1, 2)
        for n in (heads, grouped, grouped)
    )
    packed = documents._Documents.of(filled(rows, length))
    together = documents._together(device, dtype, heads, grouped, size, size)
    assert together is not None
    found = together(query, key, value, packed, 0.1)
    apiece = documents._one_by_one(query, key, value, packed.bounds, 0.1)
    wanted = documents._one_by_one(query.float(), key.float(), value.float(), packed.bounds, 0.1)
    assert found.shape == wanted.shape
    for out in (found, apiece):
        off = (out.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)  # of each token and head
        assert off.max() <= 0.03
    with documents.apart(filled(rows, length)):
        torch.testing.assert_close(documents.attend(None, query, key, value, None, 0.1)[0], found, rtol=0, atol=0)


@gpu
@pytest.mark.parametrize("kind", ["Qwen3", "Llama", "GPTNeoX"])
@pytest.mark.parametrize("rows", MORE_ROWS.values(), ids=MORE_ROWS)
@pytest.mark.parametrize("short", [True, False])
def test_a_target_on_a_gpu_has_the_features_of_its_own_masked_attention(kind, rows, short, device, monkeypatch):
    calls, call = [], documents._call
    monkeypatch.setattr(documents, "SHORT", 10_000 if short else 0)
    monkeypatch.setattr(documents, "_call", lambda *args: calls.append(args) or call(*args))
    batch = pack(rows, max(map(sum, rows)))
    found = Target.from_model(model(kind).to(torch.bfloat16), [1, 3], [device]).features(*batch).float()
    assert len(calls) == (1 + 4 if short else 0)  # the trial's, and one a layer
    monkeypatch.setattr(documents, "use", lambda body: None)
    monkeypatch.setattr(fused_target, "use", lambda body: None)
    masked = Target.from_model(model(kind).to(torch.bfloat16), [1, 3], [device]).features(*batch).float()
    assert len(calls) == (1 + 4 if short else 0)
    assert torch.isfinite(found).all()
    # Whole rows without documents stray by 1.2 at least, and by 0.18 in the mean.
    off = (found - masked).norm(dim=-1) / masked.norm(dim=-1)
    assert off.max() <= 0.4
    assert off.mean() <= 0.06
