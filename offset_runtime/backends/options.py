"""Options of a backend that a user may set. Plain values: reading them loads no backend."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

KVType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


# llama.cpp counts in 32 bits, and a larger number would silently become a small one.
_MOST = 2**31 - 1024


class LlamaCppOptions(BaseModel):
    """How llama.cpp runs a GGUF file. The names are llama-cpp-python's.

    `n_ctx`: tokens that all sequences together may hold, rounded up to 256; the memory for them is taken at
    load. None: 8,192. A single sequence is limited by this and by what the model was trained on. `n_batch`: most
    tokens of one call; `n_ubatch`: of one computation. `n_seq_max`: most open sequences. `n_threads`,
    `n_threads_batch`: threads of decode and prefill; None: one a usable core. `n_gpu_layers`: layers on the GPU,
    -1 all, where llama-cpp-python was built for one. `flash_attn`: None leaves it to llama.cpp. `type_k`,
    `type_v`: type of the KV cache; a quantised `type_v` needs flash attention. `use_mmap`: map the file instead of
    reading it; `use_mlock`: keep it in memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_ctx: int | None = Field(default=None, ge=1, le=_MOST)
    n_batch: int = Field(default=2048, ge=1, le=_MOST)
    n_ubatch: int = Field(default=512, ge=1, le=_MOST)
    n_seq_max: int = Field(default=64, ge=1, le=256)
    n_threads: int | None = Field(default=None, ge=1, le=512)
    n_threads_batch: int | None = Field(default=None, ge=1, le=512)
    n_gpu_layers: int = Field(default=-1, ge=-1, le=_MOST)
    flash_attn: bool | None = None
    type_k: KVType = "f16"
    type_v: KVType = "f16"
    use_mmap: bool = True
    use_mlock: bool = False

    @model_validator(mode="after")
    def _quantised_values_need_flash_attention(self) -> LlamaCppOptions:
        if self.type_v.startswith("q") and self.flash_attn is False:
            raise ValueError(f"type_v={self.type_v} needs flash attention; leave flash_attn out or set it to true")
        return self
