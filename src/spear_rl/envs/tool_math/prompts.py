"""What the policy is told, and how it is answered: tools in Hermes form, as many chat models have learned them."""

from __future__ import annotations

import json

from spear_rl.envs.tool_math.calls import SCHEMA, TOOL

_FORMAT = f"""# Tools

These functions can be called. Their signatures, in JSON, stand within <tools></tools>:
<tools>
{json.dumps(SCHEMA)}
</tools>

To call one, write its name and its arguments as a JSON object within <tool_call></tool_call>:
<tool_call>
{{"name": "{TOOL}", "arguments": {{"code": "..."}}}}
</tool_call>
What it gives back follows within <tool_response></tool_response>."""

PROMPTS = {
    "paper": (
        "You solve mathematical problems. Reason step by step, and run Python code whenever it helps: to compute, to "
        "check a guess, to search. You see what your code prints and may call the tool again. When you are sure, stop "
        f"calling it and put your final answer within \\boxed{{}}.\n\n{_FORMAT}"
    ),
    "short": (
        f'Solve the problem. To run Python, write <tool_call>{{"name": "{TOOL}", "arguments": {{"code": "..."}}}}'
        "</tool_call>. Then give the answer as \\boxed{...}."
    ),
}
"""With the tool's whole schema, as large models know it; or in two sentences, for a small one."""

VOID = "There is neither a tool call nor a \\boxed{} answer in this turn. Call the tool, or give your final answer."
MANY_CALLS = "Error: this call was not run; a turn may have {limit} calls at most."
SILENT = "(The code ran and printed nothing.)"
STATE_LOST = "(The variables of earlier calls are gone.)"


def tool_response(*replies: str) -> str:
    """What the policy reads after its calls, one block each."""
    return "\n".join(f"<tool_response>\n{reply}\n</tool_response>" for reply in replies)
