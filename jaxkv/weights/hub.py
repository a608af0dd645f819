"""Model folders from the Hugging Face hub."""

from pathlib import Path

_WANTED = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.tiktoken", "merges.txt", "vocab.txt"]
_UNWANTED = ["*/*", "*.gguf", "consolidated*"]


def download_folder(model_id: str) -> Path:
    """Fetch safetensors, configuration and tokenizer of a model, or find them in the hub's cache.

    Raises:
      FileNotFoundError: the hub has no such model, or does not show it to this user.
      ConnectionError: the hub cannot be reached and the model is not in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise FileNotFoundError(f"no folder, file or model of the hub is called {model_id!r}: {_line(error)}") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConnectionError(
            f"{model_id!r} is no local folder, is not in the hub's cache, and the hub cannot be reached: {_line(error)}"
        ) from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
