"""Ask a running server for answers, and read what it says that it accepted."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from eyas.config import Config
from eyas.errors import EyasError
from eyas.evaluation.acceptance import Prompt
from eyas.intervals import ratio_interval
from eyas.server.serve import LIMITS, Server

COMMAND = "python -m eyas evaluate served"


@dataclass(frozen=True)
class Answer:
    """Hold the server's answer to one prompt.

    output_ids: the tokens of the answer.
    end_id: the token that ended it; None where the length ended it.
    accepted: the draft tokens that each verify step accepted.
    prompt_tok: the prompt's tokens as the server counts them.
    seconds: from the request to the answer.
    """

    output_ids: list[int]
    end_id: int | None
    accepted: list[int]
    prompt_tok: int
    seconds: float


def read_answer(answer: dict, seconds: float = 0.0) -> Answer:
    """Return an answer of /generate.

    Raise EyasError if it was aborted, if the server does not say what each verify step accepted,
    or if SGLang's own sums differ.
    """
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    end_id = reason.get("matched") if reason["type"] == "stop" else None
    if reason["type"] != "length" and not isinstance(end_id, int):
        raise EyasError(
            f"the server ended an answer with {reason}",
            "the end of the text, or as many tokens as were asked for",
            "look into the server's log",
        )
    # A server without a drafter has neither count.
    n_steps = meta.get("spec_verify_ct", 0)
    n_accepted = meta.get("spec_num_correct_drafts", 0)
    # The plugin sends one value a token: a number at the first token of a step, else None.
    values = meta.get("eyas_accepted") or []
    accepted = [value for value in values if value is not None]
    if n_steps and not accepted:
        raise EyasError(
            "the server says how many drafts it accepted, not in which step",
            "meta_info.eyas_accepted, from this repository's plugin",
            "patches/README.md says how to start a server with it",
        )
    if (len(accepted), sum(accepted)) != (n_steps, n_accepted):
        raise EyasError(
            f"{len(accepted)} verify steps with {sum(accepted)} accepted drafts",
            f"SGLang's own counts, {n_steps} and {n_accepted}",
        )
    return Answer(answer["output_ids"], end_id, accepted, meta["prompt_tokens"], seconds)


class Asker:
    """Ask one server for answers to the profile's prompts, at its temperature (0: greedy).

    The server is asked for `speculative_num_steps` tokens more than are counted, so that an end of
    the text inside the last verify step is seen.
    """

    def __init__(self, server: Server, config: Config):
        self.server = server
        self.n_tok = config.decode_new_tok + config.speculative_num_steps
        self.temperature = config.temperature
        self._client = httpx.Client(
            base_url=server.url, timeout=config.request_timeout_s, limits=LIMITS
        )

    def ask(self, prompt: Prompt, n_tok: int = 0) -> Answer:
        """Return the answer to one prompt; `n_tok`: most new tokens, by default the profile's.

        Raise EyasError if the server does not answer or refuses the prompt.
        """
        request = {
            "input_ids": prompt.input_ids,
            "sampling_params": {
                "max_new_tokens": n_tok or self.n_tok,
                "temperature": self.temperature,
                "custom_params": {"eyas_accepted": True},
            },
        }
        start = time.perf_counter()
        try:
            response = self._client.post("/generate", json=request)
        except httpx.HTTPError as error:
            raise EyasError(
                f"no answer from {self.server.url}: {type(error).__name__}",
                "a running SGLang server",
                COMMAND,
            ) from None
        seconds = time.perf_counter() - start
        if response.status_code != 200:
            raise EyasError(
                f"the server refused the prompt of {prompt.id}: "
                f"HTTP {response.status_code}, {response.text[:200]}",
                "an answer",
                "look into the server's log",
            )
        return read_answer(response.json(), seconds)

    def ask_all(
        self,
        prompts: list[Prompt],
        parallel: int,
        done: Callable[[Answer], None] = lambda answer: None,
    ) -> list[Answer]:
        """Return all answers, `parallel` requests at a time. `done` is called with each answer."""

        def ask(prompt: Prompt) -> Answer:
            answer = self.ask(prompt)
            done(answer)
            return answer

        with ThreadPoolExecutor(parallel) as pool:
            return list(pool.map(ask, prompts))


def speed_ratio(plain: Asker, drafting: Asker, prompts: list[Prompt], seed: int) -> dict:
    """Return plain seconds / seconds with the drafter, for as many tokens, with its interval.

    One request runs at a time. The two servers take turns, and the first one alternates.
    Both have the prompts in their prefix caches since `ask_all`, so only decoding is timed.
    """
    plain_s = []
    drafting_s = []
    for i, prompt in enumerate(prompts):
        order = (plain, drafting) if i % 2 else (drafting, plain)
        answers = {asker: asker.ask(prompt) for asker in order}
        plain_tok = len(answers[plain].output_ids)
        drafting_tok = len(answers[drafting].output_ids)
        plain_s.append(answers[plain].seconds * drafting_tok / plain_tok)
        drafting_s.append(answers[drafting].seconds)
    return ratio_interval(plain_s, drafting_s, seed).as_dict()
