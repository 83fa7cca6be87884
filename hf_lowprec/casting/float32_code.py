"""Modules whose own code works in FP32: by class name, and why."""

# What is here gets a boundary like a norm's (inputs widened, outputs rounded), and its tensors, if any, stay FP32.
FLOAT32_CODE = {
    "FNetBasicFourierTransform": "torch.fft takes no 16-bit numbers on a CPU",
    "BrosPositionalEmbedding2D": "returns sines of FP32 boxes to a linear layer",
    "MiniMaxM3VLVisionRotaryEmbedding": "follows the dtype of a norm's weight, and its result that of the queries",
    "xLSTMBackend": "carries an FP32 state, which torch does not multiply with 16-bit numbers",
}

# What is here takes 16-bit inputs and has 16-bit tensors, but returns FP32 where 16 bits are expected: it is rounded.
FLOAT32_RESULTS = {
    "MraSelfAttention": "approximates in FP32, and a linear layer takes the result",
    "Tipsv2TextModel": "averages in FP32, and the result is multiplied with that of the image model",
}
