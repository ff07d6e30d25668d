"""The class :class:`Family`, which describes how one Hugging Face model type is converted to our network,
and the tables and features that several families share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ppfleetx.config.errors import CheckpointError, shown
from ppfleetx.config.reading.tree import nested
from ppfleetx.config.sections.model import ModelConfig
from ppfleetx.conversion.huggingface.rope import DEFAULT_BASE, PLACES, hf_rope, rope_keys

Config = Mapping[str, Any]
NEEDED = object()
"""Marks a required key, in place of a default."""


@dataclass(frozen=True)
class Feature:
    """Converts ``config.json`` keys by functions, where the mapping `Family.keys` is not sufficient.

    Attributes:
        reads: the ``config.json`` keys that ``read`` uses.
        read: a function that converts a ``config.json`` to keys of our ``Model`` section.
        write: a function that converts a ``Model`` section to keys of ``config.json``.
    """

    reads: Collection[str] = ()
    read: Callable[[Config], dict[str, Any]] = lambda _: {}
    write: Callable[[ModelConfig], dict[str, Any]] = lambda _: {}


@dataclass(frozen=True)
class Family:
    """How one Hugging Face ``model_type`` is converted to our network and back.

    Attributes:
        architecture: the name of the class in transformers.
        keys: key of ``config.json`` -> (key of our ``Model`` section, transformers' default). Several of our
            keys can be given, separated by spaces. The default is a value, or a function that computes it
            from the ``config.json``. NEEDED stands for no default: the key must be present and not null.
        fixed: keys and values of our ``Model`` section that are the same in all networks of this type.
        names: our layer or parameter -> Hugging Face's layer or tensor. ``{}`` stands for the block number,
            ``{expert}`` for the expert number, and ``{part}`` for a part of a fused layer, such as q or gate.
        features: convert further keys by functions. If two features set the same key, the later one wins.
        other_names: a function that returns further entries of ``names``, given the ``config.json``.
        part_names: our name for a part of a fused layer -> Hugging Face's name, where the two differ.
        aliases: alternative ``config.json`` keys that transformers accepts -> the keys used here.
        has_in_out_linears: whether linear weights are stored as ``[in, out]``, not ``[out, in]``.
        has_parts_in_a_row: whether a fused layer stores all queries, then all keys, then all values.
        required: ``config.json`` keys that must be present, but can be null.
        off: options that we do not support -> the values that are accepted, because they turn the option off.
    """

    architecture: str
    keys: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, Any]
    names: Mapping[str, str]
    features: tuple[Feature, ...] = ()
    other_names: Callable[[Config], Mapping[str, str]] = lambda _: {}
    part_names: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    has_in_out_linears: bool = False
    has_parts_in_a_row: bool = False
    required: Collection[str] = ()
    off: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def variant(
        self, architecture: str, *features: Feature, without: Collection[str] = (), **changes: Any
    ) -> Family:
        """Return a changed copy of this family, for a similar model type.

        Args:
            architecture: the name of the class in transformers.
            features: features to add.
            without: ``config.json`` keys to remove from ``keys``.
            changes: other fields to change. New entries of ``keys``, ``fixed``, ``names``, ``aliases`` and
                ``off`` are added to the old ones; other fields are replaced.
        """
        kept = {key: row for key, row in self.keys.items() if key not in without}
        changes["keys"] = kept | changes.get("keys", {})
        for name in ("fixed", "names", "aliases", "off"):
            changes[name] = {**getattr(self, name), **changes.get(name, {})}
        return replace(self, architecture=architecture, features=self.features + features, **changes)

    @property
    def mapped(self) -> set[str]:
        """The ``config.json`` keys that this family converts."""
        return {*self.keys, *self.aliases, *(key for one in self.features for key in one.reads)}

    def without_aliases(self, config: Config) -> dict[str, Any]:
        """Return a copy of a ``config.json`` in which the value of each alias is also stored under the usual
        key. Raises CheckpointError if an alias and its usual key have different values."""
        made = dict(config)
        for alias, name in self.aliases.items():
            if alias in made and made.setdefault(name, made[alias]) != made[alias]:
                one, two = shown(made[alias]), shown(made[name])
                raise CheckpointError(f"config.json: {alias} ({one}) and {name} ({two}) are the same key")
        return made

    def model_keys(self, config: Config) -> dict[str, Any]:
        """Convert a ``config.json`` to keys of our ``Model`` section. Keys that are null must have been
        removed. Raises CheckpointError if a key is missing, or its value is not supported."""
        made = dict(self.fixed)
        for theirs, (ours, default) in self.keys.items():
            value = config.get(theirs, default)
            if value is NEEDED:
                raise CheckpointError(f"config.json lacks {theirs}")
            made |= dict.fromkeys(ours.split(), value(config) if callable(value) else value)
        for feature in self.features:
            made |= feature.read(config)
        return nested(made.items())

    def config(self, model_type: str, model: ModelConfig, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert ``model`` to a ``config.json`` of this model type. Settings that the model type cannot
        express are lost.

        Args:
            values: the result of ``resume_policy.network(model)``: the keys that determine the network.
        """
        made = {"architectures": [self.architecture], "model_type": model_type}
        for theirs, (ours, _) in self.keys.items():
            key = ours.split()[0]
            effective = value_at(values, key)
            made[theirs] = value_at(model, key) if effective is None else effective
        for feature in self.features:
            made |= feature.write(model)
        return made


def value_at(section: Any, name: str) -> Any:
    """Return the value of the dotted key ``name``, such as ``moe.top_k``. None if ``section`` lacks the
    key."""
    for part in name.split("."):
        section = section.get(part) if isinstance(section, Mapping) else getattr(section, part, None)
    return section


# ---- families of Llama and GPT, from which others are derived


def in_layers(row: str, layers: Mapping[str, str]) -> dict[str, str]:
    """Return ``layers`` with the prefix of a transformer block added to each name.

    Args:
        row: Hugging Face's prefix, such as ``model.layers.{}``. Ours is ``decoder.layers.{}``.
        layers: our name of a layer or parameter in the block -> Hugging Face's name.
    """
    return {f"decoder.layers.{{}}.{ours}": f"{row}.{theirs}" for ours, theirs in layers.items()}


_INIT = ("initializer_range", 0.02)
SIZES = {
    "vocab_size": ("vocab_size", NEEDED),
    "hidden_size": ("hidden_size", NEEDED),
    "num_hidden_layers": ("num_layers", NEEDED),
    "num_attention_heads": ("num_attention_heads", NEEDED),
    "intermediate_size": ("ffn_hidden_size", NEEDED),
    "max_position_embeddings": ("max_position_embeddings", NEEDED),
    "initializer_range": _INIT,
    "attention_dropout": ("attention_probs_dropout_prob", 0.0),
}
KV_HEADS = {"num_key_value_heads": ("num_query_groups", lambda config: config["num_attention_heads"])}
TIED = {"tie_word_embeddings": ("tie_word_embeddings", True)}
EPSILON = {"rms_norm_eps": ("norm_epsilon", 1e-5)}
ATTENTION_BIAS = {"attention_bias": ("add_qkv_bias add_out_proj_bias", False)}
MLP_BIAS = {"mlp_bias": ("add_mlp_bias", False)}
LLAMA_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    **in_layers(
        "model.layers.{}",
        {
            "input_norm": "input_layernorm",
            "attention.qkv": "self_attn.{part}_proj",
            "attention.q_norm": "self_attn.q_norm",
            "attention.k_norm": "self_attn.k_norm",
            "attention.out_proj": "self_attn.o_proj",
            "mlp_norm": "post_attention_layernorm",
            "mlp.fc1": "mlp.{part}_proj",
            "mlp.fc2": "mlp.down_proj",
        },
    ),
    "decoder.final_norm": "model.norm",
    "head": "lm_head",
}
LLAMA = Family(
    "LlamaForCausalLM",
    SIZES
    | KV_HEADS
    | {
        "head_dim": ("head_dim", lambda config: config["hidden_size"] // config["num_attention_heads"]),
        "rms_norm_eps": ("norm_epsilon", 1e-6),
        # PaddleFormers omits the key if it is true. Other programs omit the key if it is false.
        "tie_word_embeddings": ("tie_word_embeddings", lambda config: "paddleformers_version" in config),
    },
    {
        "hidden_act": "swiglu",
        "hidden_dropout_prob": 0.0,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "add_out_proj_bias": False,
        "add_mlp_bias": False,
    },
    LLAMA_NAMES,
    (Feature(write=lambda _: {"hidden_act": "silu"}),),
    off={"hidden_act": ("silu", "swish")},
)
GPT = Family(
    "",
    {
        "vocab_size": ("vocab_size", NEEDED),
        "n_embd": ("hidden_size", NEEDED),
        "n_layer": ("num_layers", NEEDED),
        "n_head": ("num_attention_heads", NEEDED),
        "n_inner": ("ffn_hidden_size", lambda config: 4 * config["n_embd"]),
        "n_positions": ("max_position_embeddings", NEEDED),
        "layer_norm_epsilon": ("norm_epsilon", 1e-5),
        "initializer_range": _INIT,
        "resid_pdrop": ("hidden_dropout_prob", 0.1),
        "attn_pdrop": ("attention_probs_dropout_prob", 0.1),
        **TIED,
    },
    {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "add_bias_linear": True},
    {
        "embedding.word_embeddings": "transformer.wte",
        "embedding.position_embeddings": "transformer.wpe",
        **in_layers(
            "transformer.h.{}",
            {
                "input_norm": "ln_1",
                "attention.qkv": "attn.c_attn",
                "attention.out_proj": "attn.c_proj",
                "mlp_norm": "ln_2",
                "mlp.fc1": "mlp.c_fc",
                "mlp.fc2": "mlp.c_proj",
            },
        ),
        "decoder.final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)

# ---- features

_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_exact",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
"""Ungated activations: transformers' name -> our name."""


def activation(key: str, default: str) -> Feature:
    def read(config: Config) -> dict[str, Any]:
        name = config.get(key, default)
        if name not in _ACTIVATIONS:
            raise CheckpointError(f"{key} {shown(name)} of this {config['model_type']} is not supported")
        return {"hidden_act": _ACTIVATIONS[name]}

    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    return Feature({key}, read, lambda model: {key: names.get(model.hidden_act)})


EMBEDDING_DROPOUT = Feature(write=lambda model: {"embd_pdrop": model.embedding_dropout})
_ROTARY = {*PLACES, "original_max_position_embeddings", "rope_theta", "partial_rotary_factor"}


def rotary_keys(config: Config, base: float = DEFAULT_BASE) -> dict[str, Any]:
    """Convert the rotary settings of a ``config.json`` to keys of our ``Model`` section.

    Args:
        base: the default of ``rope_theta``.

    Raises CheckpointError if the settings are invalid or not supported, or if the size of a head cannot be
    derived: there is no ``head_dim``, and the hidden size is not a multiple of the number of heads.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "head_dim" not in config and hidden % heads:
        raise CheckpointError(f"config.json: {heads} heads do not divide the hidden size {hidden}")
    return rope_keys({"rope_theta": base, **config})


def rotary(base: float = DEFAULT_BASE) -> Feature:
    return Feature(_ROTARY, lambda config: rotary_keys(config, base), hf_rope)


ROTARY = rotary()
PARTIAL_ROTARY = Feature(
    _ROTARY, rotary_keys, lambda model: {**hf_rope(model), "partial_rotary_factor": model.rotary_percent}
)


def window_keys(config: Config, window: int | None) -> dict[str, Any]:
    """Convert the size of a sliding window to our key ``attention_window``. Our value is ``window`` - 1,
    because it does not count the current position. It is None if there is no window, or if the window covers
    the whole context length."""
    if window is None or window >= config["max_position_embeddings"]:
        return {"attention_window": None}
    return {"attention_window": _our_window(window)}


def _our_window(window: int | None) -> int:
    if window is None or window < 2:
        why = "" if window is None else ": a token would attend only to itself"
        raise CheckpointError(f"config.json: sliding_window {shown(window)} is not supported{why}")
    return window - 1


def hf_window(model: ModelConfig) -> int | None:
    return None if model.attention_window is None else model.attention_window + 1


WINDOW = Feature(
    {"sliding_window"},
    lambda config: window_keys(config, config.get("sliding_window")),
    lambda model: {"sliding_window": hf_window(model)},
)
_KINDS = ("full_attention", "sliding_attention")


def pattern_keys(config: Config, every: int) -> dict[str, Any]:
    """Convert the settings of a sliding window to ``attention_window`` and ``attention_window_layers``, for
    model types in which only some layers use the window.

    Args:
        every: the number of layers in a period, used if ``config`` has no ``layer_types``. The last layer of
            each period has no window.
    """
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [_KINDS[(layer + 1) % every > 0] for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= set(_KINDS):
        kind = config["model_type"]
        raise CheckpointError(f"config.json: layer_types {shown(kinds)} of this {kind} is not supported")
    sliding = [layer for layer, one in enumerate(kinds) if one == "sliding_attention"]
    if not sliding:
        return {"attention_window": None}
    window = _our_window(config.get("sliding_window"))
    return {"attention_window": window, "attention_window_layers": sliding}


def hf_pattern(model: ModelConfig) -> dict[str, Any]:
    kinds = [_KINDS[model.window_of(layer) is not None] for layer in range(model.num_layers)]
    return {"sliding_window": hf_window(model), "layer_types": kinds}


def pattern(
    every: int,
    *,
    period: str | None = None,
    also: Callable[[Config, Mapping[str, Any]], dict[str, Any]] = lambda *_: {},
) -> Feature:
    """Make a :class:`Feature` for a sliding window that only some layers use.

    Args:
        every: the default number of layers in a period. The last layer of each period has no window.
        period: the ``config.json`` key that can set this number; None: there is none.
        also: a function that returns further keys of our ``Model`` section. Its arguments are the
            ``config.json`` and the result of :func:`pattern_keys`.
    """

    def read(config: Config) -> dict[str, Any]:
        given = every if period is None else config.get(period, every)
        found = pattern_keys({"sliding_window": 4096, **config}, given)
        return found | also(config, found)

    # transformers writes the period with an underscore, too, and does not read that key.
    names = () if period is None else (period, f"_{period}")
    return Feature({"layer_types", "sliding_window", *names}, read, hf_pattern)


PERIOD = "sliding_window_pattern"


def rope_by_kind(config: Config, pattern: Mapping[str, Any], *, base: float, local: float) -> dict[str, Any]:
    """Convert rotary settings to keys of our ``Model`` section, for models in which layers with and without a
    sliding window have different rotary bases.

    Args:
        config: the ``config.json``.
        pattern: the result of :func:`pattern_keys` for ``config``.
        base: the default base of layers without a window.
        local: the default base of layers with a window.

    ``local_rotary_base`` is set only if the rotary settings of the two kinds of layers differ.
    """
    by_kind = next((config[p] for p in PLACES if "full_attention" in config.get(p, {})), None)
    usual = {"rope_theta": base, **config}
    if by_kind is not None:
        usual = {key: value for key, value in usual.items() if key not in PLACES}
        usual["rope_parameters"] = {"rope_theta": base, **by_kind["full_attention"]}
        of_windows = by_kind.get("sliding_attention") or {}
        local = of_windows.get("rope_theta", local)
        if (kind := of_windows.get("rope_type", "default")) != "default":
            raise CheckpointError(
                f"config.json: rope scaling {shown(kind)} of sliding_attention is not supported: layers with "
                "a window are not scaled"
            )
    keys = rotary_keys(usual)
    if pattern["attention_window"] is None or (local == keys["rotary_base"] and keys["rope_scaling"] is None):
        return keys
    return {**keys, "local_rotary_base": float(local)}


def hf_rope_by_kind(model: ModelConfig) -> dict[str, Any]:
    """Make ``rope_parameters`` for a ``config.json``, with separate rotary settings for layers with and
    without a sliding window."""
    usual = hf_rope(model)
    base = {"rope_theta": usual["rope_theta"]}
    return {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **base, **usual.get("rope_scaling", {})},
            "sliding_attention": {
                "rope_type": "default", "rope_theta": model.local_rotary_base or model.rotary_base,
            },
        }
    }  # fmt: skip
