"""A program that calls its policy through LiteLLM. It runs with the Python that has it, and imports nothing of Headrace.

litellm_program.py JSON      what to ask, where and how; prints the answers as a line of JSON
"""

import asyncio
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches one


async def main(told: dict[str, Any]) -> None:
    import litellm  # type: ignore[import-not-found]

    used: list[Any] = []
    for question in told["questions"]:
        messages: list[Any] = [{"role": "user", "content": question}]
        while messages[-1]["role"] != "assistant":
            answer: Any = await litellm.acompletion(
                model="openai/policy", messages=messages, stream=told["stream"], **told["options"]
            )
            if told["stream"]:
                answer = litellm.stream_chunk_builder([chunk async for chunk in answer], messages=messages)
            said = answer.choices[0].message
            used.append(said.model_dump())
            messages.append(used[-1])
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": told["seen"]} for call in said.tool_calls or ()
            ]
    print(json.dumps(used))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
