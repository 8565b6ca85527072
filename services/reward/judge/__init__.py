"""The parts of `llm_judge`: what judges are asked, how they are reached, what their answers mean and cost, and how far they agree."""
