"""What becomes of tokens that were drawn: text, log-probabilities, an end, and the outputs that users get."""

from typing import Any

from jaxkv.engine.batch import Batch
from jaxkv.engine.outputs import CompletionOutput, Logprob, RequestOutput
from jaxkv.engine.packing import Drawn
from jaxkv.engine.params import RequestOutputKind
from jaxkv.engine.sequence import Request, Sequence
from jaxkv.engine.text import AnswerText, StopTexts


class Answers:
    """The answers to all requests, as far as they are.

    Args:
      tokenizer: anything with transformers' `decode`, or None.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._texts: dict[Sequence, AnswerText] = {}
        self._said: dict[Sequence, tuple[int, int]] = {}  # tokens and characters that an output has given already
        self._prompts: dict[Request, list] = {}  # log-probabilities of prompts that are not computed to their end
        self._errors: dict[Request, BaseException] = {}

    def begin(self, request: Request) -> None:
        """A request has come."""
        params = request.params
        if (
            self._tokenizer is not None
            and params.detokenize
            and (params.stop or params.output_kind != RequestOutputKind.FINAL_ONLY)
        ):
            for sequence in request.samples:
                self._begin_text(sequence)
        if params.prompt_logprobs is not None:
            self._prompts[request] = [None] * len(request.prompt_token_ids)
            if len(request.prompt_token_ids) == 1:
                request.prompt_logprobs = self._prompts.pop(request)

    def _begin_text(self, sequence: Sequence) -> None:
        params = sequence.request.params
        stops = StopTexts(params.stop or (), params.include_stop_str_in_output)
        skip = params.skip_special_tokens
        self._texts[sequence] = AnswerText(self._tokenizer, stops, min_tokens=params.min_tokens, skip_special_tokens=skip)

    def begin_anew(self, request: Request) -> None:
        """Nothing of a request's answer is there any more."""
        for sequence in request.samples:
            if sequence.finish_reason is None:
                sequence.begin_anew()
                self._said.pop(sequence, None)
                if sequence in self._texts:
                    self._begin_text(sequence)

    def token(self, sequence: Sequence, drawn: Drawn, row: int) -> None:
        """The newest token of a sequence, which may end it: then its finish reason is set."""
        params, token = sequence.request.params, sequence.output[-1]
        sequence.cumulative_logprob += float(drawn.logprob[row])
        if sequence.logprobs is not None:
            sequence.logprobs.append(self._alternatives(drawn, row, params.logprobs or 0, params.detokenize))
        text = self._texts.get(sequence)
        if token in sequence.request.ends or token in (params.stop_token_ids or ()):
            own = token not in sequence.request.ends
            sequence.finish_reason, sequence.stop_reason = "stop", token if own else None
            if params.include_stop_str_in_output and text is not None:
                text.add(token)
        elif text is not None:
            text.add(token)
        if text is not None and text.stop is None and sequence.remaining <= 0 and sequence.finish_reason is None:
            text.finish()
        if text is not None and text.stop is not None and sequence.finish_reason is None:
            sequence.finish_reason, sequence.stop_reason = "stop", text.stop
        if sequence.finish_reason is None and len(sequence.output) >= sequence.request.limit:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            self.ended(sequence)

    def ended(self, sequence: Sequence) -> None:
        """A sequence gets no more tokens."""
        if sequence in self._texts:
            self._texts[sequence].finish()

    def failed(self, request: Request, error: BaseException) -> None:
        """A request has ended because of an error."""
        self._errors[request] = error

    def about_prompts(self, batch: Batch, drawn: Drawn, width: int) -> None:
        """Log-probabilities of prompts' tokens, where they were asked for."""
        for nth, piece in enumerate(batch.pieces):
            request, params = piece.sequence.request, piece.sequence.request.params
            if request not in self._prompts or piece.sequence.index > 0:
                continue
            known = self._prompts[request]
            for position in range(piece.begin, min(piece.end, len(known) - 1)):
                row = nth * width + position - piece.begin
                known[position + 1] = self._alternatives(drawn, row, params.prompt_logprobs or 0, params.detokenize)
            if piece.end >= len(known) - 1:
                request.prompt_logprobs = self._prompts.pop(request)

    def _alternatives(self, drawn: Drawn, row: int, count: int, texts: bool) -> dict[int, Logprob]:
        tokens = [(int(drawn.token[row]), float(drawn.logprob[row]), int(drawn.rank[row]))]
        ids, logprobs = drawn.ids[row, :count].tolist(), drawn.logprobs[row, :count].tolist()
        tokens += zip(ids, logprobs, range(1, count + 1))
        found: dict[int, Logprob] = {}
        for token, logprob, rank in tokens:
            if token not in found:
                text = self._tokenizer.decode([token]) if texts and self._tokenizer is not None else None
                found[token] = Logprob(logprob, rank, text)
        return found

    def output(self, request: Request) -> RequestOutput | None:
        """What is new of a request, as its `output_kind` says; None where that is nothing."""
        kind, finished = request.params.output_kind, request.finished
        if kind == RequestOutputKind.FINAL_ONLY and not finished:
            return None
        samples = [self._completion(s, delta=kind == RequestOutputKind.DELTA) for s in request.samples]
        completions = [sample for sample in samples if sample is not None]
        if not completions and not finished:
            return None
        out = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=completions,
            finished=finished,
            prompt_logprobs=request.prompt_logprobs,
            num_cached_tokens=request.cached or 0,
            metrics=request.metrics,
            weights_versions=tuple(request.weights),
            restarts=request.restarts,
            error=self._errors.get(request),
        )
        if finished:
            self._forget(request)
        return out

    def _completion(self, sequence: Sequence, *, delta: bool) -> CompletionOutput | None:
        text, tokens, logprobs = self._text(sequence), sequence.output, sequence.logprobs
        begin, begin_text = self._said.get(sequence, (0, 0)) if delta else (0, 0)
        if delta:
            ended = sequence.finish_reason is not None
            if begin < 0 or (begin == len(tokens) and begin_text == len(text) and not ended):
                return None  # all of it has been said
            self._said[sequence] = (-1 if ended else len(tokens), len(text))
        return CompletionOutput(
            index=sequence.index,
            text=text[begin_text:],
            token_ids=tokens[begin:],
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=None if logprobs is None else logprobs[begin:],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    def _text(self, sequence: Sequence) -> str:
        """The certain text of a sequence."""
        params = sequence.request.params
        if sequence in self._texts:
            text = self._texts[sequence]
            return text.text if sequence.finish_reason is not None else text.text[: text.certain]
        if self._tokenizer is None or not params.detokenize or sequence.finish_reason is None:
            return ""
        tokens = sequence.output
        if sequence.finish_reason == "stop" and not params.include_stop_str_in_output:
            tokens = tokens[:-1]  # by a token: stop texts are looked for in `_texts`
        skip = params.skip_special_tokens
        return self._tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    def _forget(self, request: Request) -> None:
        self._prompts.pop(request, None)
        self._errors.pop(request, None)
        for sequence in request.samples:
            self._texts.pop(sequence, None)
            self._said.pop(sequence, None)
