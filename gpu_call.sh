export PYTHONPATH=src PYTHONUNBUFFERED=1
if DITHER_ONCE=1 timeout 40 python3 bench_tmp.py | tee /dev/stderr | grep -q "WRONG 0$"; then export DITHER_ONCE=1; echo ONCE is right; fi
timeout 75 python3 benchmarks/optimizers.py --peers peers --lists squares --repeats 10 2>&1 | grep -v -i warn | tail -30
timeout 25 python3 benchmarks/optimizers.py --lists 1b --repeats 10 --only bf16 2>&1 | grep -E "^\||copy" | tail -12
seq 15 | timeout 85 xargs -P 15 -I{} sh -c 'DITHER_SHARE={}/15 timeout 80 python3 -m pytest -q -m gpu tests/gpu/test_adamw_gpu.py tests/gpu/test_linear_gpu.py --tb=line > $OUT/t{}.log 2>&1'
cat $OUT/t*.log | grep -E "^(FAILED|ERROR)" | cut -c1-150 | sort | head -30
cat $OUT/t*.log | grep -E "passed|failed" ; cat $OUT/t*.log | grep -E "^E  |Error" | cut -c1-180 | sort | uniq -c | sort -rn | head -12
timeout 62 python3 benchmarks/train.py --sizes 1b --warmup 4 --steps 6 --modes recipe:fp8-delayed,recipe:fp8-block 2>&1 | cut -c1-300 | tail -8
