#!/bin/bash
# Put your own addresses here.
export NCCL_SOCKET_IFNAME=$(ip a | grep '10.0.0' | awk '{print $7}')
export NCCL_IB_HCA=mlx5_0
export FLAGS_enable_ixdnn_attn=true
python3 -u -m paddle.distributed.launch --ips=10.0.0.12,10.0.0.104,10.0.0.115,10.0.0.143 --hosts=10.0.0.12 --gpus "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15" ../run_pretrain.py ../recipes/pretrain-llama_13b.json
