export PYTHONPATH=src
timeout 90 python -m pytest -q -m gpu --tb=short -rf -p no:cacheprovider tests/gpu/test_adamw_gpu.py -k "waits_for_nothing" 2>&1 | tail -15
timeout 100 python benchmarks/optimizers.py --lists squares,1b --repeats 10 2>&1 | tail -60
timeout 380 python benchmarks/train.py --sizes 1b --steps 10 --peer peers --profile --verbose --modes o1,recipe:fp8-current,recipe:fp8-delayed,recipe:fp8-block,recipe:fp4-block,recipe:fp8-row,torchao-tensorwise,bf16-sr 2>&1
