"""Configuration sections ``Generation``, ``Inference``, ``Offline_Eval`` and ``Serve``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ppfleetx.config.errors import RuleError
from ppfleetx.config.field_types import (
    MAX_COUNT,
    Bool,
    CountInt,
    Float,
    NonNegativeFloat,
    NumThreads,
    PathText,
    PenaltyFactor,
    PositiveFloat,
    PositiveInt,
    Says,
    Seed,
    Text,
    UnitFloat,
)
from ppfleetx.config.section import Section

READ_BY = {
    "sampling": ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed"),
    "beam_search": ("num_beams", "num_beam_groups", "diversity_rate", "length_penalty", "early_stopping"),
}
"""For each ``decode_strategy``, the keys that no other strategy reads."""


def _id_of_text(value: Any) -> Any:
    """Validator that converts a token id from a string to a number. Keys of JSON objects are always
    strings."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


def _all_of_vllm(top_k: int) -> int:
    """Validator that converts -1, which means all tokens in vLLM, to 0."""
    return max(top_k, 0)


TopK = Annotated[
    int,
    Field(strict=True, ge=-1, le=MAX_COUNT),
    AfterValidator(_all_of_vllm),
    Says("an integer of at least -1"),
]
UnitFloatOrZero = Annotated[
    float, Field(strict=True, allow_inf_nan=False, ge=0, le=1), Says("a number from 0 to 1")
]
TokenId = Annotated[CountInt, BeforeValidator(_id_of_text)]
JsonSchema = Annotated[dict[str, Any], Says("a JSON schema (a mapping)")]


