// One minimal kernel for each kind of mistake that the emulator must detect. Some of them have a correct
// counterpart in right.cu.

#include "cases.h"
#include "cuda/core/launch.h"
#include "cuda/core/vector.h"
#include "cuda/core/warp.h"
#include "memory.h"

namespace simt_tests {
namespace {

using namespace shoestring::cuda;

__device__ float warp_sum(float x) {
  return warp_reduce(x, [](float a, float b) { return a + b; });
}

__global__ void half_a_barrier() {
  if (threadIdx.x < 32) __syncthreads();
}
__global__ void return_before_barrier(int n) {
  if (static_cast<int>(threadIdx.x) >= n) return;
  __syncthreads();
}
__global__ void two_barriers() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void half_a_shuffle(float* out) {
  float x = 1;
  if (lane() < 16) x = warp_sum(x);
  out[threadIdx.x] = x;
}
__global__ void returned_lane(float* out) {
  if (lane() == 7) return;
  out[threadIdx.x] = warp_sum(1);
}
__global__ void lane_outside_mask(int* out) {
  if (lane() < 16) out[threadIdx.x] = __shfl_sync(0xffff, lane(), 16);
}
__global__ void shuffle_against_vote(int* out) {
  out[threadIdx.x] = lane() < 16 ? __shfl_sync(kAllLanes, 1, 0) : __any_sync(kAllLanes, 1);
}
__global__ void neighbour_of_another_warp(int* out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncwarp();
  out[threadIdx.x] = shared[threadIdx.x ^ 32];
}
__global__ void neighbour_in_the_warp(int* out) {
  __shared__ int shared[64];
  shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  // the mistake: a shuffle does not order memory accesses, so the read below is a race
  __shfl_sync(kAllLanes, 0, 0);
  out[threadIdx.x] = shared[threadIdx.x ^ 1];
}
__global__ void overwritten_too_soon(int* out) {
  __shared__ int shared;
  for (int i = 0; i < 2; ++i) {
    if (threadIdx.x == 63) shared = i;
    __syncthreads();
    // thread 63 may already write the next value while another thread reads this one
    out[threadIdx.x] = shared;
  }
}
__global__ void flag_without_fence(int* flag, int* out) {
  __shared__ int shared;
  if (threadIdx.x == 0) {
    shared = 1;
    atomicExch(flag, 1);
  } else if (atomicAdd(flag, 0) == 1) {
    out[threadIdx.x] = shared;
  }
}
__global__ void in_place(float* row) {  // all threads read row[0], which thread 0 overwrites
  const float first = row[0];
  row[threadIdx.x] /= first;
}
__global__ void same_place_from_each_block(int* out) { out[threadIdx.x] = 1; }
__global__ void atomic_and_plain(int* out) {
  atomicAdd(out, 1);
  if (threadIdx.x == 5) *out = 0;
}
__global__ void read_past_the_end(const int* in, int* out) { out[threadIdx.x] = in[threadIdx.x + 1]; }
__global__ void write_before_the_start(int* out) { out[static_cast<int>(threadIdx.x) - 1] = 1; }
__global__ void index_past_an_array(int* out, int n) {
  __shared__ int shared[64], next[64];
  shared[threadIdx.x] = next[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x + n];
}
__global__ void past_dynamic_memory(int* out) {
  int* shared = reinterpret_cast<int*>(dynamic_shared());
  shared[threadIdx.x + 1] = 1;
  out[threadIdx.x] = 1;
}
__global__ void misaligned(const float* in, float* out) {
  out[threadIdx.x] = load<4>(in + 1)[threadIdx.x % 4];
}
__global__ void misaligned_pair(const float* in, float* out) {
  store(out + threadIdx.x * 8, load<8>(in + 1));
}
__global__ void uninitialised(int* out) {
  __shared__ int shared[64];
  if (threadIdx.x != 3) shared[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = shared[threadIdx.x];
}
__global__ void left_by_the_last_block(int* out) {
  __shared__ int shared;
  if (blockIdx.x == 0 || blockIdx.x == 2) shared = 1;
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = shared;
}
__global__ void write_one(int* out) { *out = 1; }

int host_variable = 0;

}  // namespace

#define CASE(NAME, EXPECTED, ...) {#NAME, []() -> const char* { __VA_ARGS__; }, EXPECTED}

const std::vector<Case> kWrong {
  CASE(half_a_barrier, "wait for others that never come", return launch(half_a_barrier, 1, 64, 0, nullptr)),
      CASE(return_before_barrier, "have returned",
           return launch(return_before_barrier, 1, 64, 0, nullptr, 33)),
      CASE(two_barriers, "is at another one", return launch(two_barriers, 1, 64, 0, nullptr)),
      CASE(half_a_shuffle, "__shfl_xor_sync", Array<float> out(64);
           return launch(half_a_shuffle, 1, 64, 0, nullptr, out.data())),
      CASE(returned_lane, "__shfl_xor_sync", Array<float> out(64);
           return launch(returned_lane, 1, 64, 0, nullptr, out.data())),
      CASE(lane_outside_mask, "reads lane 16, which is not in the mask", Array<int> out(32);
           return launch(lane_outside_mask, 1, 32, 0, nullptr, out.data())),
      CASE(shuffle_against_vote, "waits for this one at", Array<int> out(32);
           return launch(shuffle_against_vote, 1, 32, 0, nullptr, out.data())),
      CASE(a_warp_of_24_lanes, "does not exist", Array<float> out(24);
           return launch(returned_lane, 1, 24, 0, nullptr, out.data())),
      CASE(neighbour_of_another_warp, "shared memory", Array<int> out(64);
           return launch(neighbour_of_another_warp, 1, 64, 0, nullptr, out.data())),
      CASE(neighbour_in_the_warp, "shared memory", Array<int> out(64);
           return launch(neighbour_in_the_warp, 1, 64, 0, nullptr, out.data())),
      CASE(overwritten_too_soon, "race in shared memory", Array<int> out(64);
           return launch(overwritten_too_soon, 1, 64, 0, nullptr, out.data())),
      CASE(flag_without_fence, "race in shared memory", Array<int> flag(1); Array<int> out(64);
           simt::set_order(0); return launch(flag_without_fence, 1, 64, 0, nullptr, flag.data(), out.data())),
      CASE(in_place, "race in global memory", Array<float> row(64);
           return launch(in_place, 1, 64, 0, nullptr, row.data())),
      CASE(same_place_from_each_block, "of another block's write", Array<int> out(32);
           return launch(same_place_from_each_block, 2, 32, 0, nullptr, out.data())),
      CASE(atomic_and_plain, "race in global memory", Array<int> out(1);
           return launch(atomic_and_plain, 1, 32, 0, nullptr, out.data())),
      CASE(read_past_the_end, "out of bounds: read of 4 bytes", Array<int> in(64); Array<int> out(64);
           return launch(read_past_the_end, 1, 64, 0, nullptr, in.data(), out.data())),
      CASE(write_before_the_start, "out of bounds: write to 4 bytes", Array<int> out(64);
           return launch(write_before_the_start, 1, 64, 0, nullptr, out.data())),
      CASE(index_past_an_array, "out of bounds: index", Array<int> out(64);
           return launch(index_past_an_array, 1, 64, 0, nullptr, out.data(), 1)),
      CASE(past_dynamic_memory, "out of bounds: write to 4 bytes", Array<int> out(64);
           return launch(past_dynamic_memory, 1, 64, 64 * 4, nullptr, out.data())),
      CASE(misaligned, "misaligned: read of 16 bytes", Array<float> in(64); Array<float> out(64);
           return launch(misaligned, 1, 32, 0, nullptr, in.data(), out.data())),
      CASE(misaligned_pair, "misaligned: access of more than 16 bytes", Array<float> in(64);
           Array<float> out(256); return launch(misaligned_pair, 1, 32, 0, nullptr, in.data(), out.data())),
      CASE(uninitialised, "uninitialised shared memory", Array<int> out(64);
           return launch(uninitialised, 1, 64, 0, nullptr, out.data())),
      CASE(left_by_the_last_block, "uninitialised shared memory", Array<int> out(4);
           return launch(left_by_the_last_block, 4, 1, 0, nullptr, out.data())),
      CASE(null_pointer, "out of bounds",
           return launch(write_one, 1, 1, 0, nullptr, static_cast<int*>(nullptr))),
      CASE(host_memory, "out of bounds", int host = 0; return launch(write_one, 1, 1, 0, nullptr, &host)),
      CASE(host_variable, "out of bounds", return launch(write_one, 1, 1, 0, nullptr, &host_variable)),
      CASE(freed_memory, "out of bounds", Array<int> out(1); simt::remove_memory(out.data());
           return launch(write_one, 1, 1, 0, nullptr, out.data())),
};

}  // namespace simt_tests
