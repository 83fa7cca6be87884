"""Classes of transformers whose own code mixes dtypes, and what each needs.

A cast follows the rules in `fp32_rules.py` and converts the inputs of models. These classes need more: they are listed
by name, each with the reason in its code.
"""

_SAM = ("Sam", "SamHQ", "Sam2", "Sam2Video", "Sam3Tracker", "Sam3TrackerVideo", "EdgeTam", "EdgeTamVideo")

CLASSES_COMPUTING_IN_FP32 = {
    "FNetBasicFourierTransform": "torch.fft takes no 16-bit numbers on a CPU",
    "AutoformerAttention": "torch.fft takes no BF16, and its results stay FP32 up to a linear layer",
    "BrosPositionalEmbedding2D": "returns sines of FP32 boxes to a linear layer",
    "MiniMaxM3VLVisionRotaryEmbedding": "follows the dtype of a norm's weight; its result follows that of the queries",
    **dict.fromkeys(
        (f"{name}PositionalEmbedding" for name in _SAM), "sines of coordinates, which go through many periods"
    ),
    "xLSTMBackend": "carries an FP32 state, which torch does not multiply by 16-bit numbers",
}
"""They are kept in FP32 like norms: their inputs are upcast and their outputs downcast."""

CLASSES_RETURNING_FP32 = {
    "MraSelfAttention": "approximates in FP32, and a linear layer takes the result",
    "Tipsv2TextModel": "averages in FP32, and the result is multiplied by that of the image model",
}
"""They have 16-bit tensors and return FP32 to 16-bit modules: their outputs are downcast."""

CLASSES_PREDICTING_IN_FP32 = {
    "ParameterProjection": "parameters of a distribution: in BF16, torch draws few values and epsilon bounds the scale",
}
"""They have 16-bit layers whose results are used in FP32: the outputs of their children are upcast."""

CLASSES_CALLED_WITH_FP32 = {
    "Blip2QFormerAttention": "image features follow the dtype of a norm's weight",
    "ClvpSelfAttention.out_proj": "queries, keys and values are rotated with FP32 tables",
    "FastSpeech2ConformerModel.decoder": "states are written over FP32 zeros",
    "FastSpeech2ConformerVarianceEmbedding": "embeds labels, which are not rounded",
    "HieraPatchEmbeddings.projection": "pixels are multiplied by an FP32 mask",
    "SLANetAttentionGRUCell": "starts from FP32 zeros, and its neighbours upcast its inputs",
    "TimesFmModel.input_ff_layer": "values are multiplied by an integer padding mask",
    "XLNetRelativeAttention": "position encodings are FP32, and the target stream does not round them",
}
"""They have 16-bit tensors and are given FP32: their inputs are downcast. A class, or `Class.child` for one of its
children."""
