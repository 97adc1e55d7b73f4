#include <algorithm>
#include <tuple>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <shoestring/experts/ops.h>

#include "checkpoint/kept_results.h"
#include "core/call.h"
#include "core/cuda.h"
#include "core/tensors.h"
#include "core/threads.h"
#include "experts/moe_route_table.h"
#include "experts/moe_sort_table.h"
#include "experts/slots.h"

namespace shoestring::experts {
namespace {

using at::Tensor;
using SortResult = std::tuple<Tensor, Tensor, Tensor>;

constexpr const char* kMoeSortOp = "moe_sort";
// The slots of a part are counted and placed by one thread, or by one warp on CUDA. Few parts keep their
// counts small.
constexpr int64_t kLeastSlots = 4096, kMostSortParts = 64, kLeastCudaSlots = 256, kMostCudaParts = 256;

void check_moe_sort(const Tensor& index, int64_t experts) {
  TORCH_CHECK(index.scalar_type() == at::kLong, kMoeSortOp, ": index: expected int64, received ",
              index.scalar_type());
  TORCH_CHECK(experts > 0 && experts <= kernels::kMostExperts, kMoeSortOp, ": experts: expected 1 to ",
              kernels::kMostExperts, ", received ", experts);
}

// Returns the number of slots in each part, a multiple of 32.
int64_t slots_of_part(int64_t slots, int64_t least, int64_t most) {
  return std::max(least, ((slots + most - 1) / most + 31) / 32 * 32);
}

// Counts the slots [begin, end) of each expert. Slots without an expert count at `experts`.
void count_slots(const char* op, const int64_t* index, int64_t begin, int64_t end, int64_t experts,
                 int64_t* counts) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t e = index[i];
    TORCH_CHECK(e >= -1 && e < experts, op, ": index: expected values from 0 to ", experts - 1,
                ", or -1 for no expert, received ", e);
    ++counts[e < 0 ? experts : e];
  }
}

// Replaces the counts (parts, experts + 1) by the place of the first slot of each part and expert.
void scan_counts(int64_t* counts, int64_t parts, int64_t experts, int64_t* offsets) {
  int64_t place = 0;
  for (int64_t e = 0; e <= experts; ++e) {
    offsets[e] = place;
    for (int64_t part = 0; part < parts; ++part) {
      int64_t& count = counts[part * (experts + 1) + e];
      const int64_t first = place;
      place += count;
      count = first;
    }
  }
}

SortResult sort_results(const Tensor& index, int64_t experts) {
  const auto options = index.options();
  return {at::empty({index.numel()}, options), at::empty({index.numel()}, options),
          at::empty({experts + 1}, options)};
}

SortResult moe_sort_cpu(const Tensor& index, int64_t experts) {
  check_moe_sort(index, experts);
  return sort_slots(kMoeSortOp, index, experts);
}

SortResult moe_sort_cuda(const Tensor& given, int64_t experts) {
  check_moe_sort(given, experts);
  const c10::OptionalDeviceGuard guard(given.device());
  const auto& k = cuda::table<kernels::MoeSortCuda>(kMoeSortOp);
  const Tensor index = given.contiguous();
  const int64_t slots = index.numel(), each = slots_of_part(slots, kLeastCudaSlots, kMostCudaParts);
  const int64_t parts = (slots + each - 1) / each;
  const SortResult result = sort_results(index, experts);
  const Tensor counts = at::empty({parts, experts + 1}, index.options());
  const auto* from = index.const_data_ptr<int64_t>();
  auto* places = counts.mutable_data_ptr<int64_t>();
  void* stream = stream_of(index);
  check_launch(kMoeSortOp, k.count(from, slots, experts, each, parts, places, stream));
  check_launch(kMoeSortOp,
               k.scan(places, experts, parts, std::get<2>(result).mutable_data_ptr<int64_t>(), stream));
  check_launch(kMoeSortOp, k.place(from, slots, experts, each, parts, places,
                                   std::get<0>(result).mutable_data_ptr<int64_t>(),
                                   std::get<1>(result).mutable_data_ptr<int64_t>(), stream));
  return result;
}

SortResult moe_sort_meta(const Tensor& index, int64_t experts) {
  check_moe_sort(index, experts);
  const auto slots = index.sym_numel();
  return {at::empty_symint({slots}, index.options()), at::empty_symint({slots}, index.options()),
          at::empty({experts + 1}, index.options())};
}

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Sorts slots, the elements of index in memory order, by their experts. index: int64 of any shape, with
  // values in [0, experts), or -1 for no expert. On CUDA, other values are no expert, too. Slots of one
  // expert keep their order. order (slots): the slots by their experts, then those without an expert.
  // inverse (slots): the place of each slot in order. offsets (experts + 1): the slots of expert e are
  // order[offsets[e]:offsets[e + 1]].
  m.def("moe_sort(Tensor index, int experts) -> (Tensor order, Tensor inverse, Tensor offsets)");
}
TORCH_LIBRARY_IMPL(shoestring, CPU, m) { m.impl(kMoeSortOp, moe_sort_cpu); }
TORCH_LIBRARY_IMPL(shoestring, CUDA, m) { m.impl(kMoeSortOp, moe_sort_cuda); }
TORCH_LIBRARY_IMPL(shoestring, Meta, m) { m.impl(kMoeSortOp, moe_sort_meta); }

}  // namespace

SortResult sort_slots(const char* op, const Tensor& given, int64_t experts) {
  const Tensor index = given.contiguous();
  const int64_t slots = index.numel(), each = slots_of_part(slots, kLeastSlots, kMostSortParts);
  const int64_t parts = (slots + each - 1) / each, stride = experts + 1;
  const SortResult result = sort_results(index, experts);
  const Tensor counts = at::zeros({parts, stride}, index.options());
  const auto* from = index.const_data_ptr<int64_t>();
  auto *count = counts.mutable_data_ptr<int64_t>(), *order = std::get<0>(result).mutable_data_ptr<int64_t>(),
       *inverse = std::get<1>(result).mutable_data_ptr<int64_t>();
  const int64_t grain = std::max<int64_t>(1, row_grain(16) / each);
  const auto for_each_part = [&](auto body) {
    at::parallel_for(0, parts, grain, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part)
        body(part * each, std::min(slots, (part + 1) * each), count + part * stride);
    });
  };
  for_each_part([&](int64_t begin, int64_t end, int64_t* of_part) {
    count_slots(op, from, begin, end, experts, of_part);
  });
  scan_counts(count, parts, experts, std::get<2>(result).mutable_data_ptr<int64_t>());
  for_each_part([&](int64_t begin, int64_t end, int64_t* places) {
    for (int64_t slot = begin; slot < end; ++slot) {
      const int64_t e = from[slot], place = places[e < 0 ? experts : e]++;
      order[place] = slot;
      inverse[slot] = place;
    }
  });
  return result;
}

}  // namespace shoestring::experts

namespace shoestring {

MoeSort moe_sort(const at::Tensor& index, int64_t experts) {
  static auto op = find<decltype(experts::moe_sort_meta)>("shoestring::moe_sort");
  const auto r = activations::kept_results([&]() -> std::vector<at::Tensor> {
    const auto [order, inverse, offsets] = op.call(index, experts);
    return {order, inverse, offsets};
  });
  return {r[0], r[1], r[2]};
}

}  // namespace shoestring
