import glob
import math
from functools import lru_cache

import pyarrow.parquet as pq


@lru_cache
def table(gpu, engine):
    g = {"h100-sxm": "h100_sxm", "h200-sxm": "h200_sxm", "a100-sxm-80gb": "a100_sxm", "l40s": "l40s"}.get(gpu)
    if not g:
        return None
    f = glob.glob(f"/work/shared/data/aiconfigurator/{g}/comm/{engine}/*/custom*")[0]
    t = pq.read_table(f).to_pandas()
    t = t[~t.kernel_source.str.contains("eager")]
    return {
        n: (list(d.message_size * 2), list(d.latency / 1e3))
        for n, d in t.sort_values("message_size").groupby("num_gpus")
    }


def seconds(gpu, engine, ranks, size):
    t = table(gpu, engine)
    if not t or ranks not in t:
        return None
    import numpy as np

    x, y = t[ranks]
    return float(np.exp(np.interp(math.log(size), np.log(x), np.log(y))))
