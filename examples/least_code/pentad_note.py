import pentad


class Note:
    def reset(self, secret: str, **row):
        self.secret = secret

    def read_note(self, page: int) -> str:
        """Reads a page of the note.

        Args:
            page: Which page.
        """
        return self.secret if page == 2 else "empty"


def reward(completion, secret):
    return float(completion.strip().endswith(secret))


rows = [{"prompt": "What is on page 2?", "secret": str(n)} for n in range(1000)]
recipe = {"actor.path": "Qwen/Qwen3-0.6B", "train_dataset.chat_template": True}
pentad.train(recipe, dataset=rows, environment=Note, reward=reward)