class StructuredOutputs(Section):
    """The format that generated text must have. Exactly one key must be set.

    Structured output needs the package llguidance (`pip install 'ppfleetx[structured]'`).
    """

    json_schema: JsonSchema | None = None
    """JSON that conforms to this schema. Requests may call this key `json`, as in vLLM."""
    json_object: Bool = False
    """Any JSON object."""
    regex: Text | None = None
    """Text that matches this regular expression as a whole."""
    choice: tuple[Text, ...] | None = None
    """One of these strings."""
    grammar: Text | None = None
    """Text that conforms to this grammar, which is in Lark's notation or in llama.cpp's GBNF."""

    @model_validator(mode="before")
    @classmethod
    def _name_of_vllm(cls, data: Any) -> Any:
        if isinstance(data, dict) and "json" in data:
            return {"json_schema" if key == "json" else key: value for key, value in data.items()}
        return data

    def violations(self) -> Iterator[RuleError]:
        given = [name for name in type(self).model_fields if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            keys = ", ".join(type(self).model_fields)
            yield RuleError(tuple(given) or ("json_schema",), f"give exactly one of {keys}")


class TokenOptions(Section):
    """How each next token is chosen: keys of section `Generation`, and of requests to the server."""

    temperature: NonNegativeFloat = 1.0
    """Sampling: logits are divided by this; 0: the most likely token."""
    top_k: TopK = 0
    """Sampling: only the k most likely tokens; 0 or -1: all."""
    top_p: UnitFloat = 1.0
    """Sampling: only the most likely tokens that together have this probability."""
    min_p: UnitFloatOrZero = 0.0
    """Sampling: only tokens with at least this share of the most likely token's probability; 0: all."""
    typical_p: UnitFloat = 1.0
    """Sampling: only the tokens whose information content is nearest to the entropy and that together have
    this probability (locally typical sampling)."""
    repetition_penalty: PenaltyFactor = 1.0
    """Divides the positive logits, and multiplies the negative logits, of tokens that have occurred; 1: no
    penalty."""
    presence_penalty: Float = 0.0
    """Subtracted from the logits of tokens that have been generated."""
    frequency_penalty: Float = 0.0
    """Subtracted from the logits of tokens that have been generated, once for each occurrence."""
    no_repeat_ngram_size: CountInt = 0
    """No sequence of this many tokens occurs twice, including the prompt; 0: no limit."""
    bad_words: tuple[Text | tuple[CountInt, ...], ...] = ()
    """Strings or lists of token ids that must not occur. A string is excluded both at the start of a word and
    inside a word."""
    suppress_tokens: tuple[CountInt, ...] = ()
    """Token ids that must not occur."""
    logit_bias: dict[TokenId, Float] = Field(default_factory=dict)
    """For each token id, a number to add to its logit."""
    stop_token_ids: tuple[CountInt, ...] = ()
    """Further tokens that end a continuation."""
    ignore_eos: Bool = False
    """The model's end tokens do not end a continuation; tokens of `stop_token_ids` still do."""
    include_stop_str_in_output: Bool = False
    """The text of a continuation includes the stop string or the end token that ended it, unless this is a
    special token; false: it does not."""
    structured_outputs: StructuredOutputs | None = None
    """The format that a continuation must have; null: any."""

    def violations(self) -> Iterator[RuleError]:
        if any(len(word) == 0 for word in self.bad_words):
            yield RuleError(("bad_words",), "an empty text is in every text; leave it out")


class GenerationConfig(TokenOptions):
    """How text is generated: decoding strategy, lengths, end tokens and prompts."""

    decode_strategy: Literal["greedy_search", "sampling", "beam_search"] = "sampling"
    """Take the most likely token, sample a token, or run beam search."""
    min_dec_len: CountInt = 0
    """The smallest number of new tokens before an end token or the end of a stop string."""
    max_dec_len: PositiveInt = 20
    """The largest number of new tokens."""
    num_return_sequences: PositiveInt = 1
    """Continuations per prompt."""
    num_beams: PositiveInt = 1
    """Beam search: number of beams, in all groups together."""
    num_beam_groups: PositiveInt = 1
    """Beam search: number of groups of beams. `diversity_rate` makes the groups differ from each other."""
    diversity_rate: NonNegativeFloat = 0.0
    """Beam search in groups: penalty on a token's log-probability for each beam of an earlier group that took
    the token in the same step (Hugging Face's diversity_penalty)."""
    length_penalty: Float = 0.0
    """Beam search: scores are divided by the length to the power of this number."""
    early_stopping: Bool | Literal["never"] = False
    """Beam search: true stops when `num_beams` sequences are finished. false stops when the best unfinished
    beam would not be among the results if it ended now. `never` stops when that beam would not be among the
    results at any length."""
    eos_token_id: CountInt | tuple[CountInt, ...] | None = None
    """The token that ends a continuation, or a list of such tokens; an empty list: only the length ends it.
    null: the tokenizer's end token, and the end tokens in the `generation_config.json` beside it."""
    forced_bos_token_id: CountInt | None = None
    """The first new token; null: not forced."""
    forced_eos_token_id: CountInt | None = None
    """The last token of a continuation that reaches `max_dec_len`; null: not forced."""
    prompt_lookup_num_tokens: CountInt = 16
    """Prompt lookup in greedy search, for at most 3 prompts at a time: propose up to this many tokens per
    prompt from earlier text, and check them in one pass; 0: off. This changes the speed, not the text. An
    exported program does so only for a batch of one prompt, after `min_dec_len`, and without a
    `repetition_penalty`. The server uses `Serve.prompt_lookup_num_tokens` instead."""
    assistant_model: PathText | None = None
    """Draft model for greedy search: a smaller model with the same tokenizer; null: none. The draft model
    proposes tokens, and the main model checks them in one pass. This changes the speed, not the text. The
    value is a directory, a GGUF file or `hf:ORG/NAME`."""
    num_assistant_tokens: PositiveInt = 20
    """The largest number of tokens that the assistant proposes for one pass. After wrong proposals, it
    proposes fewer."""
    use_cache: Bool = True
    """Keep keys and values of past tokens; false: recompute them, for comparison."""
    seed: Seed | None = None
    """Seed of sampling; null: `Global.seed`."""
    prompt: Text | tuple[Text, ...] | None = None
    """One prompt or a list of prompts."""
    prompt_file: PathText | None = None
    """A file with one prompt per line."""
    stop: Text | tuple[Text, ...] | None = None
    """A string or a list of strings. The continuation ends before the first of these strings that occurs. A
    string that is a special token stands for this token."""
    logprobs: CountInt | None = None
    """Return log-probabilities: of each new token, and of this many of the most likely tokens at its
    position; null: none. They come from the model alone, before any option such as a penalty is applied."""

    @property
    def end_ids(self) -> tuple[int, ...] | None:
        """The ids in ``eos_token_id`` as a tuple without duplicates; None if it is null."""
        given = (self.eos_token_id,) if isinstance(self.eos_token_id, int) else self.eos_token_id
        return None if given is None else tuple(dict.fromkeys(given))

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings in ``stop`` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def reads_temperature(self) -> bool:
        """Whether ``temperature`` fits the decoding strategy. Temperature 0 means greedy search, so it fits
        greedy search, too."""
        return self.decode_strategy == "sampling" or (
            self.decode_strategy == "greedy_search" and self.temperature == 0
        )

    def first_unused_option(self, keys: Iterable[str]) -> tuple[str, str] | None:
        """Return the first of ``keys`` that was set but that the configured ``decode_strategy`` does not
        read.

        The result is the pair (key, the strategy that reads it), or None if there is no such key. A key at
        its default does not count as set. ``seed`` is never returned.
        """
        # A seed changes nothing without sampling, so it does not count.
        readers = {key: strategy for strategy, read in READ_BY.items() for key in read if key != "seed"}
        for key in keys:
            is_asked_for = key in readers and getattr(self, key) != type(self).model_fields[key].default
            is_read = (
                self.reads_temperature if key == "temperature" else readers.get(key) == self.decode_strategy
            )
            if is_asked_for and not is_read:
                return key, readers[key]
        return None

    def violations(self) -> Iterator[RuleError]:
        yield from super().violations()
        if self.min_dec_len > self.max_dec_len:
            yield RuleError(
                ("min_dec_len", "max_dec_len"),
                f"at least {self.min_dec_len} new tokens and at most {self.max_dec_len} cannot both hold",
            )
        for key in ("forced_bos_token_id", "forced_eos_token_id"):
            if self.structured_outputs is not None and getattr(self, key) is not None:
                yield RuleError(
                    (key, "structured_outputs"), "a forced token can break the form; set one of them to null"
                )
        if self.prompt == ():
            yield RuleError(("prompt",), "is an empty list; give a prompt, or null for the one built in")
        if self.prompt is not None and self.prompt_file is not None:
            yield RuleError(("prompt_file", "prompt"), "give the prompts themselves or a file, not both")
        if self.stop == "" or (isinstance(self.stop, tuple) and "" in self.stop):
            yield RuleError(("stop",), "every text begins with the empty text; leave it out")
        results, strategy = self.num_return_sequences, self.decode_strategy
        conflicts = {
            "decode_strategy": strategy != "greedy_search",
            "use_cache": not self.use_cache,
            "logprobs": self.logprobs is not None,
        }
        if self.assistant_model is not None and any(conflicts.values()):
            yield RuleError(
                ("assistant_model", next(key for key in conflicts if conflicts[key])),
                "an assistant proposes tokens for greedy search with a cache and without logprobs",
            )
        if strategy == "greedy_search" and results > 1:
            yield RuleError(
                ("num_return_sequences", "decode_strategy"),
                "greedy search has one result per prompt; use sampling or beam_search for more",
            )
        if strategy == "beam_search" and results > self.num_beams:
            yield RuleError(
                ("num_return_sequences", "num_beams"),
                f"{self.num_beams} beams cannot give {results} results",
            )
        if self.num_beams % self.num_beam_groups:
            yield RuleError(
                ("num_beam_groups", "num_beams"),
                f"{self.num_beams} beams do not divide into {self.num_beam_groups} groups",
            )
        if self.num_beam_groups > 1 and self.diversity_rate == 0:
            yield RuleError(
                ("diversity_rate", "num_beam_groups"), "must be above 0: without it all groups find the same"
            )
        if strategy == "beam_search" and self.stop is not None:
            yield RuleError(
                ("stop", "decode_strategy"), "beam search ends at the end token only; it takes no stop texts"
            )
        if strategy == "beam_search" and self.logprobs is not None:
            yield RuleError(("logprobs", "decode_strategy"), "beam search gives one score for a continuation")


class TensorRTConfig(Section):
    """How TensorRT runs parts of an exported model on a GPU."""

    max_batch_size: PositiveInt = 1
    """Largest batch."""
    workspace_size: PositiveInt = 1 << 30
    """Bytes TensorRT may use."""
    min_subgraph_size: PositiveInt = 3
    """Smallest number of operators in a subgraph that TensorRT runs; Paddle runs smaller subgraphs itself."""
    precision: Literal["fp32", "fp16", "int8"] = "fp16"
    """Precision of the subgraphs."""
    use_static: Bool = False
    """Store the built engine beside the model."""
    use_calib_mode: Bool = False
    """Calibrate for int8."""
    collect_shape: Bool = False
    """Record dynamic shapes into `shape_range_info_filename`."""
    shape_range_info_filename: PathText | None = None
    """File of the recorded shapes."""

    def violations(self) -> Iterator[RuleError]:
        if self.collect_shape and self.shape_range_info_filename is None:
            yield RuleError(
                ("collect_shape", "shape_range_info_filename"), "name the file to record the shapes into"
            )


class InferenceConfig(Section):
    """How `ppfleetx infer` runs an exported model.

    Options of generation that section `Generation` does not set are taken from the export.
    """

    model_dir: PathText = "./output"
    """The output directory of `ppfleetx export`, or `rank_0` in it."""
    mp_degree: PositiveInt | None = None
    """Tensor-parallel ranks of the exported model: 1, because an export holds the whole model; null: 1."""
    verify: Bool = True
    """Compare the checksums of all files of the export before it runs; sizes are always compared."""
    cpu_threads: NumThreads | None = None
    """Threads of the math library (CPU); null: OMP_NUM_THREADS or, if it is not set, this process's share of
    the available CPUs."""
    ir_optim: Bool = True
    """Let Paddle Inference fuse operators."""
    onednn: Bool = False
    """Use oneDNN's kernels for the operations that have them (CPU). In float32, MKL is as fast."""
    panels: Bool = True
    """For `ppfleetx export` on a CPU: the exported program makes a second copy of its matrices when it is
    loaded. The copy speeds up batches and the checking of proposed tokens. false: half the memory."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Precision on the CPU. bf16 needs `onednn` and a CPU with avx512_bf16 or amx_bf16."""
    TensorRT: TensorRTConfig | None = None
    """Use TensorRT (GPU); null: do not."""

    def violations(self) -> Iterator[RuleError]:
        if self.precision == "bf16" and not self.onednn:
            yield RuleError(
                ("precision", "onednn"), "only oneDNN computes in bfloat16 on a CPU: set onednn to True"
            )


DetokenizerName = Literal["wikitext", "ptb", "lambada", "none"]


class OfflineEvalConfig(Section):
    """`ppfleetx eval` of a `GPTEvalModule`: perplexity of a text, or accuracy of last words (cloze)."""

    eval_path: PathText | None = None
    """A text file (perplexity), or a jsonl file of objects with a key `text` (cloze)."""
    cloze_eval: Bool = False
    """Accuracy of the last word of each text, instead of perplexity."""
    cloze_strict: Bool = True
    """Cloze: an answer is right if every token of the last word is the most likely one; false: if the last
    token of the word is."""
    detokenizer: DetokenizerName | None = None
    """Perplexity: rules that remove the benchmark's spaces around punctuation (lambada and none change
    nothing); null: wikitext or ptb if the file's name contains `wiki` or `ptb`, else none."""
    overlapping_eval: PositiveInt = 32
    """Perplexity: number of tokens by which the window moves. Only these tokens are scored, so a smaller
    number gives them more context but takes more time."""
    batch_size: PositiveInt = 8
    """Windows per forward pass, on each data rank; no effect on the result."""
    max_seq_len: PositiveInt = 1024
    """Tokens per window. Only the end of a longer cloze text is used."""
    logging_freq: PositiveInt = 10
    """Batches between log lines."""

    def violations(self) -> Iterator[RuleError]:
        if not self.cloze_eval and self.overlapping_eval > self.max_seq_len:
            yield RuleError(
                ("overlapping_eval", "max_seq_len"),
                f"windows of {self.max_seq_len} tokens that move by {self.overlapping_eval} leave gaps",
            )


Port = Annotated[int, Field(strict=True, ge=0, le=65535), Says("an integer from 0 to 65535")]
Name = Annotated[str, Field(strict=True, min_length=1), Says("a text of at least one character")]

API_KEY_VARIABLE = "PPFLEETX_API_KEY"


class ServeConfig(Section):
    """The HTTP server of `ppfleetx serve`.

    Each request brings its own options of generation, with the defaults of OpenAI's API. The server uses
    only `eos_token_id` of section `Generation`.
    """

    host: Name = "127.0.0.1"
    """Address to listen on; `0.0.0.0` is every address of the machine."""
    port: Port = 8000
    """Port to listen on; 0: any free port, which the log names."""
    model_name: Name = "gpt"
    """Name of the model in requests and answers."""
    adapters: dict[Name, PathText] = Field(default_factory=dict)
    """Checkpoints with adapters (`Model.lora`) for this model, by name. A request selects an adapter by
    giving its name as `model`. Each step computes the sequences with the same adapter together, and the
    adapters one after another."""
    api_key_env: Text = API_KEY_VARIABLE
    """Environment variable with the key that requests must send (`Authorization: Bearer KEY`). If the default
    variable is not set, no key is needed; a variable named here must be set."""
    parse_special_tokens: Bool = True
    """Special tokens in the text of a prompt, such as `<|endoftext|>`, become their ids, as with OpenAI's
    completions and vLLM; false: they are ordinary text, for prompts from untrusted users."""
    max_batch_size: PositiveInt = 16
    """The largest number of sequences that are decoded at the same time. It limits the memory of the KV
    cache."""
    max_waiting: CountInt = 256
    """The largest number of sequences that wait for a place in the batch; further requests are answered with
    429."""
    max_prefill_tokens: PositiveInt = 2048
    """The largest number of prompt tokens, including padding, in one step; a longer prompt is run alone."""
    prefix_cache_tokens: CountInt = 4096
    """Size of the prefix cache in tokens; 0: no cache. Keys and values are kept after their sequence has
    ended, for later prompts that begin with the same tokens, such as a shared system message or the next turn
    of a chat. The base model and each of `adapters` have an equal part."""
    prompt_lookup_num_tokens: CountInt = 16
    """Prompt lookup: while at most 3 sequences are decoded, propose up to this many tokens of each from its
    earlier text, and check them in one pass; 0: off. This changes the speed, not the text."""
    chat_template: PathText | None = None
    """Chat template: the name of a template in the tokenizer's directory, or a file; null: the model's
    default template, or a plain one if the model has none."""
    allowed_origins: tuple[Text, ...] = ()
    """Origins, such as `https://example.org`, whose web pages may use the server from a browser (CORS); `*`:
    all origins."""
    max_body_bytes: PositiveInt = 1 << 20
    """Size of the largest request body; larger ones are answered with 413."""
    request_timeout: PositiveFloat = 300.0
    """The largest number of seconds from a request to the end of its answer; after that the answer is 504, or
    an error at the end of a stream."""
    shutdown_timeout: PositiveFloat = 10.0
    """Seconds for running requests to finish after SIGINT or SIGTERM."""
