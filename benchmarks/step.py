"""How long does one training step of a drafter take, forward and backward, and where does the time go?

    python benchmarks/step.py --json out.json                             # ours: locked, whole, triton
    python benchmarks/step.py --specforge DIR --speculators DIR           # with the two peers in the same process
    python benchmarks/step.py --shapes packed --variants triton --profile
    python benchmarks/step.py --tiny                                      # a toy on any machine, to see that it runs

The drafter of Qwen3-8B (hidden 4096, intermediate 12,288, 32/8 heads of 128, 5 layers, 5 taps, vocabulary 151,936) in
bfloat16, on features and weights made up. All variants of a shape stand in one process and take turns in random
order: a sample is the mean of some steps back to back, the table has median and range of the samples. An optimiser
step is timed apart, for peers bring none of their own. Memory is the peak of the second step without what other
variants hold; first step is what a user waits for, compiling included.

Useful work is counted alike for all: linear layers three times, the frozen head twice, over slots that carry loss,
and attention's visible pairs three and a half times. The ceiling is a bfloat16 product of 8192^3 in this process.

Peers are taken from a checkout at run time, sgl-project/SpecForge (known to work: a6b6b023) and
vllm-project/speculators (c05b95b3): only the files that define their models are loaded, since their packages' pins
exclude current torch, and speculators' base classes, which want pydantic and a verifier, are replaced by small
ones here. SpecForge pads and cannot pack; speculators takes one row and runs the teacher's head besides.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import json
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dflash import strategies
from dflash.blocks import sample_anchors
from dflash.drafter import Drafter
from dflash.events import EventWriter
from dflash.geometry import Geometry
from dflash.optim import Master
from dflash.pipeline.batch import Batch
from dflash.pipeline.step import FrozenEnds, gradient_step
from dflash.probe import Probe
from dflash.settings import JobSettings, Optim
from dflash.weights import draw

OURS = ("eager", "locked", "whole", "triton")
PEERS = ("specforge", "specforge-whole", "speculators")


@dataclass(frozen=True)
class Sizes:
    hidden: int = 4096
    intermediate: int = 12288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layers: int = 5
    taps: int = 5
    vocabulary: int = 151936


@dataclass(frozen=True)
class Shape:
    name: str
    rows: int
    context: int  # tokens a row
    document: int  # tokens a document
    anchors: int  # blocks a row
    block: int

    @property
    def packed(self) -> bool:
        return self.document < self.context


QWEN3_8B = Sizes()
SHAPES = (
    Shape("batch", 4, 3072, 3072, 512, 16),
    Shape("long", 1, 40000, 40000, 1024, 32),
    Shape("packed", 1, 40000, 2000, 1024, 32),
)
TINY = Sizes(64, 96, 4, 2, 16, 2, 2, 500)
TINY_SHAPES = (Shape("batch", 2, 64, 64, 8, 4), Shape("packed", 1, 96, 32, 8, 4))


@dataclass
class Variant:
    """One way to make a step: `step(n)` leaves gradients; `work` is what it counts as useful, TFLOP."""

    name: str
    step: Callable[[int], Any]
    parameters: list[nn.Parameter]
    work: float
    first: float = 0.0
    memory: float = 0.0
    samples: list[float] = dataclasses.field(default_factory=list)
    close: Callable[[], None] = lambda: None


def main() -> None:
    options = parse()
    device = torch.device("cpu" if options.tiny or not torch.cuda.is_available() else "cuda")
    sizes = TINY if options.tiny else QWEN3_8B
    shapes = TINY_SHAPES if options.tiny else SHAPES
    if options.shapes:
        shapes = tuple(s for s in shapes if s.name in options.shapes.split(","))
    torch.manual_seed(options.seed)
    ceiling = matrix_ceiling(device, options.tiny)
    results: list[dict[str, Any]] = []
    report = {
        "benchmark": "step",
        "sizes": dataclasses.asdict(sizes),
        "shapes": [dataclasses.asdict(s) for s in shapes],
        "ceiling_tflops": ceiling,
        "results": results,
        **machine(device, options.commit),
    }
    for shape in shapes:
        results += measure(shape, sizes, device, options)
        print(table([r for r in results if r["shape"] == shape.name], ceiling), flush=True)
        if options.json:  # after each shape, so that a run cut short leaves what it has
            Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="", help="comma-separated names: batch, long, packed (all)")
    parser.add_argument("--variants", default="", help=f"comma-separated, of {', '.join(OURS + PEERS)}")
    parser.add_argument("--specforge", type=Path, help="a checkout of sgl-project/SpecForge")
    parser.add_argument("--speculators", type=Path, help="a checkout of vllm-project/speculators")
    parser.add_argument("--samples", type=int, default=5, help="samples of each variant at each shape")
    parser.add_argument("--steps", type=int, default=3, help="steps of a sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="also one step of each under torch.profiler")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on CPU; figures say nothing")
    options = parser.parse_args()
    default = ["eager"] if options.tiny else ["locked", "whole", "triton"]
    default += ["specforge", "specforge-whole"] if options.specforge else []
    default += ["speculators"] if options.speculators else []
    options.variants = options.variants.split(",") if options.variants else default
    unknown = set(options.variants) - {*OURS, *PEERS}
    if unknown:
        parser.error(f"--variants: {', '.join(sorted(unknown))} is none of {', '.join(OURS + PEERS)}")
    return options


def measure(shape: Shape, sizes: Sizes, device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All variants at one shape, in turn and then in random order."""
    dtype = torch.float32 if options.tiny else torch.bfloat16
    data = Data.make(shape, sizes, device, dtype)
    variants: list[Variant] = []
    for name in options.variants:
        before = allocated(device)
        try:
            variant = make(name, data, options)
        except Skipped as reason:
            print(f"{shape.name} {name}: {reason}", flush=True)
            continue
        began = time.perf_counter()
        variant.step(0)
        wait(device)
        variant.first = time.perf_counter() - began
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        variant.step(1)
        wait(device)
        # Without what others hold, with what all share: features, embedding and head.
        variant.memory = (peak(device) - before + data.bytes) / 1e9
        variants.append(variant)
        print(f"{shape.name} {name}: first step {variant.first:.1f} s, {variant.memory:.1f} GB", flush=True)
    order = random.Random(options.seed)
    number = 2
    for _ in range(options.samples):
        for variant in order.sample(variants, len(variants)):
            variant.step(number)  # caches and clocks are the variant's own again
            wait(device)
            began = time.perf_counter()
            for _ in range(options.steps):
                number += 1
                variant.step(number)
            wait(device)
            variant.samples.append((time.perf_counter() - began) / options.steps * 1e3)
    results = []
    for variant in variants:
        figures = summary(shape, variant)
        if options.profile:
            figures["profile"] = profile(variant, device)
        results.append(figures)
    if variants and variants[0].name in OURS:
        results[0]["optimiser_ms"] = optimiser(variants[0], device, options)
    for variant in variants:
        variant.close()
        variant.step, variant.parameters = lambda n: None, []
    variants.clear()
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return results


