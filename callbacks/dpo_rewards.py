"""The rewards that DPO gives its pairs without saying so, and how often the chosen answer has the higher one. torch is imported in use.

The reward of an answer is `beta` times how much more likely the trained model finds it than the reference does. The accuracy is the share of pairs
whose chosen answer has the *higher* reward: a tie counts against it, as does a reward that is not a number. So does TRL count for
`rewards/accuracies`, and before the first step, with all rewards 0, the accuracy is 0.

A batch is TRL's: `input_ids`, `attention_mask` and `completion_mask` of [2 * pairs, length], the chosen answers first, the rejected ones in the same
order after them; maybe `ref_chosen_logps` and `ref_rejected_logps` of [pairs], computed beforehand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from ckptmgr.core.errors import ConfigError

# Not for the model.
_NOT_INPUTS = frozenset({"completion_mask", "ref_chosen_logps", "ref_rejected_logps", "labels"})
_NEEDED = frozenset({"input_ids", "completion_mask"})
# What a loss function may call its rewards.
_REWARDS = (("rewards/chosen", "rewards/rejected"), ("chosen_rewards", "rejected_rewards"))


def is_preference_batch(batch: Any) -> bool:
    """Whether `batch` has what `implicit_rewards` needs of one."""
    return isinstance(batch, Mapping) and batch.keys() >= _NEEDED


def has_reference(batch: Mapping[str, Any]) -> bool:
    """Whether `batch` brings the reference's log-probabilities itself."""
    return batch.keys() >= {"ref_chosen_logps", "ref_rejected_logps"}


def reward_accuracies(outputs: Any) -> Any:
    """Which pairs of a step were put in the right order, as [pairs] of booleans on their device, from what the loss function gave; None if it does not
    say. `outputs` has the rewards of each pair as `rewards/chosen` and `rewards/rejected`, or `chosen_rewards` and `rejected_rewards`."""
    for chosen, rejected in _REWARDS:
        found = [_named(outputs, chosen), _named(outputs, rejected)]
        if all(hasattr(each, "detach") for each in found):
            return found[0].detach().reshape(-1) > found[1].detach().reshape(-1)
    return None


def implicit_rewards(model: Any, batch: Mapping[str, Any], *, reference: Any = None, beta: float = 0.1) -> Any:
    """The rewards of a batch, as (chosen, rejected), [pairs] each, float32, without gradient.

    Both models run once, in eval mode, so that nothing random is drawn, and are left in the mode they were in. Equal to what TRL computes in the
    step, unless the model has dropout there (TRL takes it out by default).

    Args:
        model: a causal language model: called with the tensors of the batch, its result has `logits` of [rows, length, vocabulary].
        reference: the model that `model` began as; needed unless the batch has its log-probabilities.

    Raises:
        ConfigError: there is neither.
    """
    import torch

    with torch.no_grad():
        ours = completion_log_probs(model, batch)
        if has_reference(batch):
            theirs = torch.cat([batch["ref_chosen_logps"], batch["ref_rejected_logps"]]).to(ours)
        elif reference is None:
            raise ConfigError(
                "rewards cannot be computed without a reference model",
                hint="give reference=, or batches with ref_chosen_logps and ref_rejected_logps",
            )
        else:
            theirs = completion_log_probs(reference, batch)
        chosen, rejected = (beta * (ours - theirs)).chunk(2)
    return chosen, rejected


def completion_log_probs(model: Any, batch: Mapping[str, Any]) -> Any:
    """The log-probability of each row's answer, the sum over its tokens: [rows], float32."""
    import torch

    inputs = {name: value for name, value in batch.items() if name not in _NOT_INPUTS}
    with _evaluating(model):
        result = model(**inputs)
    logits = result["logits"] if isinstance(result, Mapping) else getattr(result, "logits", result)
    sums = []
    # Row by row: in float32, all rows at once would take several times the memory of the step itself.
    for row, tokens, mask in zip(logits, batch["input_ids"], batch["completion_mask"], strict=True):
        wanted = mask[1:].bool()
        scores = row[:-1][wanted].float()
        said = scores.gather(1, tokens[1:][wanted].unsqueeze(1)).squeeze(1)
        sums.append((said - scores.logsumexp(1)).sum())
    return torch.stack(sums)


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """In eval mode; afterwards each module is in the mode it was in, frozen ones too."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _named(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
