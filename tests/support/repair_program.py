"""A program of two turns, as somebody writes it who knows nothing of Headrace but the address it is given: it uses OpenAI's own client."""

from __future__ import annotations

import openai

import headrace


class Repair(headrace.Environment):
    """Asks for a sum; says that it was wrong, and asks again. One in the second turn earns half."""

    async def episode(self, e: headrace.Episode) -> float:
        messages = list(e.messages)
        async with openai.AsyncOpenAI(base_url=e.base_url, api_key=e.api_key) as client:
            for reward in (1.0, 0.5):
                answer = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
                said = answer.choices[0].message
                if (said.content or "").strip() == e.public["answer"]:
                    return reward
                messages += [said.model_dump(), {"role": "user", "content": messages[0]["content"]}]
        return 0.0 if e.index % 2 else 0.1
