"""`LLM`: offline generation under vLLM's names. A script for vLLM runs after its import has been changed."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterable
from collections.abc import Sequence as List
from typing import Any

import jax
from tqdm.auto import tqdm

from jaxkv.config import shown
from jaxkv.engine.engine import Engine
from jaxkv.engine.options import EngineOptions
from jaxkv.engine.outputs import RequestOutput
from jaxkv.engine.params import RequestOutputKind, SamplingParams
from jaxkv.engine.prompts import Prompt, as_prompts, chat_prompts
from jaxkv.model.decoder import Decoder, check_decoder
from jaxkv.weights.generation_defaults import GenerationDefaults
from jaxkv.weights.loading import dtype_name, open_model

_WITHOUT_EFFECT = {
    "trust_remote_code": "no code of a model's folder is ever run",
    "enforce_eager": "steps are compiled",
    "disable_log_stats": "nothing is logged at each step",
    "swap_space": "a preempted request is computed again",
    "max_seq_len_to_capture": "there are no graphs to capture",
    "enable_chunked_prefill": "prompts always come in chunks",
    "disable_custom_all_reduce": "there is one device",
}
"""vLLM's arguments that change no result, and why nothing is to do for them."""


class LLM:
    """A model that answers many prompts together, by continuous batching over a paged cache with a prefix cache.

    Args:
      model: a name or path as for `jaxkv.load`, or a `Decoder`, whose arrays are used as they are, without a copy.
      tokenizer: a transformers tokenizer, or the name or path of one; None is the model's own (of a `Decoder`: none).
      dtype: of the parameters, as for `jaxkv.load`; "auto" keeps the file's.
      tensor_parallel_size: devices that the model is divided over; 1, more are not supported yet.
      **options: vLLM's names, see `jaxkv.engine.options.EngineOptions`: `gpu_memory_utilization`, `block_size`, `max_model_len`,
        `max_num_seqs`, `max_num_batched_tokens`, `enable_prefix_caching`, `num_gpu_blocks_override`, `kv_cache_dtype`, `seed`; and of
        jaxkv's own `deterministic` and `implementation`. Arguments of vLLM's that change no result are accepted: `trust_remote_code`,
        `enforce_eager`, `disable_log_stats`, `swap_space`, `max_seq_len_to_capture`, `enable_chunked_prefill`.

    Attributes:
      engine: the `Engine` below.

    Raises:
      TypeError: an argument is unknown.
      ValueError: an argument is out of range or not supported; and what `jaxkv.load` raises.

    Examples:
      llm = LLM("HuggingFaceTB/SmolLM2-135M-Instruct")
      for output in llm.generate(["Hello, my name is"], SamplingParams(temperature=0.8, top_p=0.95)):
          print(output.outputs[0].text)

    Source: the names and their meanings are vLLM's (Kwon et al., SOSP 2023).
    """

    def __init__(
        self,
        model: str | os.PathLike | Decoder,
        *,
        tokenizer: Any = None,
        dtype: Any = "auto",
        tensor_parallel_size: int = 1,
        **options: Any,
    ):
        known = {field.name for field in dataclasses.fields(EngineOptions)}
        if unknown := sorted(options.keys() - known - _WITHOUT_EFFECT.keys()):
            raise TypeError(f"LLM() has no argument {unknown[0]!r}; there are {', '.join(sorted(known))}")
        if tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size!r} is not supported yet: the engine runs on one device, give 1"
            )
        options = {name: value for name, value in options.items() if name in known}
        EngineOptions(**options)  # whatever is wrong with them is said before a model is read
        self._defaults = GenerationDefaults()
        if isinstance(model, Decoder):
            if dtype not in ("auto", None) and dtype_name(dtype) != model.config.dtype:
                raise ValueError(
                    f"dtype is {dtype!r}, but the model given is {model.config.dtype}: cast it, or leave dtype out"
                )
            decoder = model
        else:
            chosen, opened = dtype_name(dtype), open_model(model)
            self._defaults = opened.generation_defaults()
            decoder, tokenizer = opened.decoder(dtype=chosen), opened.tokenizer if tokenizer is None else tokenizer
        if isinstance(tokenizer, str | os.PathLike):
            import transformers

            tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer)
        self.engine = Engine(decoder, tokenizer, **options)
        self._names = itertools.count()

    def __repr__(self) -> str:
        return f"LLM({self.engine.config.family}, {self.engine!r})"

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | List[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: List[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all of them together.

        An exception, Ctrl-C included, ends the requests of this call and leaves the engine usable.

        Args:
          prompts: a text, a list of token ids, `{"prompt": text}`, `{"prompt_token_ids": ids}` (with a `"cache_salt"` if prompts are not
            to share pages with others), or a list of these, mixed.
          sampling_params: for all prompts, or one for each; None is `get_default_sampling_params()`.
          use_tqdm: whether a progress bar is shown.
          priority: for each prompt; less is served earlier.

        Returns:
          The outputs, in the prompts' order.

        Raises:
          ValueError: a prompt or an argument cannot be served; before anything is computed.
        """
        return self._answer(as_prompts(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: List[Any],
        sampling_params: SamplingParams | List[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: List[Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or several, in the model's chat template.

        Args:
          messages: `[{"role": ..., "content": ...}, ...]`, or a list of such lists.
          sampling_params, use_tqdm: as for `generate`.
          chat_template: in the place of the tokenizer's own, in Jinja.
          add_generation_prompt: end with the beginning of an answer.
          continue_final_message: let the last message be gone on with; then without `add_generation_prompt`.
          tools: for the template.
          chat_template_kwargs: more variables of the template.

        Returns:
          The outputs, one for each conversation.

        Raises:
          ValueError: there is no chat template, it fails, or an argument cannot be served.
        """
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        options |= {"tools": tools, **(chat_template_kwargs or {})}
        if chat_template is not None:
            options["chat_template"] = chat_template
        return self._answer(chat_prompts(self.engine.tokenizer, messages, options), sampling_params, use_tqdm, None)

    def _answer(self, prompts: list[Prompt], given: Any, use_tqdm: bool, priority: List[int] | None) -> list[RequestOutput]:
        params = self._params(given, len(prompts))
        if priority is not None and len(priority) != len(prompts):
            raise ValueError(f"there are {len(prompts)} prompts and {len(priority)} priorities: give one for each")
        names: list[str] = []
        done: dict[str, RequestOutput] = {}
        try:
            for i, (prompt, its) in enumerate(zip(prompts, params)):
                name = str(next(self._names))
                salt, text = prompt.cache_salt, prompt.text
                self.engine.add_request(
                    name,
                    prompt.ids or text or [],
                    its,
                    prompt_text=text,
                    priority=0 if priority is None else int(priority[i]),
                    cache_salt=salt,
                )
                names.append(name)
            with tqdm(total=len(names), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while len(done) < len(names):
                    for output in self.engine.step():
                        if output.request_id in names and output.finished:
                            done[output.request_id] = output
                            bar.update()
        except BaseException:
            self.engine.abort(names)
            self.engine.recover()
            with contextlib.suppress(Exception):
                self.engine.step()  # takes the last outputs of what was aborted
            raise
        for output in done.values():
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}") from output.error
        return [done[name] for name in names]

    def _params(self, given: Any, count: int) -> list[SamplingParams]:
        each = (
            given
            if isinstance(given, list | tuple)
            else [self.get_default_sampling_params() if given is None else given] * count
        )
        if len(each) != count:
            raise ValueError(f"there are {count} prompts and {len(each)} sampling_params: give one for each, or one for all")
        for params in each:
            if not isinstance(params, SamplingParams):
                raise ValueError(f"sampling_params must be a jaxkv.SamplingParams, or one for each prompt, got {shown(params)}")
        return [dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY) for params in each]

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, with what the model's `generation_config.json` says in their place; a new object each time."""
        names = {
            "temperature": "temperature",
            "top_k": "top_k",
            "top_p": "top_p",
            "min_p": "min_p",
            "max_new_tokens": "max_tokens",
        }
        said = {ours: getattr(self._defaults, theirs) for theirs, ours in names.items()}
        return SamplingParams(**{name: value for name, value in said.items() if value is not None})

    def get_tokenizer(self) -> Any:
        """The tokenizer; None where there is none."""
        return self.engine.tokenizer

    def update_params(self, params: Any, *, running: str = "continue") -> None:
        """Compute with other parameters from now on, such as those that a trainer has just made; nothing is copied or compiled.

        Args:
          params: a `Decoder`, or a pytree of its structure, with arrays of the same shapes and dtypes.
          running: what becomes of unfinished requests: "continue" lets them go on, over what the old parameters have computed so far;
            "restart" begins their answers anew. Outputs say which, in `weights_versions` and `restarts`.

        Raises:
          ValueError: the parameters do not fit; nothing has changed then.
        """
        if running not in ("continue", "restart"):
            raise ValueError(f'running must be "continue" or "restart", got {running!r}')
        if isinstance(params, tuple):
            check_decoder(params, "params")
        leaves, runner = jax.tree.leaves(params), self.engine.runner
        wanted = [(x.shape, x.dtype) for x in runner.leaves]
        if [(getattr(x, "shape", None), getattr(x, "dtype", None)) for x in leaves] != wanted:
            raise ValueError(
                f"params must be those of the model: {len(wanted)} arrays of its shapes and dtypes, got {shown(params)}"
            )
        self.engine.replace_weights(leaves, restart=running == "restart")

    def reset_prefix_cache(self) -> bool:
        """Forget what pages hold that nobody is using; what running requests hold is forgotten, too, for later ones."""
        self.engine.scheduler.cache.clear()
        return True

    def sleep(self, level: int = 1) -> None:
        """Give the memory of all pages back, for a trainer; the weights stay where they are, since the trainer may be using them.

        Args:
          level: 1, as for vLLM.

        Raises:
          ValueError: another level.
        """
        if level != 1:
            raise ValueError(
                f"level must be 1, got {level!r}: the weights are not freed; `del llm` frees everything that is the engine's own"
            )
        self.engine.sleep()

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory for pages again; `tags` may name "kv_cache" and "weights", as for vLLM."""
        if tags is None or "kv_cache" in list(tags):
            self.engine.wake_up()

    def warm_up(self, *, sampled: bool | None = None) -> int:
        """Compile every program that ordinary steps need, and wait for it.

        Args:
          sampled: with sampling, or greedy; None is both.

        Returns:
          How many programs there are.
        """
        runner = self.engine.runner
        for kind in (False, True) if sampled is None else (sampled,):
            runner.programs.want(runner.shapes(sampled=kind))
        runner.programs.wait()
        return runner.programs.compilations
