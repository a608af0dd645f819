"""What `jaxkv chat` does: messages in, answers out while they are made, one history on one cache.

The model runs on a second thread (`jaxkv.cli.worker`); Ctrl-C on the main thread asks it to stop after the step it is at.
"""

import argparse
import itertools
import sys

import jax

import jaxkv
from jaxkv.cli.lines import Lines
from jaxkv.cli.model import check_pool, open_with_tokenizer
from jaxkv.cli.prompts import DEFAULT_NEW_TOKENS
from jaxkv.cli.sampling import chosen_sampling, complaint, typed_sampling
from jaxkv.cli.worker import Worker
from jaxkv.config import pages_for
from jaxkv.decode.conversation import CONTEXT
from jaxkv.decode.overflow import overflow_message
from jaxkv.programs import keep_programs
from jaxkv.text import Answers, ChatHistory, TextStream, end_tokens
from jaxkv.weights.generation_defaults import GenerationDefaults

HELP = """\
/reset    begin a new conversation
/help     this
/exit     end (Ctrl-D, too)
Ctrl-C stops an answer; what there is of it stays in the conversation. A message that begins with / is written with //."""


def run(args: argparse.Namespace) -> int:
    """The command; see `jaxkv chat --help`."""
    typed_sampling(args)
    keep_programs()
    opened = open_with_tokenizer(args.model)
    tokenizer, config, defaults = opened.tokenizer, opened.config, opened.generation_defaults()
    history = ChatHistory(tokenizer, system=args.system)
    context = chosen_context(args.context, config.max_seq_len)
    check_pool(config, args.page_size, pages_for(context, args.page_size) + 1)
    longest = longest_answer(args.max_new_tokens, context, defaults)
    history_room = context - longest
    ends = end_tokens(tokenizer, config.eos_token_ids, vocab_size=config.vocab_size)
    _say(complaint(defaults))
    conversation = jaxkv.Conversation(
        opened.decoder(dtype=args.dtype), max_seq_len=context, sampling=chosen_sampling(args, defaults), eos_token_id=ends,
        page_size=args.page_size,
    )  # fmt: skip
    chat = Chat(conversation, history, ends, history_room, longest, jax.random.key(args.seed))
    return talk(chat, Lines(sys.stdin, sys.stdout, sys.stderr))


def chosen_context(wanted: int | None, allowed: int) -> int:
    """Tokens of the conversation.

    Raises:
      ValueError: the model allows fewer than were asked for.
    """
    if wanted is not None and wanted > allowed:
        raise ValueError(f"--context {wanted} is too many: the model allows {allowed} tokens")
    return wanted or min(CONTEXT, allowed)


def longest_answer(wanted: int | None, context: int, defaults: GenerationDefaults) -> int:
    """Tokens that are kept free for an answer: as many as wanted, else as the model's file says, else 256; at most half of the context.

    Raises:
      ValueError: more are wanted than leave room for a message.
    """
    if wanted is not None and wanted > context - 8:
        raise ValueError(
            f"--max-new-tokens {wanted} leaves no room for a message in a conversation of {context} tokens (--context)"
        )
    return wanted or min(defaults.max_new_tokens or DEFAULT_NEW_TOKENS, context // 2)


class Chat:
    """A conversation in texts: a question at a time, and its answer on stdout.

    Args:
      conversation: what computes the answers.
      history: the turns so far.
      ends: tokens that end an answer.
      room: tokens that the history may have.
      longest: tokens of an answer, at most.
      key: of the sampling.
    """

    def __init__(
        self,
        conversation: jaxkv.Conversation,
        history: ChatHistory,
        ends: tuple[int, ...],
        room: int,
        longest: int,
        key: jax.Array,
    ):
        self.conversation, self.history = conversation, history
        self._ends, self._room, self._longest, self._key = ends, room, longest, key
        self._turns = itertools.count()
        self._overflow_said = False

    def ask(self, question: str, *, stoppable: bool) -> bool:
        """Writes the answer to a question.

        Args:
          question: of the user.
          stoppable: whether Ctrl-C ends the answer only.

        Returns:
          Whether Ctrl-C ended it.

        Raises:
          ValueError: the question has no room in the context.
          KeyboardInterrupt: Ctrl-C, a second one where the first stops the answer.
        """
        tokens, dropped = self.history.ask(question, self._room)
        if dropped:
            _say(f"the context is full: the oldest {'turn is' if dropped == 1 else f'{dropped} turns are'} forgotten")
        key = jax.random.fold_in(self._key, next(self._turns))  # asked once more, a question gets another answer
        answers = Answers(self.history.tokenizer, 1, self._ends, TextStream(sys.stdout, [""]))
        try:
            worker = Worker(self.conversation.answer(tokens, max_new_tokens=self._longest, key=key))
        except ValueError:
            self.history.take_back()
            raise
        stopped = False
        try:
            for token in worker:
                answers.token(0, token.token)
        except KeyboardInterrupt:
            if not stoppable:
                raise
            stopped = True
            worker.stop()
            for token in worker:
                answers.token(0, token.token)
        answers.finish()
        self._remember(answers.texts[0], stopped)
        return stopped

    def _remember(self, text: str, stopped: bool) -> None:
        if text or not stopped:
            self.history.answered(text)
        else:
            self.history.take_back()  # most templates take no question without an answer
        if not stopped and not self.conversation.finished:
            _say(f"stopped after {self._longest} tokens (--max-new-tokens)")
        nonfinite, dtype = self.conversation.nonfinite, self.conversation.model.config.dtype
        if nonfinite and not self._overflow_said:
            self._overflow_said = True
            _say(overflow_message(nonfinite, nonfinite, dtype))


def talk(chat: Chat, lines: Lines) -> int:
    """Questions and answers until there are no more lines; returns the exit status.

    Raises:
      KeyboardInterrupt: Ctrl-C twice, or once where nobody types.
      ValueError: a message has no room, or is no text, where nobody types.
    """
    lines.note("/help says what there is, Ctrl-D ends")
    interrupted = False
    while True:
        try:
            line = lines.read()
        except KeyboardInterrupt:
            if interrupted or not lines.typed:
                raise
            lines.note("\nCtrl-C again, or Ctrl-D, ends")
            interrupted = True
            continue
        interrupted = False
        command = line.strip() if line is not None and line.startswith("/") and not line.startswith("//") else None
        if line is None or command == "/exit":
            return 0
        if command == "/reset":
            chat.history.clear()
            lines.note("a new conversation")
        elif command is not None:
            _say(
                HELP
                if command == "/help"
                else f"there is no {command}; /help says what there is. For a message that begins with /: //"
            )
        elif line.strip():
            try:
                interrupted = chat.ask(line.removeprefix("/") if line.startswith("//") else line, stoppable=lines.typed)
            except ValueError as error:
                if not lines.typed:
                    raise
                _say(str(error))


def _say(line: str | None) -> None:
    if line is not None:
        print(f"jaxkv chat: {line}" if line is not HELP else line, file=sys.stderr)
