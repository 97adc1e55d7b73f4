#pragma once

// The interface of the emulator for cuda/core and for the names of CUDA C++ in cuda_runtime.h. See
// ../README.md.

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <type_traits>
#include <vector>

// Marks functions that access memory on behalf of the emulator. In files with kernels, all accesses outside
// such functions are checked.
#define SIMT_UNCHECKED __attribute__((no_sanitize("thread")))

namespace simt {

using Where = std::source_location;

/// Runs a kernel: every thread of every block. Returns the text of the first error, or null. `function` is
/// the kernel, whose name and __shared__ variables are looked up. `shared_bytes` is the size of dynamic
/// shared memory. `body` calls the kernel with its arguments.
const char* run(const void* function, int64_t blocks, int threads, int shared_bytes, void (*body)(void*),
                void* arguments);

template <class Call>
const char* run(const void* function, int64_t blocks, int threads, int shared_bytes, Call call) {
  return run(
      function, blocks, threads, shared_bytes, [](void* c) SIMT_UNCHECKED { (*static_cast<Call*>(c))(); },
      &call);
}

/// Ends the launch with the error `text`. Must be called on a thread of a kernel.
[[noreturn]] void fail(const std::string& text);
[[noreturn]] void fail(const char* text);
/// Ends the launch with an error in printf's format. It is for functions that are compiled with kernels:
/// there the memory of a std::string would be checked like a kernel's.
[[noreturn]] void failf(const char* format, ...) __attribute__((format(printf, 1, 2)));

/// Takes launches over from run(). `arguments` are `size` bytes to which `kernel` is applied; the launcher
/// must copy them to run the kernel later. tests/device runs kernels in the threads of its streams.
using Launcher = const char* (*)(const void* function, int64_t blocks, int threads, int shared_bytes,
                                 void* stream, void (*kernel)(void*), const void* arguments, size_t size);
void set_launcher(Launcher launcher);
/// Launches a kernel in a stream: calls the launcher, or run() if there is none.
const char* launch(const void* function, int64_t blocks, int threads, int shared_bytes, void* stream,
                   void (*kernel)(void*), void* arguments, size_t size);

template <class Call>
const char* launch(const void* function, int64_t blocks, int threads, int shared_bytes, void* stream,
                   Call call) {
  static_assert(std::is_trivially_copyable_v<Call>, "arguments of kernels are copied byte by byte");
  return launch(
      function, blocks, threads, shared_bytes, stream,
      [](void* c) SIMT_UNCHECKED { (*static_cast<Call*>(c))(); }, &call, sizeof call);
}

struct Index {
  unsigned x, y, z;
};
Index thread_index();
Index block_index();
Index block_size();
Index grid_size();
unsigned char* dynamic_shared();

/// Waits until `count` threads (a multiple of 32; 0 for the whole block) have reached barrier `id`. Each of
/// them then sees what the other ones wrote before. `name` and `where` are for error messages. If `count` is
/// 0, all threads must come from the same source line.
void barrier(int id, int count, const char* name, Where where);
/// Arrives at barrier `id` without waiting. Threads that wait at the barrier then see what this thread wrote
/// before.
void barrier_arrive(int id, int count, const char* name, Where where);

/// Combines one value from each thread of the block and returns the result to every thread, as
/// __syncthreads_or does.
int barrier_reduce(int value, int (*combine)(int, int), const char* name, Where where);

/// Runs an operation that all lanes in `mask` take part in, such as a shuffle. When the last of these lanes
/// arrives, compute(in, mask, lane, out) is called for each lane, with the inputs of all lanes. Only if
/// `orders_memory` is true does the operation order memory accesses.
using Compute = void (*)(const void* const in[32], unsigned mask, int lane, void* out);
void warp_collective(const char* name, unsigned mask, const void* in, void* out, Compute compute,
                     bool orders_memory, Where where);

/// Raises an error if a shuffle reads a lane that is not in its mask.
void check_source(const char* name, unsigned mask, int lane, Where where);

/// Checks an access of `size` bytes for races and bounds. The compiler inserts a similar check before each
/// load and store of a kernel.
void check_read(const void* address, size_t size, Where where = Where::current());
void check_write(const void* address, size_t size, Where where = Where::current());
void check_atomic(const void* address, size_t size, Where where = Where::current());

/// Checks a row that ldmatrix reads: 16 bytes of shared memory, aligned to 16 bytes.
void check_matrix_row(const void* row, Where where);

/// Starts a cp.async of `bytes` (4, 8 or 16) bytes to shared memory: `from_bytes` bytes are copied, and the
/// rest becomes zero. The data arrive only at copy_async_wait(). Any access to them before is an error.
void copy_async(void* to, const void* from, int bytes, int from_bytes, Where where);
void copy_async_commit(Where where);
// Waits until at most `pending` of this thread's groups of cp.async are in flight, always the most recent
// ones.
void copy_async_wait(int pending, Where where);

/// Registers memory that kernels may access. All memory that is not registered, including host memory, is out
/// of bounds.
void add_memory(void* begin, size_t size);
void remove_memory(void* begin);
bool knows_memory(void* address);

/// Sets the order in which threads and blocks run: 0 is ascending, 1 is descending, and a number from 2 on is
/// the seed of a random order. Without this call and without the environment variable SIMT_ORDER, launches
/// use the orders 0 to 3 in turn.
void set_order(int order);

/// How wrong approximate functions such as 2^x are. `exact`: as the C library's function. Otherwise they take
/// and return zero instead of subnormal numbers, and are wrong by up to their bound: by an amount that
/// depends on the argument (random), or by the whole bound (up, down). The environment variable
/// SIMT_APPROXIMATE sets the mode of a process by these names.
enum class Approximation { exact, random, up, down };
void set_approximation(Approximation mode);
/// Return the argument of an approximate function, and its result: `result` with an error of at most `ulps`
/// units in the last place. A unit counts as at least `least`. Zero, infinity and results of the
/// argument zero are exact.
float argument_of(float x);
float approximate(float result, float argument, int ulps, float least = 0);

/// A GPU that the emulator stands for. Host code selects kernels by these properties, and no block may have
/// more shared memory than `shared_bytes`, static and dynamic together. The emulator itself can run kernels
/// for any GPU.
struct Gpu {
  const char* name;
  int capability;  // major * 10 + minor
  int shared_bytes;
  int multiprocessors;
};
const std::vector<Gpu>& gpus();
/// Returns the selected GPU: an A100, unless the environment variable SIMT_CAPABILITY or one of the functions
/// below selects another one. They return false if they know no such GPU.
const Gpu& gpu();
bool set_gpu(const std::string& name);
bool set_capability(int capability);

/// The arguments of a launch, for tests of the choice of kernels.
struct Launch {
  std::string kernel, file;  // such as "forward<float, 64>" and "attention.cu"
  int threads, static_bytes, dynamic_bytes;
};
/// Returns the launches since the last call. Only launches after log_launches(true, ...) are logged. If
/// `only`, kernels are logged and not run.
void log_launches(bool on, bool only);
std::vector<Launch> take_launches();

/// Returns the number of threads per block in the last launch.
int last_threads();

}  // namespace simt
