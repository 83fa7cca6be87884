"""Modules whose own code works in FP32: by class name, and why."""

_SAM = ("Sam", "SamHQ", "Sam2", "Sam2Video", "Sam3Tracker", "Sam3TrackerVideo", "EdgeTam", "EdgeTamVideo")

# What is here gets a boundary like a norm's (inputs widened, outputs rounded), and its tensors, if any, stay FP32.
FLOAT32_CODE = {
    "FNetBasicFourierTransform": "torch.fft takes no 16-bit numbers on a CPU",
    "AutoformerAttention": "torch.fft takes no BF16, and what it correlates is FP32 up to a linear layer",
    "BrosPositionalEmbedding2D": "returns sines of FP32 boxes to a linear layer",
    "MiniMaxM3VLVisionRotaryEmbedding": "follows the dtype of a norm's weight, and its result that of the queries",
    **dict.fromkeys(
        (f"{name}PositionalEmbedding" for name in _SAM), "sines of coordinates, which go through many periods"
    ),
    "xLSTMBackend": "carries an FP32 state, which torch does not multiply with 16-bit numbers",
}

# What is here takes 16-bit inputs and has 16-bit tensors, but returns FP32 where 16 bits are expected: it is rounded.
FLOAT32_RESULTS = {
    "MraSelfAttention": "approximates in FP32, and a linear layer takes the result",
    "Tipsv2TextModel": "averages in FP32, and the result is multiplied with that of the image model",
}

# What is here has 16-bit layers whose results are computed with in FP32: those return exact FP32 copies.
FLOAT32_PREDICTIONS = {
    "ParameterProjection": "parameters of a distribution: torch draws few from BF16, whose epsilon bounds their scale",
}

# What is here, a class or a child of one, has 16-bit tensors and is called with FP32: its inputs are rounded.
FLOAT32_INPUTS = {
    "Blip2QFormerAttention": "image features follow the dtype of a norm's weight",
    "ClvpSelfAttention.out_proj": "queries, keys and values are rotated with FP32 tables",
    "FastSpeech2ConformerModel.decoder": "states are written over FP32 zeros",
    "FastSpeech2ConformerVarianceEmbedding": "embeds labels, which are not rounded",
    "HieraPatchEmbeddings.projection": "pixels are multiplied with an FP32 mask",
    "SLANetAttentionGRUCell": "starts from FP32 zeros, and its neighbours widen what they give it",
    "TimesFmModel.input_ff_layer": "values are multiplied with a padding of integers",
    "XLNetRelativeAttention": "encodings of positions are FP32, and the stream of targets does not round them",
}
