// Counting sort of slots by experts on CUDA. A warp counts the slots of a part for each expert, one block
// turns the counts into places, and a warp places the slots of its part, 32 at a time. The order is stable,
// and no result leaves the GPU.

#include "core/cuda_tables.h"
#include "cuda/experts/warps.h"
#include "experts/moe_sort_table.h"

namespace shoestring::cuda {
namespace {

constexpr int kScanThreads = 512, kInvertThreads = 256;

// Returns the expert of a slot, or `experts` if it has none.
__device__ inline int expert_of(int64_t index, int64_t experts) {
  return static_cast<int>(index >= 0 && index < experts ? index : experts);
}

// Budget: 48 registers, 0 bytes shared, no spills.
__global__ void __launch_bounds__(kExpertWarps* kWarp)
    count_slots(const int64_t* index, int64_t slots, int64_t experts, int64_t each, int64_t parts,
                int64_t* counts) {
  const int64_t part = warp_of_launch();
  if (part >= parts) return;  // all lanes of a warp have the same part
  const int64_t begin = part * each, end = begin + each < slots ? begin + each : slots;
  auto* own = shared_of_warp<int>(experts + 1);
  for (int64_t e = lane(); e <= experts; e += kWarp) own[e] = 0;
  __syncwarp();
  for (int64_t i = begin + lane(); i < end; i += kWarp) atomicAdd(own + expert_of(index[i], experts), 1);
  __syncwarp();
  for (int64_t e = lane(); e <= experts; e += kWarp) counts[part * (experts + 1) + e] = own[e];
}

// Replaces the counts of each part by the places of the first slots of its experts.
// Budget: 56 registers, 0 bytes shared, no spills.
__global__ void __launch_bounds__(kScanThreads)
    scan_counts(int64_t* counts, int64_t experts, int64_t parts, int64_t* offsets) {
  auto* first =
      reinterpret_cast<int64_t*>(dynamic_shared());  // counts of the experts, then their first places
  for (int64_t e = threadIdx.x; e <= experts; e += kScanThreads) {
    int64_t sum = 0;
    for (int64_t part = 0; part < parts; ++part) sum += counts[part * (experts + 1) + e];
    first[e] = sum;
  }
  __syncthreads();
  if (warp() == 0) {
    int64_t before = 0;
    for (int64_t begin = 0; begin <= experts; begin += kWarp) {
      const int64_t e = begin + lane();
      const int64_t own = e <= experts ? first[e] : 0;
      int64_t sum = own;
      for (int offset = 1; offset < kWarp; offset *= 2) {
        const int64_t other = __shfl_up_sync(kAllLanes, sum, offset);
        if (lane() >= offset) sum += other;
      }
      if (e <= experts) offsets[e] = first[e] = before + sum - own;
      before += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e <= experts; e += kScanThreads) {
    int64_t place = first[e];
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t at = part * (experts + 1) + e, count = counts[at];
      counts[at] = place;
      place += count;
    }
  }
}

// Budget: 56 registers, 0 bytes shared, no spills.
__global__ void __launch_bounds__(kExpertWarps* kWarp)
    place_slots(const int64_t* index, int64_t slots, int64_t experts, int64_t each, int64_t parts,
                const int64_t* places, int64_t* order, int64_t* inverse) {
  const int64_t part = warp_of_launch();
  if (part >= parts) return;  // all lanes of a warp have the same part
  const int64_t begin = part * each, end = begin + each < slots ? begin + each : slots;
  auto* next = shared_of_warp<int64_t>(experts + 1);
  for (int64_t e = lane(); e <= experts; e += kWarp) next[e] = places[part * (experts + 1) + e];
  __syncwarp();
  for (int64_t first = begin; first < end; first += kWarp) {
    const int64_t slot = first + lane();
    const int expert = slot < end ? expert_of(index[slot], experts) : -1;
    const unsigned same = __match_any_sync(kAllLanes, expert);
    const int before = __popc(same & ((1u << lane()) - 1));
    if (expert >= 0) {
      const int64_t place = next[expert] + before;
      order[place] = slot;
      inverse[slot] = place;
    }
    __syncwarp();
    if (expert >= 0 && before == 0) next[expert] += __popc(same);
    __syncwarp();
  }
}

// Budget: 16 registers, 0 bytes shared, no spills.
__global__ void __launch_bounds__(kInvertThreads)
    invert_order(const int64_t* order, int64_t slots, int64_t* inverse) {
  const int64_t place = int64_t{blockIdx.x} * kInvertThreads + threadIdx.x;
  if (place < slots) inverse[order[place]] = place;
}

const char* run_count(const int64_t* index, int64_t slots, int64_t experts, int64_t each, int64_t parts,
                      int64_t* counts, void* stream) {
  const ExpertWarps warps(parts, 4 * (experts + 1));
  return launch(count_slots, warps.blocks, warps.threads, warps.shared_bytes, stream, index, slots, experts,
                each, parts, counts);
}

const char* run_scan(int64_t* counts, int64_t experts, int64_t parts, int64_t* offsets, void* stream) {
  const int bytes = static_cast<int>(experts + 1) * static_cast<int>(sizeof(int64_t));
  return launch(scan_counts, 1, kScanThreads, bytes, stream, counts, experts, parts, offsets);
}

const char* run_place(const int64_t* index, int64_t slots, int64_t experts, int64_t each, int64_t parts,
                      int64_t* places, int64_t* order, int64_t* inverse, void* stream) {
  const ExpertWarps warps(parts, 8 * (experts + 1));
  return launch(place_slots, warps.blocks, warps.threads, warps.shared_bytes, stream, index, slots, experts,
                each, parts, static_cast<const int64_t*>(places), order, inverse);
}

const char* run_invert(const int64_t* order, int64_t slots, int64_t* inverse, void* stream) {
  return launch(invert_order, (slots + kInvertThreads - 1) / kInvertThreads, kInvertThreads, 0, stream, order,
                slots, inverse);
}

const kernels::MoeSortCuda kTable{run_count, run_scan, run_place, run_invert};
const bool kProvided = (provide("moe_sort", &kTable), true);

}  // namespace
}  // namespace shoestring::cuda
