"""The routers of the encoder and the decoder, from the model's Params."""

from lingvo_moe.core.config.hyperparams import ParamError, Params


def configured_router(p: Params, decoder: bool, name: str, router: Params) -> Params:
    """The router of one side, with the parameters that the model sets.

    Args:
        decoder: which side.
        name: the router's parameter.

    Raises:
        ValueError: a router that looks ahead, in the decoder.
        ParamError: a vocabulary that is too small.
    """
    if decoder and router.cls.LooksAhead(router):
        raise ValueError(
            f"task.{name}: {router.cls.__name__} looks at later tokens, which a decoder does "
            f"not have yet; choose another one for the decoder, e.g. task.decoder_router=top2"
        )
    router = router.Copy()
    if "aux_loss_scale" in router and router.aux_loss_scale is None:
        # Algorithm 1's loss is 1/E^2 when experts are balanced: times k it would have no force.
        # Scaled by E^2, as in the authors' Lingvo, k means the same for any number of experts.
        router.aux_loss_scale = float(p.num_experts**2)
    if "vocab_size" in router:
        vocab_size = p.target_vocab_size if decoder else p.source_vocab_size
        if 0 < router.vocab_size < vocab_size:
            why = f"must be at least {vocab_size}, the ids that it is asked for, or 0, which takes that"
            raise ParamError(f"task.{name}.vocab_size", str(router.vocab_size), why)
        router.vocab_size = router.vocab_size or vocab_size
    return router
