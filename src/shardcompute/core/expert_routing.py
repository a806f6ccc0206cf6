"""Expert routing: how the rows of a sparse block choose their experts and weigh the answers. Pure data.

The router's logits become scores; the best `per_token` of them, within the best groups, are chosen; the chosen scores
are the weights. Defaults are Mixtral's: weights are a softmax over the logits of the chosen ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LEAST_SUM = 1e-20
"""Added to the sum that weights are divided by: scores by sigmoid may all be zero."""


@dataclass(frozen=True, slots=True)
class Routing:
    """See the module's contract."""

    scores: Literal["softmax", "sigmoid"] = "softmax"
    weights_over: Literal["all", "chosen"] = "chosen"
    """Chosen scores are weights as they are, or divided by their sum."""
    has_choice_bias: bool = False
    """Every expert has a bias that is added to its score for the choice alone (`e_score_correction_bias`)."""
    groups: int = 1
    chosen_groups: int = 1
    """Experts are chosen from the best so many of `groups` equal groups of neighbours."""
    group_by: Literal["best", "best_two"] = "best"
    """What a group is judged by: its best score, or the sum of its two best."""
    scale: float = 1.0
    """Multiplies the weights."""
    weighs_input: bool = False
    """Rows are multiplied by their weights before the experts see them, instead of the experts' answers (Llama 4)."""

    @property
    def chooses_by_logits(self) -> bool:
        """Whether scores need not be computed to know which are the best."""
        is_ordered = self.groups == 1 or self.group_by == "best"
        return not self.has_choice_bias and is_ordered


PLAIN_ROUTING = Routing()
