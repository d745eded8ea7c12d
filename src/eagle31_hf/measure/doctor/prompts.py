"""Prompts to examine a chat model with: short, of many kinds, and nobody's data set."""

CONVERSATIONS: tuple[list[dict[str, str]], ...] = tuple(
    [{"role": "user", "content": text}]
    for text in (
        "Explain in three sentences why the sky is blue.",
        "Write a Python function that returns the n-th Fibonacci number.",
        "A train leaves at 9:40 and arrives at 13:05. How long is the ride?",
        "Translate into French: The shop is closed on Sundays.",
        "Write a short, polite e-mail that declines an invitation to a meeting.",
        "Summarise the plot of Romeo and Juliet in two sentences.",
        "What is the difference between a list and a tuple in Python?",
        "Give me a simple recipe for pancakes.",
        "List five things to pack for a weekend in the mountains.",
        "If a shirt costs 24 euros after a discount of 20 percent, what did it cost before?",
        "Write a SQL query that counts the orders of each customer.",
        "Who wrote The Origin of Species, and what is it about?",
        "Write a haiku about autumn.",
        "How do I undo the last commit in git without losing my changes?",
        "Name three advantages and three disadvantages of working from home.",
        "Continue the story: The lighthouse keeper had not spoken to anyone for a month, until",
        "What should I look for when I buy a used bicycle?",
        "Write a bash one-liner that finds the ten largest files below a folder.",
        "Explain photosynthesis to a ten-year-old.",
        "Correct the grammar: Me and him was going to the store yesterday.",
    )
)
