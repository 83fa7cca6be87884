"""Every argument of a `forward` of transformers that may hold floating numbers, by name, and what it is.

Those with "label", "target" or "mask" in their names are not listed: they are references and masks.

`tests/casting/test_argument_roles.py` asks for each new one, and compares the list with what the package does.
An argument that may be floating is annotated as a tensor, as a model's output, or not at all; many of those are
integers or no tensors all the same.
"""

ACTIVATIONS = {
    "images and sound, as pixels, samples and spectra": """
        pixel_values pixel_values_images pixel_values_local pixel_values_videos high_res_pixel_values image
        image_pixel_values codebook_pixel_values conditional_pixel_values prompt_pixel_values image_patches frame
        input_values decoder_input_values moshi_input_values user_input_values audio_mel mel_spectrogram reference_mel
        spectrogram input_features audio_input_features prompt_depth inputs patch_input audio_latents
        audio_prompt_latents latents""",
    "embeddings": """
        inputs_embeds decoder_inputs_embeds encoder_inputs_embeds encoder_embeds conditioning_encoder_inputs_embeds
        text_encoder_inputs_embeds action_embeds image_embeds image_embeddings image_encoder_embeddings
        intermediate_embeddings conditional_embeddings perceiver_embeddings query_embeds text_embeds visual_embeds
        noise_embeds patch_embeds deepstack_visual_embeds speaker_embedding speaker_embeddings tts_pad_embed
        per_layer_inputs condition_vector conditioning""",
    "embeddings of positions": """
        bbox_pos_emb object_queries_position_embeddings position_bias position_embeddings query_position_embeddings
        spatial_position_embeddings text_position_embedding vision_pos_embeds vision_pos_encoding
        vision_position_embedding""",
    "hidden states, features and results of other modules": """
        encoder_hidden_states encoder_outputs mm_encoder_outputs hidden hidden_states backbone_last_hidden_state
        context context_hidden_states cross_attention_states image_features image_hidden_states text_features
        class_features task_features text_encoder_hidden_states vision_encoder_hidden_states vision_features
        vision_embeds x4_feat backbone_features prompt_features decoder_queries object_queries deepstack_features
        msa_feats structure_feats visual_feats trailing_text_hidden thinker_reply_part mems past_buckets_states
        past_key_values shared_kv_states cache attention_similarity self_conditioning_logits trend""",
    "features that a linear layer embeds": "state states actions static_real_features",
    "places that a decoder predicts, and ratios that it derives from masks": "reference_points valid_ratios",
    "a matrix that states are multiplied with": "target_mapping",
}

NUMBERS = {
    "times": "past_time_features future_time_features time_step timestep second_per_grid_ts video_second_per_grid",
    "observations, in their own unit": "past_values future_values",
    "rewards": "rewards returns_to_go",
    "places": "bbox boxes visual_bbox visual_pos input_boxes input_points flattened_patches position_ids "
    "text_position_ids",
    "scales": "audio_scales numeric_values_scale guidance_scale temperature speaking_rate",
    "numbers of a text": "numeric_values float_answer",
    "counts": "num_items_in_batch",
    "noise, which is ranked, or mixed with the data": "noise noise_sequence",
}

NOT_FLOATING = {
    "tokens, indices, codes and classes": """
        input_ids attack_input_ids attack_input_pronunciation_ids attack_input_shape_ids attack_token_type_ids
        audio_input_ids decoder_input_ids input_pronunciation_ids input_shape_ids ple_input_ids
        qformer_input_ids talker_input_ids task_inputs task_type_ids text_inputs token_type_ids aspect_ratio_ids
        audio_codes code codes moshi_audio_codes quantized_code residual_codes user_audio_codes cls_index dataset_index
        flip_pairs freq lang_id langs level_start_index patch_ids pooled_patches_idx sequence_id speaker_id spkr_id
        static_categorical_features subsampled_output_points xpath_subs_seq xpath_tags_seq ans
        is_impossible start_positions end_positions image_token_pooling video_token_pooling""",
    "counts and sizes in integers": """
        aftercnn_lens audio_embed_sizes audio_feature_lengths chunk_sample_lengths feature_lens grid_thw height
        image_grid_thw image_grids image_num_crops image_sizes input_values_cutoffs lengths logits_to_keep merge_sizes
        num_delay_tokens num_local_patches patch_lengths patch_offsets spatial_shapes spatial_shapes_list
        video_grid_thw video_grids width""",
    "flags, numbers of Python and objects": """
        apply_cfg bandwidth drop_audio_conditioning drop_code generation_step generation_steps global_pointer
        interpolate_pos_encoding norm num_steps order_head output_attentions output_hidden_states
        output_router_logits padding_cache return_dict return_loss sample sway_coefficient threshold
        use_audio_in_video use_cache""",
}
