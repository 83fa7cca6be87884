"""Fields of tiny configs for model types and classes whose field names do not suffice, each with the reason."""

from typing import Any

RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
RESNET |= {"layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
# Their default backbone is timm's, an optional package.
LAST = {"backbone_config": {**RESNET, "out_features": ["stage4"]}}
# A fourth level would be a 3 × 3 convolution of one pixel, of which torch's BF16 gradient on a CPU is now and then NaN.
PYRAMID = {"backbone_config": RESNET, "num_feature_levels": 3}
# Half the pixels of a patch, so that all four stages are wider than a window.
SWIN = {"patch_size": 2, "encoder_stride": 16}
EFFICIENTNET = {"width_coefficient": 1.0, "hidden_dim": 1280}
EFFICIENTNET |= {"in_channels": [32, 16, 24], "out_channels": [16, 24, 40], "num_block_repeats": [1, 1, 1]}
HISTORY = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3], "num_time_features": 1}
HISTORY |= {"encoder_layers": 1, "decoder_layers": 1}
# Three levels for the reason above; words of a text are told apart by the ids that BERT's vocabulary has for points.
GROUNDING = {"num_feature_levels": 3, "max_text_len": 8, "text_config": {"vocab_size": 1030}}
# Prompts and pixels share a width; the numbers of positions are half of it.
SAM = {"num_pos_feats": 32}
# Widths and maps of the four stages of its backbone, the last of 16 pixels a side: a patch of its prompts.
SAM2 = {"backbone_channel_list": [96, 48, 24, 12], "backbone_feature_sizes": [[8, 8], [4, 4], [2, 2]]}
# Their configs have this token only where a checkpoint brings it.
THINKER = {"vision_start_token_id": 91}
# Of a kind of layer; half of what is rotated in a head.
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
# Blocks are lists of kernel, widths, stride and whether channels are weighed: names do not reach into them.
PP_LCNET = {
    "stem_channels": [3, 8, 16],
    "block_configs": [
        [[3, 16, 16, 1, True]],
        [[3, 16, 16, 1, False]],
        [[3, 16, 32, 2, False]],
        [[3, 32, 64, 2, False]],
    ],
}
# A stage is half as wide as the one before, as its neck expects.
HALVING = {
    "out_indices": [1, 2, 3, 4],
    "block_configs": [[[3, a, b, s, False]] for a, b, s in ((16, 16, 1), (16, 16, 2), (16, 32, 2), (32, 64, 2))],
}
# Heads that join the states of four layers.
FROM_4_LAYERS = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}

FIELDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("detr", "conditional_detr", "dab-detr", "table-transformer"), LAST),
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin"), SWIN),
    **dict.fromkeys(("efficientnet", "align_vision_model"), EFFICIENTNET),
    **dict.fromkeys(("grounding-dino", "mm-grounding-dino"), GROUNDING),
    **dict.fromkeys(("sam_vision_model", "sam_hq_vision_model"), SAM),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), THINKER),
    **dict.fromkeys(("informer", "time_series_transformer"), HISTORY),
    **{kind: {"encoder_stride": 8} for kind in ("vit", "deit")},  # a masked patch is drawn again in its size
    "musicgen_decoder": {"decoder_start_token_id": 1},
    **{kind: {"prompt_encoder_config": {"patch_size": 16}} for kind in ("sam2_video", "edgetam_video")},
    **{
        kind: {"quantization_dim": 192, "initializer_range": 0.2} for kind in ("neucodec", "xcodec2")
    },  # of both encoders
    **{kind: {"image_token_index": 5} for kind in ("blip-2", "instructblip")},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    # Smaller, every letter is as likely as the next, and the mean square of probabilities has no gradient there.
    **{kind: {"initializer_range": 0.2} for kind in ("pp_ocrv5_mobile_rec", "pp_ocrv5_server_rec")},
    "deformable_detr": PYRAMID,
    "align": {"projection_dim": 40},  # the width at which its image model ends
    "clap_audio_model": {"patch_embeds_hidden_size": 8},  # doubled three times, it is hidden_size
    "clvp_encoder": {"num_attention_heads": 2},  # a head is rotated in 32 of its numbers or more
    "cvt": {"depth": [1, 2, 3]},  # a stage asks for the rate of the block of its own number
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},  # no defaults
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},  # no default
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2},  # no defaults
    "ernie4_5_vl_moe_text": {"rope_parameters": {"mrope_section": [3, 3, 2]}},  # height and width alternate
    "llama4_vision_model": {"intermediate_size": 256},  # four pixels' widths
    "mobilevit": {"initializer_range": 0.2},  # smaller, the states vanish on their way through so many convolutions
    "mobilevitv2": {"image_size": 64, "initializer_range": 0.2},
    "sam2_vision_model": SAM2,
    "sam2_prompt_encoder": {"patch_size": 16},
    "sam3_vision_model": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    # With the text encoder, whose contrastive loss compares as many queries as there are texts and contexts.
    "oneformer": {"is_training": True, "text_encoder_n_ctx": 4, "task_seq_len": 12, "text_encoder_context_length": 12},
    "lw_detr_vit": {"num_windows": 4},  # four by four patches
    "lw_detr": {"projector_scale_factors": [1.0], "group_detr": 2, "backbone_config": {"out_indices": [1, 2]}},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1]},
    "step3p5": {"sliding_window": 8},  # no default
    "cohere_compass_text": {"rope_parameters": {"full_attention": SECTIONS}},
    "glm5_next_text": {"index_kpool": 4},  # divides index_topk
    "qwen4_exp_text": {  # no defaults
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 8, "indexer_compress_ratio": 4},
    },
    "muse_spark_audio": {"out_hidden_size": 64},  # the text's width
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},  # a fourth of the text's width
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "1/2"},
    "moonshine_streaming": {"num_key_value_heads": 4},  # no default
    "t5gemma2_text": {"dropout_rate": 0.0},  # no default
    "efficientloftr": {"out_features": [8, 8, 16, 32]},  # widths
    "sapiens2_head": {"upsample_out_channels": [16], "conv_out_channels": [16]},  # no defaults
    "shieldgemma2": {"yes_token_index": 20, "no_token_index": 21},  # no fields, but read
    "pp_ocrv5_mobile_det": {"neck_out_channels": 96},
    "pp_ocrv6_small_det": {
        **{"layer_list_out_channels": [16, 16, 32, 64], "neck_out_channels": 96, "backbone_config": HALVING},
    },
    "tipsv2_dpt": {"backbone_config": FROM_4_LAYERS},
    "pp_lcnet_v4": PP_LCNET,
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},  # two that share
    "fastspeech2_conformer_hifigan": {"model_in_dim": 64},  # of the spectrogram
    "levit": {"patch_size": 16},  # a stem of four strided convolutions
    "mamba2": {"num_heads": 8},  # heads times their width is twice the model's width
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},  # and one with experts
    "reformer": {"axial_pos_shape": [3, 4], "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4},
    "xmod": {"default_language": "en_XX"},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "instructblipvideo": {"video_token_index": 5},
    "voxtral": {"audio_token_id": 5},
    "lilt": {"hidden_size": 96},  # six numbers of a box share it
    "seggpt": {"num_hidden_layers": 4, "merge_index": 0, "intermediate_hidden_state_indices": [1, 2, 3, 3]},
    "autoformer": {**HISTORY, "label_length": 4},
    "aria": {"projector_patch_to_query_dict": {16: 8}},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2},
    "chameleon": {"vocabulary_map": {"<image>": 5, "IMGIMGAA": 6}},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6, "<|visual token 000000|>": 7}},
    "dpt": {"backbone_out_indices": [0, 1], "neck_hidden_sizes": [8, 16], "reassemble_factors": [4, 2]},
}

# By class, for what its model type's other classes do without.
CLASS_FIELDS: dict[str, dict[str, Any]] = {
    "BeitForSemanticSegmentation": FROM_4_LAYERS,
    "Data2VecVisionForSemanticSegmentation": FROM_4_LAYERS,
    "Blip2ForImageTextRetrieval": {"qformer_config": {"use_qformer_text_input": True}},
    # The mask head joins every stage, and splits width and heads in groups of 8.
    "DetrForSegmentation": {
        **{"encoder_attention_heads": 8, "decoder_attention_heads": 8},
        **{"backbone_config": {**RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]}},
    },
    "HieraForPreTraining": {"decoder_hidden_size": 32, "decoder_depth": 1, "decoder_num_heads": 4},
    "PatchTSTForClassification": {"num_targets": 2},
    "PerceiverForImageClassificationConvProcessing": {"num_cross_attention_heads": 1},
    "PerceiverForImageClassificationFourier": {"num_cross_attention_heads": 1},
    "ReformerModelWithLMHead": {"is_decoder": True},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
}
