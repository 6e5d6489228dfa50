from datasets import Dataset
from trl import GRPOTrainer


class Note:
    def reset(self, secret: str, **row):
        self.secret = secret

    def read_note(self, page: int) -> str:
        """Reads a page of the note.

        Args:
            page: Which page.
        """
        return self.secret if page == 2 else "empty"


def reward(completions, secret, **columns):
    texts = [completion[-1]["content"] for completion in completions]
    return [float(text.strip().endswith(right)) for text, right in zip(texts, secret, strict=True)]


prompt = [{"role": "user", "content": "What is on page 2?"}]
rows = Dataset.from_list([{"prompt": prompt, "secret": str(n)} for n in range(1000)])
trainer = GRPOTrainer(
    model="Qwen/Qwen3-0.6B",
    train_dataset=rows,
    environment_factory=Note,
    reward_funcs=reward,
)
trainer.train()
