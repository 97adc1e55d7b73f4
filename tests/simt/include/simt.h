#pragma once

// The emulator's interface: what cuda/core and the CUDA names in cuda_runtime.h stand on. See ../README.md.

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>

// Code that touches memory on the emulator's own behalf; everything else in a kernel's file is checked.
#define SIMT_UNCHECKED __attribute__((no_sanitize("thread")))

namespace simt {

using Where = std::source_location;

/// Runs every thread of every block, and returns the text of the first error, or null. `shared_bytes`:
/// dynamic memory.
const char* run(int64_t blocks, int threads, int shared_bytes, void (*kernel)(void*), void* arguments);

template <class Call>
const char* run(int64_t blocks, int threads, int shared_bytes, Call call) {
  return run(
      blocks, threads, shared_bytes, [](void* c) SIMT_UNCHECKED { (*static_cast<Call*>(c))(); }, &call);
}

/// Ends the launch with this text. Called on a kernel's thread.
[[noreturn]] void fail(const std::string& text);
[[noreturn]] void fail(const char* text);
/// The same for code that is compiled with kernels, where a string's own memory would be checked: printf's
/// format.
[[noreturn]] void failf(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Index {
  unsigned x, y, z;
};
Index thread_index();
Index block_index();
Index block_size();
Index grid_size();
unsigned char* dynamic_shared();

/// Waits until `count` threads (a multiple of 32; 0: the whole block) are at barrier `id`. What they wrote is
/// then seen by all of them. `name` and `where` are for messages; at barrier 0 all have to come from one
/// line.
void barrier(int id, int count, const char* name, Where where);
/// As barrier(), without waiting: publishes what this thread wrote.
void barrier_arrive(int id, int count, const char* name, Where where);

/// One value from each thread of the block to a result for each: what __syncthreads_or and its kin need.
int barrier_reduce(int value, int (*combine)(int, int), const char* name, Where where);

/// An operation of the lanes in `mask` together: when the last of them is there, compute(in, mask, lane, out)
/// is called for each, with everybody's input. Orders no memory, unless `orders_memory`.
using Compute = void (*)(const void* const in[32], unsigned mask, int lane, void* out);
void warp_collective(const char* name, unsigned mask, const void* in, void* out, Compute compute,
                     bool orders_memory, Where where);

/// The lane that a shuffle reads has to be in its mask.
void check_source(const char* name, unsigned mask, int lane, Where where);

/// A checked access of `size` bytes, as the compiler inserts one before each load and store of a kernel.
void check_read(const void* address, size_t size, Where where = Where::current());
void check_write(const void* address, size_t size, Where where = Where::current());
void check_atomic(const void* address, size_t size, Where where = Where::current());

/// A row of ldmatrix, which is read: 16 bytes of shared memory, aligned to as many.
void check_matrix_row(const void* row, Where where);

/// cp.async: `bytes` (4, 8 or 16) to shared memory, of which `from_bytes` are read and the others zero. They
/// arrive at the wait, no sooner, and nobody may touch them before.
void copy_async(void* to, const void* from, int bytes, int from_bytes, Where where);
void copy_async_commit(Where where);
void copy_async_wait(int pending, Where where);  // at most this many of the last groups stay under way

/// Memory that kernels may touch. Everything else, host memory too, is out of bounds.
void add_memory(void* begin, size_t size);
void remove_memory(void* begin);
bool knows_memory(void* address);

/// The order in which threads and blocks take turns: 0 ascending, 1 descending, 2 and up random by that seed.
/// Unless it is set here or by SIMT_ORDER, each launch has the next.
void set_order(int order);

/// The compute capability that host code is told, 80 (8.0) unless it is set here or by SIMT_CAPABILITY: which
/// kernels it then chooses. The emulator runs all of them.
int capability();
void set_capability(int capability);

/// Threads in a block of the last launch.
int last_threads();

}  // namespace simt
