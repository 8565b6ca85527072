"""An environment for verifiers 0.4: sums of small numbers, and a harness that asks from the environment's own process.

verifiers finds it by its name, `verifiers-sums`, where the folder of this file is on PYTHONPATH or the file is installed.
"""

import itertools
import random
import re

import httpx
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last number of an answer that came to its end is the sum."""
        numbers = re.findall(r"\d+", trace.last_reply)
        return float(trace.calls[-1].finish_reason == "stop" and numbers[-1:] == [self.data.answer])


class SumsConfig(vf.TasksetConfig):
    below: int = 10
    """Each number is less."""
    question: str = "What is {a} + {b}?"
    instruction: str | None = "Reply with only the number."
    held_out: bool = False
    """The quarter of the sums that is not for training, in the place of the others."""


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        config = self.config
        pairs = list(itertools.product(range(config.below), repeat=2))
        random.Random(0).shuffle(pairs)
        quarter = len(pairs) // 4
        return [
            SumTask(
                SumData(
                    name=f"{a}+{b}",
                    prompt=config.question.format(a=a, b=b),
                    system_prompt=config.instruction,
                    answer=str(a + b),
                ),
                config.task,
            )
            for a, b in (pairs[:quarter] if config.held_out else pairs[quarter:])
        ]


class OneQuestion(vf.Harness[vf.HarnessConfig]):
    """Asks once, without a process of its own, which takes longer to start than a small model to answer."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        async with httpx.AsyncClient(timeout=None) as client:
            answer = await client.post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": messages},
                headers={"authorization": f"Bearer {secret}"},
            )
        return vf.ProgramResult(exit_code=int(answer.is_error), stdout="", stderr=answer.text)


__all__ = ["OneQuestion", "SumsTaskset"]
