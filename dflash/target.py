"""The frozen target: any causal language model that transformers loads, run as far as its last tap.

A tap is the output of a decoder layer, 0-based, as z-lab counts them: tap l is `hidden_states[l + 1]` of
transformers. Layers behind the last tap are dropped when the model is loaded, and so are the final norm's and
the head's work; the head's weight is kept for the drafter, which shares embedding and head with its target.
A loss that asks for the target's own distribution needs the `whole` target: every layer and the final norm.

Documents packed into one row do not see each other: transformers tells them apart by position ids that
restart and builds for each layer the mask of its kind, full or sliding (`transformers.masking_utils`). On a GPU
targets whose layers are all plain causal ones do without the mask (`dflash/documents.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dflash import documents, made_up, models, settings
from dflash.devices import compute_dtype, sent
from dflash.fused import target as fused_target
from dflash.settings import SettingError

DEFAULT_TAPS = 5


def default_taps(num_layers: int, num_taps: int = DEFAULT_TAPS) -> list[int]:
    """z-lab's spread (dflash/model.py, `build_target_layer_ids`): from layer 1 to num_layers - 3, evenly,
    rounded.

    One tap is the middle layer. A shallow target gets fewer taps than asked: each layer is tapped at most
    once, and a target of fewer than 5 layers has one tap.
    """
    first, last = 1, num_layers - 3
    if num_taps == 1 or last <= first:
        return [num_layers // 2]
    num_taps = min(num_taps, last - first + 1)
    return [round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps)]


@dataclass
class Target:
    """A frozen target on one device or spread over several; make one with `load`, further ones with `replica`.

    One thread at a time may call `features` of one Target. `embedding` and `head` are weights [V, H] without
    gradients, the same tensor when the model ties them. `embedding_scale` is what the model multiplies
    embeddings by (Gemma: sqrt(H)), else 1. The rest is what a drafter copies from its target's
    configuration.
    """

    body: Any  # the decoder, a PreTrainedModel
    layers: nn.ModuleList
    norm: nn.Module  # the final norm; an identity unless the target is whole
    embedding: torch.Tensor
    head: torch.Tensor
    taps: list[int]
    whole: bool  # features end with what the head reads
    devices: tuple[torch.device, ...]  # the layers stand on them in even runs, embedding and head on the first
    hidden_size: int
    num_layers: int  # of the whole target, before it was cut
    vocab_size: int  # rows of the embedding
    embedding_scale: float
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    architectures: list[str]  # the target's class in transformers, as its configuration names it

    @property
    def device(self) -> torch.device:
        """Where `features` leaves its output."""
        return self.devices[0]

    @property
    def width(self) -> int:
        """Columns of `features`."""
        return (len(self.taps) + self.whole) * self.hidden_size

    @classmethod
    def load(cls, target: settings.Target, devices: Sequence[torch.device], whole: bool = False) -> Target:
        """Load `target.model` and keep the part up to the last tap, or all of it; raises SettingError.

        Over several devices it is spread layer by layer. It passes through host memory, once, unless its weights are
        made up: those are drawn where they are to be.
        """
        if target.made_up:
            model = blank(target, devices[0])
            return cls.from_model(model, target.taps, devices, whole, made_up.filler(model))
        return cls.from_model(pretrained(target, devices[0]), target.taps, devices, whole)

    @classmethod
    def ends(cls, target: settings.Target, device: torch.device, whole: bool = False) -> Target:
        """The outline with embedding and head in place: all that a drafter's own process needs of its target.

        One layer is read beside them, whatever the target's size; it is not kept. Raises SettingError.
        """
        outline = cls.outline(target, device, whole)
        if target.made_up:
            model = blank(target, device)
            fill = made_up.filler(model)
            fill(model.get_input_embeddings(), device)
            if outline.head is not outline.embedding:
                fill(model.get_output_embeddings(), device)
        else:
            model = pretrained(target, device, layers=1)
        embedding = model.get_input_embeddings().weight.detach().to(device)
        tied = outline.head is outline.embedding
        head = embedding if tied else model.get_output_embeddings().weight.detach().to(device)
        return replace(outline, embedding=embedding, head=head, devices=(device,))

    @classmethod
    def outline(cls, target: settings.Target, device: torch.device | None = None, whole: bool = False) -> Target:
        """The same Target without weights (torch's meta device): sizes, dtypes and taps; raises SettingError.

        `device` is where it would be loaded, which settles `dtype=auto`; None: the CPU.
        """
        model = blank(target, device or torch.device("cpu"))
        return cls.from_model(model, target.taps, [torch.device("meta")], whole)

    @classmethod
    def from_model(
        cls,
        model: Any,
        taps: list[int] | None,
        devices: Sequence[torch.device],
        whole: bool = False,
        place: Callable[[nn.Module, torch.device], object] = nn.Module.to,
    ) -> Target:
        """Take over a causal LM of transformers, cut behind its last tap unless `whole`; raises SettingError.

        `place` brings a module to its device.
        """
        config = model.config.get_text_config()
        body = model.get_decoder()
        name, layers = decoder_layers(body, config.num_hidden_layers)
        depth = len(layers)
        _check_taps(taps, depth)
        taps = default_taps(depth) if taps is None else list(taps)
        output, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        _check_head(model, output, whole)
        tied = output.weight is embeddings.weight
        if not whole:
            setattr(body, name, layers[: taps[-1] + 1])
            setattr(body, _final_norm(body), nn.Identity())
        body.eval().requires_grad_(False)
        if devices[0].type == "cuda":  # on a CPU a mask costs no more than the calls it saves
            documents.use(body)
        for module, device in _places(body, getattr(body, name), devices):
            place(module, device)
        if not tied:
            place(output, devices[0])
        if devices[0].type == "cuda":
            fused_target.use(body)
        embedding = embeddings.weight.detach()
        heads = config.num_attention_heads
        return cls(
            body=body,
            layers=getattr(body, name),
            norm=getattr(body, _final_norm(body)),
            embedding=embedding,
            head=embedding if tied else output.weight.detach(),
            taps=taps,
            whole=whole,
            devices=tuple(devices),
            hidden_size=config.hidden_size,
            num_layers=depth,
            vocab_size=embedding.shape[0],
            embedding_scale=float(getattr(embeddings, "scalar_embed_scale", 1.0)),
            num_attention_heads=heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=config.intermediate_size,
            rms_norm_eps=_first(config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
            rope_theta=_rope_theta(config),
            max_positions=config.max_position_embeddings,
            architectures=[type(model).__name__],
        )

    def replica(self, devices: Sequence[torch.device]) -> Target:
        """A second Target for another worker, on as many devices.

        It has modules of its own, so that threads do not meet in them, and shares every weight that is already
        where it should be; the others are copied there one by one.
        """
        assert len(devices) == len(self.devices)
        there: dict[int, torch.Tensor] = {}
        for module, device in _places(self.body, self.layers, devices):
            for parameter in module.parameters():
                there[id(parameter)] = _at(parameter, device)
            for buffer in module.buffers():
                there[id(buffer)] = _at(buffer, device)
        there[id(self.embedding)] = there[id(self.body.get_input_embeddings().weight)].detach()
        there.setdefault(id(self.head), _at(self.head, devices[0]))
        twin = copy.deepcopy(self, there)
        twin.devices = tuple(devices)
        return twin

    @torch.no_grad()  # not inference_mode: the drafter's backward keeps features
    def features(self, tokens: torch.Tensor, document: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """The taps' outputs side by side: [R, S, len(taps) * H] from int64 [R, S] each, on the CPU; given on `device`.

        A whole target adds what its head reads as the last H columns. `document` is -1 on padding, which may
        only stand at a row's end; `position` restarts at 0 in every document. Padding is computed as a document
        of its own: its features are finite and mean nothing.
        """
        padding = document < 0
        position = torch.where(padding, padding.cumsum(-1) - 1, position)
        kept: dict[int, torch.Tensor] = {}
        with self._tapped(kept), self._handed_over(), documents.apart(position):
            there = sent(tokens, self.device), sent(position, self.device)
            last = self.body(input_ids=there[0], position_ids=there[1], use_cache=False).last_hidden_state
        parts = [kept[tap] for tap in self.taps] + [last] * self.whole
        return torch.cat([part.to(self.device) for part in parts], dim=-1)

    @contextmanager
    def _tapped(self, kept: dict[int, torch.Tensor]) -> Iterator[None]:
        def keep(tap: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                kept[tap] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self.layers[tap].register_forward_hook(keep(tap)) for tap in self.taps]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _handed_over(self) -> Iterator[None]:
        """Every layer finds its input on its own device: hidden states, and the mask and rotary tables all share."""
        if len(self.devices) == 1:
            yield
            return
        # The original is kept beside its copy, so that no other tensor gets its id during the call.
        moved: dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

        def move(value: Any, device: torch.device) -> Any:
            if isinstance(value, torch.Tensor):
                if value.device == device:
                    return value
                return moved.setdefault((id(value), device), (value, value.to(device)))[1]
            if isinstance(value, tuple | list):
                return type(value)(move(item, device) for item in value)
            if isinstance(value, dict):
                return {key: move(item, device) for key, item in value.items()}
            return value

        def hand_over(device: torch.device) -> Any:
            return lambda module, args, kwargs: (move(args, device), move(kwargs, device))

        places = zip(self.layers, _runs(len(self.layers), self.devices), strict=True)
        handles = [
            module.register_forward_pre_hook(hand_over(device), with_kwargs=True)
            for module, device in [*places, (self.norm, self.devices[-1])]
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _at(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The same tensor where it is there already, else a copy, a parameter of one."""
    if tensor.device == device:
        return tensor
    copied = tensor.detach().to(device)
    return nn.Parameter(copied, requires_grad=False) if isinstance(tensor, nn.Parameter) else copied


def _runs(layers: int, devices: Sequence[torch.device]) -> list[torch.device]:
    """The device of each layer: as many layers on each as the number allows."""
    return [devices[layer * len(devices) // layers] for layer in range(layers)]


def _places(
    body: nn.Module, layers: nn.ModuleList, devices: Sequence[torch.device]
) -> Iterator[tuple[nn.Module, torch.device]]:
    """Every part of a decoder and its device: what comes before the layers on the first, the norm on the last."""
    norm = getattr(body, _final_norm(body))
    for child in body.children():
        if child is layers:
            yield from zip(layers, _runs(len(layers), devices), strict=True)
        else:
            yield child, devices[-1] if child is norm else devices[0]


def blank(target: settings.Target, device: torch.device) -> Any:
    """The causal LM of transformers without weights (torch's meta device), in the dtype that it has on `device`;
    raises SettingError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = models.folder(target.model, target.models_dir, weights=not target.made_up)
    remote = {"trust_remote_code": target.trust_remote_code}
    with _loading(target), torch.device("meta"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **remote)
        return AutoModelForCausalLM.from_config(config, dtype=compute_dtype(target.dtype, device), **remote)


def pretrained(target: settings.Target, device: torch.device, layers: int | None = None) -> Any:
    """The causal LM of transformers in host memory, or its first `layers`; raises SettingError."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    folder = models.folder(target.model, target.models_dir)
    local = {"local_files_only": True, "trust_remote_code": target.trust_remote_code}
    with _loading(target):
        config = AutoConfig.from_pretrained(folder, **local)
        if layers is not None:
            text = config.get_text_config()
            text.num_hidden_layers = layers
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:layers]
            logging.set_verbosity_error()  # it would list every weight of the layers that are not wanted
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=compute_dtype(target.dtype, device),
            use_safetensors=True,
            output_loading_info=True,
            **local,
        )
    if missing := sorted(found["missing_keys"]):  # transformers would go on with random weights
        raise SettingError(
            "target.model",
            target.model,
            f"its weight files must hold all weights; {len(missing)} are missing: {missing[0]}",
        )
    return model


def load_tokenizer(target: settings.Target) -> Any:
    """The target's tokenizer; raises SettingError."""
    from transformers import AutoTokenizer

    folder = models.folder(target.model, target.models_dir, weights=not target.made_up)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=target.trust_remote_code)
    except Exception as error:  # as with the weights, an open list
        why = str(error).strip().split("\n")[0]
        raise SettingError("target.model", target.model, f"its tokenizer cannot be loaded ({why})") from None


