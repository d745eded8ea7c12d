"""EAGLE 3.1 speculative decoding for Hugging Face transformers: the same text, faster; in half
precision up to rounding.

eagle = Eagle31Drafter.from_pretrained("...", target=model)
model.generate(**inputs, assistant_model=eagle)
"""

from transformers import AutoConfig, AutoModel

from .configuration_eagle31 import Eagle31Config
from .drafter.drafter import Eagle31Drafter
from .errors import Eagle31Error
from .generation.hooks import install
from .generation.stock_loop import Eagle31CandidateGenerator
from .generation_config import Eagle31GenerationConfig
from .memory import MemoryPlan, plan_memory
from .stats import SpeculationStats

AutoConfig.register(Eagle31Config.model_type, Eagle31Config)
AutoModel.register(Eagle31Config, Eagle31Drafter)
install()

__version__ = "0.1.0"
__all__ = [
    "Eagle31CandidateGenerator",
    "Eagle31Config",
    "Eagle31Drafter",
    "Eagle31Error",
    "Eagle31GenerationConfig",
    "MemoryPlan",
    "SpeculationStats",
    "plan_memory",
]
