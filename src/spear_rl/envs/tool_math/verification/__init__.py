"""Whether an answer is right: the boxed answer, integers, and math-verify in the sandbox."""
