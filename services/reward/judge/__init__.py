"""The parts of `llm_judge`: what judges are asked, what their answers mean, how they are reached, and what they cost."""
