"""What a proof on a small model cannot see, and the contract of all families has found (`make families`)."""

# (model type, capability) -> why it is refused although it is proved.
REFUSED = {
    ("big_bird", "heads"): "for short sentences, native code makes its attentions again with all heads",
}


def known_refusals(model_type: str) -> dict[str, str]:
    """Capability -> why it is refused, for this model type."""
    return {capability: reason for (name, capability), reason in REFUSED.items() if name == model_type}