def stop_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a response: those of the generation config, and the tokenizer's end of text."""
    stops = model.generation_config.eos_token_id
    return {*(stops if isinstance(stops, list | tuple) else [stops]), tokenizer.eos_token_id} - {None}


@contextmanager
def _loading(target: settings.Target) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # what transformers and safetensors raise on a damaged folder is an open list
        why = str(error).strip().split("\n")[0]
        raise SettingError("target.model", target.model, f"must be a model that transformers loads ({why})") from error


def decoder_layers(body: nn.Module, depth: int) -> tuple[str, nn.ModuleList]:
    """A decoder's list of `depth` layers and its name there; raises SettingError."""
    for name, child in body.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == depth:
            return name, child
    raise SettingError("target.model", type(body).__name__, "must keep its decoder layers in one module list")


def _final_norm(body: nn.Module) -> str:
    for name in ("norm", "final_layer_norm", "ln_f"):
        if isinstance(getattr(body, name, None), nn.Module):
            return name
    raise SettingError("target.model", type(body).__name__, "must have a final norm under a name known here")


def _check_taps(taps: list[int] | None, depth: int) -> None:
    # The last layer cannot be tapped: transformers' hidden_states, which z-lab reads, has it behind the final
    # norm, SGLang and vLLM before it.
    if taps is not None and taps[-1] >= depth - 1:
        raise SettingError("target.taps", taps, f"must be below {depth - 1}, the last of the target's {depth} layers")


def _check_head(model: Any, output: nn.Module, whole: bool) -> None:
    """The drafter reads the head's weight alone; raises SettingError where that is not the target's head."""
    if getattr(output, "bias", None) is not None:
        raise SettingError("target.model", type(model).__name__, "must have a head without bias")
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if whole and getattr(config, name, None) not in (None, 1):
            raise SettingError(
                "target.model",
                type(model).__name__,
                f"shapes its logits after the head ({name}), so no loss can learn its distribution; use loss.kind=ce",
            )


def _first(config: Any, *names: str) -> float:
    """The first of these entries that the configuration has."""
    return float(next(getattr(config, name) for name in names if getattr(config, name, None) is not None))


def _rope_theta(config: Any) -> float:
    """The base of rotary positions; of the full-attention layers where kinds differ."""
    parameters = config.rope_parameters
    return float(parameters.get("full_attention", parameters)["rope_theta"])
