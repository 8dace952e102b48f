/* What a server of TVM's RPC does for this project: reads files that say which CPU it has, runs the microbenchmarks,
 * and times kernels as often as one sample needs, without a message per call. A library with functions of TVM's C ABI.
 *
 *   probe_read(path, out) -> bytes        the file's beginning; -1 if it cannot be read
 *   probe_run(command, out) -> bytes      what the shell command prints; -1 if it fails
 *   probe_tiles() -> error                asks for the tile registers of AMX; 0, or why the operating system refuses them
 *   probe_kernel(path) -> handle          the function `main` of a library that TVM has loaded; 0 if there is none
 *   probe_time(handle, calls, first, count, arguments ...) -> seconds
 *       of `calls` calls in a row; `arguments` hold all sets in a row, `count` tensors each, and `first` is the set
 *       with which to begin. -1 if a call fails.
 *
 * Texts are tensors of bytes, zero-terminated; `out` is filled from its beginning.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <tvm/ffi/c_api.h>

#define EXPORT __attribute__((visibility("default")))

static DLTensor *tensor_of(const TVMFFIAny *value) {
  if (value->type_index == kTVMFFIDLTensorPtr) return (DLTensor *)value->v_ptr;
  return (DLTensor *)((char *)value->v_obj + sizeof(TVMFFIObject)); /* kTVMFFITensor: a DLTensor behind its header */
}

static char *bytes_of(const TVMFFIAny *value, int64_t *size) {
  DLTensor *tensor = tensor_of(value);
  if (size) *size = tensor->shape[0];
  return (char *)tensor->data + tensor->byte_offset;
}

static int whole(TVMFFIAny *result, int64_t value) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = value;
  return 0;
}

static int64_t fill(FILE *stream, const TVMFFIAny *out) {
  int64_t size, used = 0;
  char *bytes = bytes_of(out, &size);
  while (used < size) {
    size_t got = fread(bytes + used, 1, (size_t)(size - used), stream);
    if (!got) break;
    used += (int64_t)got;
  }
  return used;
}

EXPORT int __tvm_ffi_probe_read(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  (void)self, (void)count;
  FILE *file = fopen(bytes_of(&args[0], NULL), "rb");
  if (!file) return whole(result, -1);
  int64_t used = fill(file, &args[1]);
  fclose(file);
  return whole(result, used);
}

EXPORT int __tvm_ffi_probe_run(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  (void)self, (void)count;
  FILE *output = popen(bytes_of(&args[0], NULL), "r");
  if (!output) return whole(result, -1);
  int64_t used = fill(output, &args[1]);
  return whole(result, pclose(output) ? -1 : used);
}

EXPORT int __tvm_ffi_probe_tiles(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  (void)self, (void)args, (void)count;
#if defined(__linux__) && defined(__x86_64__)
  enum { ARCH_REQUEST_XCOMP_PERMISSION = 0x1023, XFEATURE_XTILEDATA = 18 };
  return whole(result, syscall(SYS_arch_prctl, ARCH_REQUEST_XCOMP_PERMISSION, XFEATURE_XTILEDATA) ? errno : 0);
#else
  return whole(result, ENOSYS);
#endif
}

EXPORT int __tvm_ffi_probe_kernel(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  (void)self, (void)count;
  void *library = dlopen(bytes_of(&args[0], NULL), RTLD_NOW | RTLD_NOLOAD); /* TVM has filled in its own symbols */
  return whole(result, library ? (int64_t)(intptr_t)dlsym(library, "__tvm_ffi_main") : 0);
}

EXPORT int __tvm_ffi_probe_time(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  (void)self;
  TVMFFISafeCallType kernel = (TVMFFISafeCallType)(intptr_t)args[0].v_int64;
  int64_t calls = args[1].v_int64, set = args[2].v_int64, size = args[3].v_int64, sets = (count - 4) / size;
  struct timespec start, end;
  int failed = 0;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (int64_t call = 0; call < calls && !failed; ++call, ++set) {
    TVMFFIAny nothing = {0};
    failed = kernel(NULL, args + 4 + size * (set % sets), (int32_t)size, &nothing);
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  result->type_index = kTVMFFIFloat;
  result->zero_padding = 0;
  result->v_float64 = failed ? -1.0 : (end.tv_sec - start.tv_sec) + 1e-9 * (end.tv_nsec - start.tv_nsec);
  return 0;
}