def summary(shape: Shape, variant: Variant) -> dict[str, Any]:
    ms = statistics.median(variant.samples)
    return {
        "shape": shape.name,
        "variant": variant.name,
        "ms": ms,
        "samples_ms": variant.samples,
        "useful_tflop": variant.work,
        "tflops": variant.work / ms * 1e3,
        "memory_gb": variant.memory,
        "first_step_s": variant.first,
        "context_ktok_s": shape.rows * shape.context / ms,
    }


# Made-up data, the same for all.


@dataclass
class Data:
    shape: Shape
    sizes: Sizes
    device: torch.device
    batches: list[Batch]  # one set of features, several sets of anchors
    embedding: Tensor
    head: Tensor

    @classmethod
    def make(cls, shape: Shape, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Data:
        def random_(*size: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*size, device=device) * scale).to(dtype)

        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(sizes.vocabulary - 1, (shape.rows, shape.context), generator=generator)
        place = torch.arange(shape.context).expand(shape.rows, -1)
        document, position = place // shape.document, place % shape.document
        supervised = torch.ones_like(tokens, dtype=torch.bool)
        features = torch.empty(shape.rows, shape.context, sizes.taps * sizes.hidden, device=device, dtype=dtype)
        for row in features:  # a row at a time: the float32 numbers they are made from are as large again
            row.copy_(torch.randn(row.shape, device=device))
        batches = []
        for number in range(4):
            drawn = [
                sample_anchors(supervised[r].numpy(), document[r].numpy(), shape.anchors, (number, r))
                for r in range(shape.rows)
            ]
            anchors = torch.stack([torch.from_numpy(d) for d in drawn])
            batches.append(
                Batch(number, tokens, supervised, document, position, tokens.numel(), features, anchors=anchors)
            )
        embedding = random_(sizes.vocabulary, sizes.hidden, scale=0.02)
        return cls(shape, sizes, device, batches, embedding, random_(sizes.vocabulary, sizes.hidden, scale=0.02))

    @property
    def bytes(self) -> int:
        return self.batches[0].bytes + self.embedding.nbytes + self.head.nbytes

    def work(self) -> float:
        """Useful TFLOP of a step, mean over the batches."""
        s, g = self.shape, self.sizes
        wide, narrow = g.heads * g.head_dim, g.kv_heads * g.head_dim
        slots, context = s.rows * s.anchors * s.block, s.rows * s.context
        layer = g.hidden * (2 * wide + 2 * narrow) + 3 * g.hidden * g.intermediate
        linear = slots * g.layers * layer
        linear += context * (g.layers * 2 * g.hidden * narrow + g.taps * g.hidden * g.hidden)
        labelled = pairs = 0.0
        for batch in self.batches:
            assert batch.anchors is not None
            there = batch.anchors >= 0
            left = s.document - batch.position.gather(1, batch.anchors.clamp(min=0)) - 1
            labelled += float((left.clamp(max=s.block - 1) * there).sum()) / len(self.batches)
            seen = batch.position.gather(1, batch.anchors.clamp(min=0)) + s.block
            pairs += float((seen * s.block * there).sum()) / len(self.batches)
        head = labelled * g.hidden * g.vocabulary
        attention = g.layers * pairs * 2 * wide
        return (linear * 2 * 3 + head * 2 * 2 + attention * 2 * 3.5) / 1e12


