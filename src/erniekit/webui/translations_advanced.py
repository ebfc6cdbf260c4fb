"""Chinese help of the keys under "Advanced options"; the English one is with the key. Used by translations.py."""

from __future__ import annotations

ADVANCED_ZH: dict[str, str] = {
    # methods
    "train_only": "只训练名称匹配这些模式的权重，如 layers.0.*,lm_head；mtp 表示多词元预测层。",
    "freeze": "名称匹配这些模式的权重不训练。",
    "neftune_noise_alpha": "NEFTune：训练时加到词嵌入上的噪声强度；0 表示关闭。",
    "neftune": "PaddleFormers 的开关：neftune_noise_alpha 取其默认值。",
    "use_dora": "DoRA：把权重的大小与方向分开训练。",
    "lora_init": "适配器的初始值：default，或 pissa（取权重的主奇异方向）。",
    "pissa_iterations": "PiSSA 近似奇异值分解的迭代次数；0 表示精确分解。",
    "muon_momentum": "optim: muon 的动量。",
    "muon_learning_rate": "Muon 所训练矩阵的峰值学习率；不填则同 learning_rate。",
    "muon_scale": "Muon 更新的大小：match_adamw 与 AdamW 相当，可共用学习率；original 为原论文的缩放。",
    "token_loss": "SFT 与 PT 中每个词元的损失：cross_entropy，或已安装插件的损失名。",
    "eval_generate": "每次评估时对评估文件的前几个提示生成回答，写入 samples.jsonl 与报告；0 表示不生成。",
    "eval_generate_max_tokens": "每个生成回答的最多词元数。",
    # model
    "continue_training": "从模型的权重开始；False 表示按其配置随机初始化。",
    "initializer_range": "随机初始化的标准差；不填则用 config.json 中的值。",
    "attention": "注意力内核；结果相同，且不会跨文档。",
    "kernels": "操作=实现，用于测试与测速：只用指定的内核，如 experts=plain。erniekit doctor 会列出各操作的选择及原"
    "因。",
    "compile": "用 torch.compile 编译解码层：首步较慢，之后更快。不填：NVIDIA 卡上行长固定或只有几种、且不以 CUDA "
    "Graph 重放时开启；含专家且重放的层仅在运行超过一刻钟、或打包且未设 max_steps 时编译。",
    "cuda_graph": "以 CUDA graph 重放各层。不填：微批很短、启动内核比计算更慢时开启；compile 为 False 时不开启。"
    "仅 NVIDIA 卡，SFT 与 PT。",
    "model_config": "替换 config.json 中的值；单个值写作 model_config.NAME=VALUE。",
    "num_nextn_predict_layers": "训练模型中预测后续词元的层：填其层数；0 表示保持不变。",
    "multi_token_pred_lambda": "多词元预测损失的权重；不计入报告的损失。",
    "use_recompute_mtp": "反向时重新计算多词元预测层，节省显存。",
    # data
    "eval_dataset_prob": "同 train_dataset_prob，用于评估数据。",
    "length_buckets": "packing 为 False 时，把一个微批的各行拼接并补齐到几种长度，供编译与 CUDA graph 使用；损失不变。"
    "auto：层被编译时开启。也可填 on、off 或具体长度：4096,6144,8192。",
    "columns": "文件的哪一列对应哪个字段：{prompt: q, response: a}。",
    "mix_schedule": "从指定步起改变各文件的占比：500=0.5/0.5,1000=0.2/0.8。",
    "curriculum": "由易到难排列样本：length 按长度，或按某一数值列；不填则不排序。",
    "curriculum_epochs": "按此顺序训练的轮数；之后随机打乱。0 表示每一轮都如此。",
    "greedy_intokens": "从缓冲区中紧凑地拼接；False 表示按读取顺序。",
    "streaming": "边读取边训练：数据可在本机、网址、对象存储或 Hub；需设置 max_steps，KTO 与 VL-SFT 阶段除外。",
    "shuffle_buffer": "流式读取时，在这么多个样本的区块内打乱；第一步要等一个区块读完。",
    "buffer_size": "拼接时可供挑选的样本数。",
    "random_shuffle": "按随机种子打乱训练数据。",
    "mix_strategy": "多个文件如何混合：按占比随机、依次、或到最先/最后一个读完为止。",
    "num_samples_each_epoch": "compat: erniekit 下每轮抽取的样本数；否则一轮即遍历一次数据。",
    "max_bad_fraction": "坏样本比例超过此值时停止；1 表示从不因坏样本停止。",
    "dataset_num_proc": "分词的进程数；0 表示用全部核心。",
    "dataloader_num_workers": "提前准备批次的线程数。",
    "prefetch_factor": "每个线程预先备好的批数。",
    "cache_dir": "分词结果的缓存目录；不填则为 ~/.cache/erniekit。",
    "split": "文档在训练、评估、测试之间的比例；另有 eval_dataset_path 时全部用于训练。",
    "eval_part": "评估 split 中的哪一部分。",
    "data_filelist": "用逗号分隔的前缀，或列出前缀的文件，代替 input_dir。",
    "data_weights": "各前缀的权重，写法相同。",
    # train
    "per_device_eval_batch_size": "每个评估批的序列数；不填则同 batch_size。",
    "global_batch_size": "所有设备每步的序列总数；未填梯度累积时由它推算。",
    "minimum_eval_times": "至少评估这么多次。",
    "early_stopping_patience": "连续多少次评估没有改善就停止；0 表示不停止。",
    "early_stopping_threshold": "改善多少才算改善。",
    "deterministic": "在显卡上每次运行和续训都得到逐位相同的结果：注意力用 FlashAttention-2，不按耗时选择内核。CPU "
    "上总是如此。",
    "compat": "erniekit：连旧工具的缺陷也一并复现（下一轮用户消息前的结束符、微批均值的均值、首步学习率为 0），用于"
    "对照旧记录。",
    "doctor": "第一步之前检查标签、泄漏、梯度与磁盘。",
    "max_bad_steps": "损失或梯度连续多少步不是有限值就停止。",
    "preempt_grace_s": "收到 SIGTERM 后保存可用的秒数。",
    "hang_soft_s": "多少秒没有进展就把各进程的调用栈写到 output_dir/hangs；0：十个中位步长，至少 60 秒；-1：从不。"
    "前几步、评估和保存时放宽十倍，准备阶段放宽二十倍。",
    "hang_hard_s": "多少秒没有进展就结束进程（退出码 70）以便重启；0：hang_soft_s 的三倍；-1：从不。",
    "straggler_factor": "某进程自身耗时超过中位数多少倍时报告；0：关闭。",
    "drift_check_steps": "每隔多少步检查各副本是否逐位相同，首步之后与每次保存之前也会检查；0：从不。",
    "sft_benchmark": "训练途中不评估、不保存，结束时打印每秒词元数。",
    # LoRA
    "lora_plus_scale": "B 的学习率为 A 的多少倍。",
    "rslora_plus": "rslora，且 lora_plus_scale 为 4、lora_alpha 为 4。",
    "frozen_base": "LoRA 所在层的冻结权重：bf16 按 compute_type 保存；其余在读入时压缩为 8 或 4 位（误差见 docs/comp"
    "ression.md）。"
    "wint4/8：路由专家 int4，注意力与稠密前馈 int8，共享专家 bf16。LoRA 本身保持 bf16。",
    "frozen_products": "与压缩权重的矩阵乘：解压为 bf16 计算；或在可精确表示时（int4、mxfp4）用 fp8：Hopper 卡上更快"
    "，激活会被舍入，约 2.6%。",
    # optimiser
    "adam_beta1": "梯度均值的衰减。",
    "adam_epsilon": "加在分母上的小数。",
    "layerwise_lr_decay_bound": "最底层学习率占最顶层的比例；1 表示各层相同。",
    "decay_function": "wsd 的下降方式。",
    "decay_steps": "学习率策略跨越的步数；不填则为 max_steps。",
    "num_cycles": "全程的余弦周期数；0.5 表示只下降一次。",
    "lr_end": "polynomial 结束时的学习率。",
    "power": "polynomial 的幂次。",
    "optim": "adamw；adamw_custom 是 ERNIEKit 的名称，即 optim_states: bf16 且状态放在内存。",
    "optim_states": "AdamW 的动量：fp32（每个权重 8 字节）、bf16（4）或 8bit（2，每 256 个一块）；舍入无偏。",
    "use_lowprecision_moment": "ERNIEKit 对 optim_states: bf16 的名称。",
    "master_weights": "16 位权重之外：fp32 副本（4 字节）；exact16（2 字节：补足缺少的 16 位，无损）；none（0：只有"
    "权重本身，随机舍入）。",
    "update_in_backward": "梯度一算完就更新该权重并释放：每个权重省 2 字节。仅单设备、gradient_accumulation_steps 为"
    " 1，裁剪按 grad_clip。",
    "grad_clip": "max_grad_norm 限制哪个范数：整个梯度的；update_in_backward 时用上一步的，或每个张量自己的。",
    # memory
    "recompute_granularity": "重计算的粒度：整层，或只有注意力；auto：按显存所需取最少的层数。",
    "memory_limit": "recompute_granularity: auto 规划时可用的显存（GiB）；不填则接近全部。",
    "frozen_layers_in_host": "多少层的压缩冻结权重（frozen_base）放在内存、用前复制到设备；不填：按显存所需取最少。",
    "no_recompute_layers": "不做重计算的层。",
    "loss_subbatch_seqlen": "计算损失时同时存在的 logits 行数；词表很大时调小。",
    "gc_interval": "每 N 步运行一次 Python 垃圾回收；0 表示不干预。",
    "tensorwise_offload_optimizer": "同上，但设备上只留最少张量的状态；offload_optim 仍放不下时使用。",
    "offload_recompute_inputs": "把重计算的输入放在内存；用于开启重计算的长序列。",
    # checkpoints
    "save_minutes": "距上一个检查点超过这么多分钟也保存；0 关闭；save_strategy: no 时除非明确给出此项也关闭。有两个"
    "更新的之后会被删除。",
    "save_strategy": "何时保存。no：只在结束时保存模型，不含继续训练所需的状态；ignore_save_lr_and_optim: False 会保"
    "留这些状态。",
    "keep_every": "步数为此值倍数的检查点也保留；0 关闭。",
    "overwrite_output_dir": "即使 output_dir 中已有运行也重新开始；False 表示续训。",
    "resume_from_checkpoint": "从这个检查点继续；不填则用最新的完整检查点。",
    "override_resume": "即使影响结果的参数有变化也继续。",
    "extend_run": "即使之前的学习率按较短的训练安排，也延长到更大的 max_steps 或 num_train_epochs。学习率与它们无关"
    "时不需要。",
    "metric_for_best_model": "按哪个指标判断最佳；不填则为损失。",
    "greater_is_better": "指标是否越大越好；不填则由指标决定。",
    "verify": "使用检查点前如何校验；auto：小于 20 GB 时校验全部哈希。",
    "ignore_load_lr_and_optim": "续训时只读取权重。",
    "ignore_save_lr_and_optim": "只保存权重：更小，但无法精确续训。",
    "unified_checkpoint_config": "async_save：边训练边写盘。remove_master_weight：不保存 fp32 权重；master_weight_co"
    "mpatible：缺少时由 16 位权重生成。"
    "后两者续训都不是逐位一致。",
    "ckpt_quant_stage": "优化器动量完整保存（O0），或用 8 位（O1）、4 位（O2）；更小，续训近似而非精确。",
    "save_on_each_node": "各节点不共享磁盘时：检查点写到每个节点自己的磁盘，而不只是第一个节点。",
    # tracking
    "logging_strategy": "何时记录日志。",
    "logging_first_step": "无论 logging_steps 为何都记录第 1 步。",
    "logging_dir": "事件文件的目录；不填则为 output_dir/runs。",
    "run_name": "在记录工具中的名称。",
    "disable_tqdm": "用日志行代替进度条。",
    # parallel
    "data_parallel_degree": "模型副本数。由设备数推出；填写的数与之不符时停止。",
    "sequence_parallel": "各层矩阵之间的部分也切到张量并行的设备上：显存更少，时间相同。",
    "virtual_pp_degree": "每个流水线设备持有的段数。2 或更多时等待更少、通信更多；梯度累积须为 pipeline_parallel_deg"
    "ree 的倍数。",
    "pp_schedule": "流水线的执行次序；auto 取 1f1b，virtual_pp_degree 大于 1 时取 interleaved。zero_bubble 等待最少"
    "，但重计算或编译的层会抵消收益。",
    "pp_runner": "由谁执行流水线；torch 使用 torch 自带的调度，用于对照。",
    "pp_seg_method": "在何处切分各层：平均（uniform、layer:Name），或按边界如 [0,29,57]，其中计入嵌入层、每层、归一"
    "化与输出头。最后一段应少分几层。",
    "islands": "同一任务使用不同设备，流水线跨越其间：依次写 设备:进程数（gpu:8,iluvatar_gpu:8）。gpu:8:3 还说明相对"
    "速度，gpu:8:3:79G 说明显存；未写的会实测。",
    "pipeline_parallel_config": "接受 ERNIEKit 流水线的选项；erniekit config 会说明每项在此的作用。",
    "tensor_parallel_config": "接受 ERNIEKit 张量并行的选项；erniekit config 会说明每项在此的作用。",
    "sharding_parallel_config": "接受 ERNIEKit 分片的选项；erniekit config 会说明每项在此的作用。",
    "expert_tensor_parallel_degree": "一个专家切到几个设备上：即 tensor_parallel_degree，除非 moe_group 已按专家分配。",
    "devices": "使用本机的哪些设备，如 0,1；不填则由 *_VISIBLE_DEVICES 决定。",
    "max_restarts": "多进程运行崩溃后重启的次数；用户错误不重启。",
    # experts
    "moe_group": "整个专家分配给哪些设备：mp（tp、model）张量并行的设备；ep（data、dp）读不同数据的设备；world（all"
    "）两者；dummy（none）不分配。",
    "moe_multimodal_dispatch_use_allgather": "词元如何到达其他设备上的专家：留空或含 alltoall 时只发往其专家所在处；"
    "其他值则全部收集到各处。",
    "moe_aux_loss_lambda": "均衡专家使用的损失权重；不计入报告的损失。",
    "moe_orthogonal_loss_lambda": "使路由方向彼此分开的损失权重。",
    "moe_z_loss_lambda": "使路由 logits 保持较小的损失权重。",
    "moe_vision_aux_loss_lambda": "视觉专家的 moe_aux_loss_lambda；不填则与文本相同。",
    "moe_vision_orthogonal_loss_lambda": "视觉专家的 moe_orthogonal_loss_lambda；不填则与文本相同。",
    "moe_vision_z_loss_lambda": "视觉专家的 moe_z_loss_lambda；不填则与文本相同。",
    "moe_use_aux_free": "选择专家时加上均衡偏置；不填则按模型自身的方式。False 的路由方式与发布的模型不同。",
    "moe_use_aux_free_update_coef": "每步之后该偏置移动多少：预训练时生效，全量微调时填写才生效，LoRA 时从不。",
    "moe_gate_lr_ratio": "路由的学习率占其他参数的比例。",
    "use_recompute_moe": "反向时重新计算专家；recompute: True 且整层粒度时本来就会。",
    "expert_max_capacity": "一个专家在一个微批中最多处理的词元数；其余不经过它。",
    "expert_min_capacity": "config.json 限制专家容量（moe_capacity）时，至少留出的容量。",
    # preferences
    "pref_loss_ratio": "偏好损失的权重。",
    "offset_alpha": "按得分差设置的间隔。",
    "simpo_gamma": "simpo 的间隔。",
    "dpop_lambda": "dpop 惩罚项的权重。",
    "normalize_logps": "消除一对回答长度不同的影响。",
    "reference_logps": "参考模型的对数概率：live 每步计算，cached 在第一步前算一次并保存。",
    "ref_model_update_steps": "每 N 步把当前模型复制到参考模型。",
    "mask_out_eos_token": "对数概率不计结束符。",
    "dpo_benchmark": "训练途中不评估、不保存，结束时打印每秒词元数。",
    # vision
    "visual_ld": "vit_lr_ratio 的旧名称。",
    "text_dataset_prob": "这些文件各自的占比。",
    "text_dataset_type": "它们的格式；不填则自动识别。",
    "modality_ratio": "图片步数与文本步数之比，如 [1,1]：整步交替。",
    "variable_resolution": "compat: erniekit 下 min_pixels 与 max_pixels 是否生效；否则总是生效。",
    "min_pixels": "图片的最小像素数；更小的会被放大。",
    "video_max_pixels": "每帧的最大像素数；不填则同 max_pixels。",
    "video_min_pixels": "每帧的最小像素数。",
    "video_min_frames": "视频的最少帧数；-1：不限。",
    "video_target_frames": "恰好这么多帧；需要 video_fps 为 -1。",
    "video_frames_sample": "每个间隔取哪一帧。",
    "render_timestamp": "把时间画进每一帧，发布的模型需要如此。",
    "use_pic_id": "每张图片前加“Picture n:”；“Video n:”总会加。",
    "chat_template": "没有思考的回答如何书写：最后一个回答前放空思考（ernie_vl），或每个回答前都放。",
    "vision_train_turns": "含图片的对话在没有思考时训练哪些回答：last 最后一个，all 全部，各带一个空思考。",
    "video_positions": "视频之后文本的位置：其最大位置之后（ERNIEKit、vLLM），或其较长边之后（transformers）。",
    "exif_orientation": "按 EXIF 旋转图片；ERNIEKit 不旋转。",
    "one_sample_in_one_seq": "视频超过 max_seq_len 时先降分辨率再减帧；不影响拼接。",
    "drop_untrainble_sample": "compat: erniekit 下丢弃没有训练词元的样本；否则总是丢弃。",
    "max_patches": "一条拼接序列中所有图片的最大图块数，4 个为一个词元：限制视觉塔的显存。0：不限。",
    "media_check": "第一步之前如何检查媒体：decode 会把损坏的记为坏样本；header 更快，损坏的留到用到时跳过。",
    "media_max_pixels": "存储的像素超过此数的图片按文件头记为坏样本。",
    "media_max_bytes": "文件或归档成员超过此字节数记为坏样本。",
    "media_max_frames": "帧数超过此数的视频记为坏样本。",
    "media_max_seconds": "时长超过此秒数的视频记为坏样本。",
    "media_timeout": "解码多少秒没有进展就记为坏样本。",
    "media_num_proc": "每个进程用于解码媒体的子进程数；0：与核心数相同，最多 8。",
    "vision_feature_cache": "视觉塔冻结时把图片特征存到磁盘，每张只解码计算一次；auto：全部放得进 vision_feature_cac"
    "he_gb 时开启。",
    "vision_feature_cache_gb": "所有模型与运行共用的特征缓存上限（GB），位于数据缓存目录。",
    "vision_proof": "在每个检查点（不含导出）中保留一两行带图片的小样本：导出与评估据此证明像素、词元与位置同训练时。",
}
