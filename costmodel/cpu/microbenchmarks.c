/* Microbenchmarks behind `python -m costmodel calibrate`. One measurement per process:
 *
 *   microbenchmarks list                                 vector_bits, registers, one "kernel DTYPE NAME" per rate
 *   microbenchmarks rate NAME THREADS REPETITIONS        arithmetic rate in operations/s (multiply-accumulate = 2)
 *   microbenchmarks read|write BYTES THREADS REPETITIONS bandwidth in bytes/s, BYTES per thread
 *   microbenchmarks region THREADS REPETITIONS           seconds of one parallel region
 *
 * Each prints "best median". What the compiler does not report for this CPU (-march=native) is not compiled in;
 * a process that dies of an unsupported instruction costs one measurement, not the run.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#ifdef __linux__
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#if defined(__AVX512F__) || defined(__AVX2__) || !defined(__AVX__)
#define LOAD_BYTES VECTOR_BYTES
#else
#define LOAD_BYTES 16 /* AVX without AVX2 has no wide integer addition */
#endif
#if defined(__AVX512F__) || defined(__aarch64__) || defined(__riscv_v)
#define REGISTERS 32
#elif defined(__x86_64__)
#define REGISTERS 16
#else
#define REGISTERS 0 /* unknown */
#endif

enum { MAX_THREADS = 1024, MAX_REPETITIONS = 1024 };
#define TARGET_SECONDS 3e-3 /* of one repetition */
#define WARM_UP_SECONDS 30e-3 /* a core takes some time to reach the clock it then keeps */

static volatile double sink;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* ---- arithmetic: twelve independent accumulators hide the latency and fit sixteen registers ---- */

#define TWELVE(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

/* Accumulators that begin alike and add the same are one to the compiler, and one chain of dependent additions to the CPU:
   each is made opaque before the loop. */
#if defined(__AVX512F__)
#define OPAQUE(I) __asm__ volatile("" : "+v"(acc##I));
#elif defined(__x86_64__)
#define OPAQUE(I) __asm__ volatile("" : "+x"(acc##I));
#endif

#define DEFINE_FMA(NAME, SCALAR)                                                       \
  typedef SCALAR vector_##NAME __attribute__((vector_size(VECTOR_BYTES)));             \
  static double fma_##NAME(long iterations) {                                          \
    volatile SCALAR factor = (SCALAR)0.5, addend = (SCALAR)0.25;                       \
    vector_##NAME zero = {0}, a = zero + factor, b = zero + addend;                    \
    vector_##NAME acc0 = a, acc1 = a + b, acc2 = b, acc3 = acc1 + a, acc4 = acc3 + a,  \
                  acc5 = acc4 + a, acc6 = acc5 + a, acc7 = acc6 + a, acc8 = acc7 + a,  \
                  acc9 = acc8 + a, acc10 = acc9 + a, acc11 = acc10 + a;                \
    for (long i = 0; i < iterations; ++i) {                                            \
      acc0 = acc0 * a + b; acc1 = acc1 * a + b; acc2 = acc2 * a + b;                   \
      acc3 = acc3 * a + b; acc4 = acc4 * a + b; acc5 = acc5 * a + b;                   \
      acc6 = acc6 * a + b; acc7 = acc7 * a + b; acc8 = acc8 * a + b;                   \
      acc9 = acc9 * a + b; acc10 = acc10 * a + b; acc11 = acc11 * a + b;               \
    }                                                                                  \
    vector_##NAME total = acc0 + acc1 + acc2 + acc3 + acc4 + acc5 + acc6 + acc7 + acc8 \
                          + acc9 + acc10 + acc11;                                      \
    sink = (double)total[0];                                                           \
    return 12.0 * 2.0 * (VECTOR_BYTES / sizeof(SCALAR)) * iterations;                  \
  }

DEFINE_FMA(float64, double)
DEFINE_FMA(float32, float)
#if defined(__AVX512FP16__) || defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
#define HAVE_FLOAT16 1
DEFINE_FMA(float16, _Float16)
#endif

#if defined(__AVX512BF16__)
static double dot_avx512_bf16(long iterations) {
  volatile short bits = 0x3f00; /* 0.5 */
  __m512i raw = _mm512_set1_epi16(bits);
  __m512bh a, b;
  memcpy(&a, &raw, sizeof a);
  memcpy(&b, &raw, sizeof b);
#define DECLARE(I) __m512 acc##I = _mm512_setzero_ps();
  TWELVE(DECLARE)
  TWELVE(OPAQUE)
#undef DECLARE
  for (long i = 0; i < iterations; ++i) {
#define STEP(I) acc##I = _mm512_dpbf16_ps(acc##I, a, b);
    TWELVE(STEP)
#undef STEP
    /* the two factors are opaque each time round, so no multiplication can be hoisted */
    __asm__ volatile("" : "+v"(a), "+v"(b));
  }
  __m512 total = _mm512_setzero_ps();
#define ADD(I) total = _mm512_add_ps(total, acc##I);
  TWELVE(ADD)
#undef ADD
  sink = _mm512_reduce_add_ps(total);
  return 12.0 * 64 * iterations; /* 16 lanes x 2 products x 2 */
}
#endif

