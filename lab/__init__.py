"""Laboratory: fits of shipped models, their validation, public measurements and benchmarks. Not in the wheel.

``python -m lab.data``, ``lab.fit``, ``lab.validate``, ``lab.bench.NAME``; the packages never import it. Where a figure
is made:

=====================================================  ================================================================
CPU: whole networks, FP32; BF16 and INT8               ``lab.bench.models``; ``--precisions float32,bfloat16,int8``
CPU: fused against separate kernels, pairs, algorithms ``lab.bench.kernels published|pairs|algorithms|few|residuals``
CPU: networks and kernels never measured               ``lab.bench.zero_trials``, ``lab.validate.ranking``
CPU: what fusing a site gains                          ``lab.bench.pictures gains``
GPU: kernels on shapes and GPUs left out               ``lab.validate kernels scans serving``
GPU: kernels to which nothing is fitted                ``lab.bench.unseen_kernels liger|frontier|scans|lookups``
collectives                                            ``lab.validate collectives``
whole training steps, and their memory                 ``lab.validate training memory``
published throughput of large models, published MFU    ``lab.bench.published_throughput llama3|megatron|mixtures|mfu``
whole models of one GPU, image models                  ``lab.validate models vision``
recorded jobs, replayed and predicted; vTrain's GPT    ``lab.validate replay dlrm vtrain``
host time on an unknown host                           ``lab.fit.host_overheads``
spread between releases                                ``lab.fit.speed_band --releases``
time and memory of a prediction for 4,096 GPUs         ``lab.bench.scale``
sharding against greedy plans and the optimum          ``lab.bench.sharding``
screenshots of the pages, as in the README             ``lab.bench.pictures pages``
=====================================================  ================================================================
"""
