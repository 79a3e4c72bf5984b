"""vLLM as a row of `rpg bench rollout`: the real one, on a CPU, in the process that the bench gives it."""

from engine_vllm.small_models import needs_vllm
from rpg.bench.synthetic import sizes_for
from rpg.bench.timing import apart
from rpg.bench.vllm import vllm_generate

pytestmark = needs_vllm
SIZES = sizes_for("cpu", model="17m", prompts=4, prompt_tokens=8, new_tokens=8, repeats=1)


def test_it_samples_with_and_without_log_probabilities():
    for with_logp in (False, True):
        found = apart(vllm_generate, SIZES, with_logp, limit=300)
        assert set(found) == {"tokens/s", "ms a step"}
        assert found["tokens/s"] > 0
