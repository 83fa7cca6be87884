"""Modules whose own code works in FP32 only, or hands FP32 on: by class name, and why.

What is here gets a boundary like a norm's (inputs widened, outputs rounded), and its tensors, if any, stay FP32.
"""

FLOAT32_CODE = {
    "FNetBasicFourierTransform": "torch.fft takes no 16-bit numbers on a CPU",
    "BrosPositionalEmbedding2D": "returns sines of FP32 boxes to a linear layer",
    "MiniMaxM3VLVisionRotaryEmbedding": "follows the dtype of a norm's weight, and its result that of the queries",
    "MraSelfAttention": "computes in FP32 and returns it to a linear layer",
    "xLSTMBackend": "carries an FP32 state, which torch does not multiply with 16-bit numbers",
}