#if defined(__AVX512VNNI__)
static double dot_avx512_vnni(long iterations) {
  volatile char byte = 1;
  __m512i a = _mm512_set1_epi8(byte), b = a;
#define DECLARE(I) __m512i acc##I = _mm512_setzero_si512();
  TWELVE(DECLARE)
  TWELVE(OPAQUE)
#undef DECLARE
  for (long i = 0; i < iterations; ++i) {
#define STEP(I) acc##I = _mm512_dpbusd_epi32(acc##I, a, b);
    TWELVE(STEP)
#undef STEP
    __asm__ volatile("" : "+v"(a), "+v"(b));
  }
  __m512i total = _mm512_setzero_si512();
#define ADD(I) total = _mm512_add_epi32(total, acc##I);
  TWELVE(ADD)
#undef ADD
  sink = _mm512_reduce_add_epi32(total);
  return 12.0 * 128 * iterations; /* 16 lanes x 4 products x 2 */
}
#elif defined(__AVXVNNI__)
static double dot_avx_vnni(long iterations) {
  volatile char byte = 1;
  __m256i a = _mm256_set1_epi8(byte), b = a;
#define DECLARE(I) __m256i acc##I = _mm256_setzero_si256();
  TWELVE(DECLARE)
  TWELVE(OPAQUE)
#undef DECLARE
  for (long i = 0; i < iterations; ++i) {
#define STEP(I) acc##I = _mm256_dpbusd_avx_epi32(acc##I, a, b);
    TWELVE(STEP)
#undef STEP
    __asm__ volatile("" : "+x"(a), "+x"(b));
  }
  __m256i total = _mm256_setzero_si256();
#define ADD(I) total = _mm256_add_epi32(total, acc##I);
  TWELVE(ADD)
#undef ADD
  sink = _mm256_extract_epi32(total, 0);
  return 12.0 * 64 * iterations; /* 8 lanes x 4 products x 2 */
}
#endif

#if defined(__linux__) && defined(__AMX_TILE__) && (defined(__AMX_BF16__) || defined(__AMX_INT8__))
#define HAVE_AMX 1
enum { ARCH_REQUEST_XCOMP_PERMISSION = 0x1023, XFEATURE_XTILEDATA = 18 };

/* The kernel grants the tile registers on request only; a refusal ends this one measurement. */
static void request_tiles(void) {
  if (syscall(SYS_arch_prctl, ARCH_REQUEST_XCOMP_PERMISSION, XFEATURE_XTILEDATA) != 0) {
    fprintf(stderr, "the operating system refuses the AMX tile registers\n");
    exit(3);
  }
}

static void configure_tiles(void) {
  static _Thread_local int configured = 0;
  if (configured) return;
  configured = 1;
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t column_bytes[16];
    uint8_t rows[16];
  } config;
  memset(&config, 0, sizeof config);
  config.palette = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.column_bytes[tile] = 64;
    config.rows[tile] = 16;
  }
  __asm__ volatile("" : : "r"(&config) : "memory"); /* older compilers' intrinsic reads only its first 8 bytes */
  _tile_loadconfig(&config);
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  _tile_zero(4); _tile_zero(5); _tile_zero(6); _tile_zero(7);
}

/* Four accumulator tiles over two left and two right tiles: the register tile of a real product. */
#define DEFINE_AMX(NAME, INSTRUCTION, OPERATIONS)                 \
  static double NAME(long iterations) {                           \
    configure_tiles();                                            \
    for (long i = 0; i < iterations; ++i) {                       \
      INSTRUCTION(0, 4, 6); INSTRUCTION(1, 4, 7);                 \
      INSTRUCTION(2, 5, 6); INSTRUCTION(3, 5, 7);                 \
    }                                                             \
    return 4.0 * (OPERATIONS) * iterations;                       \
  }
#ifdef __AMX_BF16__
DEFINE_AMX(dot_amx_bf16, _tile_dpbf16ps, 16.0 * 16 * 32 * 2)
#endif
#ifdef __AMX_INT8__
DEFINE_AMX(dot_amx_int8, _tile_dpbssd, 16.0 * 16 * 64 * 2)
#endif
#endif