class Skipped(Exception):
    """Why a variant is not part of the table, in a sentence."""


def make(name: str, data: Data, options: argparse.Namespace) -> Variant:
    if name in OURS:
        return ours(name, data)
    if name.startswith("specforge"):
        if not options.specforge:
            raise Skipped("left out: no checkout given with --specforge")
        return specforge(options.specforge, data, whole=name.endswith("whole"))
    if not options.speculators:
        raise Skipped("left out: no checkout given with --speculators")
    return speculators(options.speculators, data)


def ours(name: str, data: Data) -> Variant:
    g, s, device = data.sizes, data.shape, data.device
    job = JobSettings.from_dict(
        {
            "data": {"path": "-", "row_tokens": s.context},
            "target": {"model": "-"},
            "drafter": {"block": s.block, "anchors": s.anchors, "layers": g.layers},
            "train": {"rows": s.rows},
            "compile": name,
        }
    )
    target = types.SimpleNamespace(
        hidden_size=g.hidden,
        num_attention_heads=g.heads,
        num_key_value_heads=g.kv_heads,
        head_dim=g.head_dim,
        intermediate_size=g.intermediate,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        taps=list(range(1, g.taps + 1)),
    )
    folder = tempfile.TemporaryDirectory()
    probe = Probe(EventWriter(Path(folder.name) / "events.jsonl"))
    try:
        strategy = strategies.make(name, device.type, probe)
    except strategies.Unavailable as reason:
        raise Skipped(f"left out: compile={name} {reason}") from None
    strategy.setup_thread()
    geometry = Geometry.settle(job.drafter, target)
    weights = draw(geometry, job.seed, device, data.head.dtype)
    drafter = Drafter(geometry, strategy.prepare, strategy.attend, weights, strategy.attend_alike)
    forward = strategy.compile_forward(drafter)
    ends = FrozenEnds(data.embedding, 1.0, data.head, g.vocabulary - 1)

    def step(number: int) -> Tensor:
        batch = data.batches[number % len(data.batches)]
        # Some strategies refuse compiles that nobody announced, in the whole process: only while their step runs.
        strategy.setup_process()
        try:
            return strategy.run(
                "drafter0", name, lambda: gradient_step(job, drafter, forward, ends, batch, True, False)
            )
        finally:
            strategy.close()

    return Variant(name, step, list(drafter.parameters()), data.work(), close=folder.cleanup)


