"""A recipe that the planner's tests plan: the 0.3B model, all weights, 8K."""

RECIPE = """model_name_or_path: baidu/ERNIE-4.5-0.3B-Paddle
train_dataset_path: data.jsonl
fine_tuning: Full
compute_type: bf16
max_seq_len: 8192
batch_size: 1
gradient_accumulation_steps: 4
output_dir: out
"""