struct kernel {
  const char *dtype, *name;
  double (*run)(long iterations); /* returns the operations done */
};
static const struct kernel kernels[] = {
    {"float64", "fma_float64", fma_float64},
    {"float32", "fma_float32", fma_float32},
#ifdef HAVE_FLOAT16
    {"float16", "fma_float16", fma_float16},
#endif
#ifdef __AVX512BF16__
    {"bfloat16", "vdpbf16ps", dot_avx512_bf16},
#endif
#ifdef __AVX512VNNI__
    {"int8", "vpdpbusd", dot_avx512_vnni},
#elif defined(__AVXVNNI__)
    {"int8", "vpdpbusd", dot_avx_vnni},
#endif
#ifdef HAVE_AMX
#ifdef __AMX_BF16__
    {"bfloat16", "tdpbf16ps", dot_amx_bf16},
#endif
#ifdef __AMX_INT8__
    {"int8", "tdpbssd", dot_amx_int8},
#endif
#endif
};
enum { KERNELS = sizeof kernels / sizeof kernels[0] };

/* ---- bandwidth: eight independent accumulators, loads as memory operands ---- */

typedef uint64_t load_vector __attribute__((vector_size(LOAD_BYTES)));

static double read_buffer(load_vector *buffer, size_t bytes, long passes) {
  size_t count = bytes / LOAD_BYTES / 8 * 8;
  load_vector s0 = {0}, s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
  for (long pass = 0; pass < passes; ++pass) {
    const load_vector *p = buffer;
    for (size_t i = 0; i < count; i += 8) {
      s0 += p[i]; s1 += p[i + 1]; s2 += p[i + 2]; s3 += p[i + 3];
      s4 += p[i + 4]; s5 += p[i + 5]; s6 += p[i + 6]; s7 += p[i + 7];
    }
    __asm__ volatile("" ::: "memory"); /* every pass reads again */
  }
  s0 += s1 + s2 + s3 + s4 + s5 + s6 + s7;
  sink = (double)s0[0];
  return (double)count * LOAD_BYTES * passes;
}

static double write_buffer(load_vector *buffer, size_t bytes, long passes) {
  size_t count = bytes / LOAD_BYTES / 8 * 8;
  load_vector value = {0};
  for (long pass = 0; pass < passes; ++pass) {
    value += (uint64_t)pass + 1;
    for (size_t i = 0; i < count; i += 8) {
      buffer[i] = value; buffer[i + 1] = value; buffer[i + 2] = value; buffer[i + 3] = value;
      buffer[i + 4] = value; buffer[i + 5] = value; buffer[i + 6] = value; buffer[i + 7] = value;
    }
    __asm__ volatile("" ::: "memory");
  }
  return (double)count * LOAD_BYTES * passes;
}

static load_vector *make_buffer(size_t bytes) {
  void *memory = NULL;
  size_t alignment = bytes >= (2u << 20) ? (2u << 20) : 4096;
  if (posix_memalign(&memory, alignment, bytes) != 0) {
    fprintf(stderr, "no memory for %zu bytes\n", bytes);
    exit(3);
  }
#ifdef MADV_HUGEPAGE
  madvise(memory, bytes, MADV_HUGEPAGE);
#endif
  memset(memory, 1, bytes); /* first touch by the thread that uses it */
  return memory;
}

/* ---- threads in step ---- */

static void pin(int index) {
#ifdef __linux__
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &allowed) && index-- == 0) {
      CPU_ZERO(&one);
      CPU_SET(cpu, &one);
      pthread_setaffinity_np(pthread_self(), sizeof one, &one); /* best effort */
      return;
    }
  }
#else
  (void)index;
#endif
}

static int threads;
static atomic_int arrived, generation;

static void barrier(void) {
  int mine = atomic_load(&generation);
  if (atomic_fetch_add(&arrived, 1) + 1 == threads) {
    atomic_store(&arrived, 0);
    atomic_fetch_add(&generation, 1);
    return;
  }
  for (long spins = 0; atomic_load(&generation) == mine; ++spins)
    if (spins > 10000) sched_yield();
}

static struct {
  double (*kernel)(long);                                 /* arithmetic, or NULL */
  double (*stream)(load_vector *, size_t, long);          /* bandwidth, or NULL */
  size_t bytes;
  int repetitions;
  long work; /* iterations or passes of a repetition, the same on every thread */
} job;
static double rates[MAX_REPETITIONS];

static double work(load_vector *buffer) {
  return job.kernel ? job.kernel(job.work) : job.stream(buffer, job.bytes, job.work);
}

static void *in_step(void *argument) {
  int index = (int)(intptr_t)argument;
  load_vector *buffer;
  pin(index);
  buffer = job.stream ? make_buffer(job.bytes) : NULL;
  for (double start = now(); now() - start < WARM_UP_SECONDS;) work(buffer);
  barrier();
  if (index == 0) { /* choose the work of a repetition while the others wait */
    for (;;) {
      double start = now(), elapsed;
      work(buffer);
      elapsed = now() - start;
      if (elapsed > TARGET_SECONDS) break;
      job.work *= elapsed < TARGET_SECONDS / 10 ? 4 : 2;
    }
  }
  for (int repetition = 0; repetition < job.repetitions; ++repetition) {
    double start, done;
    barrier();
    start = now();
    done = work(buffer);
    barrier();
    if (index == 0) rates[repetition] = threads * done / (now() - start);
  }
  free(buffer);
  return NULL;
}

