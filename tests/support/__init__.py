"""What several tests share: rank pools, servers, recorded numbers, small tokenizers, tiny configs."""