# Peers: their model files, none of their packages' imports.


def shells(folder: Path, names: Sequence[str]) -> None:
    """Packages whose __init__ does not run, so that their modules can be imported one by one."""
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = module


def qwen3(data: Data, **more: Any) -> Any:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    g = data.sizes
    return Qwen3Config(
        hidden_size=g.hidden,
        intermediate_size=g.intermediate,
        num_hidden_layers=g.layers,
        num_attention_heads=g.heads,
        num_key_value_heads=g.kv_heads,
        head_dim=g.head_dim,
        vocab_size=g.vocabulary,
        rms_norm_eps=1e-6,
        max_position_embeddings=max(40960, data.shape.context),
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **more,
    )


def specforge(folder: Path, data: Data, whole: bool) -> Variant:
    g, s, device = data.sizes, data.shape, data.device
    if s.packed:
        raise Skipped("left out: SpecForge cannot pack documents")
    if not (folder / "specforge/algorithms/common/dflash_family_model.py").is_file():
        raise SystemExit(f"--specforge={folder} is no checkout of SpecForge")
    if "specforge.algorithms.common.dflash_family_model" not in sys.modules:
        names = ("", ".modeling", ".modeling.draft", ".core", ".algorithms", ".algorithms.common")
        shells(folder, ["specforge" + name for name in names])
    family = importlib.import_module("specforge.algorithms.common.dflash_family_model")
    backend = "flex_attention" if device.type == "cuda" else "sdpa"
    config = qwen3(data, num_target_layers=36, block_size=s.block, attention_bias=False)
    config.dflash_config = {"mask_token_id": g.vocabulary - 1, "target_layer_ids": list(range(1, g.taps + 1))}
    config._attn_implementation = backend
    with torch.device(device):
        draft = family.DFlashDraftModel(config).to(data.head.dtype)
    embed, head = frozen(data)
    model = family.OnlineDFlashModel(
        torch.compile(draft) if whole else draft,
        head,
        embed,
        mask_token_id=g.vocabulary - 1,
        block_size=s.block,
        attention_backend=backend,
        num_anchors=s.anchors,
        loss_decay_gamma=7.0,
    )
    tokens = data.batches[0].tokens.to(device)
    mask = torch.ones_like(tokens, dtype=torch.float32)
    features = data.batches[0].features
    parameters = list(draft.parameters())

    def step(number: int) -> None:
        clear(parameters)
        loss, _, _ = model(input_ids=tokens, hidden_states=features, loss_mask=mask)
        loss.backward()

    return Variant("specforge-whole" if whole else "specforge", step, parameters, data.work())


