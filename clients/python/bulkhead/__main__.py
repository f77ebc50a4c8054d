"""``python -m bulkhead generate MODEL "text"``, and ``chat MODEL``: models that generate, in words.
``comfyui install DIR`` puts the nodes into ComfyUI."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, Sequence

from . import comfyui
from .client import Client, connect
from .errors import Error
from .generation import Generation
from .text import Message, Text

NUMBERS = {
    "temperature": "of the distribution that is drawn from; 0 is greedy",
    "top_k": "draw among this number of the likeliest tokens; 0: all",
    "top_p": "draw among the likeliest that hold this share of the probability",
    "min_p": "draw among those at least this likely, relative to the likeliest",
    "repetition_penalty": "divides the logits of tokens that were there; 1: none",
    "ras_repeats": "draw again what the last frames hold this number of times, where a model looks back; 0: off",
    "seed": "of the answer's own random stream",
    "max_new_tokens": "end after this number of tokens",
    "guidance": "weight of classifier-free guidance, for models that have it",
}
METHOD = "generate"
ANSWER_SHARE = 4  # of a sequence: a chat keeps a quarter of it free for the answer


def number(text: str) -> float | int:
    value = json.loads(text)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(text)
    return value


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m bulkhead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, does in {"generate": "answer one text", "chat": "answer lines of standard input, one conversation"}.items():
        command = commands.add_parser(name, help=does, description=does, epilog="Exit status: 0 answered, 1 failed and why, 2 wrong usage, "
                                      "3 no daemon answers, 130 interrupted.")  # fmt: skip
        command.add_argument("model")
        if name == "generate":
            command.add_argument("text", help="what to answer; - is standard input")
            command.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
            command.add_argument("--json", action="store_true", help='{"token", "text"} a line as they come, then {"text", "tokens", …}')
        command.add_argument("--system", help="what the model is told before the conversation")
        for parameter, meaning in NUMBERS.items():
            names = dict.fromkeys((f"--{parameter.replace('_', '-')}", f"--{parameter}"))
            command.add_argument(*names, dest=parameter, type=number, metavar="N", help=meaning)
        command.add_argument("--do-sample", dest="do_sample", choices=["true", "false"], help="draw, or take the likeliest")
        command.add_argument("--package", help="the model's folder, where it is another one here than for the daemon")
        command.add_argument("--socket", help="the control socket (default: as `bulkhead` finds it)")
    nodes = commands.add_parser("comfyui", help="put the nodes into a ComfyUI folder, or take them out", epilog="Exit status: 0 done, 1 failed and why, 2 wrong usage.")
    nodes.add_argument("does", choices=["install", "uninstall"])
    nodes.add_argument("folder", type=Path, help="that of ComfyUI's main.py")
    return parser.parse_args(arguments)


def parameters_of(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in NUMBERS if getattr(options, name) is not None}
    if options.do_sample is not None:
        given["do_sample"] = options.do_sample == "true"
    return given


class ProgressLine:
    """One line on a terminal's standard error, cleared before other output is printed."""

    def __init__(self) -> None:
        self._visible = sys.stderr.isatty()
        self._shown = False

    def show(self, text: str) -> None:
        if self._visible:
            self._shown = True
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Conversation:
    """One model, asked in text."""

    def __init__(self, client: Client, options: argparse.Namespace) -> None:
        self._client, self._options = client, options
        self._progress = ProgressLine()
        self._system: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
        self._turns: list[Message] = []  # questions and answers, alternating
        self.text, self._length = self._opened()

    def _opened(self) -> tuple[Text, int]:
        """Loads the model and its package's tokenizer. Returns the text codec and the positions
        of a sequence."""
        model = self._options.model
        self._progress.show(f"loading {model} …")
        try:
            with self._client.open(model) as channel:
                described = channel.methods.get(METHOD)
        finally:
            self._progress.clear()
        if described is None:
            raise Error("method_unknown", f"generating with {model}: it has no method `{METHOD}`", "name a model with `runtime: generate`")
        if described.get("codebooks", 1) != 1:
            raise Error("input_invalid", f"answering in words with {model}: it gives codes of {described['codebooks']} codebooks",
                        "take its tokens: Client.generate, or `bulkhead generate`")  # fmt: skip
        return Text(self._options.package or described["package"]), described["length"]

    def _fitting(self, question: Message) -> tuple[list[Message], list[int]]:
        """Returns as many of the latest turns as leave room for an answer, and their prompt with
        the question. Tells what is left out."""
        turns = self._turns
        prompt = self.text.prompt([*self._system, *turns, question])
        room = min(self._options.max_new_tokens or self._length, self._length // ANSWER_SHARE)
        while turns and len(prompt) + room > self._length:
            turns = turns[2:]
            prompt = self.text.prompt([*self._system, *turns, question])
        if left_out := (len(self._turns) - len(turns)) // 2:
            print(f"the oldest {left_out} of {len(self._turns) // 2} questions are left out, with their answers: "
                  f"a sequence has {self._length} positions", file=sys.stderr)  # fmt: skip
        return turns, prompt

    def answer(self, text: str, *, raw: bool = False, as_json: bool = False) -> None:
        """Prints the answer as it arrives, and statistics on standard error. Adds the answer to
        the conversation."""
        question = {"role": "user", "content": text}
        turns, prompt = ([], self.text.encode(text)) if raw or not self.text.chats else self._fitting(question)
        self._progress.show(f"reading {len(prompt)} tokens …")
        said: list[str] = []
        with self._client.generate(self._options.model, prompt, **parameters_of(self._options)) as generation:
            try:
                self._print(generation, said, as_json)
            finally:
                self._progress.clear()
                if said and not as_json:
                    print(flush=True)
        if as_json:
            print(json.dumps({"text": "".join(said), "tokens": generation.tokens, **generation.statistics}, ensure_ascii=False), flush=True)
        else:
            print(summary(generation), file=sys.stderr, flush=True)
        self._turns = [*turns, question, {"role": "assistant", "content": "".join(said)}]

    def _print(self, generation: Generation, said: list[str], as_json: bool) -> None:
        pieces = self.text.stream()
        for count, token in enumerate(generation, 1):
            piece = pieces.push(token)
            said.append(piece)
            if as_json:
                self._progress.clear()
                print(json.dumps({"token": token, "text": piece}, ensure_ascii=False), flush=True)
            elif piece:
                self._progress.clear()
                sys.stdout.write(piece)
                sys.stdout.flush()
            if not sys.stdout.isatty():
                self._progress.show(f"{count} tokens …")


def summary(generation: Generation) -> str:
    told = generation.statistics
    line = f"{len(generation.tokens)} tokens ({told.get('finish')}), {told.get('tokens_per_second', 0):.1f} tokens/s, "
    line += f"the first after {told.get('first_token_ms', 0):.0f} ms; prompt of {told.get('prompt_tokens')}"
    line += f", {told['reused_tokens']} of them known already" if told.get("reused_tokens") else ""
    return line + (f"; seed {told['seed']}" if "seed" in told else "")


def tell(error: Error, as_json: bool) -> int:
    if as_json:
        print(json.dumps({"error": {"code": error.code, "attempt": error.attempt, "remedy": error.remedy}}), file=sys.stderr)
    else:
        print(f"error: {error.attempt} ({error.code})" + (f"\n  {error.remedy}" if error.remedy else ""), file=sys.stderr)
    return 3 if error.code == "not_running" else 1


def chat(conversation: Conversation) -> int:
    """Reports a failed answer and goes on: the daemon restarts the model."""
    status = 0
    for line in questions():
        try:
            conversation.answer(line)
            status = 0
        except Error as error:
            status = tell(error, False)
            if status == 3:
                break
    return status


def questions() -> Any:
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    as_json = options.command == "generate" and options.json
    if isinstance(sys.stdin, io.TextIOWrapper):
        # As for arguments: invalid bytes are refused by name.
        sys.stdin.reconfigure(errors="surrogateescape")
    try:
        if options.command == "comfyui":
            print({"install": comfyui.install, "uninstall": comfyui.uninstall}[options.does](options.folder))
            return 0
        with connect(options.socket, name=f"python -m bulkhead {options.command}") as client:
            conversation = Conversation(client, options)
            if options.command == "chat":
                return chat(conversation)
            conversation.answer(sys.stdin.read() if options.text == "-" else options.text, raw=options.raw, as_json=as_json)
            return 0
    except Error as error:
        return tell(error, as_json)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


if __name__ == "__main__":
    sys.exit(main())