static int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void run_in_step(void) {
  pthread_t others[MAX_THREADS];
  for (int i = 1; i < threads; ++i)
    if (pthread_create(&others[i], NULL, in_step, (void *)(intptr_t)i) != 0) {
      fprintf(stderr, "cannot start thread %d\n", i);
      exit(3);
    }
  in_step((void *)0);
  for (int i = 1; i < threads; ++i) pthread_join(others[i], NULL);
  qsort(rates, job.repetitions, sizeof rates[0], ascending);
  printf("%.9g %.9g\n", rates[job.repetitions - 1], rates[job.repetitions / 2]);
}

/* ---- parallel region: as TVM's pool does it, a queue per worker and threads that spin with sched_yield ---- */

static struct {
  atomic_int pending;
  char padding[124]; /* no false sharing */
} queues[MAX_THREADS];
static atomic_int unfinished, stop;
static volatile int calls;

__attribute__((noinline)) static void empty_task(void) { calls = calls + 1; }
static void (*volatile task)(void) = empty_task;

static void *region_worker(void *argument) {
  int index = (int)(intptr_t)argument;
  pin(index);
  for (;;) {
    while (atomic_load(&queues[index].pending) == 0) {
      if (atomic_load(&stop)) return NULL;
      sched_yield();
    }
    atomic_fetch_sub(&queues[index].pending, 1);
    task();
    atomic_fetch_sub(&unfinished, 1);
  }
}

static void run_region(int repetitions) {
  enum { REGIONS = 500 };
  pthread_t others[MAX_THREADS];
  pin(0);
  for (int i = 1; i < threads; ++i)
    if (pthread_create(&others[i], NULL, region_worker, (void *)(intptr_t)i) != 0) exit(3);
  for (int repetition = -1; repetition < repetitions; ++repetition) { /* -1: warm up */
    double start = now();
    for (int region = 0; region < REGIONS; ++region) {
      if (threads > 1) {
        atomic_store(&unfinished, threads - 1);
        for (int i = 1; i < threads; ++i) atomic_fetch_add(&queues[i].pending, 1);
      }
      task();
      if (threads > 1)
        while (atomic_load(&unfinished) != 0) sched_yield();
    }
    if (repetition >= 0) rates[repetition] = (now() - start) / REGIONS;
  }
  atomic_store(&stop, 1);
  for (int i = 1; i < threads; ++i) pthread_join(others[i], NULL);
  qsort(rates, repetitions, sizeof rates[0], ascending);
  printf("%.9g %.9g\n", rates[0], rates[repetitions / 2]);
}

static int usage(void) {
  fprintf(stderr, "usage: list | rate NAME THREADS REPETITIONS | read|write BYTES THREADS REPETITIONS"
                  " | region THREADS REPETITIONS\n");
  return 2;
}

int main(int argc, char **argv) {
  if (argc == 2 && strcmp(argv[1], "list") == 0) {
    printf("vector_bits %d\nregisters %d\n", 8 * VECTOR_BYTES, REGISTERS);
    for (int i = 0; i < KERNELS; ++i) printf("kernel %s %s\n", kernels[i].dtype, kernels[i].name);
    return 0;
  }
  if (argc < 4) return usage();
  threads = atoi(argv[argc - 2]);
  job.repetitions = atoi(argv[argc - 1]);
  if (threads < 1 || threads > MAX_THREADS || job.repetitions < 1 || job.repetitions > MAX_REPETITIONS)
    return usage();
  if (argc == 4 && strcmp(argv[1], "region") == 0) {
    run_region(job.repetitions);
    return 0;
  }
  if (argc != 5) return usage();
  job.work = 1;
  if (strcmp(argv[1], "rate") == 0) {
    for (int i = 0; i < KERNELS; ++i)
      if (strcmp(argv[2], kernels[i].name) == 0) {
        job.kernel = kernels[i].run;
        job.work = 1000;
      }
    if (!job.kernel) return usage();
#ifdef HAVE_AMX
    if (strncmp(argv[2], "tdp", 3) == 0) request_tiles();
#endif
  } else if (strcmp(argv[1], "read") == 0 || strcmp(argv[1], "write") == 0) {
    job.stream = argv[1][0] == 'r' ? read_buffer : write_buffer;
    job.bytes = strtoull(argv[2], NULL, 10);
    if (job.bytes < 8 * LOAD_BYTES) return usage();
  } else {
    return usage();
  }
  run_in_step();
  return 0;
}