def speculators(folder: Path, data: Data) -> Variant:
    g, s, device = data.sizes, data.shape, data.device
    source = folder / "src"
    if not (source / "speculators/models/dflash/core.py").is_file():
        raise SystemExit(f"--speculators={folder} is no checkout of speculators")
    if "speculators.models.dflash.core" not in sys.modules:
        shells(source, ["speculators", "speculators.models", "speculators.models.dflash"])
        sys.modules["speculators.models.dflash"].DFlashSpeculatorConfig = object  # type: ignore[attr-defined]
        base = types.ModuleType("speculators.model")
        base.SpeculatorModel, base.DraftVocabMixin = _SpeculatorModel, _DraftVocabMixin  # type: ignore[attr-defined]
        sys.modules["speculators.model"] = base
        for name in ("speculators.config", "speculators.utils"):
            sys.modules[name] = types.ModuleType(name)
    core = importlib.import_module("speculators.models.dflash.core")
    losses = importlib.import_module("speculators.losses")
    layers = qwen3(data, layer_types=["full_attention"] * g.layers)
    layers._attn_implementation = "simple_flex_attention" if device.type == "cuda" else "eager"
    config = types.SimpleNamespace(
        transformer_layer_config=layers,
        draft_vocab_size=g.vocabulary,
        block_size=s.block,
        mask_token_id=g.vocabulary - 1,
        aux_hidden_state_layer_ids=list(range(1, g.taps + 1)),
        sliding_window_non_causal=False,
        sample_from_anchor=False,
    )
    with torch.device(device):
        model = core.DFlashDraftModel(config).to(data.head.dtype)
    for linear in (model.lm_head, model.verifier_lm_head):
        linear.weight = nn.Parameter(data.head, requires_grad=False)
    model.embed_tokens.weight = nn.Parameter(data.embedding, requires_grad=False)
    with torch.no_grad():
        for parameter in model.layers.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.02)
    # A batch becomes one row of documents.
    one = data.batches[0]
    assert one.features is not None
    row = torch.arange(s.rows)[:, None]
    given = {
        "hidden_states": one.features.reshape(1, -1, one.features.shape[-1]),
        "input_ids": one.tokens.reshape(1, -1).to(device),
        "loss_mask": torch.ones(1, one.tokens.numel(), device=device, dtype=torch.long),
        "verifier_last_hidden_states": one.features.reshape(1, -1, one.features.shape[-1])[..., : g.hidden],
        "document_ids": (row * (s.context // s.document + 1) + one.document).reshape(1, -1).to(device),
        "position_ids": one.position.reshape(1, -1).to(device),
    }
    loss_config = losses.resolve_loss_config("ce", "fused" if device.type == "cuda" else "eager")
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step(number: int) -> None:
        clear(parameters)
        _, loss, _ = model(**given, loss_config=loss_config, gamma=7.0, max_anchors=s.anchors * s.rows)
        loss.backward()

    return Variant("speculators", step, parameters, data.work())


class _SpeculatorModel(nn.Module):
    """What the DFlash model of speculators needs of its base class."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def register(cls, name: str) -> Callable[[type], type]:
        return lambda registered: registered

    def post_init(self) -> None:
        """Weights are set by the benchmark."""


class _DraftVocabMixin(nn.Module):
    """Embedding and heads, the whole vocabulary."""

    def _init_vocab(self, config: Any) -> None:
        layers = config.transformer_layer_config
        self.embed_tokens = nn.Embedding(1, layers.hidden_size)
        self.lm_head = nn.Linear(layers.hidden_size, 1, bias=False)
        self.verifier_lm_head = nn.Linear(layers.hidden_size, 1, bias=False)


def frozen(data: Data) -> tuple[nn.Embedding, nn.Linear]:
    embed = nn.Embedding.from_pretrained(data.embedding, freeze=True)
    head = nn.Linear(data.sizes.hidden, 1, bias=False)
    head.weight = nn.Parameter(data.head, requires_grad=False)
    return embed, head


def clear(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None


# Figures.


def optimiser(variant: Variant, device: torch.device, options: argparse.Namespace) -> float:
    """Milliseconds of gradient gathering, clipping, AdamW and new working weights."""
    master = Master(variant.parameters, Optim())
    over = torch.ones((), device=device)
    spent = []
    for number in range(options.samples + 1):
        variant.step(number)
        wait(device)
        began = time.perf_counter()
        master.step(master.gradient(), 1e-6, over)
        wait(device)
        spent.append((time.perf_counter() - began) * 1e3)
    return statistics.median(spent[1:])


CLASSES = (
    ("matrix product", r"gemm|nvjet|cutlass|xmma|cublas|splitk"),
    ("attention", r"flex_attention|triton_tem|^forward$|^(context|own|query)_backward$|key_tile_ranges"),
    ("loss", r"cross_entropy|softmax|argmax|nll"),
    ("norm, rotary, SwiGLU", r"add_norm|turn_heads|swiglu|rms_norm|RMSNorm"),
    ("compiled elementwise", r"^triton_(poi|red|per)"),
    ("copy", r"Memcpy|Memset|copy|CatArray|fill"),
)


def profile(variant: Variant, device: torch.device) -> dict[str, Any]:
    """Device milliseconds of one step by class of kernel, of the longest kernels, and of matrix products by shape."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        variant.step(1)
        wait(device)
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        # Compiled graphs lie over their kernels as annotations, which would count twice.
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("## "):
            kernels[event.name].append(event.time_range.elapsed_us() / 1e3)
    classes: dict[str, float] = defaultdict(float)
    for name, spent in kernels.items():
        label = next((label for label, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")
        classes[label] += sum(spent)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:24]
    products = []
    for event in profiler.key_averages(group_by_input_shape=True):
        if event.key in ("aten::mm", "aten::addmm", "aten::bmm") and event.self_device_time_total:
            sizes = [size for size in event.input_shapes if len(size) == 2][:2]  # a third is where it goes
            work = 2 * sizes[0][0] * sizes[0][1] * sizes[1][1] * event.count / 1e12 if len(sizes) == 2 else 0.0
            ms = event.self_device_time_total / 1e3
            products.append({"shapes": str(sizes), "count": event.count, "ms": ms, "tflops": work / ms * 1e3})
    print(f"\n{variant.name}: device ms of one step by class of kernel")
    for label, ms in sorted(classes.items(), key=lambda item: -item[1]):
        print(f"  {ms:9.2f}  {label}")
    for name, spent in longest:
        print(f"  {sum(spent):9.2f}  {len(spent):5d} x {name[:100]}")
    for product in sorted(products, key=lambda p: -p["ms"])[:16]:
        print("  {ms:9.2f}  {count:5d} x {shapes}  {tflops:.0f} TFLOP/s".format(**product))
    return {
        "classes_ms": dict(classes),
        "kernels": [{"name": name, "count": len(spent), "ms": sum(spent)} for name, spent in longest],
        "products": products,
    }


def table(results: list[dict[str, Any]], ceiling: float) -> str:
    lines = ["shape    variant            ms   range          GB   TFLOP/s  % ceiling  Ktok/s  first step s"]
    for r in results:
        spread = f"{min(r['samples_ms']):.1f}..{max(r['samples_ms']):.1f}"
        share = 100 * r["tflops"] / ceiling
        lines.append(
            f"{r['shape']:8s} {r['variant']:16s} {r['ms']:6.1f}   {spread:14s} {r['memory_gb']:5.1f} {r['tflops']:8.1f}"
            f" {share:9.1f} {r['context_ktok_s']:8.2f} {r['first_step_s']:10.1f}"
        )
        if "optimiser_ms" in r:
            lines.append(f"         optimiser step   {r['optimiser_ms']:6.1f}")
    return "\n".join(lines)


def matrix_ceiling(device: torch.device, tiny: bool) -> float:
    """TFLOP/s of a square product in bfloat16 (float32 on CPU) on random data, the best of ten."""
    size = 256 if tiny else 8192
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    spent = []
    for _ in range(13):
        wait(device)
        began = time.perf_counter()
        a @ b
        wait(device)
        spent.append(time.perf_counter() - began)
    return 2 * size**3 / min(spent[3:]) / 1e12


def machine(device: torch.device, commit: str | None) -> dict[str, Any]:
    import transformers

    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    try:
        import triton

        kernels = triton.__version__
    except ImportError:
        kernels = None
    return {
        "card": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": kernels,
        "transformers": transformers.__version__,
        "commit": commit or head.stdout.strip() or None,
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated() if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


if __name__ == "__main__":
    main()
