"""What to say about tokens that were chosen from logits that are not finite; `GenerateStats.nonfinite` counts them."""


def overflow_message(nonfinite: int, total: int, dtype: str, what: str = "tokens") -> str | None:
    """One line with the way out; None where all logits were finite.

    Args:
      nonfinite: tokens whose logits were not.
      total: tokens of the whole result.
      dtype: of the model.
      what: is counted.
    """
    if not nonfinite:
        return None
    out = "the weights hold NaN or infinity, or are wrong for this model"
    if dtype == "float16":
        out = 'numbers beyond 65504 overflow in float16: load the model with dtype="bfloat16" or "float32"'
    return f"{nonfinite} of {total} {what} were chosen from logits that are not finite, and mean nothing: {out}"
