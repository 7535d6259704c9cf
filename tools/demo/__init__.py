"""Parts of `tools/train_demo.py`: prompts, teacher, cleaning, corpora, tokenizer, student, training, evaluation, card."""
