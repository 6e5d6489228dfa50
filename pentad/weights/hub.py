"""Uploading a saved folder to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from pentad.core.errors import Problem, RunError, UserError
from pentad.weights.hf import HfFolder


def push_to_hub(
    folder: str | Path,
    repo: str,
    *,
    private: bool = True,
    token: str | None = None,
    message: str = "Upload model",
    endpoint: str | None = None,
) -> str:
    """Uploads a folder as it is and returns the address of the commit.

    The folder is opened first, so that a torn one never leaves the machine. Without a token the
    one of `hf auth login` is used.
    """
    HfFolder(folder)
    if repo.count("/") != 1:
        raise UserError(Problem(f"repo = {repo}", "a repository is named user/name"))
    api = HfApi(endpoint=endpoint, token=token)
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        return str(api.upload_folder(folder_path=folder, repo_id=repo, commit_message=message))
    except Exception as error:  # the hub's, the network's and the login's are of many kinds
        reason = str(error).strip().split("\n")[0]
        rule = f"{folder} was not uploaded to {repo} at {api.endpoint} ({reason})"
        raise RunError(f"{rule}; check the network, the name and `hf auth login`") from error
